"""One GPU: decoding against its memory bandwidth, training against its matrix throughput.

Networks of the shapes of Qwen3-0.6B and Qwen3-8B with random weights, made on the device. Logits
and losses are compared with transformers' and with the plain path before a speed is reported; the
device's limits are measured in the same run. Without a GPU it says so and measures nothing.
"""

import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from benchmarks import gpu_peers
from benchmarks.gpu_work import (
    RANK,
    SHAPES,
    TINY,
    Decoding,
    decoded,
    flop_per_token,
    graph_runner,
    random_base,
    step_bytes,
    synchronize,
    train_call,
    version,
)
from benchmarks.lib.arguments import BenchmarkParser
from benchmarks.lib.machine import machine, versions
from benchmarks.lib.report import Cell, Report, Target, about
from benchmarks.lib.timing import best_s
from benchmarks.stream_trace import traced
from tinkercloud.architectures.config import ArchitectureConfig
from tinkercloud.embedded.forward.kv_blocks import BLOCK_TOKENS
from tinkercloud.embedded.forward.runners import TorchRunner
from tinkercloud.embedded.model.base_model import BaseModel

COLUMNS = (
    *("shape", "work", "sequences", "tokens/s", "ms a step", "forward ms", "of the limit"),
    "peak GiB",
)
DECODE_TARGET, TRAINING_TARGET, PEER_TARGET = 0.70, 0.45, 1.0
LOGIT_TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 8e-2}  # of the largest logit
GRAPHS, ADAPTER, EAGER, PEER = "graphs", "graphs, adapter", "eager", "transformers"
NONE = "-"


@dataclass(frozen=True)
class Plan:
    """What is measured. train: sequences of so many tokens; None: not this shape's training."""

    device: torch.device
    dtype: torch.dtype
    shapes: Mapping[str, ArchitectureConfig]
    at_once: Sequence[int]
    context: int
    num_steps: int
    train: Mapping[str, tuple[int, int]]
    buffer_bytes: int
    matrix: int

    @classmethod
    def of(cls, device: torch.device, quick: bool) -> "Plan":
        if device.type == "cpu":
            sizes = {"buffer_bytes": 2**26, "matrix": 512, "context": 40, "num_steps": 8}
            work = {"at_once": (1, 3), "train": {"tiny": (3, 40)}}
            return cls(device, torch.float32, TINY, **sizes, **work)
        at_once = (1,) if quick else (1, 8, 32, 128)
        train = {"Qwen3-0.6B": (8, 1024)} | ({} if quick else {"Qwen3-8B": (8, 1024)})
        sizes = {"buffer_bytes": 2**32, "matrix": 8192, "context": 512}
        work = {"at_once": at_once, "train": train, "num_steps": 64 if quick else 256}
        return cls(device, torch.bfloat16, SHAPES, **sizes, **work)

    def sync(self) -> None:
        synchronize(self.device)


@dataclass(frozen=True)
class Peak:
    """Of the device, in 10**9 bytes and 10**9 operations a second."""

    read_gb_s: float
    gflop_s: float


