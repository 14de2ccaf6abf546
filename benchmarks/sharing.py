"""Sampling for one model and training for another share one device: what each keeps of its speed.

SmolLM2-135M behind the real server, through the official SDK. First samples alone, then training
alone, then both at once; a request that is answered is followed by the next.
"""

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lib.arguments import BenchmarkParser
from benchmarks.lib.machine import versions
from benchmarks.lib.processes import prepare_process
from benchmarks.lib.report import Cell, Report, Target, about
from benchmarks.lib.server import MODEL, embedded_flags, our_server, sdk_datum, sdk_for
from benchmarks.lib.smollm2 import weights

SAMPLES, PROMPT, NEW = 16, 64, 32  # in flight, tokens, tokens
CALLS, DATUMS = 2, 8  # in flight, and what one call trains on
VOCAB = 49152
LENGTH, QUICK_LENGTH = 128, 16  # tokens of a datum
WINDOW_S, QUICK_WINDOW_S = 30.0, 8.0
FAIR = 0.35  # of its own speed, that each of two keeps at least
BUSY = 0.85  # what the two keep together at least: sharing costs little
COLUMNS = ("alone or both", "work", "tokens/s", "of alone", "answers", "longest s", "failed")


@dataclass
class WorkResult:
    """Answers within the window; a longest wait that is still going on at its end counts too.
    waiting_since: of each worker's request (perf_counter)."""

    mode: str
    work: str
    tokens: int = 0
    answers: int = 0
    failed: int = 0
    longest_s: float = 0.0
    window_s: float = 0.0
    waiting_since: dict[int, float] = field(default_factory=dict)

    @property
    def tokens_s(self) -> float:
        return self.tokens / self.window_s

    def cells(self, alone: float) -> tuple[Cell, ...]:
        share = f"{self.tokens_s / alone:.0%}" if alone else "-"
        counts = (self.answers, round(self.longest_s, 2), self.failed)
        return (self.mode, self.work, round(self.tokens_s, 1), share, *counts)


class Bench:
    def __init__(self, tinker: Any, training: Any, sampling: Any, *, quick: bool):
        self._tinker, self._training, self._sampling = tinker, training, sampling
        self._window_s = QUICK_WINDOW_S if quick else WINDOW_S
        self._length = QUICK_LENGTH if quick else LENGTH
        generator = np.random.default_rng(0)
        self._prompts = generator.integers(0, VOCAB, (64, PROMPT)).tolist()
        self._data = []
        for _ in range(DATUMS):
            ids = generator.integers(0, VOCAB, self._length + 1)
            inputs = {"target_tokens": ids[1:], "weights": np.ones(self._length, np.float32)}
            self._data.append(sdk_datum(tinker, ids[:-1], inputs))

    async def run(self) -> list[WorkResult]:
        await self._sample(0)
        await self._train(0)
        results = await self._together("alone", "sampling")
        results += await self._together("alone", "training")
        return results + await self._together("both", "sampling", "training")

    async def _sample(self, number: int) -> int:
        params = self._tinker.SamplingParams(max_tokens=NEW, seed=number, stop=[])
        prompt = self._tinker.ModelInput.from_ints(self._prompts[number % len(self._prompts)])
        result = await self._sampling.sample(prompt, num_samples=1, sampling_params=params)
        return sum(len(sequence.tokens) for sequence in result.sequences)

    async def _train(self, number: int) -> int:
        result = await self._training.forward_backward(self._data, "cross_entropy")
        assert np.isfinite(result.metrics["loss:sum"]), f"call {number}"
        return DATUMS * self._length

    async def _together(self, mode: str, *works: str) -> list[WorkResult]:
        kinds = {"sampling": (SAMPLES, self._sample), "training": (CALLS, self._train)}
        results, workers = [], []
        for work in works:
            in_flight, request = kinds[work]
            result, numbers = WorkResult(mode, work, window_s=self._window_s), count(1)
            results.append(result)
            workers += [self._loop(result, request, numbers, i) for i in range(in_flight)]
        tasks = [asyncio.create_task(worker) for worker in workers]
        await asyncio.sleep(self._window_s)
        now = time.perf_counter()
        for result in results:
            waits = [now - start for start in result.waiting_since.values()]
            result.longest_s = max([result.longest_s, *waits])
            # Ends the loops after the requests that are underway, which are not counted.
            result.waiting_since.clear()
        await asyncio.gather(*tasks)
        return results

    @staticmethod
    async def _loop(
        result: WorkResult,
        request: Callable[[int], Awaitable[int]],
        numbers: Iterator[int],
        worker: int,
    ) -> None:
        while True:
            result.waiting_since[worker] = start = time.perf_counter()
            try:
                tokens = await request(next(numbers))
            except Exception as error:  # noqa: BLE001 - counted and shown
                result.failed += 1
                print(f"{result.work}: {error!r}", file=sys.stderr)
                tokens = 0
            if worker not in result.waiting_since:
                return
            result.tokens += tokens
            result.answers += 1
            result.longest_s = max(result.longest_s, time.perf_counter() - start)


async def measured(model: Path, *, quick: bool) -> list[WorkResult]:
    with our_server(*embedded_flags(model, "float32")) as server:
        tinker = sdk_for(server)
        service = tinker.ServiceClient()
        training = await service.create_lora_training_client(base_model=MODEL, rank=32)
        sampling = await service.create_sampling_client(base_model=MODEL)
        return await Bench(tinker, training, sampling, quick=quick).run()


def speeds(results: list[WorkResult], mode: str) -> dict[str, float]:
    """Tokens a second of each kind of work."""
    return {result.work: result.tokens_s for result in results if result.mode == mode}


def targets(results: list[WorkResult]) -> list[Target]:
    alone = speeds(results, "alone")
    both = speeds(results, "both")
    # On a machine that is busy with something else, no answer may come in a window.
    shares = {work: both[work] / alone[work] if alone[work] else 0.0 for work in both}
    return [
        *(Target.at_least(f"{w} keeps of its speed", share, FAIR) for w, share in shares.items()),
        Target.at_least("the two shares together", sum(shares.values()), BUSY),
    ]


def main() -> int:
    parser = BenchmarkParser("sharing", __doc__, quick="shorter windows, shorter sequences")
    options = parser.parse_args()
    prepare_process()
    results = asyncio.run(measured(weights(), quick=options.quick))
    alone = speeds(results, "alone")
    report = Report(
        title="Sampling and training at once",
        about=about(ABOUT.format(length=QUICK_LENGTH if options.quick else LENGTH)),
        command=parser.command(options),
        columns=COLUMNS,
        rows=[result.cells(alone[result.work]) for result in results],
        versions=versions("tinkercloud", "tinker", "torch"),
        targets=targets(results),
    )
    report.publish(options.json)
    return 1 if any(result.failed for result in results) else 0


ABOUT = f"""\
SmolLM2-135M in float32 behind the real server, through the official SDK. Sampling: {SAMPLES}
requests in flight, {PROMPT} + {NEW} tokens each, of the base model. Training: {CALLS}
forward_backward calls in flight, {DATUMS} x {{length}} tokens each, a LoRA adapter of rank 32. A
request that is answered is followed by the next. Longest is the longest that a request waited for
its answer."""

if __name__ == "__main__":
    sys.exit(main())
