"""Tokenizers, from the `transformers` package where that is installed."""

import importlib
from typing import Any

from tinker_gmi.connection.errors import TinkerError


def load_tokenizer(tokenizer_id: str) -> Any:
    """A Hugging Face tokenizer by its name or folder; a suffix after a colon is ignored."""
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise TinkerError(
            "get_tokenizer needs the package transformers: pip install transformers"
        ) from error
    return transformers.AutoTokenizer.from_pretrained(tokenizer_id.partition(":")[0])
