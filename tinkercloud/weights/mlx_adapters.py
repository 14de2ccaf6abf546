"""Adapters as MLX-LM keeps them: adapters.safetensors and adapter_config.json.

y = W x + scale (x A) B, with A (in, rank) as MODULE.lora_a and B (rank, out) as MODULE.lora_b: the
transposes of ours. Of the config count `fine_tune_type`, `num_layers` (the last so many layers are
adapted) and `lora_parameters`: rank, scale, and as `keys` the modules, named within a layer.
Source: MLX-LM's documentation of LoRA, and of its adapter files.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tinkercloud.core.types import LoraSpec
from tinkercloud.errors import UserError
from tinkercloud.weights.adapters import (
    ADAPTER_CONFIG_FILE,
    Adapter,
    adapted_modules,
    fresh_adapter,
)
from tinkercloud.weights.checkpoints import read_tensors
from tinkercloud.weights.loader import read_config
from tinkercloud.weights.peft_import import ImportedAdapter

MLX_FILE = "adapters.safetensors"
FORMAT = "mlx-lm"
_A, _B = ".lora_a", ".lora_b"
_SEED = 0  # of A where a module is not adapted: its B is 0
_LAYER = "model.layers."


def write_mlx_adapter(adapter: Adapter, spec: LoraSpec, num_layers: int, directory: Path) -> None:
    """The two files, which MLX-LM loads on a copy of the base. A module whose B is 0 outside the
    layers is left out; raises UserError for another one, which only layers have there."""
    tensors: dict[str, Tensor] = {}
    for name, (a, b) in adapter.items():
        if not name.startswith(_LAYER):
            if b.count_nonzero():
                raise UserError(f"{name} is adapted; MLX-LM adapts modules of layers only")
            continue
        tensors[name + _A] = a.detach().cpu().T.contiguous()
        tensors[name + _B] = b.detach().cpu().T.contiguous()
    save_file(tensors, directory / MLX_FILE, metadata={"format": "mlx"})
    keys = sorted({name.removeprefix(_LAYER).partition(".")[2] for name in _modules(tensors)})
    config = {
        "fine_tune_type": "lora",
        "num_layers": num_layers,
        "lora_parameters": {
            "rank": spec.rank,
            "scale": spec.alpha / spec.rank,
            "dropout": 0.0,
            "keys": keys,
        },
    }
    (directory / ADAPTER_CONFIG_FILE).write_text(json.dumps(config, indent=2))


def read_mlx_adapter(directory: Path, base: Path) -> ImportedAdapter:
    """For the base model at `base`. Raises UserError for what is not LoRA, or does not fit."""
    parameters = _parameters(directory)
    tensors = read_tensors(directory / MLX_FILE)
    shapes = read_config(base).linear_shapes()
    modules = _modules(tensors)
    rank, scale = parameters
    spec = LoraSpec(
        rank,
        _SEED,
        train_attn=any(".self_attn." in name for name in modules),
        train_mlp=any(".mlp." in name for name in modules),
        train_unembed=False,
        alpha=scale * rank,
    )
    unknown = sorted(modules - set(adapted_modules(spec, shapes)))
    if unknown or not modules:
        lacking = ", ".join(unknown[:3]) or "no module"
        raise UserError(f"{directory} adapts what this base model lacks: {lacking}")
    adapter = fresh_adapter(spec, shapes, torch.device("cpu"))
    for name in modules:
        out_features, in_features = shapes[name]
        a, b = tensors.get(name + _A), tensors.get(name + _B)
        sizes = [tuple(t.shape) if t is not None else None for t in (a, b)]
        if a is None or b is None or sizes != [(in_features, rank), (rank, out_features)]:
            raise UserError(
                f"the adapter's tensors of {name} are {sizes}; this base model needs "
                f"{(in_features, rank)} and {(rank, out_features)}"
            )
        adapter[name] = (a.float().T.contiguous(), b.float().T.contiguous())
    return ImportedAdapter(spec, adapter, FORMAT)


def _modules(tensors: Mapping[str, Tensor]) -> set[str]:
    """Raises UserError for tensors that are none of LoRA, such as DoRA's magnitudes."""
    modules = set()
    for name in tensors:
        module, part = name[: -len(_A)], name[-len(_A) :]
        if part not in (_A, _B):
            raise UserError(f"{name} is no tensor of LoRA")
        modules.add(module)
    return modules


def _parameters(directory: Path) -> tuple[int, float]:
    """Rank and scale."""
    try:
        config: Any = json.loads((directory / ADAPTER_CONFIG_FILE).read_text(encoding="utf-8"))
        kind = config.get("fine_tune_type", "lora")
        parameters = config["lora_parameters"]
        rank, scale = int(parameters["rank"]), float(parameters["scale"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{directory} has no {ADAPTER_CONFIG_FILE} of MLX-LM: {error!r}") from None
    if kind != "lora":
        raise UserError(f"{directory} holds {kind!r}, not LoRA; only that can be had exactly")
    if rank < 1:
        raise UserError(f"{directory} has the rank {rank}")
    return rank, scale
