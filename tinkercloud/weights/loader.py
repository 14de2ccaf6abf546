"""Weights and config of a base model: a Hugging Face folder (safetensors) or one GGUF file.

Weights go by Hugging Face names without the ".weight" suffix: "model.layers.0.self_attn.q_proj",
its bias "model.layers.0.self_attn.q_proj.bias", "model.embed_tokens", "model.norm", "lm_head".
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tinkercloud.architectures.config import ArchitectureConfig, from_hf, token_ids
from tinkercloud.errors import ConfigError
from tinkercloud.weights.gguf_file import GGUFFile
from tinkercloud.weights.gguf_loader import gguf_config, gguf_shapes, gguf_weights
from tinkercloud.weights.json_file import read_json

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_NAMED_AT_MOST = 8  # tensors listed in an error


def read_config(path: Path) -> ArchitectureConfig:
    """The config alone, without reading weights. Raises ConfigError."""
    if is_gguf(path):
        return gguf_config(GGUFFile(path))
    config = from_hf(read_json(path / "config.json"))
    generation = path / "generation_config.json"
    if not generation.is_file():
        return config
    try:
        more = token_ids(read_json(generation).get("eos_token_id"))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{generation} has a wrong eos_token_id: {error}") from error
    return replace(config, eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *more))))


def check_tensors(path: Path) -> None:
    """Without reading weights. Raises ConfigError listing what is missing, unexpected or of the
    wrong shape."""
    config = read_config(path)
    if is_gguf(path):
        _check_shapes(path, config, gguf_shapes(GGUFFile(path)))
    else:
        _check_shapes(path, config, _safetensors_shapes(path, config, _tensor_files(path)))


def read_model(
    path: Path, dtype: torch.dtype
) -> tuple[ArchitectureConfig, Iterator[tuple[str, Tensor]]]:
    """The config, and every tensor on the CPU in `dtype`, read from the file as it is asked for; a
    tied "lm_head" is left out. Raises ConfigError listing what is missing, unexpected or of the
    wrong shape."""
    config = read_config(path)
    if is_gguf(path):
        file = GGUFFile(path)
        _check_shapes(path, config, gguf_shapes(file))
        return config, gguf_weights(file, config, dtype)
    files = _tensor_files(path)
    _check_shapes(path, config, _safetensors_shapes(path, config, files))
    return config, _safetensors_weights(path, config, files, dtype)


def read_weight(path: Path, name: str) -> Tensor | None:
    """One weight by our name, float32; None where the model has none of that name."""
    config = read_config(path)
    if name == "lm_head" and config.tie_word_embeddings:
        name = "model.embed_tokens"
    if is_gguf(path):
        named = gguf_weights(GGUFFile(path), config, torch.float32)
    else:
        named = _safetensors_weights(path, config, _tensor_files(path), torch.float32)
    return next((tensor for ours, tensor in named if ours == name), None)


def is_gguf(path: Path) -> bool:
    """A file is taken for GGUF, a folder for Hugging Face. Raises ConfigError for neither."""
    if not path.exists():
        raise ConfigError(f"no model at {path}")
    return path.is_file()


def _tensor_files(folder: Path) -> list[str]:
    """File names that hold the weights. Pickled weights are never opened."""
    if (folder / _SINGLE).is_file():
        return [_SINGLE]
    if not (folder / _INDEX).is_file():
        raise ConfigError(f"{folder} has neither {_SINGLE} nor {_INDEX}; other files are not read")
    places = read_json(folder / _INDEX).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise ConfigError(f"{folder / _INDEX} has no weight_map of file names")
    files = sorted(set(places.values()))
    for name in files:
        if Path(name).name != name or not (folder / name).is_file():
            raise ConfigError(f"{_INDEX} names {name!r}, which is not in {folder}")
    return files


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt", device="cpu") as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} is not a whole safetensors file: {error}") from error


def _our_name(name: str, config: ArchitectureConfig) -> str | None:
    """None for what old or tied checkpoints carry and nobody needs."""
    if name.endswith(".rotary_emb.inv_freq"):
        return None
    if name == "lm_head.weight" and config.tie_word_embeddings:
        return None
    return name.removesuffix(".weight")


def _safetensors_shapes(
    folder: Path, config: ArchitectureConfig, files: list[str]
) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        with _open(folder / file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a dict
                if (ours := _our_name(name, config)) is not None:
                    shapes[ours] = tuple(tensors.get_slice(name).get_shape())
    return shapes


def _safetensors_weights(
    folder: Path, config: ArchitectureConfig, files: list[str], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    for file in files:
        with _open(folder / file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a dict
                if (ours := _our_name(name, config)) is not None:
                    yield ours, tensors.get_tensor(name).to(dtype)


def _check_shapes(
    path: Path, config: ArchitectureConfig, shapes: Mapping[str, tuple[int, ...]]
) -> None:
    expected = config.weight_shapes()
    wrong = [
        f"{name} is {shapes[name]}, not {shape}"
        for name, shape in expected.items()
        if name in shapes and shapes[name] != shape
    ]
    faults = {
        "missing": sorted(expected.keys() - shapes.keys()),
        "unexpected": sorted(shapes.keys() - expected.keys()),
        "of the wrong shape": wrong,
    }
    texts = [f"{kind}: {_listed(names)}" for kind, names in faults.items() if names]
    if texts:
        raise ConfigError(f"the tensors in {path} do not fit its config; {'; '.join(texts)}")


def _listed(names: list[str]) -> str:
    rest = len(names) - _NAMED_AT_MOST
    return ", ".join(names[:_NAMED_AT_MOST]) + (f" and {rest} more" if rest > 0 else "")
