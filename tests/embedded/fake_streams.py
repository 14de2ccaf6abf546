"""Streams that compute at once and remember what they were promised: who waited for whom.

Time on them is a vector clock (Mattern 1989): one entry a stream, and waiting merges. What the host
happens to have seen counts for nothing, so that a race shows even where it would never strike.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from tinkercloud.embedded.forward.batch import Batch
from tinkercloud.embedded.forward.kv_blocks import BLOCK_TOKENS, BlockPool, KVLayout
from tinkercloud.embedded.forward.runners import Runner
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.sampling.cuda_streams import ParallelStreams, StreamRole

MAIN = "main"


class Race(AssertionError):
    """Something was used that another stream may not be done with."""


@dataclass(eq=False)
class FakeStream:
    name: str
    log: list[str]
    clock: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def wait_stream(self, stream: "FakeStream") -> None:
        self.log.append(f"{self.name} waits for {stream.name}")
        for name, time in stream.clock.items():
            self.clock[name] = max(self.clock[name], time)

    def tick(self) -> tuple[str, int]:
        self.clock[self.name] += 1
        return self.name, self.clock[self.name]

    def is_after(self, event: tuple[str, int]) -> bool:
        return self.clock[event[0]] >= event[1]


class FakeStreams:
    def __init__(self) -> None:
        self.log: list[str] = []
        self.current = FakeStream(MAIN, self.log)
        self._streams = {role: FakeStream(role.value, self.log) for role in StreamRole}

    def parallel(self) -> ParallelStreams:
        return ParallelStreams(self._streams, lambda: self.current, self.use)

    @contextmanager
    def use(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def note(self, what: str) -> None:
        self.log.append(f"{self.current.name}: {what}")


class Places:
    """Who last wrote each place, and who read it since. Raises Race."""

    def __init__(self, streams: FakeStreams):
        self._streams = streams
        self._written: dict[tuple[int, int], tuple[str, int]] = {}
        self._read: dict[tuple[int, int], list[tuple[str, int]]] = defaultdict(list)

    def use(self, reads: set[tuple[int, int]], writes: set[tuple[int, int]]) -> None:
        """By one piece of work on the current stream."""
        stream = self._streams.current
        for place in reads | writes:
            self._check(stream, place, [self._written.get(place)], "written")
        for place in writes:
            self._check(stream, place, self._read[place], "read")
        event = stream.tick()
        for place in writes:
            self._written[place] = event
            self._read[place] = []
        for place in reads:
            self._read[place].append(event)

    @staticmethod
    def _check(
        stream: FakeStream, place: object, events: list[tuple[str, int] | None], what: str
    ) -> None:
        for event in events:
            if event is not None and not stream.is_after(event):
                raise Race(f"{place} is {what} on {event[0]} and used on {stream.name}")

    def copied(self, source: int, target: int) -> None:
        """A whole block."""
        slots = range(BLOCK_TOKENS)
        self.use({(source, slot) for slot in slots}, {(target, slot) for slot in slots})


class WatchedRunner:
    """Another runner, whose passes are noted, and their keys and values watched."""

    def __init__(self, runner: Runner, streams: FakeStreams):
        self._runner, self._streams = runner, streams
        self.places = Places(streams)
        self.is_exact, self.scan, self.norms = runner.is_exact, runner.scan, runner.norms
        self.fuses_lm_head, self.scores, self.candidates = False, None, None
        self.fails_on: str | None = None  # the stream's name
        self.rows: dict[str, list[int]] = defaultdict(list)  # of each pass, by stream

    def kv_layout(self, base: BaseModel) -> KVLayout:
        return self._runner.kv_layout(base)

    def is_row_invariant(self, base: BaseModel) -> bool:
        return self._runner.is_row_invariant(base)

    @property
    def captured(self) -> Tensor:
        return self._runner.captured

    def capture(self, base: BaseModel, layers: tuple[int, ...]) -> None:
        self._runner.capture(base, layers)

    def forward(self, batch: Batch, pool: BlockPool) -> Tensor:
        self._streams.note("pass")
        name = self._streams.current.name
        self.rows[name].append(len(batch.tokens))
        blocks = batch.tables[batch.sequence, batch.positions // BLOCK_TOKENS]
        written = zip(blocks.tolist(), (batch.positions % BLOCK_TOKENS).tolist(), strict=True)
        self.places.use(_read(batch), set(written))
        if name == self.fails_on:
            raise RuntimeError("the pass failed")
        # The compiled pass, which needs no streams, writes its next logits to the same memory.
        return self._runner.forward(batch, pool).clone()

    def rest(self) -> None:
        self._runner.rest()


def _read(batch: Batch) -> set[tuple[int, int]]:
    """Places of all tokens up to the last of each sequence."""
    read: set[tuple[int, int]] = set()
    for row in np.flatnonzero(np.diff(batch.sequence, append=-1)).tolist():
        table = batch.tables[batch.sequence[row]].tolist()
        tokens = range(int(batch.positions[row]) + 1)
        read.update((table[i // BLOCK_TOKENS], i % BLOCK_TOKENS) for i in tokens)
    return read
