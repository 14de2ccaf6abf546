"""Device memory that is freed and taken again: storages whose content waits on the host.

A storage is emptied in place (`resize_(0)`), so that all views of it (parameters, gradients,
optimizer shards, communication buckets) stay valid and need no new pointer when it is filled again.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, UntypedStorage


class HostStore:
    """Storages of one owner. Tensors must not be used between `offload` and `onload`."""

    def __init__(self) -> None:
        self._offloaded: list[tuple[UntypedStorage, int, Tensor | None]] = []
        self._constant: dict[int, Tensor] = {}

    @property
    def is_offloaded(self) -> bool:
        return bool(self._offloaded)

    def offload(
        self,
        tensors: Iterable[Tensor],
        *,
        constant: Iterable[Tensor] = (),
        zero: Iterable[Tensor] = (),
    ) -> int:
        """Move the tensors' storages to the host; returns the device bytes freed.

        constant: tensors that never change: their host copy is made once. zero: tensors that hold
        zeros: nothing is copied.
        """
        assert not self._offloaded, "offloaded twice"
        for storage in _storages(zero):
            self._empty(storage, None)
        for storage in _storages(constant):
            key = storage._cdata
            if key not in self._constant:
                self._constant[key] = _to_host(storage)
            self._empty(storage, self._constant[key])
        for storage in _storages(tensors):
            self._empty(storage, _to_host(storage))
        return sum(size for _, size, _ in self._offloaded)

    def _empty(self, storage: UntypedStorage, copy: Tensor | None) -> None:
        self._offloaded.append((storage, storage.nbytes(), copy))
        storage.resize_(0)

    def onload(self) -> int:
        """Bring everything back; returns the device bytes taken."""
        total = 0
        for storage, size, copy in self._offloaded:
            storage.resize_(size)
            view = _bytes(storage)
            view.zero_() if copy is None else view.copy_(copy, non_blocking=True)
            total += size
        if any(storage.device.type == "cuda" for storage, _, _ in self._offloaded):
            torch.cuda.synchronize()
        self._offloaded.clear()
        return total

    @contextmanager
    def on_device(self, tensors: Iterable[Tensor]) -> Iterator[None]:
        """Those of the tensors that are offloaded are on the device for the block, read-only: what
        is written is lost."""
        storages = {tensor.untyped_storage()._cdata for tensor in tensors}
        loaded = [part for part in self._offloaded if part[0]._cdata in storages]
        try:
            for storage, size, copy in loaded:
                storage.resize_(size)
                view = _bytes(storage)
                view.zero_() if copy is None else view.copy_(copy)
            yield
        finally:
            for storage, _, _ in loaded:
                storage.resize_(0)


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of their storages on the device, each counted once."""
    return sum(storage.nbytes() for storage in _storages(tensors))


def _storages(tensors: Iterable[Tensor]) -> Iterator[UntypedStorage]:
    """Each storage once, without those that are empty already."""
    seen: set[int] = set()
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage._cdata not in seen:
            seen.add(storage._cdata)
            yield storage


def _bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _to_host(storage: UntypedStorage) -> Tensor:
    on_gpu = storage.device.type == "cuda"
    host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=on_gpu)
    return host.copy_(_bytes(storage))
