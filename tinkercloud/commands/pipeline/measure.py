"""The same sample without drafts, with drafts made in between on the same machine, and with drafts
of a worker behind a delay, serially and overlapped.

Every run's tokens and log-probabilities are compared before a speed is reported.
"""

import secrets
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tinkercloud.addresses import Address
from tinkercloud.commands.bench import (
    PROSE,
    EngineFactory,
    Workload,
    open_target,
    require_equal,
    run_timed,
)
from tinkercloud.commands.pipeline import namespace
from tinkercloud.commands.pipeline.scripted_drafter import Script, ScriptedDrafter
from tinkercloud.commands.pipeline.spans import Span, within, write_trace
from tinkercloud.commands.pipeline.worker_process import (
    OVERLAPPED,
    SERIAL,
    Job,
    WorkerProcess,
    worker_process,
)
from tinkercloud.config import Config
from tinkercloud.core.types import SampleOutput, SampleRequest, SamplingParams
from tinkercloud.embedded.forward.kv_blocks import BlockPool
from tinkercloud.embedded.forward.runners import Runner
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.model.device import (
    freeze_garbage_collector,
    set_up_torch,
    usable_cores,
)
from tinkercloud.embedded.model.version import Version
from tinkercloud.embedded.sampling.speculation import Speculation
from tinkercloud.errors import ConfigError
from tinkercloud.speculative.draft_length.fixed_length import FixedLength
from tinkercloud.speculative.drafters.drafter import Draft, Drafter, Stream
from tinkercloud.speculative.drafters.guarded_drafter import GuardedDrafter
from tinkercloud.speculative.remote.connection import ClientSecurity
from tinkercloud.speculative.remote.link import GrpcLink
from tinkercloud.speculative.remote.messages import Target
from tinkercloud.speculative.remote.remote_drafter import RemoteDrafter

PLAIN, LOCAL = "plain", "local"
CONTENDERS = (PLAIN, LOCAL, SERIAL, OVERLAPPED)
ACCEPTED, SECOND, COST, DRAFTED = 0.8, 0.3, 0.1, 4
"""Of the scripted drafter; COST: of a drafted token, in passes of the target."""
ROUND_TRIP = 0.3  # passes of the target
WAIT_S, CONNECT_S, KV_CACHE_BYTES = 5.0, 30.0, 2**30
COLUMNS = (
    *("round trip ms", "passes", "plain tokens/s", "local times", "serial times"),
    *("overlapped times", "overlapped / serial", "prepared in time %", "bytes sent a round"),
)


@dataclass(frozen=True)
class Scale:
    """One more round trip, that of ROUND_TRIP passes, is the first that is measured. loss: as `Job`
    has it."""

    tokens: int = 96
    repeats: int = 3
    round_trips_ms: tuple[float, ...] = (0, 2, 5, 10, 20, 50, 100, 200)
    loss: float | None = None


@dataclass
class Kept:
    """Of one contender at one round trip, the fastest run. prepared: the share of drafts that were
    there when they were asked for; lanes: what each side did."""

    seconds: float = float("inf")
    prepared: float = 0.0
    bytes_a_round: float = 0.0
    start_s: float = 0.0
    lanes: dict[str, list[Span]] = field(default_factory=dict)


@dataclass(frozen=True)
class Point:
    """pass_s: of the target, with one token."""

    round_trip_ms: float
    pass_s: float
    num_tokens: int
    kept: Mapping[str, Kept]

    def times(self, name: str, of: str = PLAIN) -> float:
        return self.kept[of].seconds / self.kept[name].seconds

    def cells(self) -> tuple[float, ...]:
        """In the order of COLUMNS."""
        overlapped = self.kept[OVERLAPPED]
        return (
            round(self.round_trip_ms, 1), round(self.round_trip_ms / 1e3 / self.pass_s, 2),
            round(self.num_tokens / self.kept[PLAIN].seconds, 1), round(self.times(LOCAL), 2),
            round(self.times(SERIAL), 2), round(self.times(OVERLAPPED), 2),
            round(self.times(OVERLAPPED, SERIAL), 2), round(100 * overlapped.prepared),
            round(overlapped.bytes_a_round),
        )  # fmt: skip


def measured(config: Config, scale: Scale, say: Callable[[str], None]) -> list[Point]:
    """For the first model of the settings. say: gets a line for each point. Raises ConfigError."""
    if scale.tokens < 2 or scale.repeats < 1:
        raise ConfigError("--tokens must be at least 2 and --repeats at least 1")
    if scale.loss is not None and (reason := namespace.missing()):
        raise ConfigError(f"--loss-percent needs a network namespace: {reason}")
    num_threads = config.engine.threads or threads_beside_worker()
    set_up_torch(num_threads)
    version, tokenizer = open_target(config)
    freeze_garbage_collector()  # as the engine's process does
    with tempfile.TemporaryDirectory() as scratch:
        bench = PipelineBench(
            version, lambda text: tokenizer.encode(text).ids, num_threads, scale, Path(scratch)
        )
        return bench.points(say)


def write_spans(point: Point, path: Path) -> None:
    write_trace(path, {name: kept.lanes for name, kept in point.kept.items()})


def threads_beside_worker() -> int:
    """For the target: a core is left to what stands for another machine."""
    return max(1, usable_cores() - 1)


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


