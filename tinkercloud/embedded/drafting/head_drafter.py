"""The draft head as drafter: it continues from hidden states that the target's own passes leave.

Row i of a sample is the target's states after token i, with token i + 1. Rejected tokens need no
rewind: chains leave the head's cache as it was.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tinkercloud.decoding.device_copy import to_device
from tinkercloud.embedded.drafting.compiled_head import CompiledHead, Product
from tinkercloud.embedded.drafting.network_drafter import row_params
from tinkercloud.embedded.forward.runners import NativeRunner, Runner
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.model.device import one_torch_thread
from tinkercloud.speculative.drafters.draft_distribution import AUDIT_EVERY, AuditSchedule
from tinkercloud.speculative.drafters.drafter import NO_DRAFT, Draft, Drafter, Stream
from tinkercloud.speculative.head.cache import HeadCache, NewRows, extend
from tinkercloud.speculative.head.draft import ChainStart, draft_chains
from tinkercloud.speculative.head.head import Head

MAX_UNREAD = 256  # rows of a sample that wait for `propose`; older ones are dropped
MAX_STEADY = 16  # unread rows of a sample that is drafted for in every round, from above
MAX_CONTEXT = 1024  # rows of a sample in the head's cache, which is then emptied


@dataclass(slots=True, eq=False)
class _Reader:
    """unread: states (n, L, D) of the next rows; first: the place of their first."""

    stream: Stream
    slot: int
    unread: list[Tensor] = field(default_factory=list)
    num_unread: int = 0
    first: int = 0
    output: Tensor | None = None  # (D,) of the last row that was read


class HeadDrafter(Drafter):
    """Parameters may be replaced between rounds (`use`). It computes on the target's device; where
    there is a `product`, on the compiled pass's."""

    name = "head"
    is_coupled = True

    def __init__(
        self,
        head: Head,
        params: Mapping[str, Tensor],
        audit_every: int = AUDIT_EVERY,
        product: Product | None = None,
    ):
        self.head = head
        self._network = head if product is None else CompiledHead(head, product)
        self._params = self._network.placed(params)
        self.layers = head.config.layers
        self._audits = AuditSchedule(audit_every)
        self._cache = HeadCache(head, 1)
        self._free = [0]
        self._readers: dict[int, _Reader] = {}

    @property
    def params(self) -> dict[str, Tensor]:
        return dict(self._params)

    def use(self, params: Mapping[str, Tensor]) -> None:
        self._params = self._network.placed(params)
        for reader in self._readers.values():
            self._begin_anew(reader)

    def begin(self, stream: Stream) -> None:
        if not self._free:
            num_slots = len(self._cache.lengths)
            self._cache.reserve(2 * num_slots, 0)
            self._free = list(range(num_slots, 2 * num_slots))
        self._readers[stream.id] = _Reader(stream, self._free.pop())

    def observe_hidden(self, stream: Stream, first: int, hidden: Tensor) -> None:
        """hidden (n, L, D): the target's states after the tokens from place `first` on, all of
        them accepted."""
        reader = self._readers[stream.id]
        if reader.num_unread and reader.first + reader.num_unread != first:
            self._begin_anew(reader)
        if not reader.num_unread:
            reader.first = first
        reader.unread.append(hidden.clone())  # CUDA graphs write the next pass there
        reader.num_unread += len(hidden)
        if reader.num_unread > MAX_UNREAD:
            newest = torch.cat(reader.unread)[-MAX_UNREAD // 2 :]
            end = reader.first + reader.num_unread
            self._begin_anew(reader)
            reader.unread, reader.num_unread = [newest], len(newest)
            reader.first = end - len(newest)

    def end(self, stream: Stream) -> None:
        reader = self._readers.pop(stream.id)
        self._cache.rewind(reader.slot, 0)
        self._free.append(reader.slot)

    @torch.inference_mode()
    def catch_up(self, streams: Sequence[Stream]) -> None:
        readers = [self._readers[stream.id] for stream in streams]
        with one_torch_thread():
            self._read([r for r in readers if r.num_unread > MAX_STEADY], num_left=1)

    @torch.inference_mode()
    def propose(self, requests: Sequence[tuple[Stream, int]]) -> list[Draft]:
        with one_torch_thread():
            return self._proposed(requests)

    def _proposed(self, requests: Sequence[tuple[Stream, int]]) -> list[Draft]:
        readers = [(self._readers[stream.id], most) for stream, most in requests if most > 0]
        self._read([reader for reader, _ in readers if reader.num_unread])
        ready = [(reader, most) for reader, most in readers if reader.output is not None]
        drafts = self._drafts(ready) if ready else {}
        return [drafts.get(stream.id, NO_DRAFT) for stream, _ in requests]

    def _read(self, readers: Sequence[_Reader], num_left: int = 0) -> None:
        """Their unread states, each with the token after it, but for so many of the last ones."""
        if not readers:
            return
        for reader in readers:
            if self._cache.lengths[reader.slot] + reader.num_unread > MAX_CONTEXT:
                self._cache.rewind(reader.slot, 0)
        states = [torch.cat(reader.unread) for reader in readers]
        counts = [reader.num_unread - num_left for reader in readers]
        unread = torch.cat([each[:n] for each, n in zip(states, counts, strict=True)])
        features = self._network.fuse(self._params, unread).split(counts)
        tokens = [
            torch.tensor(r.stream.tokens[r.first + 1 : r.first + 1 + count])
            for r, count in zip(readers, counts, strict=True)
        ]
        assert [len(ids) for ids in tokens] == counts, "states of tokens that were not accepted"
        new = NewRows(
            [r.slot for r in readers],
            pad_sequence(list(features), batch_first=True),
            to_device(pad_sequence(tokens, batch_first=True), self.head.device),
            counts,
        )
        outputs = extend(self._network, self._params, self._cache, new)
        for i, (reader, count) in enumerate(zip(readers, counts, strict=True)):
            reader.output = outputs[i, count - 1]
            reader.unread = [states[i][count:]] if num_left else []
            reader.num_unread, reader.first = num_left, reader.first + count

    def _drafts(self, ready: Sequence[tuple[_Reader, int]]) -> dict[int, Draft]:
        depth = max(most for _, most in ready)
        outputs = [reader.output for reader, _ in ready if reader.output is not None]
        rows = [[row_params(reader.stream, k) for reader, _ in ready] for k in range(depth)]
        takes = self._audits.takes
        audited = [
            i for i, (reader, _) in enumerate(ready) if takes(reader.stream.params.temperature)
        ]
        slots = [reader.slot for reader, _ in ready]
        start = ChainStart(slots, torch.stack(outputs), rows, audited)
        chains = draft_chains(self._network, self._params, self._cache, start)
        # One copy for both: each copy to the host waits for the device. float64 holds any token id.
        values = torch.stack((chains.tokens.double(), chains.chances.clamp(0, 1).double())).tolist()
        tokens, confidences = [[int(token) for token in row] for row in values[0]], values[1]
        return {
            reader.stream.id: Draft(
                tuple(tokens[i][:most]),
                tuple(confidences[i][:most]),
                tuple(chains.distributions.get(i, ())[:most]),
            )
            for i, (reader, most) in enumerate(ready)
        }

    def _begin_anew(self, reader: _Reader) -> None:
        self._cache.rewind(reader.slot, 0)
        reader.unread, reader.num_unread, reader.output = [], 0, None


def head_drafter(
    head: tuple[Head, Mapping[str, Tensor]], base: BaseModel, runner: Runner
) -> HeadDrafter:
    """On what the engine computes with; the target's passes keep the states that it reads."""
    product = runner.product if isinstance(runner, NativeRunner) else None
    drafter = HeadDrafter(*head, product=product)
    runner.capture(base, drafter.layers)
    return drafter
