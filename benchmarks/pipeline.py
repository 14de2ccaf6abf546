"""Drafts from another machine, over networks of any round trip: when they pay, and what overlap adds.

The same sample without drafts, with drafts made in between on the same machine, and with drafts of a
worker behind a delay, serially and overlapped. Every run's tokens and log-probabilities are compared
before a speed is reported.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from benchmarks.lib.arguments import BenchmarkParser
from benchmarks.lib.machine import ROOT, versions
from benchmarks.lib.pipeline_worker import OVERLAPPED, SERIAL, Job, WorkerProcess, worker_process
from benchmarks.lib.report import Cell, Report, Target, about
from benchmarks.lib.scripted_drafter import Script, ScriptedDrafter, Span
from benchmarks.lib.smollm2 import weights
from benchmarks.lib.timing import alternating
from benchmarks.speculation_rl import LocalModel
from tinkercloud.commands.bench import PROSE, EngineFactory, Workload, require_equal, run_timed
from tinkercloud.core.types import FromBase, SampleOutput, SampleRequest, SamplingParams
from tinkercloud.embedded.forward.kv_blocks import BlockPool
from tinkercloud.embedded.forward.runners import Runner
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.model.device import freeze_garbage_collector
from tinkercloud.embedded.model.version import Version
from tinkercloud.embedded.sampling.speculation import Speculation
from tinkercloud.speculative.draft_length.fixed_length import FixedLength
from tinkercloud.speculative.drafters.drafter import Draft, Drafter, Stream
from tinkercloud.speculative.drafters.guarded_drafter import GuardedDrafter
from tinkercloud.speculative.remote.connection import Address, ClientSecurity
from tinkercloud.speculative.remote.link import GrpcLink
from tinkercloud.speculative.remote.messages import Target as DraftTarget
from tinkercloud.speculative.remote.remote_drafter import RemoteDrafter

PLAIN, LOCAL = "plain", "local"
ACCEPTED, SECOND, COST, DRAFTED = 0.8, 0.5, 0.1, 4
ROUND_TRIP, TIMES = 0.3, 1.2
"""Passes of the target; overlapped drafts are to be so many times as fast as serial ones there."""
WAIT_S, CONNECT_S, KV_CACHE_BYTES = 5.0, 30.0, 2**30
PICTURE = ROOT / "docs" / "speculation_remote.png"
COLOURS = {PLAIN: "#9aa3af", LOCAL: "#059669", SERIAL: "#d97706", OVERLAPPED: "#2563eb"}
COLUMNS = (
    *("round trip ms", "passes", "plain tokens/s", "local times", "serial times"),
    *("overlapped times", "overlapped / serial", "prepared in time %", "bytes sent a round"),
)


@dataclass(frozen=True)
class Scale:
    """One round trip, that of ROUND_TRIP passes, is added."""

    tokens: int = 96
    repeats: int = 5
    round_trips_ms: tuple[float, ...] = (0, 2, 5, 10, 20, 50, 100, 200)


QUICK = Scale(tokens=24, repeats=1, round_trips_ms=(0, 20))


@dataclass
class Kept:
    """Of one contender at one round trip, the fastest run. prepared: the share of drafts that were
    there when they were asked for; spans: what the engine's thread did."""

    seconds: float = float("inf")
    prepared: float = 0.0
    bytes_a_round: float = 0.0
    spans: list[Span] = field(default_factory=list)


class TimedDrafter(Drafter):
    """Another drafter; remembers how long the engine waited for drafts."""

    def __init__(self, drafter: Drafter):
        self.name, self.is_coupled, self._drafter = drafter.name, drafter.is_coupled, drafter
        self.spans: list[Span] = []

    def begin(self, stream: Stream) -> None:
        self._drafter.begin(stream)

    def observe(self, stream: Stream, num_new: int) -> None:
        self._drafter.observe(stream, num_new)

    def end(self, stream: Stream) -> None:
        self._drafter.end(stream)

    def propose(self, requests: Sequence[tuple[Stream, int]]) -> list[Draft]:
        start_s = time.monotonic()
        drafts = self._drafter.propose(requests)
        self.spans.append(Span("wait for drafts", start_s, time.monotonic()))
        return drafts


