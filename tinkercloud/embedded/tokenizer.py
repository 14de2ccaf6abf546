"""A Hugging Face tokenizer folder for every base model, also for one that came as a GGUF file.

Byte-level BPE ("gpt2" in GGUF) is rebuilt here from the metadata, with the `tokenizers` library
alone; SentencePiece ("llama") goes through transformers where that is installed.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers import processors as post_processors
from tokenizers.models import BPE

from tinkercloud.embedded.gguf_file import GGUFFile
from tinkercloud.errors import ConfigError

_FORMAT = 1  # of the folders written here; a change makes all cached ones stale
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # token types of ggml
_ROLES = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}

_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_SPLIT = _QWEN2_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_SPLITS = {"qwen2": _QWEN2_SPLIT, "llama-bpe": _LLAMA3_SPLIT}
_SINGLE_DIGITS = ("smollm", "starcoder", "refact")
_PLAIN = ("gpt-2", "gpt2", "default")


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
    model = metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        byte_level_tokenizer(metadata).save(str(folder / "tokenizer.json"))
        _write_json(folder / "tokenizer_config.json", _tokenizer_config(metadata))
    elif model == "llama":
        _convert_sentencepiece(path, folder)
    else:
        raise ConfigError(f"{path.name}: tokenizer model {model!r} is not supported")
    _write_json(folder / "config.json", {"model_type": metadata.get("general.architecture")})


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def byte_level_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """The byte-level BPE tokenizer that GGUF metadata describes. Raises ConfigError."""
    pre = metadata.get("tokenizer.ggml.pre", "default")
    tokens = metadata.get("tokenizer.ggml.tokens")
    merges = metadata.get("tokenizer.ggml.merges")
    if not tokens or merges is None:
        raise ConfigError("the GGUF file has no tokenizer.ggml.tokens or no tokenizer.ggml.merges")
    tokenizer = Tokenizer(_bpe(tokens, merges, ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(_added_tokens(tokens, metadata.get("tokenizer.ggml.token_type", [])))
    bos = _roles(metadata).get("bos_token")
    if metadata.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe") and bos is not None:
        tokenizer.post_processor = post_processors.TemplateProcessing(
            single=[bos, "$A"],
            pair=[bos, "$A", f"{bos}:1", "$B:1"],
            special_tokens=[(bos, tokens.index(bos))],
        )
    return tokenizer


def _added_tokens(tokens: list[str], types: list[int]) -> list[AddedToken]:
    """The tokens that are matched whole in a text, before the merges."""
    return [
        AddedToken(token, special=kind != _USER_DEFINED, normalized=False)
        for token, kind in zip(tokens, types, strict=False)
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]


def _roles(metadata: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and its like, as far as the file names them."""
    tokens = metadata["tokenizer.ggml.tokens"]
    named = {
        f"{ours}_token": metadata.get(f"tokenizer.ggml.{theirs}_token_id")
        for theirs, ours in _ROLES.items()
    }
    return {
        role: tokens[index]
        for role, index in named.items()
        if index is not None and 0 <= index < len(tokens)
    }


def _bpe(tokens: list[str], merges: list[str], *, ignore_merges: bool) -> BPE:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise ConfigError("the GGUF file's vocabulary names a token twice")
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    try:
        return BPE(vocabulary, pairs, ignore_merges=ignore_merges)
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(f"the GGUF file's merges do not fit its vocabulary: {error}") from error


def _pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
    if pre in _SPLITS:
        split = pre_tokenizers.Split(Regex(_SPLITS[pre]), behavior="isolated")
        last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([split, last])
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in _SINGLE_DIGITS:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), last])
    if pre in _PLAIN:
        return last
    known = ", ".join((*_SPLITS, *_SINGLE_DIGITS, *_PLAIN))
    raise ConfigError(
        f"the GGUF file's pre-tokenizer {pre!r} is not supported (supported: {known}); "
        "serve the model from its Hugging Face folder"
    )


def _tokenizer_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    architecture = metadata.get("general.architecture")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata.get(f"{architecture}.context_length"),
        "chat_template": metadata.get("tokenizer.chat_template"),
        **_roles(metadata),
    }
    return {key: value for key, value in config.items() if value is not None}


def _convert_sentencepiece(path: Path, folder: Path) -> None:
    try:
        from transformers import AutoTokenizer  # seconds to import, and only needed here
    except ImportError as error:
        raise ConfigError(
            f"{path.name} has a SentencePiece tokenizer; install transformers to convert it"
        ) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(path.parent), gguf_file=path.name, local_files_only=True
        )
    except Exception as error:  # a foreign converter may raise anything
        raise ConfigError(f"cannot convert the tokenizer of {path.name}: {error}") from error
    tokenizer.save_pretrained(folder)
