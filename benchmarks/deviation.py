"""How far log-probabilities in training are from the sampled ones, by what computes.

SmolLM2-135M with an adapter that has taken a step: prompts are continued at temperature 1, all at
once, and the tokens scored by the trainer's pass. Each way to compute has a process of its own.
"""

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch

from benchmarks.lib.arguments import BenchmarkParser
from benchmarks.lib.machine import versions
from benchmarks.lib.report import Cell, Report, Target, about
from benchmarks.lib.smollm2 import document_tokens, weights
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.model.device import set_up_torch, usable_cores
from tinkercloud.embedded.native.train_bindings import has_compiled_pass
from tinkercloud.embedded.process.deviation import Deviation, measure
from tinkercloud.weights.tokenizer import ensure_tokenizer_folder

COMPILED, TORCH, GPU = "compiled kernels", "PyTorch on a CPU", "GPU"
DTYPES = ("float32", "bfloat16")
COLUMNS = ("computed by", "dtype", "promised", "tokens", "mean", "p99", "largest")
NO_KERNELS = {"CC": "/does/not/exist/cc"}


@dataclass(frozen=True)
class Size:
    """lengths: of the prompts in tokens."""

    lengths: Sequence[int]
    num_sampled: int


FULL, QUICK = Size((16, 64, 200, 400) * 2, 64), Size((16, 100), 16)


def measured(path: str, dtype: str, size: Size) -> tuple[bool, Deviation]:
    """Whether equality is promised, and how far it is from that. Called once in a process."""
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        if path == TORCH:
            os.environ |= NO_KERNELS | {"XDG_CACHE_HOME": scratch}
        set_up_torch(usable_cores())
        tokenizer = ensure_tokenizer_folder(weights(), root / "tokenizer")
        assert tokenizer is not None
        text = document_tokens(tokenizer)
        stride = len(text) // len(size.lengths)
        prompts = [text[i * stride :][:length] for i, length in enumerate(size.lengths)]
        device = torch.device("cuda" if path == GPU else "cpu")
        base = BaseModel.load("smollm2", weights(), None, getattr(torch, dtype), device)
        promised = has_compiled_pass(device, base.dtype)
        return promised, measure(base, prompts, size.num_sampled, usable_cores(), root)


def paths() -> list[str]:
    return [COMPILED, TORCH, *([GPU] if torch.cuda.is_available() else [])]


def rows_of(size: Size) -> Iterator[tuple[Cell, ...]]:
    """All at the same time: no time is measured."""
    ways = [(path, dtype) for path in paths() for dtype in DTYPES]
    spawn = get_context("spawn")
    with ProcessPoolExecutor(len(ways), mp_context=spawn, max_tasks_per_child=1) as processes:
        futures = [processes.submit(measured, path, dtype, size) for path, dtype in ways]
        for (path, dtype), future in zip(ways, futures, strict=True):
            promised, found = future.result()
            figures = map(nats, (found.mean, found.p99, found.largest))
            yield (path, dtype, "yes" if promised else "no", found.num_tokens, *figures)


def nats(value: float) -> str:
    """A text: of most figures two digits after the point would be nothing."""
    return f"{value:.1e}" if value else "0"


def targets(rows: Sequence[Sequence[Cell]]) -> list[Target]:
    return [
        Target(f"{path}, {dtype}: largest", largest, "0", largest == "0")
        for path, dtype, *_, largest in rows
        if path == COMPILED
    ]


def main() -> int:
    parser = BenchmarkParser("deviation", __doc__, quick="two short prompts")
    options = parser.parse_args()
    rows = list(rows_of(QUICK if options.quick else FULL))
    report = Report(
        title="Deviation: log-probabilities in training from the sampled ones",
        about=about(ABOUT, left_out=[*([] if torch.cuda.is_available() else [NO_GPU]), CLUSTER]),
        command=parser.command(options),
        columns=COLUMNS,
        rows=rows,
        versions=versions("tinkercloud", "torch"),
        targets=targets(rows),
    )
    report.publish(options.json)
    return 0


ABOUT = """\
SmolLM2-135M-Instruct with an adapter of rank 8 that has taken one step. Prompts of 16 to 400 tokens
of natural text are continued by 64 tokens each, all at once, at temperature 1 over the whole
vocabulary; then the trainer's pass scores what was sampled, as `forward` does. *mean*, *p99* and
*largest* are of the absolute difference of the two log-probabilities, in nats, over all tokens.
*promised*: whether equality to the bit is promised there.

The figures do not depend on the load of the machine. A server reports the same of its own training:
`on_policy_ratio_deviation:max` in the metrics of `optim_step`, and `/metrics` since its start."""
NO_GPU = "a GPU: there is none on this machine."
CLUSTER = "the cluster: `/metrics` of a server on it has the figures."

if __name__ == "__main__":
    sys.exit(main())
