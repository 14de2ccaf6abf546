"""Tokenizers rebuilt from GGUF metadata with the `tokenizers` library alone.

Two kinds: byte-level BPE ("gpt2" in GGUF), whose merges the file lists, and SentencePiece BPE
("llama"), whose merges follow from the scores. Metadata keys: the GGUF specification of ggml.
"""

from collections.abc import Mapping
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers.models import BPE

from tinkercloud.errors import ConfigError

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


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that the metadata describes. Raises ConfigError for one that is not known."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise ConfigError("the file has no tokenizer.ggml.tokens")
    if len(set(tokens)) != len(tokens):
        raise ConfigError("the vocabulary names a token twice")
    match metadata.get("tokenizer.ggml.model"):
        case "gpt2":
            tokenizer, adds_bos = _byte_level(metadata, tokens)
        case "llama":
            tokenizer, adds_bos = _sentencepiece(metadata, tokens)
        case unknown:
            raise ConfigError(f"tokenizer model {unknown!r} is not supported")
    tokenizer.add_tokens(_added_tokens(tokens, metadata.get("tokenizer.ggml.token_type", [])))
    bos = _roles(metadata).get("bos_token")
    if metadata.get("tokenizer.ggml.add_bos_token", adds_bos) and bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"],
            pair=[bos, "$A", f"{bos}:1", "$B:1"],
            special_tokens=[(bos, tokens.index(bos))],
        )
    return tokenizer


def tokenizer_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The content of `tokenizer_config.json`: roles of tokens, chat template, length."""
    architecture = metadata.get("general.architecture")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata.get(f"{architecture}.context_length"),
        "chat_template": metadata.get("tokenizer.chat_template"),
        **_roles(metadata),
    }
    return {key: value for key, value in config.items() if value is not None}


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


def _added_tokens(tokens: list[str], types: list[int]) -> list[AddedToken]:
    """The tokens that are matched whole in a text, before the merges."""
    return [
        AddedToken(token, special=kind != _USER_DEFINED, normalized=False)
        for token, kind in zip(tokens, types, strict=False)
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]


def _byte_level(metadata: Mapping[str, Any], tokens: list[str]) -> tuple[Tokenizer, bool]:
    """(tokenizer, whether texts begin with bos where the file does not say)."""
    merges = metadata.get("tokenizer.ggml.merges")
    if merges is None:
        raise ConfigError("the file has no tokenizer.ggml.merges")
    pre = metadata.get("tokenizer.ggml.pre", "default")
    llama3 = pre == "llama-bpe"
    vocabulary = {token: index for index, token in enumerate(tokens)}
    try:
        model = BPE(vocabulary, [tuple(merge.split(" ", 1)) for merge in merges])
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(f"the merges do not fit the vocabulary: {error}") from error
    model.ignore_merges = llama3
    tokenizer = Tokenizer(model)
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, llama3


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
    supported = ", ".join((*_SPLITS, *_SINGLE_DIGITS, *_PLAIN))
    raise ConfigError(f"pre-tokenizer {pre!r} is not supported (supported: {supported})")


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str]) -> tuple[Tokenizer, bool]:
    """As `_byte_level`. Spaces are U+2581, and bytes outside the vocabulary are "<0xNN>"."""
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise ConfigError("the file has no tokenizer.ggml.scores for its tokens")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(
        BPE(
            vocabulary,
            _merges(vocabulary, scores),
            unk_token=_roles(metadata).get("unk_token"),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    replace = normalizers.Replace(" ", "\u2581")
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend("\u2581"), replace]) if prefix else replace
    )
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer, True


def _merges(vocabulary: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to build a token from two others, the best-scored token first."""
    merges: list[tuple[float, int, int, int, tuple[str, str]]] = []
    for token, index in vocabulary.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                order = (-scores[index], index, vocabulary[left], vocabulary[right])
                merges.append((*order, (left, right)))
    return [merge[-1] for merge in sorted(merges)]
