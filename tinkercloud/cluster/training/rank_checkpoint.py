"""Checkpoints (`weights.checkpoints`) of models that lie on many ranks.

Tensors are whole in the files and cut on the ranks, so that a checkpoint knows nothing of the plan
that wrote it. The first rank writes; every rank reads the parts it needs from the shared folder.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tinkercloud.cluster.training.adapter_slots import AdapterShapes, AdapterSlot
from tinkercloud.cluster.training.collectives import Together
from tinkercloud.cluster.training.rank_models import RankModel
from tinkercloud.cluster.training.rank_optimizer import Kind
from tinkercloud.cluster.weights.conversion import Bucket, Catalogue, full_tensors, load_full
from tinkercloud.cluster.weights.tensor_file import TensorFile
from tinkercloud.core.types import LoraSpec
from tinkercloud.errors import UserError
from tinkercloud.weights.adapters import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_FILE,
    Adapter,
    save_adapter,
)
from tinkercloud.weights.checkpoints import OPTIMIZER_FILE, write_tensors

MOMENTS: tuple[Kind, ...] = ("exp_avg", "exp_avg_sq")
_PEFT = "base_model.model."
_BUCKET_BYTES = 256 * 1024**2

Read = Callable[[str], Any]
"""A tensor of an open file by name, to be sliced or taken whole."""


# ---- adapters


def gathered(
    model: RankModel, kind: Kind, shapes: AdapterShapes, together: Together
) -> dict[str, Tensor]:
    """Whole tensors by "MODULE.lora_A" and "MODULE.lora_B" on the first rank, in the order of
    checkpoints; {} on the others. Every rank calls this."""
    slot = model.slot
    assert slot is not None
    own: dict[str, Tensor] = {}
    sizes = shapes.modules
    for name in slot.tensors:
        whole = slot.join(name, model.optimizer.read(name.replace(".", "/"), kind), sizes)
        if _is_owner(slot, name):
            own[name] = whole.cpu()
    found = dict(together.to_first(own))
    names = (f"{m}.lora_{x}" for m in shapes.ranks(model.spec) for x in "AB")
    return {name: found[name] for name in names} if together.is_first else {}


def _is_owner(slot: AdapterSlot, name: str) -> bool:
    """One rank of those that hold the same tensor."""
    if slot.layout[name].group.rank() != 0:
        return False
    if not getattr(slot.tensors[name], "allreduce", True):
        return parallel_state.get_expert_data_parallel_rank() == 0
    return parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0


def write_adapter(
    tensors: Mapping[str, Tensor], spec: LoraSpec, base_model: str, directory: Path
) -> None:
    """PEFT's two files; experts of another rank than the rest are named in `rank_pattern`."""
    adapter: Adapter = {}
    for name, tensor in tensors.items():
        module, _, leaf = name.rpartition(".")
        if leaf == "lora_A":
            adapter[module] = (tensor, tensors[f"{module}.lora_B"])
    save_adapter(adapter, spec, base_model, directory)
    others = {a.shape[0] for a, _ in adapter.values()} - {spec.rank}
    if others:
        path = directory / ADAPTER_CONFIG_FILE
        config = json.loads(path.read_text())
        config["rank_pattern"] = {r"experts\.\d+\.(gate|up|down)_proj": others.pop()}
        path.write_text(json.dumps(config, indent=2))


def save_lora(
    model: RankModel, base_model: str, shapes: AdapterShapes, together: Together, directory: Path
) -> None:
    """The adapter's files (every rank calls this, the first one writes)."""
    tensors = gathered(model, "weight", shapes, together)
    with together.agreed():
        if together.is_first:
            write_adapter(tensors, model.spec, base_model, directory)


def save_lora_moments(
    model: RankModel, shapes: AdapterShapes, together: Together, directory: Path
) -> None:
    state: dict[str, Tensor] = {}
    for kind in MOMENTS:
        for name, tensor in gathered(model, kind, shapes, together).items():
            state[f"{kind}.{name}"] = tensor
    with together.agreed():
        if together.is_first:
            write_tensors(state, directory / OPTIMIZER_FILE)


def adapter_ranks(directory: Path, spec: LoraSpec, shapes: AdapterShapes) -> dict[str, int]:
    """module -> rank of the checkpoint's adapter; raises UserError when it does not fit here."""
    expected = shapes.ranks(spec)
    ranks: dict[str, int] = {}
    with _opened(directory / ADAPTER_FILE) as file:
        here = set(file.keys())
        for module in expected:
            a, b = (_shape(file, here, f"{_PEFT}{module}.lora_{x}.weight") for x in "AB")
            out_features, in_features = shapes.modules[module]
            rank = spec.rank if ".experts." not in module else a[0]
            if (b, a) != ((out_features, rank), (rank, in_features)):
                raise UserError(
                    f"the checkpoint's adapter for {module} is {b} x {a}; this base model needs "
                    f"{(out_features, rank)} x {(rank, in_features)}"
                )
            ranks[module] = rank
        others = here - {f"{_PEFT}{m}.lora_{x}.weight" for m in ranks for x in "AB"}
        if others:
            raise UserError(
                f"the checkpoint has tensors this base model lacks: {sorted(others)[:3]}"
            )
    return ranks


