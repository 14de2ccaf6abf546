"""Sampling for one model and training for another share one device: what each keeps of its speed.

SmolLM2-135M behind the real server, through the official SDK. First samples alone, then training
alone, then both at once; whoever is there asks again as soon as it is answered.
"""

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from report import Cell, Report, versions
from smollm2 import weights

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.serving import start_server  # noqa: E402

MODEL = "smollm2"
SAMPLES, PROMPT, NEW = 16, 64, 32  # in flight, tokens, tokens
CALLS, DATUMS = 2, 8  # in flight, and what one call trains on
LENGTH, QUICK_LENGTH = 128, 16  # tokens of a datum
WINDOW_S, QUICK_WINDOW_S = 30.0, 8.0
FAIR = 0.35  # of its own speed, that each of two keeps at least
BUSY = 0.85  # what the two keep together at least: turns cost little
COLUMNS = ("alone or both", "work", "tokens/s", "of alone", "answers", "longest s", "failed")


@dataclass
class Seen:
    """Answers within the window; a longest wait that is still going on at its end counts too."""

    mode: str
    work: str
    tokens: int = 0
    answers: int = 0
    failed: int = 0
    longest_s: float = 0.0
    window_s: float = 0.0
    begun: dict[int, float] = field(default_factory=dict)

    @property
    def tokens_s(self) -> float:
        return self.tokens / self.window_s

    def cells(self, alone: float) -> tuple[Cell, ...]:
        share = f"{self.tokens_s / alone:.0%}" if alone else "-"
        counts = (self.answers, round(self.longest_s, 2), self.failed)
        return (self.mode, self.work, round(self.tokens_s, 1), share, *counts)


class Bench:
    def __init__(self, training: Any, sampling: Any, vocab: int, *, quick: bool):
        import tinker

        self._training, self._sampling = training, sampling
        self._window_s = QUICK_WINDOW_S if quick else WINDOW_S
        self._length = QUICK_LENGTH if quick else LENGTH
        generator = np.random.default_rng(0)
        self._prompts = generator.integers(0, vocab, (64, PROMPT)).tolist()
        self._data = []
        for _ in range(DATUMS):
            ids = generator.integers(0, vocab, self._length + 1)
            inputs = {"target_tokens": ids[1:], "weights": np.ones(self._length, np.float32)}
            self._data.append(
                tinker.Datum(
                    model_input=tinker.ModelInput.from_ints(ids[:-1].tolist()),
                    loss_fn_inputs={k: tinker.TensorData.from_numpy(v) for k, v in inputs.items()},
                )
            )
        self._tinker = tinker

    async def run(self) -> list[Seen]:
        await self._sample(0)
        await self._train(0)
        (samples,) = await self._together("alone", sampling=True)
        (training,) = await self._together("alone", training=True)
        return [samples, training, *await self._together("both", sampling=True, training=True)]

    async def _sample(self, number: int) -> int:
        params = self._tinker.SamplingParams(max_tokens=NEW, seed=number, stop=[])
        prompt = self._tinker.ModelInput.from_ints(self._prompts[number % len(self._prompts)])
        result = await self._sampling.sample_async(prompt, num_samples=1, sampling_params=params)
        return sum(len(sequence.tokens) for sequence in result.sequences)

    async def _train(self, number: int) -> int:
        future = await self._training.forward_backward_async(self._data, "cross_entropy")
        result = await future
        assert np.isfinite(result.metrics["loss:sum"]), f"call {number}"
        return DATUMS * self._length

    async def _together(
        self, mode: str, *, sampling: bool = False, training: bool = False
    ) -> list[Seen]:
        kinds = [(sampling, "sampling", SAMPLES, self._sample)]
        kinds += [(training, "training", CALLS, self._train)]
        seen, running = [], []
        for wanted, work, in_flight, ask in kinds:
            if wanted:
                seen.append(Seen(mode, work, window_s=self._window_s))
                numbers = iter(range(1, 1_000_000))
                running += [self._loop(seen[-1], ask, numbers, i) for i in range(in_flight)]
        tasks = [asyncio.create_task(one) for one in running]
        await asyncio.sleep(self._window_s)
        now = time.perf_counter()
        for one in seen:
            waits = [now - begun for begun in one.begun.values()]
            one.longest_s = max([one.longest_s, *waits])
        for one in seen:
            one.begun.clear()  # tells the loops to end after what is underway, which is not counted
            one.window_s = self._window_s
        await asyncio.gather(*tasks)
        return seen

    @staticmethod
    async def _loop(
        seen: Seen, ask: Callable[[int], Awaitable[int]], numbers: Any, worker: int
    ) -> None:
        while True:
            seen.begun[worker] = begun = time.perf_counter()
            try:
                tokens = await ask(next(numbers))
            except Exception as error:  # noqa: BLE001 - counted and shown
                seen.failed += 1
                print(f"{seen.work}: {error!r}", file=sys.stderr)
                tokens = 0
            if worker not in seen.begun:
                return
            seen.tokens += tokens
            seen.answers += 1
            seen.longest_s = max(seen.longest_s, time.perf_counter() - begun)


async def measured(model: Path, *, quick: bool) -> list[Seen]:
    with (
        tempfile.TemporaryDirectory() as folder,
        start_server(
            *("--backend", "embedded", "--model", f"{MODEL}={model}", "--dtype", "float32"),
            data_dir=Path(folder) / "data",
        ) as server,
    ):
        os.environ.update(server.sdk_environment)
        import tinker  # here, because it reads the environment

        service = tinker.ServiceClient()
        training = await service.create_lora_training_client_async(base_model=MODEL, rank=32)
        sampling = await service.create_sampling_client_async(base_model=MODEL)
        return await Bench(training, sampling, 49152, quick=quick).run()


def targets(seen: list[Seen]) -> list[dict[str, Cell]]:
    alone = {one.work: one.tokens_s for one in seen if one.mode == "alone"}
    kept = {one.work: one.tokens_s / alone[one.work] for one in seen if one.mode == "both"}
    found = [
        {"name": f"{work} keeps of its speed", "value": round(share, 2), "target": f">= {FAIR}",
         "met": share >= FAIR}
        for work, share in kept.items()
    ]  # fmt: skip
    both = sum(kept.values())
    name = "the two shares together"
    return [
        *found,
        {"name": name, "value": round(both, 2), "target": f">= {BUSY}", "met": both >= BUSY},
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--quick", action="store_true", help="shorter windows, shorter sequences")
    given = parser.parse_args()
    model = weights()
    seen = asyncio.run(measured(model, quick=given.quick))
    alone = {one.work: one.tokens_s for one in seen if one.mode == "alone"}
    report = Report(
        title="Sampling and training at once",
        about=ABOUT.format(length=QUICK_LENGTH if given.quick else LENGTH),
        command="python benchmarks/sharing.py" + (" --quick" if given.quick else ""),
        columns=COLUMNS,
        rows=[one.cells(alone[one.work]) for one in seen],
        versions=versions("tinkercloud", "tinker", "torch"),
        targets=targets(seen),
    )
    report.publish(given.json)
    return 1 if any(one.failed for one in seen) else 0


ABOUT = f"""\
SmolLM2-135M in float32 behind the real server, through the official SDK. Sampling: {SAMPLES}
requests in flight, {PROMPT} + {NEW} tokens each, of the base model. Training: {CALLS}
forward_backward calls in flight, {DATUMS} x {{length}} tokens each, a LoRA adapter of rank 32. Who
is answered asks again. Longest is the longest that a request waited for its answer."""

if __name__ == "__main__":
    sys.exit(main())
