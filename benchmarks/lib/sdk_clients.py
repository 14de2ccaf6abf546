"""Many clients of the official SDK in one process, each with a session of its own: run as a module
with a `Crowd` as JSON. It says "ready", waits for a line, works, and writes what came of it.

Every answer is checked: samples of one prompt and seed are all the same, and models that are
trained alike have the same losses.
"""

import asyncio
import json
import random
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from benchmarks.lib.processes import give_way
from benchmarks.lib.server import sdk_datum

SAMPLING, TRAINING = "sampling", "training"
LORA_SEED = 7
AT_ONCE = 8  # clients that connect


@dataclass(frozen=True)
class Crowd:
    """pace_s: the mean pause of a client between an answer and its next request; drawn anew each
    time. expected: what a sample of the prompt of the same place is."""

    sampling: int
    training: int
    seconds: float
    pace_s: float
    base_model: str
    prompts: Sequence[Sequence[int]]
    expected: Sequence[Sequence[int]]
    seed: int = 0


@dataclass
class Work:
    """Of all clients of one kind. losses: of each model, by its steps."""

    sent: int = 0
    wrong: int = 0
    latencies_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    losses: list[list[float]] = field(default_factory=list)

    def add(self, other: "Work") -> None:
        self.sent += other.sent
        self.wrong += other.wrong
        self.latencies_s += other.latencies_s
        self.failures += other.failures
        self.losses += other.losses


Step = Callable[[], Awaitable[None]]


class Clients:
    def __init__(self, crowd: Crowd):
        import tinker

        self._tinker: Any = tinker
        self._crowd = crowd
        self._random = random.Random(crowd.seed)
        self._work = {SAMPLING: Work(), TRAINING: Work()}
        self._services: list[Any] = []
        self._connecting = asyncio.Semaphore(AT_ONCE)

    async def connect(self) -> list[tuple[str, Step]]:
        crowd = self._crowd
        samplers = (self._sampler() for _ in range(crowd.sampling))
        trainers = (self._trainer() for _ in range(crowd.training))
        steps = await asyncio.gather(*samplers, *trainers)
        kinds = [SAMPLING] * crowd.sampling + [TRAINING] * crowd.training
        return list(zip(kinds, steps, strict=True))

    async def _service(self) -> Any:
        # In a thread: a new client waits for its first answers.
        service = await asyncio.to_thread(self._tinker.ServiceClient)
        self._services.append(service)
        return service

    async def _sampler(self) -> Step:
        async with self._connecting:
            service = await self._service()
            client = await service.create_sampling_client(base_model=self._crowd.base_model)
        prompts = [self._tinker.ModelInput.from_ints(list(each)) for each in self._crowd.prompts]
        work = self._work[SAMPLING]

        async def step() -> None:
            place = self._random.randrange(len(prompts))
            expected = list(self._crowd.expected[place])
            params = self._tinker.SamplingParams(
                max_tokens=len(expected), seed=place, temperature=1.0
            )
            answer = await client.sample(prompts[place], num_samples=1, sampling_params=params)
            (sequence,) = answer.sequences
            work.wrong += list(sequence.tokens) != expected

        return step

    async def _trainer(self) -> Step:
        async with self._connecting:
            service = await self._service()
            client = await service.create_lora_training_client(
                base_model=self._crowd.base_model, rank=8, seed=LORA_SEED
            )
        tokens = np.array(self._crowd.prompts[0], dtype=np.int32)
        inputs = {
            "target_tokens": np.roll(tokens, -1).astype(np.int64),
            "weights": np.ones(len(tokens), dtype=np.float32),
        }
        datum = sdk_datum(self._tinker, tokens, inputs)
        adam = self._tinker.AdamParams(learning_rate=1e-3)
        losses: list[float] = []
        self._work[TRAINING].losses.append(losses)

        async def step() -> None:
            passed = client.forward_backward([datum], "cross_entropy")
            stepped = client.optim_step(adam)
            losses.append((await passed).metrics["loss:sum"])
            await stepped

        return step

    async def work(self, clients: Sequence[tuple[str, Step]]) -> dict[str, Work]:
        deadline = time.monotonic() + self._crowd.seconds
        await asyncio.gather(*(self._repeat(kind, step, deadline) for kind, step in clients))
        return self._work

    async def _repeat(self, kind: str, step: Step, deadline: float) -> None:
        work, rate = self._work[kind], 1 / self._crowd.pace_s
        await asyncio.sleep(self._random.random() * self._crowd.pace_s)
        while time.monotonic() < deadline:
            work.sent += 1
            began = time.perf_counter()
            try:
                await step()
            except Exception as error:  # noqa: BLE001 - counted and shown; none is left out
                work.failures.append(repr(error)[:300])
            else:
                work.latencies_s.append(time.perf_counter() - began)
            await asyncio.sleep(self._random.expovariate(rate))

    async def close(self) -> None:
        await asyncio.gather(
            *(service.close("success") for service in self._services), return_exceptions=True
        )


async def main() -> None:
    give_way()
    clients = Clients(Crowd(**json.loads(sys.argv[1])))
    connected = await clients.connect()
    _say("ready")
    await asyncio.to_thread(sys.stdin.readline)
    work = await clients.work(connected)
    await clients.close()
    _say(json.dumps({kind: asdict(each) for kind, each in work.items()}))


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main())
