"""What this machine can do at most: memory reads and matrix products, on the cores one process may
use. Every speed of the other benchmarks is also given as a fraction of these, taken in their run.

Bandwidth is streaming reads of a buffer far larger than the caches, in large pages where there are
any. Matrix throughput is the best over square products and over the shapes of a small model's
layers.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tinkercloud.embedded.model.device import choose_dtype, usable_cores  # noqa: E402
from tinkercloud.embedded.model.huge_pages import in_huge_pages  # noqa: E402

BUFFER_BYTES = 1024**3
ROWS = 8192  # of the matrix whose product with a vector is one of the two ways to read
SHAPES = ((2048, 2048, 2048), (512, 576, 1536), (128, 576, 1536), (512, 1536, 576))  # M, K, N


@dataclass(frozen=True)
class Limits:
    """read_gb_s: 10**9 bytes a second. gflop_s: 10**9 additions and multiplications a second, by
    number type; a type that the processor does not multiply itself is not there."""

    read_gb_s: float
    gflop_s: dict[str, float]

    def best_of(self, other: "Limits") -> "Limits":
        """The higher figure of each: other work on the machine only lowers them."""
        rates = {
            name: max(rate, other.gflop_s.get(name, 0.0)) for name, rate in self.gflop_s.items()
        }
        return Limits(max(self.read_gb_s, other.read_gb_s), rates)


def measure(seconds: float = 2.0) -> Limits:
    """Takes about `seconds` for each figure; sets the threads of this process."""
    torch.set_num_threads(usable_cores())
    dtypes = [torch.float32, *([torch.bfloat16] if native_bfloat16() else [])]
    rates = {str(dtype).removeprefix("torch."): matrix_gflop_s(dtype, seconds) for dtype in dtypes}
    return Limits(read_gb_s(seconds), rates)


def native_bfloat16() -> bool:
    """Whether the CPU multiplies bfloat16 itself."""
    return choose_dtype("auto", torch.device("cpu")) is torch.bfloat16


@torch.inference_mode()
def read_gb_s(seconds: float) -> float:
    held = {"buffer": torch.ones(ROWS, BUFFER_BYTES // 4 // ROWS)}
    in_huge_pages(held)
    buffer = held["buffer"]
    vector = torch.ones(buffer.shape[1])
    ways = (lambda: torch.mv(buffer, vector), lambda: buffer.sum())
    return max(BUFFER_BYTES / best_s(way, seconds / len(ways)) for way in ways) / 1e9


@torch.inference_mode()
def matrix_gflop_s(dtype: torch.dtype, seconds: float) -> float:
    rates = []
    for m, k, n in SHAPES:
        left, right = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)
        took = best_s(lambda a=left, b=right: torch.mm(a, b.T), seconds / len(SHAPES))
        rates.append(2 * m * k * n / took)
    return max(rates) / 1e9


def best_s(work: Callable[[], object], seconds: float) -> float:
    """The shortest of at least three runs."""
    work()
    best, count, deadline = float("inf"), 0, time.perf_counter() + seconds
    while count < 3 or time.perf_counter() < deadline:
        begun = time.perf_counter()
        work()
        best, count = min(best, time.perf_counter() - begun), count + 1
    return best


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=2.0, help="for each figure")
    limits = measure(parser.parse_args().seconds)
    print(f"cores: {usable_cores()}")
    print(f"memory reads: {limits.read_gb_s:.1f} GB/s")
    for name, rate in limits.gflop_s.items():
        print(f"matrix products in {name}: {rate:.0f} GFLOP/s")
    if "bfloat16" not in limits.gflop_s:
        print("matrix products in bfloat16: not measured, the processor has no such instructions")
    return 0


if __name__ == "__main__":
    sys.exit(main())
