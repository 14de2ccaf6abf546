"""Full tensors to shards and back: loading a base model, gathering for export, sync, checkpoints.

`full_tensors` and `load_full` work on anything shaped like the parameters: weights, or an
optimizer's moments. All ranks call them alike, in the same order.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tinkercloud.cluster.weights.mapping import (
    Entry,
    Source,
    WeightMap,
    full_shapes,
    named_tensors,
)
from tinkercloud.errors import ConfigError
from tinkercloud.planning.plan import MegatronArguments

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_NAMED_AT_MOST = 8  # tensors listed in an error
FILE_BYTES = 4 * 1024**3  # of one file of an export

Bucket = list[tuple[str, Tensor]]


@dataclass(frozen=True, slots=True)
class Item:
    """One parameter of the whole network, in the catalogue of every rank.

    stage, expert_rank: of the ranks that hold it. entry: its mapping; `entry.parameter` is the name
    on those ranks. shapes: of the full tensors. dtype: of the weight.
    """

    stage: int
    expert_rank: int | None
    entry: Entry
    shapes: Mapping[str, tuple[int, ...]]
    dtype: torch.dtype

    def num_elements(self) -> int:
        return sum(torch.Size(shape).numel() for shape in self.shapes.values())


class Catalogue:
    """The parameters of the whole network, in the one order in which all ranks walk through them:
    ranks that took another would pair up the wrong collectives."""

    def __init__(self, model: Any, arguments: MegatronArguments, architecture: str):
        from megatron.core import parallel_state as state

        self.stage = state.get_pipeline_model_parallel_rank()
        self.expert_rank = state.get_expert_model_parallel_rank()
        self.arguments = arguments
        self.tensors = dict(named_tensors(model))
        mapped = WeightMap(arguments, architecture, self.expert_rank)
        self.entries = {entry.parameter: entry for entry in mapped.entries(model)}
        self.items = self._all_items([self._item(e) for e in self.entries.values()])

    def _item(self, entry: Entry) -> Item:
        shard = self.tensors[entry.parameter]
        expert_rank = self.expert_rank if entry.is_expert else None
        return Item(self.stage, expert_rank, entry, full_shapes(entry, shard), shard.dtype)

    def _all_items(self, local: list[Item]) -> list[Item]:
        """The items of all ranks, each once, by stage; a tied tensor only where it is first."""
        # Also from ranks that hold the same items: one message of each, once.
        by_rank: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(by_rank, local)
        items: list[Item] = []
        names: set[str] = set()
        for item in sorted((item for part in by_rank for item in part), key=_order):
            if not names.issuperset(item.entry.names):
                names.update(item.entry.names)
                items.append(item)
        return items

    def is_local(self, item: Item) -> bool:
        return item.stage == self.stage and item.expert_rank in (None, self.expert_rank)

    def names(self) -> list[str]:
        """Every Hugging Face name, in the order of `full_tensors`."""
        return [name for item in self.items for name in item.entry.names]


def _order(item: Item) -> tuple[int, int]:
    return item.stage, item.expert_rank or 0


def split_group(entry: Entry) -> Any:
    """The ranks that the parameter is sharded over; None where it is replicated."""
    from megatron.core import parallel_state as state

    if entry.split == "replicated":
        return None
    if entry.split == "etp":
        return state.get_expert_tensor_parallel_group()
    return state.get_tensor_model_parallel_group()


def load_full(catalogue: Catalogue, source: Source, put: Callable[[str, Tensor], None]) -> None:
    """Make this rank's shard of every parameter from full tensors, without communication.

    put(parameter name, shard) is called with each.
    """
    for entry in catalogue.entries.values():
        group = split_group(entry)
        rank, size = (0, 1) if group is None else (group.rank(), group.size())
        put(entry.parameter, entry.shard(source, rank, size))


def full_tensors(
    catalogue: Catalogue,
    shard: Callable[[str], Tensor],
    bucket_bytes: int,
    *,
    dtype: torch.dtype | None = None,
    select: Callable[[str], bool] = lambda name: True,
) -> Iterator[Bucket]:
    """Full tensors under their Hugging Face names, on every rank, bucket by bucket.

    shard(parameter name): this rank's shard; called once, in the same order on all ranks that hold
    the parameter (so that it may communicate among them). dtype: of the tensors; None: that of each
    weight. select: by Hugging Face name; an item is gathered when any of its names is selected. A
    bucket has bucket_bytes at most, or one item.
    """
    bucket: Bucket = []
    held = 0
    for item in catalogue.items:
        if not any(select(name) for name in item.entry.names):
            continue
        tensors = _full_item(catalogue, item, shard, dtype or item.dtype)
        size = sum(t.numel() * t.element_size() for t in tensors.values())
        if bucket and held + size > bucket_bytes:
            yield bucket
            bucket, held = [], 0
        bucket += [(name, tensor) for name, tensor in tensors.items() if select(name)]
        held += size
    if bucket:
        yield bucket


@torch.no_grad()
def _full_item(
    catalogue: Catalogue, item: Item, shard: Callable[[str], Tensor], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Gathered over the ranks that it is sharded over, then broadcast over the expert-parallel
    group of its stage, then over the pipeline: each rank has it before it passes it on."""
    from megatron.core import parallel_state as state

    tensors: dict[str, Tensor] | None = None
    if catalogue.is_local(item):
        local = shard(item.entry.parameter).detach().to(dtype).contiguous()
        tensors = item.entry.unshard(_all_gathered(local, split_group(item.entry)))
    if item.expert_rank is not None and item.stage == catalogue.stage:
        experts = state.get_expert_model_parallel_group()
        tensors = _broadcast(tensors, item, (experts, item.expert_rank), dtype)
    stages = state.get_pipeline_model_parallel_group()
    return _broadcast(tensors, item, (stages, item.stage), dtype)


