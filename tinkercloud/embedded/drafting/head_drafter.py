"""The draft head as drafter: it continues from hidden states that the target's own passes leave.

Row i of a sample is the target's states after token i, with token i + 1. Rejected tokens need no
rewind: chains leave the head's cache as it was.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tinkercloud.embedded.drafting.compiled_head import CompiledHead
from tinkercloud.embedded.drafting.head_network import (
    ChainRequest,
    HeadNetwork,
    TorchHead,
    UnreadRows,
)
from tinkercloud.embedded.drafting.network_drafter import row_params
from tinkercloud.embedded.forward.runners import NativeRunner, Runner
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.model.device import one_torch_thread
from tinkercloud.speculative.drafters.draft_distribution import AUDIT_EVERY, AuditSchedule
from tinkercloud.speculative.drafters.drafter import NO_DRAFT, Draft, Drafter, Stream
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
    """Parameters may be replaced between rounds (`use`)."""

    name = "head"
    is_coupled = True

    def __init__(self, network: HeadNetwork, audit_every: int = AUDIT_EVERY):
        self._network = network
        self.layers = network.head.config.layers
        self._audits = AuditSchedule(audit_every)
        self._readers: dict[int, _Reader] = {}

    @property
    def head(self) -> Head:
        return self._network.head

    @property
    def params(self) -> dict[str, Tensor]:
        return dict(self._network.params)

    def use(self, params: Mapping[str, Tensor]) -> None:
        self._network.use(params)
        for reader in self._readers.values():
            self._begin_anew(reader)

    def begin(self, stream: Stream) -> None:
        self._readers[stream.id] = _Reader(stream, self._network.begin())

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
        self._network.end(self._readers.pop(stream.id).slot)

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
        unread = [self._taken(reader, reader.num_unread - num_left) for reader in readers]
        for reader, output in zip(readers, self._network.read(unread), strict=True):
            if output is None:
                self._begin_anew(reader)
            reader.output = output

    def _taken(self, reader: _Reader, count: int) -> UnreadRows:
        if self._network.length(reader.slot) + count > MAX_CONTEXT:
            self._network.empty(reader.slot)
        states = reader.unread[0] if len(reader.unread) == 1 else torch.cat(reader.unread)
        tokens = reader.stream.tokens[reader.first + 1 : reader.first + 1 + count]
        assert len(tokens) == count, "states of tokens that were not accepted"
        reader.num_unread -= count
        reader.unread = [states[count:]] if reader.num_unread else []
        reader.first += count
        return UnreadRows(reader.slot, states[:count], tokens)

    def _drafts(self, ready: Sequence[tuple[_Reader, int]]) -> dict[int, Draft]:
        requests = [
            ChainRequest(
                reader.slot,
                reader.output,
                row_params(reader.stream, 0),
                most,
                self._audits.takes(reader.stream.params.temperature),
            )
            for reader, most in ready
            if reader.output is not None
        ]
        drafts = self._network.drafts(requests, self.unsure_below)
        streams = [reader.stream.id for reader, _ in ready]
        return dict(zip(streams, drafts, strict=True))

    def _begin_anew(self, reader: _Reader) -> None:
        self._network.empty(reader.slot)
        reader.unread, reader.num_unread, reader.output = [], 0, None


def head_drafter(
    head: tuple[Head, Mapping[str, Tensor]], base: BaseModel, runner: Runner
) -> HeadDrafter:
    """On what the engine computes with; the target's passes keep the states that it reads."""
    network: HeadNetwork
    if isinstance(runner, NativeRunner):
        network = CompiledHead(*head, base, runner.team)
    else:
        network = TorchHead(*head)
    drafter = HeadDrafter(network)
    runner.capture(base, drafter.layers)
    return drafter
