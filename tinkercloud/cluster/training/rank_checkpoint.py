"""Checkpoints (`weights.checkpoints`) of models that are sharded over many ranks.

Files hold full tensors, so that a checkpoint does not depend on the plan that wrote it. The first
rank writes; every rank reads the parts that it needs from the shared folder.
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
from tinkercloud.cluster.training.collectives import Collectives
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


def gather_adapter(
    model: RankModel, kind: Kind, shapes: AdapterShapes, collectives: Collectives
) -> dict[str, Tensor]:
    """Full tensors by "MODULE.lora_A" and "MODULE.lora_B" on the first rank, in the order of
    checkpoints; {} on the others. Collective over all ranks."""
    slot = model.slot
    assert slot is not None
    owned: dict[str, Tensor] = {}
    sizes = shapes.modules
    # All ranks of a stage walk slot.tensors in the order of its sites, so that the collectives of
    # `read` and `gather` pair up.
    for name in slot.tensors:
        full = slot.gather(name, model.optimizer.read(name.replace(".", "/"), kind), sizes)
        if _is_owner(slot, name):
            owned[name] = full.cpu()
    tensors = dict(collectives.gather_to_first(owned))
    names = (f"{m}.lora_{x}" for m in shapes.ranks(model.spec) for x in "AB")
    return {name: tensors[name] for name in names} if collectives.is_first else {}


def _is_owner(slot: AdapterSlot, name: str) -> bool:
    """Whether this rank is the first of those that have the same full tensor."""
    if slot.layout[name].group.rank() != 0:
        return False
    if not getattr(slot.tensors[name], "allreduce", True):
        return parallel_state.get_expert_data_parallel_rank() == 0
    return parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0


def write_adapter(
    tensors: Mapping[str, Tensor], spec: LoraSpec, base_model: str, directory: Path
) -> None:
    """PEFT's two files; PEFT's `rank_pattern` names experts whose rank differs from the others'."""
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
    model: RankModel,
    base_model: str,
    shapes: AdapterShapes,
    collectives: Collectives,
    directory: Path,
) -> None:
    """The adapter's files, written by the first rank. Collective over all ranks."""
    tensors = gather_adapter(model, "weight", shapes, collectives)
    with collectives.shared_errors():
        if collectives.is_first:
            write_adapter(tensors, model.spec, base_model, directory)


def save_lora_moments(
    model: RankModel, shapes: AdapterShapes, collectives: Collectives, directory: Path
) -> None:
    state: dict[str, Tensor] = {}
    for kind in MOMENTS:
        for name, tensor in gather_adapter(model, kind, shapes, collectives).items():
            state[f"{kind}.{name}"] = tensor
    with collectives.shared_errors():
        if collectives.is_first:
            write_tensors(state, directory / OPTIMIZER_FILE)


def adapter_ranks(directory: Path, spec: LoraSpec, shapes: AdapterShapes) -> dict[str, int]:
    """module -> rank of the checkpoint's adapter. Raises UserError when it does not fit here."""
    expected = shapes.ranks(spec)
    ranks: dict[str, int] = {}
    with _opened(directory / ADAPTER_FILE) as file:
        names = set(file.keys())
        for module in expected:
            a, b = (_shape(file, names, f"{_PEFT}{module}.lora_{x}.weight") for x in "AB")
            out_features, in_features = shapes.modules[module]
            rank = spec.rank if ".experts." not in module else a[0]
            if (b, a) != ((out_features, rank), (rank, in_features)):
                raise UserError(
                    f"the checkpoint's adapter for {module} is {b} x {a}; this base model needs "
                    f"{(out_features, rank)} x {(rank, in_features)}"
                )
            ranks[module] = rank
        others = names - {f"{_PEFT}{m}.lora_{x}.weight" for m in ranks for x in "AB"}
        if others:
            raise UserError(
                f"the checkpoint has tensors this base model lacks: {sorted(others)[:3]}"
            )
    return ranks


