"""Whether throughput holds from 1 to 256 clients, and how long their requests take.

SmolLM2-135M behind the real server, with drafts and without, beside its engine alone in this
process and an engine of two workers, one for prompts and one for what follows them. *Burst*: all
clients ask at once, and each asks again as soon as it is answered. *Poisson*: requests come at
random times, at a rate that is a share of what the best burst was served with, whether earlier ones
are answered or not. Every request is counted: those that fail, and those that are not answered when
the time is up. What is answered twice has to be equal, token by token.
"""

import asyncio
import json
import random
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import httpx
import torch

from benchmarks.lib.arguments import BenchmarkParser
from benchmarks.lib.engines import InProcess, one_engine, two_workers
from benchmarks.lib.machine import ROOT, versions
from benchmarks.lib.peers import PEERS
from benchmarks.lib.processes import prepare_process
from benchmarks.lib.report import Cell, Report, Target, about
from benchmarks.lib.server import KV_CACHE_BYTES, MAX_BATCH, MODEL, default_dtype
from benchmarks.lib.smollm2 import document_tokens, tokenizer_of, weights
from benchmarks.lib.timing import quantile
from benchmarks.lib.tinker_http import RequestFailed
from benchmarks.peers.sampling_bench import Prompts
from benchmarks.peers.sampling_check import Reference
from benchmarks.peers.sampling_tinker import TinkerClient, TinkerServer
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.model.device import usable_cores
from tinkercloud.embedded.model.version import Version
from tinkercloud.embedded.sampling.engine import SamplingEngine
from tinkercloud.weights.huggingface import ensure_hf_folder
from tinkercloud.weights.tokenizer import ensure_tokenizer_folder

PROMPT_TOKENS = 64
HOLDS = 0.95  # of the best burst's throughput, at the most clients
LEAST_TIMES = 0.95  # with drafts, of the speed without
CHECKED = 2  # answers of every load whose tokens are checked
PICTURE = ROOT / "docs" / "concurrency.png"
SERVER, PLAIN = "server", "server without drafts"
ENGINE, WORKERS = "engine alone", "two workers"
COLOURS = {SERVER: "#2563eb", PLAIN: "#d97706", ENGINE: "#6b7280", WORKERS: "#059669"}
DOCUMENTS, RECORDS = "documents", "records"
COLUMNS = (
    *("contender", "load", "text", "clients", "requests", "answered", "failed", "unfinished"),
    *("goodput tokens/s", "latency p50 s", "p99 s"),
)


class Client(Protocol):
    async def sample(self, prompt: Sequence[int], max_tokens: int, seed: int) -> list[int]:
        """At temperature 1. Raises httpx.HTTPError, or RequestFailed."""
        ...


class OverHttp:
    def __init__(self, client: TinkerClient):
        self._client = client

    async def sample(self, prompt: Sequence[int], max_tokens: int, seed: int) -> list[int]:
        [tokens] = await self._client.sample(prompt, max_tokens, seed=seed)
        return tokens


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

Prompt = Sequence[int]


@dataclass
class LoadResult:
    """What became of one load's requests. wall_s: from the first one to the last answer. answers:
    by the request's number, its prompt and its tokens."""

    contender: str
    load: str
    text: str
    clients: int
    sent: int = 0
    failed: int = 0
    wall_s: float = 0.0
    latencies_s: list[float] = field(default_factory=list)
    answers: dict[int, tuple[Prompt, list[int]]] = field(default_factory=dict)
    fault: str | None = None

    @property
    def goodput(self) -> float:
        """New tokens of answered requests by the wall time; 0 for wrong ones."""
        if self.fault:
            return 0.0
        return sum(len(tokens) for _, tokens in self.answers.values()) / self.wall_s

    @property
    def is_wrong(self) -> bool:
        return bool(self.fault or self.failed)

    @property
    def unfinished(self) -> int:
        return self.sent - len(self.answers) - self.failed

    def cells(self) -> tuple[Cell, ...]:
        waits = self.latencies_s
        shown = [f"{quantile(waits, q, 'nearest'):.2f}" if waits else "-" for q in (0.5, 0.99)]
        counts = (self.clients, self.sent, len(self.answers), self.failed, self.unfinished)
        names = (self.contender, self.load, self.text)
        return (*names, *counts, self.fault or round(self.goodput, 1), *shown)


