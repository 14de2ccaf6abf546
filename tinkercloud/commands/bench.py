"""`tinkercloud bench speculation`: the same samples with drafts and without, by turns.

Tokens and log-probabilities are compared before a speed is told. Every turn has an engine of its
own, so that a drafter has seen nothing but what the turn itself writes.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tinkercloud.core.types import SampleOutput, SampleRequest, SamplingParams
from tinkercloud.embedded.model.version import Version
from tinkercloud.embedded.sampling.base_states import Speculate
from tinkercloud.embedded.sampling.engine import SamplingEngine

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
    *("tokens a pass", "stand at depth 1, 2, 4", "draft ms", "verify ms", "equal"),
)


class UnequalError(AssertionError):
    """Samples with drafts are not the samples without."""


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


@dataclass(slots=True)
class Comparison:
    """The best of some runs; told: what the drafter's telemetry says of the last one."""

    workload: Workload
    num_tokens: int
    plain: TimedRun
    drafted: TimedRun
    told: dict[str, Any]

    @property
    def times(self) -> float:
        return self.plain.seconds / self.drafted.seconds

    def cells(self) -> tuple[str | int | float, ...]:
        told, params = self.told, self.workload.requests[0].params
        forwards = max(1, told["forwards"])
        return (
            self.workload.name, params.temperature, self.workload.at_once,
            round(self.num_tokens / self.plain.seconds, 1),
            round(self.num_tokens / self.drafted.seconds, 1), round(self.times, 2),
            round(told["tokens_per_sequence_forward"], 2), _depths(told),
            round(told["ms"]["draft"] / forwards, 2), round(told["ms"]["verify"] / forwards, 2),
            "yes",
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class EngineFactory:
    """How each turn's engine is made."""

    max_batch: int
    kv_cache_bytes: int
    num_threads: int
    speculate: Speculate

    def make(self, *, drafts: bool) -> SamplingEngine:
        return SamplingEngine(
            max_batch=self.max_batch,
            kv_cache_bytes=self.kv_cache_bytes,
            num_threads=self.num_threads,
            speculate=self.speculate if drafts else None,
        )


def compare(workload: Workload, engines: EngineFactory, repeats: int) -> Comparison:
    """Raises UnequalError."""
    best: dict[bool, TimedRun] = {}
    expected: list[SampleOutput] = []
    told: dict[str, Any] = {}
    for turn in range(2 * repeats):
        drafts = turn % 2 == 1
        engine = engines.make(drafts=drafts)
        found = run_timed(engine, workload)
        best[drafts] = min(best.get(drafts, found), found, key=lambda one: one.seconds)
        expected = expected or found.outputs
        require_equal(workload.name, found.outputs, expected)
        if drafts:
            told = next(iter(engine.speculation()[0].values()))
    num_tokens = sum(len(one.tokens) for output in expected for one in output.sequences)
    return Comparison(workload, num_tokens, best[False], best[True], told)


def run_timed(engine: SamplingEngine, workload: Workload) -> TimedRun:
    """The workload's requests, each when it comes, until all are answered."""
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

    began, num_come = time.perf_counter(), 0
    while num_come < len(arrivals) or engine.busy:
        spent = time.perf_counter() - began
        while num_come < len(arrivals) and arrivals[num_come] <= spent:
            engine.submit(workload.version, workload.requests[num_come], reply(num_come))
            num_come += 1
        if engine.busy:
            engine.step()
        else:
            time.sleep(arrivals[num_come] - spent)
    seconds = time.perf_counter() - began
    return TimedRun([one for one in outputs if one is not None], seconds, tuple(latencies))


def require_equal(
    name: str, found: Sequence[SampleOutput], expected: Sequence[SampleOutput]
) -> None:
    for a, b in zip(found, expected, strict=True):
        for one, other in zip(a.sequences, b.sequences, strict=True):
            same = np.array_equal(one.tokens, other.tokens)
            if not (same and np.array_equal(one.logprobs, other.logprobs)):
                raise UnequalError(f"{name}: samples with drafts differ from those without")


def workloads(
    version: Version, tokenize: Callable[[str], list[int]], num_tokens: int, most: int
) -> Iterator[Workload]:
    """Structured texts one at a time, greedy; then prose and JSON at temperature 1, up to `most` at
    once."""

    def request(text: str, seed: int, temperature: float) -> SampleRequest:
        params = SamplingParams(num_tokens, seed, temperature, use_eos=False)
        return SampleRequest(np.array(tokenize(text), np.int32), 1, params)

    for name, text in STRUCTURED.items():
        yield Workload(name, version, (request(text, 0, 0.0),))
    for at_once in (count for count in (1, 8, 32, 128) if count <= most):
        for name, text in (("JSON", STRUCTURED["JSON"]), ("prose", PROSE)):
            together = tuple(request(text, seed, 1.0) for seed in range(at_once))
            yield Workload(name, version, together)


def _depths(told: dict[str, Any]) -> str:
    """The share of judged tokens that stood at some depths."""
    (record,) = told["drafters"].values()
    shares = []
    for depth in (0, 1, 3):
        own = record["depths"][depth] if depth < len(record["depths"]) else None
        reached = own["verified"] if own else 0
        shares.append(f"{own['accepted'] / reached:.0%}" if own and reached else "-")
    return " ".join(shares)