class PipelineBench:
    """encode: the prompt's tokens. scratch: a folder, for the key of the workers."""

    def __init__(
        self, version: Version, encode: Callable[[str], list[int]], num_threads: int, scale: Scale,
        scratch: Path,
    ):  # fmt: skip
        self._version, self._scale, self._num_threads = version, scale, num_threads
        self._key_file = scratch / "worker.key"
        self._key_file.write_text(secrets.token_urlsafe(32), encoding="ascii")
        self._prompt = encode(PROSE)
        self._workload = self._sample(scale.tokens)
        self._expected: list[SampleOutput] = []
        runs = [self._run(None) for _ in range(1 + scale.repeats)]
        self.pass_s = min(run.seconds for run in runs) / scale.tokens

    def points(self, say: Callable[[str], None]) -> list[Point]:
        """say: gets a line for each as it is done. Raises UnequalError."""
        round_trips_ms = (1e3 * ROUND_TRIP * self.pass_s, *self._scale.round_trips_ms)
        sample = self._expected[0].sequences[0].tokens.tolist()
        script = Script([*self._prompt, *sample], ACCEPTED, SECOND, COST * self.pass_s)
        if self._scale.loss is None:
            return self._points(Job(script, round_trips_ms, str(self._key_file)), say)
        jobs = (Job(script, (ms,), str(self._key_file), self._scale.loss) for ms in round_trips_ms)
        return [point for job in jobs for point in self._points(job, say)]

    def _points(self, job: Job, say: Callable[[str], None]) -> list[Point]:
        points = []
        with worker_process(job) as worker:
            for place, ms in enumerate(job.round_trips_ms):
                kept = self._kept(job.script, worker, place)
                points.append(Point(ms, self.pass_s, self._scale.tokens, kept))
                times = ", ".join(f"{name} {points[-1].times(name):.2f}" for name in CONTENDERS[1:])
                say(f"{ms:.1f} ms: times plain: {times}")
        for point in points:
            for kind in (SERIAL, OVERLAPPED):
                kept = point.kept[kind]
                spans = within(worker.spans[kind], kept.start_s, kept.start_s + kept.seconds)
                kept.lanes["draft worker"] = spans
        return points

    def _kept(self, script: Script, worker: WorkerProcess, place: int) -> dict[str, Kept]:
        kept: dict[str, Kept] = {}
        for _ in range(self._scale.repeats):  # alternating, so that a slow minute slows all
            for name in CONTENDERS:
                port = worker.ports[name][place] if name in worker.ports else 0
                run = self._run(self._drafter(name, script, Address(worker.host, port)))
                kept[name] = min(kept.get(name, run), run, key=lambda run: run.seconds)
        return kept

    def _drafter(self, name: str, script: Script, address: Address) -> Drafter | None:
        if name == PLAIN:
            return None
        if name == LOCAL:
            return ScriptedDrafter(script)
        base = self._version.base
        target = Target(base.name, b"", base.config.vocab_size)
        link = GrpcLink(address, ClientSecurity(self._key_file), target)
        drafter = RemoteDrafter([link], WAIT_S, target.vocab_size)
        deadline = time.monotonic() + CONNECT_S
        while not drafter.is_connected:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no connection to {link.name}")
            time.sleep(0.01)
        return drafter

    def _run(self, drafter: Drafter | None) -> Kept:
        """By an engine of its own, after a token that makes its pools. Raises UnequalError."""
        timed = None if drafter is None else TimedDrafter(drafter)

        def speculate(base: BaseModel, _runner: Runner, _pool: BlockPool) -> Speculation:
            assert timed is not None
            guarded = GuardedDrafter(timed, base.config.vocab_size)
            return Speculation(guarded, FixedLength(DRAFTED))

        engines = EngineFactory(1, KV_CACHE_BYTES, self._num_threads, speculate)
        engine = (engines.plain() if timed is None else engines).make()
        run_timed(engine, self._sample(1))
        start_s = time.monotonic()
        run = run_timed(engine, self._workload)
        kept = Kept(run.seconds, start_s=start_s)
        self._expected = self._expected or run.outputs
        require_equal(self._workload.name, run.outputs, self._expected)
        waits = [] if timed is None else within(timed.spans, start_s, time.monotonic())
        kept.lanes["target"] = _with_passes(waits, start_s, start_s + run.seconds)
        if isinstance(drafter, RemoteDrafter):
            drafter.close()
            num_rounds = max(1, drafter.counts["asked"])
            kept.prepared = drafter.counts["prepared"] / num_rounds
            kept.bytes_a_round = drafter.counts["sent_bytes"] / num_rounds
        return kept

    def _sample(self, tokens: int) -> Workload:
        params = SamplingParams(tokens, 0, 1.0, use_eos=False)
        prompt = np.array(self._prompt, np.int32)
        return Workload("prose", self._version, (SampleRequest(prompt, 1, params),))


def _with_passes(waits: Sequence[Span], start_s: float, end_s: float) -> list[Span]:
    """What lies between two waits is the target's pass."""
    spans, at_s = [], start_s
    for wait in waits:
        spans += [Span("verify", at_s, wait.start_s), wait]
        at_s = wait.end_s
    return [*spans, Span("verify", at_s, end_s)]
