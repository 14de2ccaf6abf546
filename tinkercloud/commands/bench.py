"""`tinkercloud bench speculation`: the same samples with drafts and without, in alternating runs.

Tokens and log-probabilities are compared before a speed is reported. Every run has an engine of its
own, so that a drafter has seen nothing but the samples of that run.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isnan, nan
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from tinkercloud.config import Config
from tinkercloud.core.types import SampleOutput, SampleRequest, SamplingParams
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.model.device import (
    choose_device,
    choose_dtype,
    freeze_garbage_collector,
    set_up_torch,
    usable_cores,
)
from tinkercloud.embedded.model.version import Version
from tinkercloud.embedded.process.drafter_setup import DrafterSettings, speculate
from tinkercloud.embedded.sampling.base_states import Speculate
from tinkercloud.embedded.sampling.engine import SamplingEngine
from tinkercloud.errors import ConfigError
from tinkercloud.weights.tokenizer import ensure_tokenizer_folder

STRUCTURED = {
    "JSON": '[{"id": 1, "name": "item 1", "price": 10, "tags": ["new", "small"]},\n'
    ' {"id": 2, "name": "item 2", "price": 20, "tags": ["new", "small"]},\n'
    ' {"id": 3, "name": "item 3", "price": 30, "tags":',
    "code": "class Config:\n    def __init__(self):\n        self._host = None\n"
    "        self._port = None\n        self._user = None\n\n    def get_host(self):\n"
    "        return self._host\n\n    def set_host(self, host):\n        self._host = host\n\n"
    "    def get_port(self):\n        return self._port\n\n",
    "arithmetic": "a = 3, b = 4: a + b = 7, a * b = 12\na = 4, b = 5: a + b = 9, a * b = 20\n"
    "a = 5, b = 6: a + b = 11, a * b = 30\na = 6, b = 7:",
}
PROSE = "The old harbour was quiet that morning, and nobody expected"
COLUMNS = (
    *("text", "temperature", "at once", "plain tokens/s", "with drafts", "times"),
    *("tokens a pass", "accepted at depth 1, 2, 4", "draft ms", "verify ms", "equal"),
)
REPEATS = 3
Row = dict[str, str | int | float]


class UnequalError(AssertionError):
    """Samples with drafts are not the samples without."""


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """tokens: of each sample. at_once: samples, at most. details: a file for where drafts were
    wrong, if any: a line of JSON for each sample, which costs time."""

    tokens: int
    at_once: int
    details: Path | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    """arrivals_s: when each request comes, in ascending order; () for all of them at once."""

    name: str
    version: Version
    requests: tuple[SampleRequest, ...]
    arrivals_s: tuple[float, ...] = ()

    @property
    def at_once(self) -> int:
        return sum(request.num_samples for request in self.requests)


@dataclass(frozen=True, slots=True)
class TimedRun:
    """seconds: from the first arrival to the last answer. latencies_s: of each request."""

    outputs: list[SampleOutput]
    seconds: float
    latencies_s: tuple[float, ...]

    @property
    def p99_ms(self) -> float:
        return 1e3 * float(np.percentile(self.latencies_s, 99))


@dataclass(frozen=True, slots=True)
class AcceptanceSummary:
    """Of one drafter in an engine. by_depth: the share of verified tokens that were accepted, nan
    where none was verified. per_pass: tokens that a pass adds to a sample. rows: of a sample in a
    pass, with drafted ones. *_ms: of a pass."""

    by_depth: tuple[float, ...]
    per_pass: float
    rows: float
    num_tokens: int
    draft_ms: float
    verify_ms: float

    @classmethod
    def of(cls, telemetry: dict[str, Any]) -> "AcceptanceSummary":
        (record,) = telemetry["drafters"].values()
        num_passes, ms = max(1, telemetry["forwards"]), telemetry["ms"]
        per_pass = telemetry["tokens_per_sequence_forward"]
        return cls(
            tuple(
                depth["accepted"] / depth["verified"] if depth["verified"] else nan
                for depth in record["depths"]
            ),
            per_pass,
            sum(telemetry["rows"].values()) * per_pass / max(1, telemetry["tokens"]),
            telemetry["tokens"],
            ms["draft"] / num_passes,
            ms["verify"] / num_passes,
        )


@dataclass(slots=True)
class Turns:
    """The runs of one engine, in turns with others. acceptance: in the last run, None where it does
    not draft."""

    runs: list[TimedRun]
    acceptance: AcceptanceSummary | None = None

    @property
    def typical(self) -> TimedRun:
        return sorted(self.runs, key=lambda run: run.seconds)[len(self.runs) // 2]

    def times(self, other: "Turns") -> float:
        """How many times as fast as the other."""
        return times_as_fast(
            [run.seconds for run in self.runs], [run.seconds for run in other.runs]
        )


@dataclass(slots=True)
class Comparison:
    """plain, drafted: the typical runs. times: see `Turns`. acceptance: in the last run."""

    workload: Workload
    num_tokens: int
    plain: TimedRun
    drafted: TimedRun
    times: float
    acceptance: AcceptanceSummary

    def cells(self) -> tuple[str | int | float, ...]:
        """In the order of COLUMNS."""
        workload, acceptance = self.workload, self.acceptance
        depths = (*acceptance.by_depth, nan, nan, nan, nan)
        return (
            workload.name, workload.requests[0].params.temperature, workload.at_once,
            round(self.num_tokens / self.plain.seconds, 1),
            round(self.num_tokens / self.drafted.seconds, 1), round(self.times, 2),
            round(acceptance.per_pass, 2), percentages((depths[0], depths[1], depths[3])),
            round(acceptance.draft_ms, 2), round(acceptance.verify_ms, 2), "yes",
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class EngineFactory:
    max_batch: int
    kv_cache_bytes: int
    num_threads: int
    speculate: Speculate | None

    def plain(self) -> "EngineFactory":
        """Without drafts."""
        return replace(self, speculate=None)

    def make(self) -> SamplingEngine:
        return SamplingEngine(
            max_batch=self.max_batch,
            kv_cache_bytes=self.kv_cache_bytes,
            num_threads=self.num_threads,
            speculate=self.speculate,
        )


def rows(config: Config, options: BenchOptions, say: Callable[[str], None]) -> list[Row]:
    """One for each workload, by the names of COLUMNS. say: gets a line for each as it is done."""
    if options.tokens < 2 or options.at_once < 1:
        raise ConfigError("--tokens must be at least 2 and --at-once at least 1")
    threads = config.engine.threads or usable_cores()
    set_up_torch(threads)
    cache_dir, drafts_dir = config.data_dir / "cache", config.data_dir / "drafts"
    drafting = speculate(
        DrafterSettings(
            config.speculate, config.speculate_trace, threads, cache_dir, drafts_dir,
            details_file=options.details,
        )
    )  # fmt: skip
    if drafting is None:
        raise ConfigError("--speculate off has nothing to compare; name a drafter")
    version, tokenizer = open_target(config)
    engines = EngineFactory(options.at_once, config.engine.kv_cache_bytes, threads, drafting)
    table_rows = []
    freeze_garbage_collector()  # as the engine's process does
    for workload in workloads(version, tokenizer, options):
        comparison = compare(workload, engines, REPEATS)
        table_rows.append(dict(zip(COLUMNS, comparison.cells(), strict=True)))
        say(f"{workload.name}, {workload.at_once} at once: {comparison.times:.2f}")
    return table_rows


def table(table_rows: Sequence[Row]) -> str:
    lines = [COLUMNS, *([str(row[name]) for name in COLUMNS] for row in table_rows)]
    return "\n".join(aligned(lines))


def aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    """Of a table, equally many cells each."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]