def load_lora(model: RankModel, directory: Path, *, with_optimizer: bool) -> None:
    """Load this rank's shards, without communication. Raises UserError."""
    slot = model.slot
    assert slot is not None
    with _opened(directory / ADAPTER_FILE) as file:
        for name in slot.tensors:
            full = _finite(file.get_tensor(f"{_PEFT}{name}.weight"), name).float()
            model.optimizer.write(name.replace(".", "/"), "weight", slot.shard(name, full))
    if not with_optimizer:
        return
    with _opened(directory / OPTIMIZER_FILE) as file:
        names = set(file.keys())
        for kind in MOMENTS:
            for name, parameter in slot.tensors.items():
                if f"{kind}.{name}" not in names:
                    raise UserError("the checkpoint's optimizer state does not fit this model")
                shard = slot.shard(name, _finite(file.get_tensor(f"{kind}.{name}"), name))
                if shard.shape != parameter.shape:
                    raise UserError(f"the checkpoint's optimizer state {name} has a wrong shape")
                model.optimizer.write(name.replace(".", "/"), kind, shard)


# ---- files


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, "pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise UserError(f"the checkpoint cannot be read: {error}") from None


def _shape(file: Any, names: set[str], name: str) -> tuple[int, ...]:
    if name not in names:
        raise UserError(f"the checkpoint has no tensor {name!r}")
    return tuple(file.get_slice(name).get_shape())


def _finite(tensor: Tensor, name: str) -> Tensor:
    if not torch.isfinite(tensor).all():
        raise UserError(f"the checkpoint's tensor {name} is not finite")
    return tensor


# ---- full-parameter models


def checkpoint_name(name: str) -> str:
    """Our name of a Hugging Face tensor: weights are named by their module, without ".weight"."""
    return name.removesuffix(".weight")


def save_network(
    model: RankModel,
    catalogue: Catalogue,
    collectives: Collectives,
    path: Path,
    kinds: Mapping[Kind, str],
) -> None:
    """Stream tensors of the network's shape into one file. kinds: what to write -> prefix of its
    names. Collective over all ranks."""
    shapes = {
        prefix + checkpoint_name(name): shape
        for prefix in kinds.values()
        for item in catalogue.items
        for name, shape in item.shapes.items()
    }
    with collectives.shared_errors():
        file = TensorFile(path, shapes) if collectives.is_first else None
    error: OSError | None = None
    for kind, prefix in kinds.items():
        read = partial(_read, model, kind)
        for bucket in full_tensors(catalogue, read, _BUCKET_BYTES, dtype=torch.float32):
            # All ranks go on gathering when the first one's disk is full: if it stopped, the others
            # would wait for it in the next collective.
            if file is not None and error is None:
                error = _written(file, prefix, bucket)
    with collectives.shared_errors():
        if error is not None:
            raise error
        if file is not None:
            file.close()


def _read(model: RankModel, kind: Kind, name: str) -> Tensor:
    return model.optimizer.read(name, kind).clone()


def _written(file: TensorFile, prefix: str, bucket: Bucket) -> OSError | None:
    try:
        for name, tensor in bucket:
            file.write(prefix + checkpoint_name(name), tensor)
    except OSError as error:
        return error
    return None


def check_network(path: Path, catalogue: Catalogue, prefixes: tuple[str, ...], base: str) -> None:
    """Raises UserError unless the file holds exactly the network's tensors."""
    expected = {
        prefix + checkpoint_name(name): tuple(shape)
        for prefix in prefixes
        for item in catalogue.items
        for name, shape in item.shapes.items()
    }
    with _opened(path) as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    if shapes != expected:
        raise UserError(f"the checkpoint's weights are not those of a {base}")


def load_network(
    model: RankModel, catalogue: Catalogue, path: Path, kinds: Mapping[Kind, str]
) -> None:
    """Load this rank's shards from a file that passed `check_network`. Raises UserError."""
    with _opened(path) as file:
        for kind, prefix in kinds.items():

            def source(name: str, prefix: str = prefix) -> Any:
                return file.get_slice(prefix + checkpoint_name(name))

            def put(parameter: str, shard: Tensor, kind: Kind = kind) -> None:
                if parameter in model.optimizer.params:
                    model.optimizer.write(parameter, kind, shard)

            load_full(catalogue, source, put)


def check_finite(path: Path, rank: int, size: int) -> None:
    """Each rank reads 1/size of the tensors. Raises UserError on the rank that finds a fault."""
    with _opened(path) as file:
        for name in sorted(file.keys())[rank::size]:
            _finite(file.get_tensor(name), name)