def _all_gathered(shard: Tensor, group: Any) -> list[Tensor]:
    if group is None or group.size() == 1:
        return [shard]
    shards = [torch.empty_like(shard) for _ in range(group.size())]
    torch.distributed.all_gather(shards, shard, group=group)
    return shards


def _broadcast(
    tensors: dict[str, Tensor] | None, item: Item, owner: tuple[Any, int], dtype: torch.dtype
) -> dict[str, Tensor]:
    """From the owner (a group, a rank in it) to the whole group, in one message."""
    group, owner_rank = owner
    if group.size() == 1:
        assert tensors is not None
        return tensors
    flat = torch.empty(item.num_elements(), dtype=dtype, device=_device())
    if group.rank() == owner_rank:
        assert tensors is not None
        torch.cat([t.flatten() for t in tensors.values()], out=flat)
    source = torch.distributed.get_global_rank(group, owner_rank)
    torch.distributed.broadcast(flat, src=source, group=group)
    sizes = [torch.Size(shape).numel() for shape in item.shapes.values()]
    parts = zip(item.shapes.items(), flat.split(sizes), strict=True)
    return {name: part.view(shape) for (name, shape), part in parts}


def _device() -> torch.device:
    backend = torch.distributed.get_backend()
    return torch.device("cuda" if backend == "nccl" else "cpu")


# ---- files


