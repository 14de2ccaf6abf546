"""Whether throughput holds from 1 to 256 clients, and how long their requests take.

SmolLM2-135M behind the real server. *Burst*: all clients ask at once, and each asks again as soon
as it is answered. *Poisson*: requests come at random times, at a rate that is a share of what the
best burst was served with, whether earlier ones are answered or not. Every request is counted:
those that fail, and those that are not answered when the time is up.
"""

import asyncio
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from benchmarks.lib.arguments import BenchmarkParser
from benchmarks.lib.machine import versions
from benchmarks.lib.peers import PEERS
from benchmarks.lib.processes import prepare_process
from benchmarks.lib.report import Cell, Report, Target, about
from benchmarks.lib.server import MAX_BATCH
from benchmarks.lib.smollm2 import document_tokens, weights
from benchmarks.lib.timing import quantile
from benchmarks.lib.tinker_http import RequestFailed
from benchmarks.peers.sampling_bench import Prompts
from benchmarks.peers.sampling_check import Reference
from benchmarks.peers.sampling_tinker import TinkerClient, TinkerServer
from tinkercloud.weights.huggingface import ensure_hf_folder

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


FULL = Volume((1, 4, 16, 32, 64, 96, 128, 256), 8, 32, (0.5, 0.9, 1.2), 40.0)
QUICK = Volume((1, 32), 4, 16, (0.8,), 5.0)


@dataclass
class LoadResult:
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
        waits = self.latencies_s
        shown = [f"{quantile(waits, q, 'nearest'):.2f}" if waits else "-" for q in (0.5, 0.99)]
        counts = (self.clients, self.sent, len(self.answers), self.failed, self.unfinished)
        return (self.load, *counts, self.fault or round(self.goodput, 1), *shown)


class Bench:
    def __init__(self, client: TinkerClient, prompts: Prompts, reference: Reference, size: Volume):
        self._client, self._prompts, self._reference = client, prompts, reference
        self._size = size

    async def run(self) -> list[LoadResult]:
        await self._request(LoadResult("warm-up", 1))
        results = []
        # Up and down again, so that a slow moment of the machine is not one number's alone.
        for clients in (*self._size.clients, *reversed(self._size.clients)):
            results.append(await self._burst(clients))
        best = max(result.goodput for result in results)
        for share in self._size.shares:
            results.append(await self._poisson(share, share * best / self._size.max_tokens))
        return results

    async def _request(self, result: LoadResult) -> None:
        (prompt,) = self._prompts.take(1, PROMPT_TOKENS)
        result.sent += 1
        start = time.perf_counter()
        try:
            (tokens,) = await self._client.sample(prompt, self._size.max_tokens)
        except (httpx.HTTPError, RequestFailed) as error:
            result.failed += 1
            print(f"{result.load}: {error!r}", file=sys.stderr)
            return
        result.latencies_s.append(time.perf_counter() - start)
        result.answers.append((prompt, tokens))

    async def _burst(self, clients: int) -> LoadResult:
        result, each = LoadResult("burst", clients), max(2, self._size.requests // clients)

        async def client() -> None:
            for _ in range(each):
                await self._request(result)

        start = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(clients)))
        return self._checked(result, start)

    async def _poisson(self, share: float, rate: float) -> LoadResult:
        """rate: requests a second. The seed is fixed: every run has the same arrivals."""
        result = LoadResult(f"Poisson, {share:.0%} of the best burst", 0)
        arrivals = random.Random(0)
        requests: set[asyncio.Task[None]] = set()
        start = time.perf_counter()
        due = start + arrivals.expovariate(rate)
        while due < start + self._size.window_s:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            requests.add(asyncio.create_task(self._request(result)))
            underway = sum(not request.done() for request in requests)
            result.clients = max(result.clients, underway)
            due += arrivals.expovariate(rate)
        if requests:
            _, late = await asyncio.wait(requests, timeout=self._size.window_s)
            for request in late:
                request.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        return self._checked(result, start)

    def _checked(self, result: LoadResult, start: float) -> LoadResult:
        result.wall_s = time.perf_counter() - start
        checked = result.answers[-CHECKED:]
        prompts, samples = [p for p, _ in checked], [t for _, t in checked]
        if any(len(tokens) != self._size.max_tokens for _, tokens in result.answers):
            result.fault = "answers of the wrong length"
        else:
            result.fault = self._reference.fault(prompts, samples)
        print(f"{result.load}, {result.clients}: {result.goodput:.1f} tokens/s", file=sys.stderr)
        return result


async def measured(model: Path, cache: Path, dtype: str, size: Volume) -> list[LoadResult]:
    folder = ensure_hf_folder(model, cache)
    reference = Reference(folder)
    server = await TinkerServer.ours(model, dtype)
    try:
        bench = Bench(server.client, Prompts(document_tokens(folder)), reference, size)
        return await bench.run()
    finally:
        await server.close()


def targets(results: Sequence[LoadResult]) -> list[Target]:
    """Of the better burst of each number of clients."""
    bursts: dict[int, float] = {}
    for result in results:
        if result.load == "burst":
            bursts[result.clients] = max(result.goodput, bursts.get(result.clients, 0.0))
    best, most = max(bursts.values()), max(bursts)
    share = bursts[most] / best if best else 0.0
    name = f"throughput at {most} clients, of the best burst's"
    return [Target.at_least(name, round(share, 3), HOLDS, digits=3)]


def main() -> int:
    parser = BenchmarkParser("concurrency", __doc__, quick="1 and 32 clients, under a minute")
    parser.add_argument("--dtype", default="float32", help="float32 or bfloat16 [float32]")
    options = parser.parse_args()
    prepare_process()
    size = QUICK if options.quick else FULL
    results = asyncio.run(measured(weights(), PEERS / "weights", options.dtype, size))
    report = Report(
        title="Concurrency",
        about=about(
            ABOUT.format(
                tokens=size.max_tokens, dtype=options.dtype, window=size.window_s, batch=MAX_BATCH
            )
        ),
        command=parser.command(options),
        columns=COLUMNS,
        rows=[result.cells() for result in results],
        versions=versions("tinkercloud", "torch"),
        targets=targets(results),
    )
    report.publish(options.json)
    return 1 if any(result.failed or result.fault for result in results) else 0


ABOUT = """\
SmolLM2-135M-Instruct in {dtype} behind the real server, at most {batch} samples decoded at
once; every request is one sample of {tokens} new tokens after a prompt of 64 of its own, at
temperature 1, by plain HTTP from a process on the same cores. *burst*: all clients send a request
at once, and each the next one as soon as it is answered; every number of clients twice. *Poisson*:
requests come for {window:.0f} s at random times, at that share of the best burst's rate, however
many still wait; clients is then the most that waited at once; answers are waited for as long again,
and requests without one by then are unfinished. Goodput is the new tokens of answered requests by
the whole wall time, the last stragglers' included. Two answers of each load are compared with
transformers' distribution."""

if __name__ == "__main__":
    sys.exit(main())