class Bench:
    def __init__(self, model: LocalModel, scale: Scale):
        self._model, self._scale = model, scale
        self._version: Version = model.store.version(model.store.publish(FromBase("smollm2")))
        self._workload = self._sample(scale.tokens)
        self._expected: list[SampleOutput] = []
        self._outputs_of_plain()

    def _outputs_of_plain(self) -> None:
        runs = [self._run(None)[0] for _ in range(1 + self._scale.repeats)]
        self.pass_s = min(run.seconds for run in runs) / self._scale.tokens

    def script(self) -> Script:
        (request,), (output,) = self._workload.requests, self._expected
        known = [*request.prompt.tolist(), *output.sequences[0].tokens.tolist()]
        return Script([known], ACCEPTED, SECOND, COST * self.pass_s)

    def measured(
        self, round_trips_ms: Sequence[float], script: Script, worker: WorkerProcess
    ) -> list[dict[str, Kept]]:
        found = []
        for place, ms in enumerate(round_trips_ms):
            kept = {name: Kept() for name in COLOURS}
            for _, name in alternating(list(COLOURS), self._scale.repeats):
                port = worker.ports[name][place] if name in worker.ports else 0
                self._keep(kept[name], self._drafter(name, script, port))
            found.append(kept)
            shown = ", ".join(f"{name} {each.seconds:.2f} s" for name, each in kept.items())
            print(f"{ms:.1f} ms: {shown}", file=sys.stderr, flush=True)
        return found

    def _drafter(self, name: str, script: Script, port: int) -> Drafter | None:
        if name == PLAIN:
            return None
        if name == LOCAL:
            return ScriptedDrafter(script, prepares=False)
        base = self._model.base
        target = DraftTarget(base.name, b"", base.config.vocab_size)
        link = GrpcLink(Address("127.0.0.1", port), ClientSecurity(), target)
        drafter = RemoteDrafter([link], WAIT_S)
        deadline = time.monotonic() + CONNECT_S
        while not drafter.snapshot()["workers"][link.name]["connected"]:  # type: ignore[index]
            if time.monotonic() > deadline:
                raise TimeoutError(f"no connection to {link.name}")
            time.sleep(0.01)
        return drafter

    def _keep(self, kept: Kept, drafter: Drafter | None) -> None:
        run, spans = self._run(drafter)
        if run.seconds >= kept.seconds:
            return
        kept.seconds, kept.spans = run.seconds, spans
        if isinstance(drafter, RemoteDrafter):
            counts = drafter.counts
            kept.prepared = counts["prepared"] / max(1, counts["asked"])
            kept.bytes_a_round = counts["sent_bytes"] / max(1, counts["asked"])

    def _run(self, drafter: Drafter | None) -> tuple["Timed", list[Span]]:
        """Of an engine of its own, after a token that makes its pools. Raises UnequalError."""
        timed = None if drafter is None else TimedDrafter(drafter)
        factory = EngineFactory(1, KV_CACHE_BYTES, self._model.threads, _speculate(timed))
        engine = factory.make(drafts=timed is not None)
        run_timed(engine, self._sample(1))
        start_s = time.monotonic()
        run = run_timed(engine, self._workload)
        end_s = time.monotonic()
        if isinstance(drafter, RemoteDrafter):
            drafter.close()
        self._expected = self._expected or run.outputs
        require_equal(self._workload.name, run.outputs, self._expected)
        waits = [] if timed is None else [each for each in timed.spans if each.start_s >= start_s]
        return Timed(run.seconds), _with_passes(waits, start_s, end_s)

    def _sample(self, tokens: int) -> Workload:
        params = SamplingParams(tokens, 0, 1.0, use_eos=False)
        prompt = np.array(self._model.encode(PROSE), np.int32)
        return Workload("prose", self._version, (SampleRequest(prompt, 1, params),))


@dataclass(frozen=True, slots=True)
class Timed:
    seconds: float


def _speculate(
    drafter: Drafter | None,
) -> Callable[[BaseModel, Runner, BlockPool], Speculation] | None:
    if drafter is None:
        return None

    def make(base: BaseModel, _runner: Runner, _pool: BlockPool) -> Speculation:
        guarded = GuardedDrafter(drafter, base.config.vocab_size)
        return Speculation(guarded, FixedLength(DRAFTED))

    return make


def _with_passes(waits: Sequence[Span], start_s: float, end_s: float) -> list[Span]:
    """What lies between two waits is the target's pass."""
    spans, at_s = [], start_s
    for wait in waits:
        spans += [Span("verify", at_s, wait.start_s), wait]
        at_s = wait.end_s
    return [*spans, Span("verify", at_s, end_s)]
