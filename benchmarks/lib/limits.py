"""What this machine can do at most: memory reads and matrix products, on the cores one process may
use. Every speed of the other benchmarks is also given as a fraction of these, taken in their run.

Bandwidth is streaming reads of a buffer far larger than the caches, in large pages where there are
any. Matrix throughput is the best over square products and over the shapes of a small model's
layers, of PyTorch's and of our compiled kernels: which of them is faster depends on the processor.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.lib.timing import best_s
from tinkercloud.embedded.model.device import choose_dtype, usable_cores
from tinkercloud.embedded.model.huge_pages import in_huge_pages
from tinkercloud.embedded.native.compiler import library
from tinkercloud.embedded.native.packed import pack, product
from tinkercloud.embedded.native.team import Team

BUFFER_BYTES = 1024**3
ROWS = 8192  # of the matrix whose product with a vector is one of the two ways to read
SHAPES = ((2048, 2048, 2048), (512, 576, 1536), (128, 576, 1536), (512, 1536, 576))  # M, K, N


@dataclass(frozen=True)
class Limits:
    """read_gb_s: 10**9 bytes a second. gflop_s: 10**9 additions and multiplications a second, by
    number type."""

    read_gb_s: float
    gflop_s: dict[str, float]

    def __str__(self) -> str:
        rates = [f"{rate:.0f} GFLOP/s in {dtype}" for dtype, rate in self.gflop_s.items()]
        return ", ".join([f"{self.read_gb_s:.1f} GB/s read", *rates])

    def best_of(self, other: "Limits") -> "Limits":
        """The higher figure of each: other work on the machine only lowers them."""
        rates = {
            name: max(rate, other.gflop_s.get(name, 0.0)) for name, rate in self.gflop_s.items()
        }
        return Limits(max(self.read_gb_s, other.read_gb_s), rates)


def measure(seconds: float = 2.0) -> Limits:
    """Takes about `seconds` for each figure; sets the threads of this process."""
    torch.set_num_threads(usable_cores())
    return Limits(read_gb_s(seconds), products(("float32", "bfloat16"), seconds))


def products(dtypes: Sequence[str], seconds: float) -> dict[str, float]:
    """10**9 operations a second, by number type. What the processor does not multiply itself is
    multiplied as float32, and has its limit."""
    own = {"float32", *(["bfloat16"] if native_bfloat16() else [])}
    rates = {name: matrix_gflop_s(getattr(torch, name), seconds) for name in own}
    return {dtype: rates.get(dtype, rates["float32"]) for dtype in dtypes}


def native_bfloat16() -> bool:
    """Whether the CPU multiplies bfloat16 itself."""
    return choose_dtype("auto", torch.device("cpu")) is torch.bfloat16


@torch.inference_mode()
def read_gb_s(seconds: float) -> float:
    tensors = {"buffer": torch.ones(ROWS, BUFFER_BYTES // 4 // ROWS)}
    in_huge_pages(tensors)
    buffer = tensors["buffer"]
    vector = torch.ones(buffer.shape[1])
    ways = (lambda: torch.mv(buffer, vector), lambda: buffer.sum())
    return max(BUFFER_BYTES / best_s(way, seconds / len(ways)) for way in ways) / 1e9


@torch.inference_mode()
def matrix_gflop_s(dtype: torch.dtype, seconds: float) -> float:
    team = Team(usable_cores()) if library() is not None else None
    rates: list[float] = []
    for m, k, n in SHAPES:
        left, right = torch.randn(m, k), torch.randn(n, k).to(dtype)
        for multiply in _ways(team, left, right):
            rates.append(2 * m * k * n / best_s(multiply, seconds / len(SHAPES)))
    if team is not None:
        team.end()
    return max(rates) / 1e9


def _ways(team: Team | None, left: Tensor, right: Tensor) -> Iterator[Callable[[], Tensor]]:
    """To multiply rows (M, K), float32, with weights (N, K): PyTorch's, and of our kernels."""
    rows = left.to(right.dtype)
    yield lambda: torch.mm(rows, right.T)
    if team is not None:
        packed = pack(team, right)
        yield lambda: product(team, left, packed)


def main() -> int:
    parser = argparse.ArgumentParser(description="What this machine can do at most.")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each figure")
    limits = measure(parser.parse_args().seconds)
    print(f"cores: {usable_cores()}")
    print(f"memory reads: {limits.read_gb_s:.1f} GB/s")
    for name, rate in limits.gflop_s.items():
        print(f"matrix products in {name}: {rate:.0f} GFLOP/s")
    if not native_bfloat16():
        print("(the processor has no instructions for bfloat16: it is multiplied as float32)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