def load_lora(model: RankModel, directory: Path, *, with_optimizer: bool) -> None:
    """Fill this rank's part (nothing is exchanged). Raises UserError."""
    slot = model.slot
    assert slot is not None
    with _opened(directory / ADAPTER_FILE) as file:
        for name in slot.tensors:
            whole = _finite(file.get_tensor(f"{_PEFT}{name}.weight"), name).float()
            model.optimizer.write(name.replace(".", "/"), "weight", slot.share(name, whole))
    if not with_optimizer:
        return
    with _opened(directory / OPTIMIZER_FILE) as file:
        here = set(file.keys())
        for kind in MOMENTS:
            for name, own in slot.tensors.items():
                if f"{kind}.{name}" not in here:
                    raise UserError("the checkpoint's optimizer state does not fit this model")
                whole = _finite(file.get_tensor(f"{kind}.{name}"), name)
                part = slot.share(name, whole)
                if part.shape != own.shape:
                    raise UserError(f"the checkpoint's optimizer state {name} has a wrong shape")
                model.optimizer.write(name.replace(".", "/"), kind, part)


# ---- files


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, "pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise UserError(f"the checkpoint cannot be read: {error}") from None


def _shape(file: Any, here: set[str], name: str) -> tuple[int, ...]:
    if name not in here:
        raise UserError(f"the checkpoint has no tensor {name!r}")
    return tuple(file.get_slice(name).get_shape())


def _finite(tensor: Tensor, name: str) -> Tensor:
    if not torch.isfinite(tensor).all():
        raise UserError(f"the checkpoint's tensor {name} is not finite")
    return tensor


# ---- whole networks


def own_name(name: str) -> str:
    """Our files' name of a Hugging Face tensor: weights go by their module alone."""
    return name.removesuffix(".weight")


def save_whole(
    model: RankModel,
    catalogue: Catalogue,
    together: Together,
    path: Path,
    kinds: Mapping[Kind, str],
) -> None:
    """Stream tensors of the network's shape into one file; kinds: what to write -> name prefix."""
    shapes = {
        prefix + own_name(name): shape
        for prefix in kinds.values()
        for item in catalogue.items
        for name, shape in item.shapes.items()
    }
    with together.agreed():
        file = TensorFile(path, shapes) if together.is_first else None
    error: OSError | None = None
    for kind, prefix in kinds.items():
        read = partial(_read, model, kind)
        for bucket in full_tensors(catalogue, read, _BUCKET_BYTES, dtype=torch.float32):
            # All ranks gather on even when the first one's disk is full: nobody waits in vain.
            if file is not None and error is None:
                error = _written(file, prefix, bucket)
    with together.agreed():
        if error is not None:
            raise error
        if file is not None:
            file.close()


def _read(model: RankModel, kind: Kind, name: str) -> Tensor:
    return model.optimizer.read(name, kind).clone()


def _written(file: TensorFile, prefix: str, bucket: Bucket) -> OSError | None:
    try:
        for name, tensor in bucket:
            file.write(prefix + own_name(name), tensor)
    except OSError as error:
        return error
    return None


def check_whole(path: Path, catalogue: Catalogue, prefixes: tuple[str, ...], base: str) -> None:
    """Raises UserError unless the file holds exactly the network's tensors."""
    expected = {
        prefix + own_name(name): tuple(shape)
        for prefix in prefixes
        for item in catalogue.items
        for name, shape in item.shapes.items()
    }
    with _opened(path) as file:
        found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    if found != expected:
        raise UserError(f"the checkpoint's weights are not those of a {base}")


def load_whole(
    model: RankModel, catalogue: Catalogue, path: Path, kinds: Mapping[Kind, str]
) -> None:
    """Fill this rank's part from a file that `check_whole` passed. Raises UserError."""
    with _opened(path) as file:
        for kind, prefix in kinds.items():

            def source(name: str, prefix: str = prefix) -> Any:
                return file.get_slice(prefix + own_name(name))

            def put(parameter: str, shard: Tensor, kind: Kind = kind) -> None:
                if parameter in model.optimizer.params:
                    model.optimizer.write(parameter, kind, shard)

            load_full(catalogue, source, put)


def check_finite(path: Path, rank: int, size: int) -> None:
    """Every rank reads its share of the file; raises UserError on the rank that finds a fault."""
    with _opened(path) as file:
        for name in sorted(file.keys())[rank::size]:
            _finite(file.get_tensor(name), name)
