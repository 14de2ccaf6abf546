"""The real weights that the benchmarks run on, and a text for their prompts."""

import sys
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.lib.machine import ROOT
from tinkercloud.config import default_data_dir
from tinkercloud.fetch import locate, packaged


def weights() -> Path:
    """SmolLM2-135M-Instruct as GGUF; ends the program with what to do where it is not here."""
    smollm2 = packaged("smollm2")
    path = locate(smollm2, default_data_dir()) or locate(smollm2, ROOT / ".tinkercloud")
    if path is None:
        sys.exit("the SmolLM2 weights are not here; run `make install`")
    return path


def tokenizer_of(folder: Path) -> Tokenizer:
    """folder: in Hugging Face's layout."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def document_tokens(folder: Path) -> list[int]:
    """Of this project's documents, one after another."""
    documents = sorted((ROOT / "docs").glob("*.md"))
    text = "\n".join(document.read_text(encoding="utf-8") for document in documents)
    return tokenizer_of(folder).encode(text).ids