def open_target(config: Config) -> tuple[Version, Tokenizer]:
    """The first model of the settings. Raises ConfigError where it has no tokenizer."""
    source = config.models[0]
    base = load_base(source.name, source.path, config)
    if base.decoder is None:
        raise ConfigError(f"{base.name} has no tokenizer, which samples of texts need")
    return Version("draft target", base, base.weights, None, 1.0), base.decoder


def load_base(name: str, path: Path, config: Config) -> BaseModel:
    """With its tokenizer, where it has one. Raises ConfigError."""
    device = choose_device()
    folder = ensure_tokenizer_folder(path, config.data_dir / "cache")
    return BaseModel.load(name, path, folder, choose_dtype(config.dtype, device), device)


def compare(workload: Workload, engines: EngineFactory, repeats: int) -> Comparison:
    """Raises UnequalError."""
    turns = in_turns(workload, {"plain": engines.plain(), "drafts": engines}, repeats)
    return compared(workload, turns["plain"], turns["drafts"])


def compared(workload: Workload, plain: Turns, drafted: Turns) -> Comparison:
    assert drafted.acceptance is not None
    run = plain.typical
    num_tokens = sum(len(s.tokens) for output in run.outputs for s in output.sequences)
    times = drafted.times(plain)
    return Comparison(workload, num_tokens, run, drafted.typical, times, drafted.acceptance)


