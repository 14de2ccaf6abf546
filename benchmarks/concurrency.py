"""Whether throughput holds from 1 to 256 clients, and how long their requests take.

SmolLM2-135M behind the real server. *Burst*: all clients ask at once, and each asks again as soon
as it is answered. *Poisson*: requests come at random times, at a rate that is a share of what the
best burst was served with, whether earlier ones are answered or not. Every request is counted:
those that fail, and those that are not answered when the time is up.
"""

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from report import Cell, Report, versions
from smollm2 import weights

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from peers.sampling_bench import Prompts  # noqa: E402
from peers.sampling_check import Reference  # noqa: E402
from peers.sampling_tinker import TinkerClient, TinkerServer  # noqa: E402
from sampling import text_ids  # noqa: E402

from tinkercloud.weights.huggingface import ensure_hf_folder  # noqa: E402

MAX_BATCH = 128
KV_CACHE_BYTES = 4 * 1024**3
PROMPT_TOKENS = 64
HOLDS = 0.95  # of the best burst's throughput, at the most clients
CHECKED = 2  # answers of every load whose tokens are checked
COLUMNS = (
    *("load", "clients", "requests", "answered", "failed", "unfinished", "goodput tokens/s"),
    *("latency p50 s", "p99 s"),
)


@dataclass(frozen=True)
class Volume:
    """requests: of a burst at least, and two from each client. shares: of the best burst's rate.
    window_s: how long requests of a Poisson load come; as long again is waited for answers."""

    clients: Sequence[int]
    requests: int
    max_tokens: int
    shares: Sequence[float]
    window_s: float


FULL = Volume((1, 4, 16, 64, 128, 256), 8, 32, (0.5, 0.9, 1.2), 40.0)
QUICK = Volume((1, 32), 4, 16, (0.8,), 5.0)


@dataclass
class Seen:
    """What became of one load's requests. wall_s: from the first one to the last answer."""

    load: str
    clients: int
    sent: int = 0
    failed: int = 0
    wall_s: float = 0.0
    latencies_s: list[float] = field(default_factory=list)
    answers: list[tuple[Sequence[int], list[int]]] = field(default_factory=list)
    fault: str | None = None

    @property
    def goodput(self) -> float:
        """New tokens of answered requests by the wall time; 0 for wrong ones."""
        return 0.0 if self.fault else sum(len(t) for _, t in self.answers) / self.wall_s

    @property
    def unfinished(self) -> int:
        return self.sent - len(self.answers) - self.failed

    def cells(self) -> tuple[Cell, ...]:
        done = sorted(self.latencies_s)
        shown = [f"{done[round(q * (len(done) - 1))]:.2f}" if done else "-" for q in (0.5, 0.99)]
        counts = (self.clients, self.sent, len(self.answers), self.failed, self.unfinished)
        return (self.load, *counts, self.fault or round(self.goodput, 1), *shown)


