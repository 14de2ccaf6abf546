"""Device memory handed back and taken again: storages that wait on the host.

A storage is emptied in place, so that every view of it (parameters, gradients, optimizer shards,
communication buckets) stays valid and needs no new pointer when it comes back.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, UntypedStorage


class HostStore:
    """Storages of one owner. Tensors must not be used between `offload` and `onload`."""

    def __init__(self) -> None:
        self._away: list[tuple[UntypedStorage, int, Tensor | None]] = []
        self._constant: dict[int, Tensor] = {}

    @property
    def is_away(self) -> bool:
        return bool(self._away)

    def offload(
        self,
        tensors: Iterable[Tensor],
        *,
        constant: Iterable[Tensor] = (),
        zero: Iterable[Tensor] = (),
    ) -> int:
        """Move the tensors' storages to the host; returns the device bytes that became free.

        constant: never change, so that their host copy is made once and kept. zero: hold zeros, so
        that nothing need be copied.
        """
        assert not self._away, "offloaded twice"
        for storage in _storages(zero):
            self._leave(storage, None)
        for storage in _storages(constant):
            key = storage._cdata
            if key not in self._constant:
                self._constant[key] = _to_host(storage)
            self._leave(storage, self._constant[key])
        for storage in _storages(tensors):
            self._leave(storage, _to_host(storage))
        return sum(size for _, size, _ in self._away)

    def _leave(self, storage: UntypedStorage, copy: Tensor | None) -> None:
        self._away.append((storage, storage.nbytes(), copy))
        storage.resize_(0)

    def onload(self) -> int:
        """Bring everything back; returns the device bytes taken."""
        total = 0
        for storage, size, copy in self._away:
            storage.resize_(size)
            view = _bytes(storage)
            view.zero_() if copy is None else view.copy_(copy, non_blocking=True)
            total += size
        if any(storage.device.type == "cuda" for storage, _, _ in self._away):
            torch.cuda.synchronize()
        self._away.clear()
        return total

    @contextmanager
    def borrowed(self, tensors: Iterable[Tensor]) -> Iterator[None]:
        """Those of the tensors that are away are on the device for the block, to be read only."""
        wanted = {tensor.untyped_storage()._cdata for tensor in tensors}
        lent = [part for part in self._away if part[0]._cdata in wanted]
        try:
            for storage, size, copy in lent:
                storage.resize_(size)
                view = _bytes(storage)
                view.zero_() if copy is None else view.copy_(copy)
            yield
        finally:
            for storage, _, _ in lent:
                storage.resize_(0)


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """What their storages hold on the device, each counted once."""
    return sum(storage.nbytes() for storage in _storages(tensors))


def _storages(tensors: Iterable[Tensor]) -> Iterator[UntypedStorage]:
    """Each storage once, those already emptied left out."""
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