class Bench:
    """texts: prompts by the name of the text. Each load's are new, and the same for every
    contender."""

    def __init__(self, texts: Mapping[str, Prompts], reference: Reference, size: Volume):
        self._texts, self._reference, self._size = texts, reference, size

    async def run(self, contenders: Mapping[str, Client]) -> list[LoadResult]:
        """The better burst of each contender, text and number of clients."""
        for name, client in contenders.items():
            warm_up = LoadResult(name, "warm-up", DOCUMENTS, 1)
            await self._request(
                client, warm_up, 0, self._texts[DOCUMENTS].take(1, PROMPT_TOKENS)[0]
            )
        best: dict[tuple[str, str, int], LoadResult] = {}
        # Up and down again, so that a slow moment of the machine is not one number's alone.
        for clients in (*self._size.clients, *reversed(self._size.clients)):
            for text in self._texts:
                for result in await self._bursts(contenders, text, clients):
                    key = (text, result.contender, clients)
                    best[key] = shown_of(best.get(key, result), result)
        results = [best[key] for key in sorted(best, key=lambda key: (key[0], key[2]))]
        most = max(result.goodput for result in of(results, SERVER, DOCUMENTS))
        for share in self._size.shares:
            rate = share * most / self._size.max_tokens
            results.append(await self._poisson(contenders[SERVER], share, rate))
        return results

    async def _bursts(
        self, contenders: Mapping[str, Client], text: str, clients: int
    ) -> list[LoadResult]:
        """Of one contender after the other. Records are for the servers, whose drafts they are
        for."""
        each = max(2, self._size.requests // clients)
        prompts = self._texts[text].take(clients * each, PROMPT_TOKENS)
        results = []
        for name, client in contenders.items():
            if text == DOCUMENTS or name in (SERVER, PLAIN):
                results.append(LoadResult(name, "burst", text, clients))
                await self._burst(client, results[-1], prompts, each)
                self._compare(results[-1], results[0])
        return results

    async def _burst(
        self, client: Client, result: LoadResult, prompts: Sequence[Prompt], each: int
    ) -> None:
        async def one(first: int) -> None:
            for number in range(first, first + each):
                await self._request(client, result, number, prompts[number])

        start = time.perf_counter()
        await asyncio.gather(*(one(i * each) for i in range(result.clients)))
        self._check(result, start)

    async def _request(
        self, client: Client, result: LoadResult, number: int, prompt: Prompt
    ) -> None:
        result.sent += 1
        start = time.perf_counter()
        try:
            tokens = await client.sample(prompt, self._size.max_tokens, number)
        except (httpx.HTTPError, RequestFailed) as error:
            result.failed += 1
            print(f"{result.load}: {error!r}", file=sys.stderr)
            return
        result.latencies_s.append(time.perf_counter() - start)
        result.answers[number] = (prompt, tokens)

    async def _poisson(self, client: Client, share: float, rate: float) -> LoadResult:
        """rate: requests a second. The seed is fixed: every run has the same arrivals."""
        result = LoadResult(SERVER, f"Poisson, {share:.0%} of the best burst", DOCUMENTS, 0)
        arrivals = random.Random(0)
        requests: set[asyncio.Task[None]] = set()
        start = time.perf_counter()
        due = start + arrivals.expovariate(rate)
        while due < start + self._size.window_s:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            [prompt] = self._texts[DOCUMENTS].take(1, PROMPT_TOKENS)
            request = self._request(client, result, len(requests), prompt)
            requests.add(asyncio.create_task(request))
            underway = sum(not request.done() for request in requests)
            result.clients = max(result.clients, underway)
            due += arrivals.expovariate(rate)
        if requests:
            _, late = await asyncio.wait(requests, timeout=self._size.window_s)
            for request in late:
                request.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        self._check(result, start)
        return result

    def _check(self, result: LoadResult, start: float) -> None:
        result.wall_s = time.perf_counter() - start
        checked = list(result.answers.values())[-CHECKED:]
        prompts, samples = [p for p, _ in checked], [t for _, t in checked]
        lengths = {len(tokens) for _, tokens in result.answers.values()}
        if lengths - {self._size.max_tokens}:
            result.fault = "answers of the wrong length"
        else:
            result.fault = self._reference.fault(prompts, samples)
        print(
            f"{result.contender}, {result.load}, {result.text}, {result.clients}: "
            f"{result.goodput:.1f} tokens/s",
            file=sys.stderr,
        )

    def _compare(self, result: LoadResult, first: LoadResult) -> None:
        both = result.answers.keys() & first.answers.keys()
        if any(result.answers[number] != first.answers[number] for number in both):
            result.fault = f"other samples than the {first.contender}'s"


def shown_of(first: LoadResult, second: LoadResult) -> LoadResult:
    """The faster one, but what went wrong in either of them is never hidden by the other."""
    return max(first, second, key=lambda each: (each.is_wrong, each.goodput))


def of(results: Sequence[LoadResult], contender: str, text: str) -> list[LoadResult]:
    """Its bursts, by the number of clients."""
    found = [r for r in results if (r.contender, r.load, r.text) == (contender, "burst", text)]
    return sorted(found, key=lambda result: result.clients)


def record_tokens(folder: Path) -> list[int]:
    """Of lines of JSON with the same keys and values that differ."""
    generator = random.Random(0)
    lines = [
        json.dumps(
            {
                "id": number,
                "city": generator.choice(("Lisbon", "Oslo", "Quito", "Nairobi", "Hanoi")),
                "temperature": generator.randint(-10, 40),
                "humidity": generator.randint(10, 99),
                "sky": generator.choice(("clear", "cloudy", "rain", "snow")),
            }
        )
        for number in range(1000)
    ]
    return tokenizer_of(folder).encode("\n".join(lines)).ids


async def measured(model: Path, cache: Path, dtype: str, size: Volume) -> list[LoadResult]:
    folder = ensure_hf_folder(model, cache)
    base = BaseModel.load(
        MODEL,
        model,
        ensure_tokenizer_folder(model, cache),
        getattr(torch, dtype),
        torch.device("cpu"),
    )
    version = Version(MODEL, base, base.weights, None, 1.0)

    def engine(threads: int) -> SamplingEngine:
        return SamplingEngine(
            max_batch=MAX_BATCH, kv_cache_bytes=KV_CACHE_BYTES, num_threads=threads
        )

    async with AsyncExitStack() as servers:
        contenders: dict[str, Client] = {}
        for name, flags in ((SERVER, ()), (PLAIN, ("--speculate", "off"))):
            server = await TinkerServer.ours(model, dtype, *flags)
            servers.push_async_callback(server.close)
            contenders[name] = OverHttp(server.client)
        with ExitStack() as threads:
            alone = one_engine(threads, version, engine(usable_cores()))
            contenders[ENGINE] = InProcess(alone)
            contenders[WORKERS] = InProcess(two_workers(threads, version, engine))
            texts = {
                DOCUMENTS: Prompts(document_tokens(folder)),
                RECORDS: Prompts(record_tokens(folder)),
            }
            return await Bench(texts, Reference(folder), size).run(contenders)


def targets(results: Sequence[LoadResult]) -> list[Target]:
    """Of the better burst of each number of clients."""
    found = [held(results, contender) for contender in (SERVER, PLAIN, ENGINE, WORKERS)]
    for text in (DOCUMENTS, RECORDS):
        pairs = zip(of(results, SERVER, text), of(results, PLAIN, text), strict=True)
        times = min(ratio(drafted, plain) for drafted, plain in pairs)
        found.append(
            Target.at_least(f"{text}: with drafts, times without, least", times, LEAST_TIMES)
        )
    pairs = zip(of(results, ENGINE, DOCUMENTS), of(results, WORKERS, DOCUMENTS), strict=True)
    times = min(ratio(alone, workers) for alone, workers in pairs)
    return [*found, Target.at_least("one engine, times two workers, least", times, 1.0)]


def held(results: Sequence[LoadResult], contender: str) -> Target:
    bursts = of(results, contender, DOCUMENTS)
    best = max(result.goodput for result in bursts)
    share = bursts[-1].goodput / best if best else 0.0
    name = f"{contender}: throughput at {bursts[-1].clients} clients, of the best burst's"
    return Target.at_least(name, round(share, 3), HOLDS, digits=3)


def ratio(first: LoadResult, second: LoadResult) -> float:
    return first.goodput / second.goodput if second.goodput else 0.0


def draw(results: Sequence[LoadResult], path: Path) -> None:
    """A PNG: throughput over clients, of both texts."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 4.2), dpi=110, layout="constrained")
    for axes, text in zip(figure.subplots(1, 2, sharey=True), (DOCUMENTS, RECORDS), strict=True):
        axes.set_xscale("log", base=2)
        clients = [result.clients for result in of(results, SERVER, text)]
        for name, colour in COLOURS.items():
            rates = [result.goodput for result in of(results, name, text)]
            if rates:
                axes.plot(clients, rates, "o-", color=colour, markersize=4, label=name)
        axes.set_xticks(clients, [str(number) for number in clients], fontsize=8)
        axes.minorticks_off()
        axes.set(title=text, xlabel="clients", ylim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=8)
    figure.axes[0].set_ylabel("tokens/s of all clients together")
    figure.savefig(path, format="png", metadata={"Software": None})


def main() -> int:
    parser = BenchmarkParser("concurrency", __doc__, quick="1 and 32 clients, a minute or two")
    parser.add_argument(
        "--dtype", default=default_dtype(), help="float32 or bfloat16 [the server's]"
    )
    parser.add_argument("--picture", action="store_true", help=f"draw {PICTURE.name} anew")
    options = parser.parse_args()
    prepare_process()
    size = QUICK if options.quick else FULL
    results = asyncio.run(measured(weights(), PEERS / "weights", options.dtype, size))
    if options.picture:
        draw(results, PICTURE)
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
    report.publish(options.json, by_instruction_set=True)
    return 1 if any(result.is_wrong for result in results) else 0


ABOUT = """\
SmolLM2-135M-Instruct in {dtype}, at most {batch} samples decoded at once; every request is one
sample of {tokens} new tokens after a prompt of 64 of its own, at temperature 1. *server*: with its
defaults, which draft from text seen before; *without drafts*: `--speculate off`; by plain HTTP from
a process on the same cores. *engine alone*: the same engine without drafts in that process;
*two workers*: an engine with one thread that computes prompts and first tokens, and hands their
keys and values to one with another thread that goes on, with the same kernels. *documents*: pieces
of this project's documents, which no draft foresees; *records*: of lines of JSON. *burst*: all
clients send a request at once, and each the next one as soon as it is answered; every number of
clients twice, of all contenders in turn, of which the better one is shown. *Poisson*: requests come
for {window:.0f} s at random times, at that share of the best burst's rate, however many still wait;
clients is then the most that waited at once; answers are waited for as long again, and requests
without one by then are unfinished. Goodput is the new tokens of answered requests by the whole wall
time, the last stragglers' included. All contenders' samples are compared token by token, and two
answers of each load with transformers' distribution."""

if __name__ == "__main__":
    sys.exit(main())