class Bench:
    def __init__(self, client: TinkerClient, prompts: Prompts, reference: Reference, size: Volume):
        self._client, self._prompts, self._reference = client, prompts, reference
        self._size = size

    async def run(self) -> list[Seen]:
        await self._ask(Seen("warm-up", 1))
        seen = []
        # Up and down again, so that a slow moment of the machine is not one number's alone.
        for clients in (*self._size.clients, *reversed(self._size.clients)):
            seen.append(await self._burst(clients))
        best = max(one.goodput for one in seen)
        for share in self._size.shares:
            seen.append(await self._poisson(share, share * best / self._size.max_tokens))
        return seen

    async def _ask(self, seen: Seen) -> None:
        (prompt,) = self._prompts.take(1, PROMPT_TOKENS)
        seen.sent += 1
        begun = time.perf_counter()
        try:
            (tokens,) = await self._client.sample(prompt, self._size.max_tokens)
        except (httpx.HTTPError, ValueError) as error:
            seen.failed += 1
            print(f"{seen.load}: {error!r}", file=sys.stderr)
            return
        seen.latencies_s.append(time.perf_counter() - begun)
        seen.answers.append((prompt, tokens))

    async def _burst(self, clients: int) -> Seen:
        seen, each = Seen("burst", clients), max(2, self._size.requests // clients)

        async def one() -> None:
            for _ in range(each):
                await self._ask(seen)

        begun = time.perf_counter()
        await asyncio.gather(*(one() for _ in range(clients)))
        return self._checked(seen, begun)

    async def _poisson(self, share: float, rate: float) -> Seen:
        """rate: requests a second. The seed is fixed: every run has the same arrivals."""
        seen, arrivals = Seen(f"Poisson, {share:.0%} of the best burst", 0), random.Random(0)
        asked: set[asyncio.Task[None]] = set()
        begun = time.perf_counter()
        due = begun + arrivals.expovariate(rate)
        while due < begun + self._size.window_s:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            asked.add(asyncio.create_task(self._ask(seen)))
            underway = sum(not task.done() for task in asked)
            seen.clients = max(seen.clients, underway)
            due += arrivals.expovariate(rate)
        if asked:
            _, late = await asyncio.wait(asked, timeout=self._size.window_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        return self._checked(seen, begun)

    def _checked(self, seen: Seen, begun: float) -> Seen:
        seen.wall_s = time.perf_counter() - begun
        checked = seen.answers[-CHECKED:]
        prompts, samples = [p for p, _ in checked], [t for _, t in checked]
        if any(len(tokens) != self._size.max_tokens for _, tokens in seen.answers):
            seen.fault = "answers of the wrong length"
        else:
            seen.fault = self._reference.fault(prompts, samples)
        print(f"{seen.load}, {seen.clients}: {seen.goodput:.1f} tokens/s", file=sys.stderr)
        return seen


async def measured(model: Path, cache: Path, dtype: str, size: Volume) -> list[Seen]:
    folder = ensure_hf_folder(model, cache)
    reference = Reference(folder, dtype)
    server = await TinkerServer.ours(model, dtype, MAX_BATCH, KV_CACHE_BYTES)
    try:
        bench = Bench(server.client, Prompts(text_ids(folder)), reference, size)
        return await bench.run()
    finally:
        await server.close()


def targets(seen: Sequence[Seen]) -> list[dict[str, Cell]]:
    """Of the better burst of each number of clients."""
    bursts: dict[int, float] = {}
    for one in seen:
        if one.load == "burst":
            bursts[one.clients] = max(one.goodput, bursts.get(one.clients, 0.0))
    best, most = max(bursts.values()), max(bursts)
    value = round(bursts[most] / best, 3) if best else 0.0
    name = f"throughput at {most} clients, of the best burst's"
    return [{"name": name, "value": value, "target": f">= {HOLDS}", "met": value >= HOLDS}]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--quick", action="store_true", help="1 and 32 clients, under a minute")
    parser.add_argument("--dtype", default="float32", help="float32 or bfloat16 [float32]")
    given = parser.parse_args()
    model = weights()
    size = QUICK if given.quick else FULL
    seen = asyncio.run(measured(model, ROOT / ".peers" / "weights", given.dtype, size))
    result = Report(
        title="Concurrency",
        about=ABOUT.format(tokens=size.max_tokens, dtype=given.dtype, window=size.window_s),
        command="python benchmarks/concurrency.py" + (" --quick" if given.quick else ""),
        columns=COLUMNS,
        rows=[one.cells() for one in seen],
        versions=versions("tinkercloud", "torch"),
        targets=targets(seen),
    )
    result.publish(given.json)
    return 1 if any(one.failed or one.fault for one in seen) else 0


ABOUT = """\
SmolLM2-135M-Instruct in {dtype} behind the real server, at most 128 samples decoded at once; every
request is one sample of {tokens} new tokens after a prompt of 64 of its own, at temperature 1, by
plain HTTP from a process on the same cores. *burst*: all clients ask at once, and each again as
soon as it is answered; every number of clients twice. *Poisson*: requests come for {window:.0f} s
at random times, at that share of the best burst's rate, whoever is still waiting; clients is then
the most that waited at once; answers are waited for as long again, and what has not come by then is
unfinished. Goodput is the new tokens of answered requests by the whole wall time, the last
stragglers' included. Two answers of each load are compared with transformers' distribution."""

if __name__ == "__main__":
    sys.exit(main())
