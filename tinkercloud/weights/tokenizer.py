"""A Hugging Face tokenizer folder for every base model, also for one that came as a GGUF file."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tinkercloud.errors import ConfigError
from tinkercloud.weights.gguf_file import GGUFFile
from tinkercloud.weights.gguf_tokenizer import build_tokenizer, tokenizer_config

_FORMAT = 1  # of the folders written here; a change makes all cached ones stale


def ensure_tokenizer_folder(path: Path, cache_dir: Path) -> Path | None:
    """A folder that `AutoTokenizer.from_pretrained` and `Tokenizer.from_file` read, offline.

    path: a Hugging Face folder (returned as it is, or None when it has no tokenizer.json) or a
    GGUF file, whose tokenizer is written below `cache_dir` once per file. Raises ConfigError for
    a tokenizer that cannot be rebuilt.
    """
    if not path.is_file():
        return path if (path / "tokenizer.json").is_file() else None
    folder = cache_dir / _cache_name(path)
    if folder.is_dir():
        return folder
    cache_dir.mkdir(parents=True, exist_ok=True)
    # Written aside and renamed: a folder under its final name is always whole.
    aside = Path(tempfile.mkdtemp(prefix=".writing-", dir=cache_dir))
    try:
        _write_folder(path, aside)
        aside.chmod(0o755)
        _rename(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder


def _cache_name(path: Path) -> str:
    stat = path.stat()
    key = f"{_FORMAT}:{path.name}:{stat.st_size}:{stat.st_mtime_ns}"
    return f"{path.stem}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"


def _rename(aside: Path, folder: Path) -> None:
    try:
        os.rename(aside, folder)
    except OSError:
        if not folder.is_dir():  # else another process was first, with the same content
            raise


def _write_folder(path: Path, folder: Path) -> None:
    metadata = GGUFFile(path).metadata
    try:
        build_tokenizer(metadata).save(str(folder / "tokenizer.json"))
    except ConfigError as error:
        raise ConfigError(
            f"{path.name}: {error}; serve the model from its Hugging Face folder"
        ) from error
    _write_json(folder / "tokenizer_config.json", tokenizer_config(metadata))
    _write_json(folder / "config.json", {"model_type": metadata.get("general.architecture")})


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def vocabulary_digest(tokenizer: Tokenizer) -> bytes:
    """Of its tokens and their ids alone: what else two files say of the same tokens may differ."""
    pairs = sorted((number, token) for token, number in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(pairs).encode()).digest()
