"""What a GGUF file asks of the machines that share it: bytes of each layer, and of its cache."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinkercloud.errors import ConfigError
from tinkercloud.weights.gguf_file import GGUFFile

_LAYER = re.compile(r"blk\.(\d+)\.")
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
CACHE_BITS = {"f16": 16.0, "q8_0": 8.5, "q4_0": 4.5}  # with the scales of quantized blocks


@dataclass(frozen=True, slots=True)
class ModelFile:
    """layer_bytes: of the weights of each layer; output_bytes: of what follows the last one,
    logits_matrix_bytes of them of the matrix of logits; input_bytes: of the embedding, which stays
    on the coordinator. cache_width: numbers of keys and
    values that each layer keeps for a token."""

    name: str
    architecture: str
    layer_bytes: tuple[int, ...]
    input_bytes: int
    output_bytes: int
    logits_matrix_bytes: int
    cache_width: tuple[int, ...]
    vocabulary: int
    hidden: int
    feed_forward: int
    trained_context: int
    quantizations: Mapping[str, int]

    @property
    def num_layers(self) -> int:
        return len(self.layer_bytes)

    @property
    def num_bytes(self) -> int:
        return sum(self.layer_bytes) + self.output_bytes + self.input_bytes

    def cache_bytes(self, layer: int, context: int, cache_type: str) -> int:
        """Of one layer's keys and values."""
        return int(self.cache_width[layer] * context * CACHE_BITS[cache_type] / 8)

    def compute_bytes(self, ubatch: int) -> int:
        """Of activations on a device without the output: float32, `ubatch` rows of what a layer
        has alive at a time; llama.cpp was measured to take less."""
        return 4 * ubatch * (6 * self.hidden + 3 * self.feed_forward)

    def logits_bytes(self, ubatch: int) -> int:
        return 4 * ubatch * self.vocabulary


def read_model_file(path: Path) -> ModelFile:
    """Raises ConfigError. Of a model in several files any of them may be named."""
    if not path.is_file():
        raise ConfigError(f"no GGUF file at {path}")
    parts = [GGUFFile(part) for part in model_parts(path)]
    metadata = parts[0].metadata
    architecture = _text(metadata, "general.architecture", path)
    hidden = _number(metadata, f"{architecture}.embedding_length", path)
    num_layers = _number(metadata, f"{architecture}.block_count", path)
    layers, others, kinds = _tensor_bytes(parts)
    if sorted(layers) != list(range(num_layers)):
        raise ConfigError(
            f"{path.name} has tensors of {len(layers)} layers and names {num_layers}; "
            "it is damaged or of a form that is not known here"
        )
    embedding = others.get("token_embd", 0)
    output = sum(others.values()) - embedding
    matrix = others.get("output", embedding)
    if "output" not in others:  # tied: llama.cpp keeps a second copy where the output is
        output += matrix
    vocabulary = metadata.get("tokenizer.ggml.tokens")
    return ModelFile(
        name=str(metadata.get("general.name", path.stem)),
        architecture=architecture,
        layer_bytes=tuple(layers[layer] for layer in range(num_layers)),
        input_bytes=embedding,
        output_bytes=output,
        logits_matrix_bytes=matrix,
        cache_width=tuple(_cache_widths(metadata, architecture, hidden, num_layers, path)),
        vocabulary=len(vocabulary) if isinstance(vocabulary, list) else 0,
        hidden=hidden,
        feed_forward=_largest(metadata.get(f"{architecture}.feed_forward_length"), 4 * hidden),
        trained_context=_largest(metadata.get(f"{architecture}.context_length"), 0),
        quantizations=dict(kinds.most_common()),
    )


def model_parts(path: Path) -> list[Path]:
    """The files of a model that llama.cpp's gguf-split has cut. Raises ConfigError."""
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match[3])
    parts = [path.with_name(f"{match[1]}-{n:05}-of-{match[3]}.gguf") for n in range(1, count + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing or not parts:
        raise ConfigError(f"parts of the model are missing: {', '.join(missing[:8])}")
    return parts


def _tensor_bytes(parts: list[GGUFFile]) -> tuple[dict[int, int], dict[str, int], Counter[str]]:
    layers: Counter[int] = Counter()
    others: dict[str, int] = {}
    kinds: Counter[str] = Counter()
    for part in parts:
        for name, entry in part.tensors.items():
            kinds[entry.kind.name] += entry.num_bytes
            if (match := _LAYER.match(name)) is not None:
                layers[int(match[1])] += entry.num_bytes
            else:
                others[name.removesuffix(".weight")] = entry.num_bytes
    return dict(layers), others, kinds


def _cache_widths(
    metadata: Mapping[str, Any], architecture: str, hidden: int, num_layers: int, path: Path
) -> Iterator[int]:
    prefix = f"{architecture}.attention"
    heads = _number(metadata, f"{prefix}.head_count", path)
    keys = _largest(metadata.get(f"{prefix}.key_length"), hidden // heads)
    values = _largest(metadata.get(f"{prefix}.value_length"), keys)
    cached = metadata.get(f"{prefix}.head_count_kv", heads)
    for layer in range(num_layers):
        count = cached[min(layer, len(cached) - 1)] if isinstance(cached, list) else cached
        yield int(count) * (keys + values)


def _largest(value: Any, default: int) -> int:
    """Some settings are a list, a number for each layer."""
    numbers = [n for n in (value if isinstance(value, list) else [value]) if isinstance(n, int)]
    return max(numbers, default=default)


def _number(metadata: Mapping[str, Any], key: str, path: Path) -> int:
    number = _largest(metadata.get(key), 0)
    if number < 1:
        raise ConfigError(f"{path.name} does not say its {key}")
    return number


def _text(metadata: Mapping[str, Any], key: str, path: Path) -> str:
    value = metadata.get(key)
    if not isinstance(value, str):
        raise ConfigError(f"{path.name} does not say its {key}")
    return value
