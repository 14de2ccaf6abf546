"""LoRA adapters: which modules, how they begin, how they look on disk (PEFT's format).

y = W x + (alpha / rank) B A x, with A (rank, in) and B (out, rank) in float32 whatever the base's
dtype (Hu et al. 2021). A ~ U(-1/sqrt(in), 1/sqrt(in)), B = 0, so a fresh adapter changes nothing.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from tinkercloud.core.types import AdapterSizes, LoraSpec
from tinkercloud.errors import UserError
from tinkercloud.weights.checkpoints import read_tensors

_PREFIX = "base_model.model."
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG_FILE = "adapter_config.json"

Adapter = dict[str, tuple[Tensor, Tensor]]
"""module name -> (A, B)."""


def adapted_modules(spec: LoraSpec, shapes: Mapping[str, tuple[int, int]]) -> list[str]:
    """Names of the linear modules that `spec` adapts, in the order of `shapes`."""
    leaves = (_ATTENTION if spec.train_attn else ()) + (_MLP if spec.train_mlp else ())
    return [
        name
        for name in shapes
        if name.rsplit(".", 1)[-1] in leaves or (name == "lm_head" and spec.train_unembed)
    ]


def adapter_sizes(shapes: Mapping[str, tuple[int, int]]) -> AdapterSizes:
    def size(leaves: tuple[str, ...]) -> int:
        return sum(sum(shapes[name]) for name in shapes if name.rsplit(".", 1)[-1] in leaves)

    return AdapterSizes(size(_ATTENTION), size(_MLP), size(("lm_head",)))


def fresh_adapter(
    spec: LoraSpec,
    shapes: Mapping[str, tuple[int, int]],
    device: torch.device,
    before_each: Callable[[], None] = lambda: None,
) -> Adapter:
    """A new adapter. `shapes`: module -> (out, in). Drawn on the CPU: a seed means one adapter.
    before_each: is called before each module, since large ranks take seconds."""
    generator = torch.Generator().manual_seed(spec.seed % 2**63)
    adapter: Adapter = {}
    for name in adapted_modules(spec, shapes):
        before_each()
        out_features, in_features = shapes[name]
        a = torch.empty(spec.rank, in_features).uniform_(-1, 1, generator=generator)
        a *= in_features**-0.5
        adapter[name] = (a.to(device), torch.zeros(out_features, spec.rank, device=device))
    return adapter


def adapter_of(params: Mapping[str, Tensor]) -> Adapter:
    """Of the parameters that `flat_params` has by name, the same tensors. Raises KeyError where one
    of a pair is missing."""
    names = [n.removesuffix(".lora_A") for n in params if n.endswith(".lora_A")]
    return {n: (params[f"{n}.lora_A"], params[f"{n}.lora_B"]) for n in names}


def flat_params(adapter: Adapter) -> dict[str, Tensor]:
    """By the names MODULE.lora_A and MODULE.lora_B."""
    params: dict[str, Tensor] = {}
    for name, (a, b) in adapter.items():
        params |= {f"{name}.lora_A": a, f"{name}.lora_B": b}
    return params


def save_adapter(adapter: Adapter, spec: LoraSpec, base_model: str, directory: Path) -> None:
    """Write PEFT's two files; PEFT loads them as they are."""
    tensors = {}
    for name, (a, b) in adapter.items():
        tensors[f"{_PREFIX}{name}.lora_A.weight"] = a.detach().cpu().contiguous()
        tensors[f"{_PREFIX}{name}.lora_B.weight"] = b.detach().cpu().contiguous()
    save_file(tensors, directory / ADAPTER_FILE, metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": spec.rank,
        "lora_alpha": spec.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "target_modules": sorted({name.rsplit(".", 1)[-1] for name in adapter}),
    }
    (directory / ADAPTER_CONFIG_FILE).write_text(json.dumps(config, indent=2))


def load_adapter(
    directory: Path, spec: LoraSpec, shapes: Mapping[str, tuple[int, int]], device: torch.device
) -> Adapter:
    """Read what `save_adapter` wrote; raises UserError when it is damaged or does not fit the base
    model."""
    tensors = read_tensors(directory / ADAPTER_FILE, finite=False)
    adapter: Adapter = {}
    for name in adapted_modules(spec, shapes):
        try:
            a = tensors.pop(f"{_PREFIX}{name}.lora_A.weight")
            b = tensors.pop(f"{_PREFIX}{name}.lora_B.weight")
        except KeyError as missing:
            raise UserError(f"the checkpoint has no tensor {missing}") from None
        out_features, in_features = shapes[name]
        needed = ((out_features, spec.rank), (spec.rank, in_features))
        if (b.shape, a.shape) != needed:
            raise UserError(
                f"the checkpoint's adapter for {name} is {tuple(b.shape)} x {tuple(a.shape)}; "
                f"this base model needs {needed[0]} x {needed[1]}"
            )
        adapter[name] = (a.float().to(device), b.float().to(device))
    if tensors:
        raise UserError(f"the checkpoint has tensors this base model lacks: {sorted(tensors)[:3]}")
    return adapter