@torch.inference_mode()
def peak(plan: Plan) -> Peak:
    """Streaming reads of a large buffer; products of square matrices in the weights' type."""
    columns = 8192
    ones = torch.ones(plan.buffer_bytes // 4 // columns, columns, device=plan.device)
    vector = torch.ones(columns, device=plan.device)
    ways = (lambda: (ones.sum(), plan.sync()), lambda: (torch.mv(ones, vector), plan.sync()))
    read = max(ones.nbytes / best_s(way, 0.5) for way in ways)
    size = plan.matrix
    left, right = (torch.randn(size, size, device=plan.device).to(plan.dtype) for _ in range(2))
    product_s = best_s(lambda: (torch.mm(left, right.T), plan.sync()), 1.0)
    return Peak(read / 1e9, 2 * size**3 / product_s / 1e9)


# ---- correctness comes first


def check(name: str, config: ArchitectureConfig, plan: Plan) -> list[str]:
    """Faults: two layers of the shape against transformers in float32, the step of fixed shapes
    against the plain path in the type that is measured."""
    cut, faults = replace(config, num_layers=2), []
    base = random_base(name, cut, torch.float32, plan.device)
    faults += against_transformers(base, plan)
    del base
    base = random_base(name, cut, plan.dtype, plan.device)
    for adapter in (False, True):
        weights, logits = version(base, adapter=adapter), []
        for runner in (graph_runner(plan.device), TorchRunner()):
            with torch.inference_mode():
                work = Decoding(weights, runner, 3, plan.context, BLOCK_TOKENS)
                logits.append(work.logits().float())
        off = float((logits[0] - logits[1]).abs().max() / logits[1].abs().max())
        if not off <= LOGIT_TOLERANCE[plan.dtype]:
            faults.append(f"{name}, adapter {adapter}: logits differ by {off:.2g} of the largest")
    return faults


def against_transformers(base: BaseModel, plan: Plan) -> list[str]:
    """Logits after a prompt and one token more, and the loss of training, in float32."""
    if find_spec("transformers") is None:
        return []
    c, model = base.config, gpu_peers.as_transformers(base)
    tokens = np.random.default_rng(4).integers(0, c.vocab_size, 41)
    with torch.inference_mode():
        logits = model(base.tensor(tokens)[None]).logits[0]
    theirs = torch.log_softmax(logits.double(), -1)
    ours = decoded(base, tokens)
    off = float((ours.float() - logits[-1]).abs().max() / logits[-1].abs().max())
    loss = train_call(base, [tokens]).loss
    expected = -float(theirs[:-1].gather(-1, base.tensor(tokens[1:])[:, None]).sum())
    faults = []
    if not off <= LOGIT_TOLERANCE[torch.float32]:
        faults.append(f"{base.name}: logits are off transformers' by {off:.2g} of the largest")
    if not math.isclose(loss, expected, rel_tol=1e-3):
        faults.append(f"{base.name}: loss {loss:.4f}, transformers' {expected:.4f}")
    return faults


# ---- speeds


def decode_rows(base: BaseModel, plan: Plan, limits: Peak) -> Iterator[list[Cell]]:
    for num_seqs in plan.at_once:
        for path in (GRAPHS, ADAPTER, EAGER):
            weights = version(base, adapter=path == ADAPTER)
            runner = TorchRunner() if path == EAGER else graph_runner(plan.device)
            steps = plan.num_steps if path != EAGER else max(4, plan.num_steps // 8)
            work = Decoding(weights, runner, num_seqs, plan.context, steps + 3)
            for _ in range(3):  # compiles and captures
                work.step()
            work.forward_s = 0.0
            plan.sync()
            start = time.perf_counter()
            for _ in range(steps):
                work.step()
            step_s, forward_s = (time.perf_counter() - start) / steps, work.forward_s / steps
            least_bytes = step_bytes(weights, num_seqs, plan.context + steps // 2)
            share = least_bytes / limits.read_gb_s / 1e9 / step_s
            figures = (num_seqs / step_s, step_s * 1000, forward_s * 1000, share)
            yield [base.name, f"decode, {path}", num_seqs, *figures, NONE]


def training_rows(
    base: BaseModel, model: "torch.nn.Module | None", plan: Plan, limits: Peak
) -> Iterator[list[Cell]]:
    """model: the same network as a peer has it."""
    num, length = plan.train[base.name]
    tokens = np.random.default_rng(5).integers(0, base.config.vocab_size, (num, length + 1))
    runs = [train_call(base, list(tokens), gpu_peers.NUM_TRAINED)]
    if not math.isclose(runs[0].loss / num / length, math.log(base.config.vocab_size), rel_tol=0.3):
        raise SystemExit(f"{base.name}: a loss of {runs[0].loss / num / length:.2f} is not right")
    if model is not None and find_spec("peft") is not None:
        runs += gpu_peers.trained(model, list(tokens))
    for run in runs:
        if not math.isclose(run.loss, runs[0].loss, rel_tol=1e-2):
            raise SystemExit(f"{base.name}: losses {runs[0].loss:.1f} and {run.loss:.1f}")
        speed = num * length / run.step_s
        share = speed * flop_per_token(base.config) / limits.gflop_s / 1e9
        work = f"training, LoRA {RANK}" + (f", {run.variant}" if run is not runs[0] else "")
        figures = (speed, run.step_s * 1000, NONE, share, run.peak_bytes / 2**30)
        yield [base.name, work, num, *figures]


def peer_rows(
    base: BaseModel, model: torch.nn.Module, plan: Plan, limits: Peak
) -> Iterator[list[Cell]]:
    weights = version(base, adapter=False)
    for num_seqs in plan.at_once:
        step_s = gpu_peers.decode_step_s(model, num_seqs, plan.context)
        least_bytes = step_bytes(weights, num_seqs, plan.context + gpu_peers.NUM_DECODED // 2)
        share = least_bytes / limits.read_gb_s / 1e9 / step_s
        figures = (num_seqs / step_s, step_s * 1000, NONE, share, NONE)
        yield [base.name, f"decode, {PEER}", num_seqs, *figures]


# ---- the report


def shown(rows: Iterator[list[Cell]]) -> Iterator[list[Cell]]:
    """Each said as it comes: a fault later on does not take with it what was measured."""
    for row in rows:
        cells = (f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in row)
        print("  ".join(cells), file=sys.stderr, flush=True)
        yield row


def measured(plan: Plan, command: str) -> Report:
    limits, rows, start = peak(plan), [], time.perf_counter()
    for name, config in plan.shapes.items():
        faults = check(name, config, plan)
        if faults:
            raise SystemExit("\n".join(faults))
        base = random_base(name, config, plan.dtype, plan.device)
        rows += shown(decode_rows(base, plan, limits))
        model = gpu_peers.as_transformers(base) if find_spec("transformers") else None
        if model is not None:
            rows += shown(peer_rows(base, model, plan, limits))
        if name in plan.train:
            rows += shown(training_rows(base, model, plan, limits))
        del base, model
    text = ABOUT.format(
        read=limits.read_gb_s,
        rate=limits.gflop_s / 1000,
        dtype=str(plan.dtype).removeprefix("torch."),
        context=plan.context,
        seconds=time.perf_counter() - start,
    )
    return Report(
        title="One GPU",
        about=about(text),
        command=command,
        columns=COLUMNS,
        rows=rows,
        versions=versions("tinkercloud", "torch", "triton", "transformers", "peft"),
        machine=machine() | {"processor": processor(plan.device)},
        targets=list(targets(rows)),
    )


def processor(device: torch.device) -> str:
    host = str(machine()["processor"])
    return f"{torch.cuda.get_device_name(device)}, {host}" if device.type == "cuda" else host


def targets(rows: Sequence[Sequence[Cell]]) -> Iterator[Target]:
    for row in rows:
        name, work, num_seqs, share = row[0], str(row[1]), row[2], float(row[-2])
        if work == f"decode, {GRAPHS}" and num_seqs == 1 and name != "Qwen3-0.6B":
            title = f"{name}: decoding alone, of the read bandwidth"
            yield Target.at_least(title, share, DECODE_TARGET, digits=3)
        if work == f"training, LoRA {RANK}":
            title = f"{name}: training, of the matrix throughput"
            yield Target.at_least(title, share, TRAINING_TARGET, digits=3)
            peers = [float(r[3]) for r in rows if r[0] == name and f"{work}, PEFT" in str(r[1])]
            if peers:
                title = f"{name}: training, tokens/s over PEFT's best"
                yield Target.at_least(title, float(row[3]) / max(peers), PEER_TARGET)
        if work == f"decode, {PEER}":
            (ours,) = [r for r in rows if r[:3] == [name, f"decode, {GRAPHS}", num_seqs]]
            title = f"{name}: decoding {num_seqs}, tokens/s over transformers'"
            yield Target.at_least(title, float(ours[3]) / float(row[3]), PEER_TARGET)


def make_parser() -> BenchmarkParser:
    parser = BenchmarkParser("gpu", __doc__, quick="one sequence, one training shape")
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="measure no speed: write a trace of prefill and decoding at once",
    )
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cpu: tiny shapes, only to see that this script runs",
    )
    return parser


def main() -> None:
    parser = make_parser()
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("there is no CUDA device here: nothing is measured")
        return
    plan = Plan.of(torch.device(options.device), options.quick)
    if options.trace is not None:
        print("\n".join(traced(plan.device, plan.dtype, options.trace)))
        return
    measured(plan, parser.command(options)).publish(options.json)


ABOUT = """\
Networks with random weights in {dtype}. *decode*: sequences of {context} tokens grow by a token a
step, drawn at temperature 1 from the whole vocabulary; a step is all from tokens to tokens,
*forward ms* its part up to the logits. *graphs*: CUDA graphs; *adapter*: with a LoRA adapter of
rank 32 on every matrix; *eager*: the plain path. *of the limit*, decoding: the bytes of all
matrices and of the sequences' keys and values, read once, at the read bandwidth, {read:.0f} GB/s;
training: 4 operations per frozen weight and token, 6 per weight of the adapter, nothing for
attention or what is computed twice, of the matrix throughput, {rate:.1f} TFLOP/s. Both limits were
measured in this run, of {seconds:.0f} s. A training step is a forward_backward and an optimizer
step, the shortest of three, on sequences of 1024 tokens; *peak GiB*: allocated on the device in it,
without the frozen weights. *transformers*: a step of its `generate` with the same weights and as
long prompts, sdpa; PEFT: a forward, a backward and AdamW of all sequences at once, its adapter's
numbers float32. What a contender has no memory for is left out."""

if __name__ == "__main__":
    main()
