"""What computes a draft head for `head_drafter`, with what it keeps of each sequence; here through
torch, on any device.

Axes: D hidden, L fused layers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tinkercloud.decoding.device_copy import to_device
from tinkercloud.decoding.sampler import RowParams
from tinkercloud.speculative.drafters.drafter import Draft
from tinkercloud.speculative.head.cache import HeadCache, NewRows, extend
from tinkercloud.speculative.head.draft import Chains, ChainStart, draft_chains
from tinkercloud.speculative.head.head import Head


@dataclass(frozen=True, slots=True)
class UnreadRows:
    """New rows of the sequence in a slot: the target's states (n, L, D) after its tokens, and the
    n tokens that follow."""

    slot: int
    states: Tensor
    tokens: Sequence[int]


@dataclass(frozen=True, slots=True)
class ChainRequest:
    """At most so many tokens behind the last row of a slot, for which the head put out `output`
    (D,). first: what the first one is drawn with; those after it have the positions that follow.
    is_audited: with the distributions that they are drawn from."""

    slot: int
    output: Tensor
    first: RowParams
    most: int
    is_audited: bool

    def row(self, step: int) -> RowParams:
        return replace(self.first, position=self.first.position + step)


class HeadNetwork(Protocol):
    """Parameters may be replaced (`use`): then what slots hold was computed with others."""

    @property
    def head(self) -> Head: ...
    @property
    def params(self) -> Mapping[str, Tensor]: ...

    def use(self, params: Mapping[str, Tensor]) -> None: ...

    def begin(self) -> int:
        """A slot without rows."""
        ...

    def end(self, slot: int) -> None: ...

    def empty(self, slot: int) -> None: ...

    def length(self, slot: int) -> int:
        """Rows that it has."""
        ...

    def read(self, unread: Sequence[UnreadRows]) -> list[Tensor | None]:
        """The output (D,) of the last row of each; None where there is no room for its rows."""
        ...

    def drafts(self, requests: Sequence[ChainRequest], unsure_below: float) -> list[Draft]:
        """Slots keep the rows that they have. unsure_below: as of `Drafter`."""
        ...


class TorchHead:
    """A `HeadNetwork`, on the device of the target's rows."""

    def __init__(self, head: Head, params: Mapping[str, Tensor]):
        self.head, self.params = head, head.placed(params)
        self._cache = HeadCache(head, 1)
        self._free = [0]

    def use(self, params: Mapping[str, Tensor]) -> None:
        self.params = self.head.placed(params)

    def begin(self) -> int:
        if not self._free:
            num_slots = len(self._cache.lengths)
            self._cache.reserve(2 * num_slots, 0)
            self._free = list(range(num_slots, 2 * num_slots))
        return self._free.pop()

    def end(self, slot: int) -> None:
        self.empty(slot)
        self._free.append(slot)

    def empty(self, slot: int) -> None:
        self._cache.rewind(slot, 0)

    def length(self, slot: int) -> int:
        return self._cache.lengths[slot]

    def read(self, unread: Sequence[UnreadRows]) -> list[Tensor | None]:
        counts = [len(rows.tokens) for rows in unread]
        states = torch.cat([rows.states for rows in unread])
        features = self.head.fuse(self.params, states).split(counts)
        tokens = pad_sequence([torch.tensor(rows.tokens) for rows in unread], batch_first=True)
        new = NewRows(
            [rows.slot for rows in unread],
            pad_sequence(list(features), batch_first=True),
            to_device(tokens, self.head.device),
            counts,
        )
        outputs = extend(self.head, self.params, self._cache, new)
        return [outputs[i, count - 1] for i, count in enumerate(counts)]

    def drafts(self, requests: Sequence[ChainRequest], unsure_below: float) -> list[Draft]:
        start = chain_start(requests)
        return drafts_of(requests, draft_chains(self.head, self.params, self._cache, start))


def chain_start(requests: Sequence[ChainRequest]) -> ChainStart:
    """For chains as long as the longest of these."""
    return ChainStart(
        [request.slot for request in requests],
        torch.stack([request.output for request in requests]),
        [[r.row(step) for r in requests] for step in range(max(r.most for r in requests))],
        [i for i, request in enumerate(requests) if request.is_audited],
    )


def drafts_of(requests: Sequence[ChainRequest], chains: Chains) -> list[Draft]:
    # One copy for both: each copy to the host waits for the device. float64 holds any token id.
    values = torch.stack((chains.tokens.double(), chains.confidences.clamp(0, 1).double())).tolist()
    tokens, confidences = [[int(token) for token in row] for row in values[0]], values[1]
    return [
        Draft(
            tuple(tokens[i][: request.most]),
            tuple(confidences[i][: request.most]),
            tuple(chains.distributions.get(i, ())[: request.most]),
        )
        for i, request in enumerate(requests)
    ]