def times_as_fast(seconds: Sequence[float], others: Sequence[float]) -> float:
    """As those that took the other seconds: the median of the turns, in each of which the machine
    is as fast for both."""
    return median(theirs / ours for theirs, ours in zip(others, seconds, strict=True))


def in_turns(
    workload: Workload, engines: Mapping[str, EngineFactory], repeats: int
) -> dict[str, Turns]:
    """By name; each engine runs once in each turn, so that a slow minute slows all. Raises
    UnequalError."""
    turns = {name: Turns([]) for name in engines}
    expected: list[SampleOutput] = []
    for _ in range(repeats):
        for name, factory in engines.items():
            engine = factory.make()
            run = run_timed(engine, workload)
            expected = expected or run.outputs
            require_equal(f"{workload.name}, {name}", run.outputs, expected)
            counters = next(iter(engine.speculation()[0].values()), None)
            turns[name].runs.append(run)
            if counters is not None:
                turns[name].acceptance = AcceptanceSummary.of(counters)
    return turns


def run_timed(engine: SamplingEngine, workload: Workload) -> TimedRun:
    """Submits each request when it comes, until all are answered."""
    outputs: list[SampleOutput | None] = [None] * len(workload.requests)
    arrivals = workload.arrivals_s or (0.0,) * len(workload.requests)
    latencies = [0.0] * len(arrivals)

    def reply(index: int) -> Callable[[SampleOutput | BaseException], None]:
        def take(outcome: SampleOutput | BaseException) -> None:
            if isinstance(outcome, BaseException):
                raise outcome
            outputs[index] = outcome
            latencies[index] = time.perf_counter() - began - arrivals[index]

        return take

    began, num_submitted = time.perf_counter(), 0
    while num_submitted < len(arrivals) or engine.busy:
        now = time.perf_counter() - began
        while num_submitted < len(arrivals) and arrivals[num_submitted] <= now:
            request = workload.requests[num_submitted]
            engine.submit(workload.version, request, reply(num_submitted))
            num_submitted += 1
        if engine.busy:
            engine.step()
        else:
            time.sleep(arrivals[num_submitted] - now)
    seconds = time.perf_counter() - began
    return TimedRun([o for o in outputs if o is not None], seconds, tuple(latencies))


def require_equal(
    name: str, outputs: Sequence[SampleOutput], expected: Sequence[SampleOutput]
) -> None:
    for output, other in zip(outputs, expected, strict=True):
        for a, b in zip(output.sequences, other.sequences, strict=True):
            same = np.array_equal(a.tokens, b.tokens)
            if not (same and np.array_equal(a.logprobs, b.logprobs)):
                raise UnequalError(f"{name}: samples with drafts differ from those without")


def workloads(version: Version, tokenizer: Tokenizer, options: BenchOptions) -> Iterator[Workload]:
    """Structured texts one at a time, greedy; then prose and JSON at temperature 1, up to `at_once`
    at once."""

    def request(name: str, text: str, seed: int, temperature: float) -> SampleRequest:
        params = SamplingParams(options.tokens, seed, temperature, use_eos=False)
        details_for = name if options.details is not None else ""
        tokens = np.array(tokenizer.encode(text).ids, np.int32)
        return SampleRequest(tokens, 1, params, details_for=details_for)

    for name, text in STRUCTURED.items():
        yield Workload(name, version, (request(name, text, 0, 0.0),))
    for at_once in (count for count in (1, 8, 32, 128) if count <= options.at_once):
        for name, text in (("JSON", STRUCTURED["JSON"]), ("prose", PROSE)):
            together = tuple(request(name, text, seed, 1.0) for seed in range(at_once))
            yield Workload(name, version, together)


def percentages(shares: Sequence[float]) -> str:
    return " ".join("-" if isnan(share) else f"{share:.0%}" for share in shares)
