"""Where the time of a decoding pass goes, by the timers of the compiled pass itself: its steps over
one row of each of some sequences.

SmolLM2-135M with its real weights. For each number of rows the fastest of many passes is shown.
GFLOP/s and GB/s are of what a step multiplies, and reads of weights or of keys and values; what it
reads of activations does not count. Another machine's load shows in *waiting* first.
"""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.lib.report import Cell, table
from benchmarks.lib.smollm2 import weights
from tinkercloud.architectures.config import ArchitectureConfig
from tinkercloud.embedded.forward.batch import Batch
from tinkercloud.embedded.forward.kv_blocks import BlockPool, blocks_for, kv_layout_of
from tinkercloud.embedded.forward.rotary_table import rotary_table
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.model.device import choose_dtype, set_up_torch, usable_cores
from tinkercloud.embedded.model.packed_tensors import PackedTensors
from tinkercloud.embedded.native.bindings import NativeModel, step_names
from tinkercloud.embedded.native.compiler import instruction_set
from tinkercloud.embedded.native.team import Team

COLUMNS = ("step", "us", "share", "waiting", "GFLOP/s", "GB/s")
MODULES = {
    "q, k, v": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate, up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
    "unembed": ("lm_head",),
}
"""The matrices that a step multiplies with, in all layers."""


@dataclass(frozen=True)
class Work:
    """Of one step in all layers. flop: additions and multiplications."""

    flop: float
    read_bytes: float


@dataclass(frozen=True)
class PassTimes:
    """steps_ns: time and waiting by step (steps, 2). whole_ns: of the call, Python's part too."""

    steps_ns: NDArray[np.int64]
    whole_ns: int


def work_of(
    config: ArchitectureConfig, num_bytes: int, num_rows: int, context: int
) -> Mapping[str, Work]:
    """By step; those that only go through activations are not in it. num_bytes: of a number.
    context: tokens that each row sees."""
    shapes = config.linear_shapes()
    work: dict[str, Work] = {}
    for step, leaves in MODULES.items():
        names = [name for name in shapes if name.endswith(leaves)]
        weights = sum(shapes[name][0] * shapes[name][1] for name in names)
        work[step] = Work(2.0 * num_rows * weights, float(num_bytes * weights))
    seen = num_rows * context * config.head_dim * config.num_layers
    flop, read = 4.0 * seen * config.num_heads, 2.0 * seen * config.num_kv_heads * num_bytes
    return work | {"attention": Work(flop, read)}


class Decoder:
    """Passes over one row of each of `num_rows` sequences, each after context - 1 others."""

    def __init__(self, base: BaseModel, team: Team, num_rows: int, context: int):
        num_blocks = blocks_for(context)
        pool = BlockPool(
            base.config, base.dtype, base.device, num_rows * num_blocks, kv_layout_of(base.dtype)
        )
        for tensor in (*pool.keys, *pool.values):
            tensor.fill_(0.5)  # pages that were never written are one page, in the nearest cache
        assert isinstance(base.weights, PackedTensors), "packed where there are the kernels"
        self._team = team
        self._model = NativeModel(base.config, base.weights.packed, pool.keys, pool.values)
        self._rotary = rotary_table(base.architecture, context)
        rows = np.arange(num_rows)
        self._batch = Batch(
            tokens=(rows * 7 + 100).astype(np.int64),
            positions=np.full(num_rows, context - 1, np.int32),
            sequence=rows.astype(np.int32),
            tables=np.arange(num_rows * num_blocks, dtype=np.int32).reshape(num_rows, num_blocks),
            versions=(),
            logit_rows=rows.astype(np.int64),
        )

    def timed_pass(self) -> PassTimes:
        times = self._model.times = np.zeros((len(step_names(self._team)), 2), np.int64)
        start = time.perf_counter_ns()
        self._model.forward(self._team, self._batch, self._rotary, ())
        return PassTimes(times, time.perf_counter_ns() - start)

    def fastest_pass(self, seconds: float) -> PassTimes:
        """Of three at least, after one that warms up."""
        self.timed_pass()
        passes, deadline = [self.timed_pass() for _ in range(3)], time.perf_counter() + seconds
        while time.perf_counter() < deadline:
            passes.append(self.timed_pass())
        return min(passes, key=lambda each: each.whole_ns)


def rows_of(
    names: Sequence[str], times: PassTimes, work: Mapping[str, Work]
) -> list[tuple[Cell, ...]]:
    """Of the table: steps that took any time, what is outside of them, the whole."""
    rows: list[tuple[Cell, ...]] = []
    for name, (ns, waiting_ns) in zip(names, times.steps_ns.tolist(), strict=True):
        rates = ("-", "-")
        if ns and name in work:
            rates = (f"{work[name].flop / ns:.1f}", f"{work[name].read_bytes / ns:.1f}")
        if 1000 * ns >= times.whole_ns:
            rows.append((name, *_time_cells(ns, times), f"{waiting_ns / ns:.0%}", *rates))
    outside = times.whole_ns - int(times.steps_ns[:, 0].sum())
    rows.append(("outside of these", *_time_cells(outside, times), "-", "-", "-"))
    flop = sum(each.flop for each in work.values()) / times.whole_ns
    read = sum(each.read_bytes for each in work.values()) / times.whole_ns
    whole = _time_cells(times.whole_ns, times)
    rows.append(("whole", *whole, "-", f"{flop:.1f}", f"{read:.1f}"))
    return rows


def _time_cells(ns: int, times: PassTimes) -> tuple[Cell, ...]:
    return round(ns / 1000), f"{ns / times.whole_ns:.1%}"


def make_parser() -> argparse.ArgumentParser:
    summary = (__doc__ or "").partition("\n\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decode_stages", description=summary)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 128], help="sequences")
    parser.add_argument("--context", type=int, default=128, help="tokens that a row sees [128]")
    parser.add_argument("--dtype", default="auto", help="float32 or bfloat16 [the processor's]")
    parser.add_argument("--threads", type=int, default=usable_cores(), help="[all cores]")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each number of rows [2]")
    return parser


def main() -> int:
    options = make_parser().parse_args()
    set_up_torch(options.threads)
    device = torch.device("cpu")
    dtype = choose_dtype(options.dtype, device)
    base = BaseModel.load("smollm2", weights(), None, dtype, device)
    team = Team(options.threads)
    print(f"{dtype}, {options.threads} threads, instruction set {instruction_set()}")
    for num_rows in options.rows:
        decoder = Decoder(base, team, num_rows, options.context)
        work = work_of(base.config, dtype.itemsize, num_rows, options.context)
        rows = rows_of(step_names(team), decoder.fastest_pass(options.seconds), work)
        print(f"\nrows: {num_rows}, context {options.context}\n")
        print(table(COLUMNS, rows, [False, *[True] * (len(COLUMNS) - 1)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