class HuggingFaceFolder:
    """Tensors of a folder of safetensors by name, as slices: only what is indexed is read."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._places = _places(folder)
        self._files: dict[str, Any] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __getitem__(self, name: str) -> Any:
        file = self._places[name]
        if file not in self._files:
            try:
                self._files[file] = safe_open(self.folder / file, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"{self.folder / file} is damaged: {error}") from error
        return self._files[file].get_slice(name)


def _places(folder: Path) -> dict[str, str]:
    """Tensor name -> file name."""
    try:
        if (folder / _SINGLE).is_file():
            with safe_open(folder / _SINGLE, framework="pt") as file:
                return dict.fromkeys(file.keys(), _SINGLE)
        places = json.loads((folder / _INDEX).read_text())["weight_map"]
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ConfigError(f"{folder} holds no safetensors model: {error}") from error
    for name in set(places.values()):
        if Path(name).name != name or not (folder / name).is_file():
            raise ConfigError(f"{_INDEX} names {name!r}, which is not in {folder}")
    return places


def load_base(model: Any, catalogue: Catalogue, folder: Path) -> None:
    """Set every weight of this rank's network from a Hugging Face folder, cast to its dtype.

    Raises ConfigError, the same on all ranks, listing what is missing, unused, or of another shape.
    """
    files = HuggingFaceFolder(folder)
    _check_names(catalogue, files, folder)
    _check_shapes(catalogue, files, folder)

    def put(parameter: str, shard: Tensor) -> None:
        with torch.no_grad():
            target = catalogue.tensors[parameter]
            assert target.shape == shard.shape, f"the mapping of {parameter} is wrong"
            target.copy_(shard)

    load_full(catalogue, lambda name: files[name], put)


_UNUSED = (".rotary_emb.inv_freq", "lm_head.weight")


def _check_names(catalogue: Catalogue, files: HuggingFaceFolder, folder: Path) -> None:
    expected = set(catalogue.names())
    layers = catalogue.arguments.num_layers
    draft = f"model.layers.{layers}."  # multi-token-prediction layers follow the last
    missing = sorted(expected - set(files))
    unused = sorted(
        name
        for name in set(files) - expected
        if not name.endswith(_UNUSED) and not name.startswith(draft)
    )
    faults = {"missing": missing, "unexpected": unused}
    texts = [f"{kind}: {_listed(names)}" for kind, names in faults.items() if names]
    if texts:
        raise ConfigError(f"the tensors in {folder} do not fit its config; {'; '.join(texts)}")


def _check_shapes(catalogue: Catalogue, files: HuggingFaceFolder, folder: Path) -> None:
    """Compares full shapes: a shard of a tensor that is too large would fit."""
    faults = []
    for item in catalogue.items:
        for name, shape in item.shapes.items():
            in_file = tuple(files[name].get_shape())
            if in_file != tuple(shape):
                faults.append(f"{name} is {in_file}, not {tuple(shape)}")
    if faults:
        raise ConfigError(f"the tensors in {folder} do not fit its config; {_listed(faults)}")


def _listed(names: Sequence[str]) -> str:
    rest = len(names) - _NAMED_AT_MOST
    return ", ".join(names[:_NAMED_AT_MOST]) + (f" and {rest} more" if rest > 0 else "")


class HuggingFaceWriter:
    """Writes buckets as a folder of safetensors that transformers and SGLang load.

    base: the folder whose config and tokenizer files are copied. Holds at most FILE_BYTES and a
    bucket in memory.
    """

    def __init__(self, folder: Path, base: Path):
        self._folder, self._base = folder, base
        self._held: dict[str, Tensor] = {}
        self._places: dict[str, str] = {}
        self._num_bytes = 0
        self._num_files = 0

    def add(self, bucket: Bucket) -> None:
        for name, tensor in bucket:
            self._held[name] = tensor.detach().cpu().contiguous()
        if sum(t.numel() * t.element_size() for t in self._held.values()) >= FILE_BYTES:
            self._flush()

    def _flush(self) -> None:
        if not self._held:
            return
        self._num_files += 1
        name = f"model-{self._num_files:05d}.safetensors"
        save_file(self._held, self._folder / name, metadata={"format": "pt"})
        self._places |= dict.fromkeys(self._held, name)
        self._num_bytes += sum(t.numel() * t.element_size() for t in self._held.values())
        self._held = {}

    def finish(self) -> None:
        """Write the last file and the index, and copy config and tokenizer."""
        self._flush()
        index = {"metadata": {"total_size": self._num_bytes}, "weight_map": self._places}
        (self._folder / _INDEX).write_text(json.dumps(index, indent=2))
        for path in self._base.iterdir():
            is_index = path.name.endswith(".index.json")  # of the base's own weight files
            if path.suffix in (".json", ".txt", ".model", ".jinja") and not is_index:
                shutil.copy(path, self._folder / path.name)
