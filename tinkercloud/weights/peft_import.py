"""Adapters of PEFT as ours: what an adapter computes stays the same, or it is refused.

Ours has one rank and one scale (alpha / rank) for all modules, and A and B for every module of a
group (attention, MLP, unembedding) that it adapts at all. Where the adapter has more ranks, A and B
are padded; where it has more scales, the difference goes into B; where a module is missing, B is 0.
What is padded has a random A, so that it can be trained.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tinkercloud.core.types import LoraSpec
from tinkercloud.errors import UserError
from tinkercloud.weights.adapters import (
    ADAPTER_FILE,
    Adapter,
    adapted_modules,
    fresh_adapter,
    save_adapter,
)
from tinkercloud.weights.checkpoints import TrainingState, write_state
from tinkercloud.weights.loader import read_config, read_weight
from tinkercloud.weights.peft_config import PeftConfig, read_peft_config

PREFIX = "base_model.model."
_DTYPES = {"F32": 4, "BF16": 2, "F16": 2}
_NAMED_AT_MOST = 5
_SEED = 0  # of what is padded
_CPU = torch.device("cpu")
_PARTS = {
    "lora_magnitude_vector": "DoRA scales the rows of the whole weight, which no A and B can",
    "lora_embedding_A": "it adapts the embeddings; here only linear modules can be",
    "lora_embedding_B": "it adapts the embeddings; here only linear modules can be",
    "trainable_tokens_delta": "it changes embeddings",
    "lora_B.bias": "B has a bias",
}


@dataclass(frozen=True, slots=True)
class ImportedAdapter:
    """format: whose files it was read from."""

    spec: LoraSpec
    adapter: Adapter
    format: str = "peft"


def import_adapter(directory: Path, base: Path) -> ImportedAdapter:
    """Read PEFT's two files for the base model at `base`; pickles are never opened.

    Raises UserError that says what cannot be represented, or does not fit the base.
    """
    config = read_peft_config(directory)
    shapes = read_config(base).linear_shapes()
    with _opened(directory) as file:
        names = frozenset(file.keys())
        modules = _modules(names, shapes)
        _check(file, names, modules, shapes, config)
        _check_others(file, names, modules, base)
        spec = _spec(modules, config)
        return ImportedAdapter(spec, _converted(file, modules, shapes, config, spec))


def write_imported(imported: ImportedAdapter, base_model: str, directory: Path) -> None:
    """A checkpoint folder without optimizer state."""
    save_adapter(imported.adapter, imported.spec, base_model, directory)
    write_state(TrainingState(base_model, imported.spec, 0, has_optimizer=False), directory)


@contextmanager
def _opened(directory: Path) -> Iterator[Any]:
    path = directory / ADAPTER_FILE
    if not path.is_file():
        raise UserError(
            f"{directory} has no {ADAPTER_FILE}; other files are not read, since pickled ones run "
            "code (PEFT writes this one with save_pretrained)"
        )
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None


def _modules(names: frozenset[str], shapes: Mapping[str, tuple[int, int]]) -> list[str]:
    """The modules of the base that the file adapts."""
    return [m for m in shapes if _tensor(m, "A") in names or _tensor(m, "B") in names]


def _tensor(module: str, letter: str) -> str:
    return f"{PREFIX}{module}.lora_{letter}.weight"


def _check(
    file: Any,
    names: frozenset[str],
    modules: list[str],
    shapes: Mapping[str, tuple[int, int]],
    config: PeftConfig,
) -> None:
    """Names, shapes and number types, before any tensor is read."""
    if not modules:
        raise UserError("the adapter adapts no linear module of this base model")
    adaptable = set(adapted_modules(LoraSpec(1, 0), shapes))
    faults = [f"{m} cannot be adapted here" for m in modules if m not in adaptable]
    for module in modules:
        out_features, in_features = shapes[module]
        rank = config.rank_of(module)
        for letter, expected in (("A", (rank, in_features)), ("B", (out_features, rank))):
            name = _tensor(module, letter)
            if name not in names:
                faults.append(f"{name} is missing")
                continue
            tensor = file.get_slice(name)
            if tuple(tensor.get_shape()) != expected:
                faults.append(f"{name} is {tuple(tensor.get_shape())}, not {expected}")
            elif tensor.get_dtype() not in _DTYPES:
                faults.append(f"{name} is {tensor.get_dtype()}; taken: {', '.join(_DTYPES)}")
    _refuse("the adapter does not fit this base model", faults)


def _check_others(file: Any, names: frozenset[str], modules: list[str], base: Path) -> None:
    """All other tensors: copies of base weights may be there, everything else is refused."""
    expected = {_tensor(module, letter) for module in modules for letter in "AB"}
    faults = [
        f"{name}: {reason}"
        for name in sorted(names - expected)
        if (reason := _fault_of(file, name, base)) is not None
    ]
    _refuse("this adapter cannot be imported exactly", faults)


def _fault_of(file: Any, name: str, base: Path) -> str | None:
    """None for a copy of a base weight: PEFT saves those of embeddings beside an adapter of the
    unembedding."""
    for part, reason in _PARTS.items():
        if name.endswith(f".{part}"):
            return reason
    if ".lora_" in name:
        return "the base model has no such module"
    ours = name.removeprefix(PREFIX).replace(".base_layer", "").removesuffix(".weight")
    weight = read_weight(base, ours)
    if weight is None:
        return "no tensor of LoRA, nor of the base model"
    if tuple(file.get_slice(name).get_shape()) == tuple(weight.shape):
        tensor: Tensor = file.get_tensor(name)
        if torch.equal(weight.to(tensor.dtype), tensor):
            return None
    return "it replaces a base weight (modules_to_save, a trained bias, a resized vocabulary)"


def _refuse(beginning: str, faults: list[str]) -> None:
    if faults:
        more = len(faults) - _NAMED_AT_MOST
        text = "; ".join(faults[:_NAMED_AT_MOST]) + (f"; and {more} more" if more > 0 else "")
        raise UserError(f"{beginning}: {text}")


def _spec(modules: list[str], config: PeftConfig) -> LoraSpec:
    """The largest rank, and the scale that most modules have."""
    rank = max(config.rank_of(module) for module in modules)
    pairs = {(config.rank_of(m), config.alpha_of(m)) for m in modules}
    alpha = pairs.pop()[1]
    if pairs or config.rank_stabilized:
        scales = Counter(scale for m in modules if (scale := config.scale_of(m)))
        alpha = scales.most_common(1)[0][0] * rank if scales else 0.0
    leaves = {module.rpartition(".")[2] for module in modules}
    return LoraSpec(
        rank,
        _SEED,
        train_attn=bool(leaves & {"q_proj", "k_proj", "v_proj", "o_proj"}),
        train_mlp=bool(leaves & {"gate_proj", "up_proj", "down_proj"}),
        train_unembed="lm_head" in leaves,
        alpha=alpha,
    )


def _converted(
    file: Any,
    modules: list[str],
    shapes: Mapping[str, tuple[int, int]],
    config: PeftConfig,
    spec: LoraSpec,
) -> Adapter:
    adapter = fresh_adapter(spec, shapes, _CPU)
    scale = spec.alpha / spec.rank
    uniform = len({(config.rank_of(m), config.alpha_of(m)) for m in modules}) == 1
    for module in modules:
        a, b = (file.get_tensor(_tensor(module, letter)).float() for letter in "AB")
        if not (torch.isfinite(a).all() and torch.isfinite(b).all()):
            raise UserError(f"the adapter's tensors of {module} are not finite")
        if not uniform and scale:
            # In float64, so that a scale costs B one rounding.
            b = (b.double() * (config.scale_of(module) / scale)).float()
        rank = config.rank_of(module)
        adapter[module][0][:rank] = a
        adapter[module][1][:, :rank] = b
    return adapter
