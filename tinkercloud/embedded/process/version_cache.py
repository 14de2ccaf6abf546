"""Published versions: the recently used in memory, the others on disk until they are sampled.

A client that publishes at every step and never says which versions it is done with would otherwise
fill the memory.
"""

import shutil
from collections import OrderedDict
from dataclasses import dataclass, replace
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from tinkercloud.embedded.model.packed_tensors import PackedTensors
from tinkercloud.embedded.model.version import Version
from tinkercloud.embedded.training.trainable_model import with_tied_head
from tinkercloud.errors import VersionLost
from tinkercloud.weights.adapters import Adapter


@dataclass(frozen=True, slots=True)
class _OnDisk:
    """What is left in memory of a version whose tensors are in a file; `bare` has none."""

    bare: Version
    path: Path


class VersionCache:
    """Versions by id. `folder` is emptied at the start: nothing in it outlives this process."""

    def __init__(self, folder: Path, memory_bytes: int):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self._folder = folder
        self._memory_bytes = memory_bytes
        self._in_memory: OrderedDict[str, Version] = OrderedDict()
        self._on_disk: dict[str, _OnDisk] = {}

    def __len__(self) -> int:
        return len(self._in_memory) + len(self._on_disk)

    @property
    def num_on_disk(self) -> int:
        return len(self._on_disk)

    def put(self, version: Version) -> None:
        self._in_memory[version.id] = version
        self._spill()

    def get(self, version_id: str) -> Version:
        """Read back from disk where needed; raises VersionLost for an unknown id."""
        if version_id in self._on_disk:
            stored = self._on_disk.pop(version_id)
            self._in_memory[version_id] = _read(stored)
            stored.path.unlink()
            self._in_memory.move_to_end(version_id)
            self._spill()
        try:
            self._in_memory.move_to_end(version_id)
        except KeyError:
            raise VersionLost(version_id) from None
        return self._in_memory[version_id]

    def drop(self, version_id: str) -> None:
        """Unknown ids are ignored. Samples underway keep their tensors until they finish."""
        self._in_memory.pop(version_id, None)
        stored = self._on_disk.pop(version_id, None)
        if stored is not None:
            stored.path.unlink(missing_ok=True)

    def _spill(self) -> None:
        """Move the least recently used out until the rest fits; the newest always stays."""
        used = sum(v.own_bytes for v in self._in_memory.values())
        for version_id in list(self._in_memory)[:-1]:
            if used <= self._memory_bytes:
                return
            version = self._in_memory[version_id]
            if version.own_bytes == 0:
                continue
            used -= version.own_bytes
            self._on_disk[version_id] = _write(version, self._folder)
            del self._in_memory[version_id]


def _write(version: Version, folder: Path) -> _OnDisk:
    path = folder / f"{version.id}.safetensors"
    if version.adapter is not None:
        tensors = {f"{n}.A": a for n, (a, _) in version.adapter.items()}
        tensors |= {f"{n}.B": b for n, (_, b) in version.adapter.items()}
        bare = replace(version, adapter={})
    else:
        tensors = _own_tensors(version)
        bare = replace(version, weights={})
    save_file({n: t.cpu().contiguous() for n, t in tensors.items()}, path)
    return _OnDisk(bare, path)


def _own_tensors(version: Version) -> dict[str, Tensor]:
    """Of full weights; packed ones are kept as they are, so that there is no second copy."""
    if isinstance(version.weights, PackedTensors):
        return version.weights.state()
    tied = version.base.config.tie_word_embeddings
    return {n: t for n, t in version.weights.items() if not (tied and n == "lm_head")}


def _read(stored: _OnDisk) -> Version:
    base = stored.bare.base
    tensors: dict[str, Tensor] = load_file(stored.path, device=str(base.device))
    if stored.bare.adapter is None and isinstance(base.weights, PackedTensors):
        weights = PackedTensors.restored(tensors, base.config.weight_shapes())
        salient = base.weights.salient_inputs
        return replace(stored.bare, weights=weights.with_salient(salient))
    if stored.bare.adapter is None:
        return replace(stored.bare, weights=with_tied_head(base, tensors))
    names = [n.removesuffix(".A") for n in tensors if n.endswith(".A")]
    adapter: Adapter = {n: (tensors[f"{n}.A"], tensors[f"{n}.B"]) for n in names}
    return replace(stored.bare, adapter=adapter)
