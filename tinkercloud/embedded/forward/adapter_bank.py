"""The low-rank factors of several adapters in tensors whose addresses do not change.

A captured graph reads fixed addresses: a row's adapter is a number in a buffer, and the factors are
copied to the slot of that number before the graph runs. All slots are multiplied at once and what
is not the row's own is masked in between; so a batch of many adapters reads each of them once.

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

NO_ADAPTER = -1  # the slot of a row without adapter
RANK_STEP = 8


@dataclass(frozen=True, slots=True)
class _Capacity:
    """Which modules, ranks and slots there is room for."""

    names: frozenset[str]
    rank: int
    slots: int

    def union(self, other: "_Capacity") -> "_Capacity":
        rank, slots = max(self.rank, other.rank), max(self.slots, other.slots)
        return _Capacity(self.names | other.names, rank, slots)

    def nbytes(self, shapes: Mapping[str, tuple[int, int]]) -> int:
        return 4 * self.slots * self.rank * sum(sum(shapes[name]) for name in self.names)


class AdapterBank:
    """Owned by one runner. `generation` grows whenever the tensors are replaced: a graph that was
    captured before would read freed memory."""

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, int]],
        device: torch.device,
        *,
        max_slots: int = 16,
        max_bytes: int = 4 * 1024**3,
    ):
        """shapes: every linear module that an adapter can have factors for, (out, in)."""
        self._shapes, self._device = shapes, device
        self._max_slots, self._max_bytes = max_slots, max_bytes
        self._slots: OrderedDict[str, int] = OrderedDict()  # by version id, in order of use
        self._refused: set[str] = set()
        self._capacity = _Capacity(frozenset(), 0, 0)
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
        """Every version's slot, NO_ADAPTER without adapter. None: there is no room for all of them.

        An adapter with numbers that are not finite is never loaded: they would reach other rows.
        """
        adapted = {v.id: v for v in versions if v.adapter is not None}
        if len(adapted) > self._max_slots or not adapted.keys().isdisjoint(self._refused):
            return None
        adapters = [v.adapter for v in adapted.values() if v.adapter is not None]
        if not self._make_room(adapters, len(adapted)):
            return None
        # Before anything is loaded, so that no slot of this batch is the least recently used.
        for version_id in [name for name in self._slots if name in adapted]:
            self._slots.move_to_end(version_id)
        for version in adapted.values():
            if version.id not in self._slots and not self._load(version):
                return None
        return [self._slots.get(version.id, NO_ADAPTER) for version in versions]

    def forget(self) -> None:
        """No slot is a version's any more; the tensors stay for the graphs that read them."""
        self._slots.clear()
        self._refused.clear()

    def delta(self, name: str, x: Tensor, slots: Tensor) -> Tensor:
        """x (B, in), slots (B,) -> scale B A x of each row's adapter, (B, out) in x's type."""
        down, up = self.down[name], self.up[name]
        inner = F.linear(x.float(), down.flatten(0, 1)).view(-1, *down.shape[:2])
        is_row_slot = slots[:, None] == torch.arange(down.shape[0], device=slots.device)
        # where, not a product with 0: another adapter's result for this row may overflow.
        inner = torch.where(is_row_slot[..., None], inner * self.scales[:, None], 0.0)
        return (inner.flatten(1) @ up.flatten(0, 1)).to(x.dtype)

    def _make_room(self, adapters: Sequence[Adapter], num_slots: int) -> bool:
        """Grow so that these adapters fit with the shapes seen before, or else these alone. New
        tensors are empty: what the old ones held is loaded again."""
        names = frozenset(name for adapter in adapters for name in adapter)
        ranks = [a.shape[0] for adapter in adapters for a, _ in adapter.values()]
        needed = _Capacity(
            names,
            -(-max(ranks, default=0) // RANK_STEP) * RANK_STEP,
            1 << (num_slots - 1).bit_length() if num_slots else 0,
        )
        for capacity in (self._capacity.union(needed), needed):
            if capacity == self._capacity:
                return True
            if capacity.nbytes(self._shapes) <= self._max_bytes:
                return self._allocate(capacity)
        return False

    def _allocate(self, capacity: _Capacity) -> bool:
        self.down, self.up = {}, {}  # freed before there are new ones
        self._slots.clear()
        self._capacity = _Capacity(frozenset(), 0, 0)
        self.generation += 1
        try:
            for name in sorted(capacity.names):
                out_size, in_size = self._shapes[name]
                shape = (capacity.slots, capacity.rank)
                self.down[name] = torch.zeros(*shape, in_size, device=self._device)
                self.up[name] = torch.zeros(*shape, out_size, device=self._device)
        except torch.OutOfMemoryError:
            self.down, self.up = {}, {}
            return False
        self.scales = torch.zeros(capacity.slots, device=self._device)
        self._capacity = capacity
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
            # The slot may have held a larger rank, or modules that this adapter lacks.
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
        if len(self._slots) < self._capacity.slots:
            return min(set(range(self._capacity.slots)) - set(self._slots.values()))
        return self._slots.popitem(last=False)[1]
