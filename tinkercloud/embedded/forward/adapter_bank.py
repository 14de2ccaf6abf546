"""The low-rank factors of several adapters in tensors that stay where they are.

A captured graph reads fixed addresses: which adapter a row has is a number in a buffer, and the
factors are copied to the slot of that number before. All slots are multiplied at once and what is
not the row's own is taken away in between; so a batch of many adapters reads each of them once.

Axes: B rows, S slots, R ranks that there is room for.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tinkercloud.embedded.model.version import Version
from tinkercloud.weights.adapters import Adapter

NONE = -1  # the slot of a row without adapter
RANK_STEP = 8


@dataclass(frozen=True, slots=True)
class _Size:
    """Which modules, ranks and slots there is room for."""

    names: frozenset[str]
    rank: int
    slots: int

    def grown(self, by: "_Size") -> "_Size":
        return _Size(self.names | by.names, max(self.rank, by.rank), max(self.slots, by.slots))

    def nbytes(self, shapes: Mapping[str, tuple[int, int]]) -> int:
        return 4 * self.slots * self.rank * sum(sum(shapes[name]) for name in self.names)


class AdapterBank:
    """Owned by one runner. `generation` grows whenever the tensors are replaced: what was captured
    before reads freed memory then."""

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, int]],
        device: torch.device,
        *,
        max_slots: int = 16,
        max_bytes: int = 4 * 1024**3,
    ):
        """shapes: every linear module that an adapter can sit on, (out, in)."""
        self._shapes, self._device = shapes, device
        self._max_slots, self._max_bytes = max_slots, max_bytes
        self._slots: OrderedDict[str, int] = OrderedDict()  # by version id, in order of use
        self._refused: set[str] = set()
        self._size = _Size(frozenset(), 0, 0)
        self.generation = 0
        self.scales = torch.zeros(0, device=device)
        self.down: dict[str, Tensor] = {}  # (S, R, in) float32
        self.up: dict[str, Tensor] = {}  # (S, R, out) float32

    def __contains__(self, name: str) -> bool:
        return name in self.down

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.down.values(), *self.up.values()))

    def place(self, versions: Sequence[Version]) -> list[int] | None:
        """Every version's slot, NONE without adapter. None: not all of them can be here together.

        An adapter with numbers that are none is never taken in: they would reach other rows.
        """
        wanted = {v.id: v for v in versions if v.adapter is not None}
        if len(wanted) > self._max_slots or not wanted.keys().isdisjoint(self._refused):
            return None
        adapters = [v.adapter for v in wanted.values() if v.adapter is not None]
        if not self._make_room(adapters, len(wanted)):
            return None
        for known in [name for name in self._slots if name in wanted]:
            self._slots.move_to_end(known)
        for version in wanted.values():
            if version.id not in self._slots and not self._load(version):
                return None
        return [self._slots.get(version.id, NONE) for version in versions]

    def forget(self) -> None:
        """No version is known any more; the tensors stay for what was captured."""
        self._slots.clear()
        self._refused.clear()

    def delta(self, name: str, x: Tensor, slots: Tensor) -> Tensor:
        """x (B, in), slots (B,) -> scale B A x of each row's adapter, (B, out) in x's type."""
        down, up = self.down[name], self.up[name]
        inner = F.linear(x.float(), down.flatten(0, 1)).view(-1, *down.shape[:2])
        own = slots[:, None] == torch.arange(down.shape[0], device=slots.device)
        # where, not a product with 0: what another adapter makes of this row may overflow.
        inner = torch.where(own[..., None], inner * self.scales[:, None], 0.0)
        return (inner.flatten(1) @ up.flatten(0, 1)).to(x.dtype)

    def _make_room(self, adapters: Sequence[Adapter], num_slots: int) -> bool:
        """Tensors for that many of such adapters, and for what there was room for; without that
        where it would be too much. New ones forget what the old ones held."""
        names = frozenset(name for adapter in adapters for name in adapter)
        ranks = [a.shape[0] for adapter in adapters for a, _ in adapter.values()]
        needed = _Size(
            names,
            -(-max(ranks, default=0) // RANK_STEP) * RANK_STEP,
            1 << (num_slots - 1).bit_length() if num_slots else 0,
        )
        for size in (self._size.grown(needed), needed):
            if size == self._size:
                return True
            if size.nbytes(self._shapes) <= self._max_bytes:
                return self._allocate(size)
        return False

    def _allocate(self, size: "_Size") -> bool:
        self.down, self.up = {}, {}  # freed before there are new ones
        self._slots.clear()
        self._size = _Size(frozenset(), 0, 0)
        self.generation += 1
        try:
            for name in sorted(size.names):
                out_size, in_size = self._shapes[name]
                shape = (size.slots, size.rank)
                self.down[name] = torch.zeros(*shape, in_size, device=self._device)
                self.up[name] = torch.zeros(*shape, out_size, device=self._device)
        except torch.OutOfMemoryError:
            self.down, self.up = {}, {}
            return False
        self.scales = torch.zeros(size.slots, device=self._device)
        self._size = size
        return True

    def _load(self, version: Version) -> bool:
        adapter = version.adapter
        assert adapter is not None
        sums = [tensor.sum() for pair in adapter.values() for tensor in pair]
        if sums and not bool(torch.isfinite(torch.stack(sums)).all()):
            self._refused.add(version.id)
            return False
        slot = self._free_slot()
        for name, down in self.down.items():
            up = self.up[name]
            down[slot].zero_()
            up[slot].zero_()
            if name in adapter:
                a, b = adapter[name]
                down[slot, : a.shape[0]].copy_(a)
                up[slot, : a.shape[0]].copy_(b.T)
        self.scales[slot] = version.scale
        self._slots[version.id] = slot
        return True

    def _free_slot(self) -> int:
        if len(self._slots) < self._size.slots:
            return min(set(range(self._size.slots)) - set(self._slots.values()))
        return self._slots.popitem(last=False)[1]
