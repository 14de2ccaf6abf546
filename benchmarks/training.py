"""Training speed and memory: forward_backward and optim_step of LoRA on SmolLM2, ours and peers'.

Every contender trains an adapter of rank 32 from the same start on the same tokens, in a process of
its own, with all cores. Losses and trained weights are compared before any speed is reported.
"""

import argparse
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.lib.arguments import BenchmarkParser
from benchmarks.lib.attention_work import TRAINING, attention_flop, num_pairs
from benchmarks.lib.limits import native_bfloat16, products
from benchmarks.lib.machine import versions
from benchmarks.lib.peers import (
    LimitReached,
    Script,
    ScriptFailed,
    Unavailable,
    python_of,
    versions_of,
)
from benchmarks.lib.processes import prepare_process
from benchmarks.lib.report import Cell, Report, Target, about
from benchmarks.lib.smollm2 import weights
from benchmarks.lib.timing import alternating
from benchmarks.peers.training_common import Job
from benchmarks.peers.training_start import Start, prepare
from tinkercloud.config import engine_environment
from tinkercloud.embedded.model.device import usable_cores
from tinkercloud.embedded.native.compiler import instruction_set
from tinkercloud.embedded.native.instruction_sets import AMX
from tinkercloud.weights.huggingface import ensure_hf_folder


def ragged(num: int, longest: int, seed: int) -> list[int]:
    """Lengths as an RL batch has them: many short, few long."""
    generator = np.random.default_rng(seed)
    return (longest * (0.1 + 0.9 * generator.beta(1.2, 2.5, num))).astype(int).tolist()


LEARNING_RATE = 1e-4
SHAPES: Mapping[str, Sequence[int]] = {
    "8 x 256": [256] * 8,
    "32 x 512": [512] * 32,
    "ragged 32 x <= 512": ragged(32, 512, seed=0),
}
QUICK: Mapping[str, Sequence[int]] = {"ragged 8 x <= 96": ragged(8, 96, seed=0)}


@dataclass(frozen=True)
class Contender:
    """module: in peers/. unembedding: whether its adapter is on that too. environment: whose
    interpreter runs it, below --peers; "" is ours. own_start: it draws its adapter itself. dtypes:
    of the frozen weights, that it is measured in."""

    module: str
    variant: str = ""
    unembedding: bool = True
    environment: str = ""
    own_start: bool = False
    dtypes: Sequence[str] = ("float32",)


DTYPES = ("float32", "bfloat16")
OURS, OURS_NARROW = "Tinkercloud", "Tinkercloud, no unembedding"
PLAIN, BEST, LEAN = "PEFT, padded", "PEFT, best", "PEFT, checkpoints"
TRL, SKYRL = "TRL, packed", "SkyRL tinker"
CONTENDERS = {
    OURS: Contender("training_tinkercloud", dtypes=DTYPES),
    PLAIN: Contender("training_peft", "plain", dtypes=DTYPES),
    BEST: Contender("training_peft", "best", dtypes=DTYPES),
    LEAN: Contender("training_peft", "lean"),
    OURS_NARROW: Contender("training_tinkercloud", "no unembedding", unembedding=False),
    TRL: Contender("training_trl", unembedding=False, environment="trl"),
    SKYRL: Contender("training_skyrl", unembedding=False, own_start=True),
}
PEFT = (PLAIN, BEST, LEAN)
SHORT = {
    "tinkercloud": (OURS, OURS_NARROW),
    "peft": PEFT,
    "trl": (TRL,),
    "skyrl": (SKYRL,),
}
NOT_QUICK = (LEAN, TRL, SKYRL)
RUNS = 3
"""Of each batch, in turns: a machine may be faster in one minute than in the next."""
LONG_TOKENS = 8192
ONE_RUN = (LEAN, TRL, SKYRL)
COLUMNS = (
    *("batch", "tokens", "contender", "dtype", "tokens/s", "of the matrix limit"),
    *("peak GB", "peak GB above loaded", "x our time"),
)
AHEAD, AHEAD_WITH_AMX = 1.4, 2.5  # of PEFT's best speed, in bfloat16
SHARE = 0.70  # of the matrix limit, in float32: twice PEFT would be beyond it
MEMORY = 0.45  # of that of PEFT's fast settings
LOSS_TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-3}
UPDATE_TOLERANCE = {"float32": 0.03, "bfloat16": 0.5}
"""Of the update's norm. Adam's first step moves a weight by its gradient's sign, and a gradient
near zero has the sign of its rounding."""


@dataclass(frozen=True)
class Row:
    """seconds: the shortest step. The bytes are of the contender's processes."""

    shape: str
    contender: str
    dtype: str
    num_tokens: int
    seconds: float
    peak_bytes: int
    loaded_bytes: int
    losses: list[float]
    adapter: Path

    @property
    def tokens_s(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def kind(self) -> Contender:
        return CONTENDERS[self.contender]


@dataclass
class Bench:
    """starts: by whether the adapter is on the unembedding too. through: a command that every
    contender is run through. limit_s: of each contender's process. runs: of a batch, alternating.
    products_s: for the matrix limit, each time. limits: that, GFLOP/s, of a batch and number type.
    """

    root: Path
    peers: Path
    starts: Mapping[bool, Start]
    contenders: Sequence[str]
    repeats: int
    through: Sequence[str]
    limit_s: float
    runs: int
    products_s: float
    limits: dict[tuple[str, str], float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    too_slow: dict[str, int] = field(default_factory=dict)

    def measure(self, shape: str, lengths: Sequence[int], dtype: str) -> list[Row]:
        """All contenders, their results compared; raises AssertionError where they differ."""
        best: dict[str, Row] = {}
        self._take_limit(shape, dtype)
        for run, name in alternating(self.contenders, self.runs):
            again = run == 0 or (name in best and name not in ONE_RUN)
            if not again or dtype not in CONTENDERS[name].dtypes:
                continue
            row = self._run(name, shape, lengths, dtype)
            if name == OURS:
                self._take_limit(shape, dtype)
            if row is not None and (name not in best or row.seconds < best[name].seconds):
                best[name] = row
        rows = list(best.values())
        for unembedding, start in self.starts.items():
            same = [row for row in rows if row.kind.unembedding == unembedding]
            compare(start, [row for row in same if not row.kind.own_start])
        return rows

    def _take_limit(self, shape: str, dtype: str) -> None:
        """Next to our steps; the best counts, as of these."""
        rate = products((dtype,), self.products_s)[dtype]
        self.limits[shape, dtype] = max(rate, self.limits.get((shape, dtype), 0.0))

    def _run(self, name: str, shape: str, lengths: Sequence[int], dtype: str) -> Row | None:
        """One run of a contender; None where it did not come to its end, which is noted."""
        num_tokens = sum(lengths)
        if num_tokens >= self.too_slow.get(name, num_tokens + 1):
            self.notes.append(f"{name}, {shape}: a smaller batch took too long already.")
            return None
        job = self._job(name, lengths, dtype)
        try:
            result = self._result(name, job)
        except Unavailable as reason:
            if isinstance(reason, ScriptFailed) and name in (OURS, OURS_NARROW):
                sys.exit(f"{name} failed on {shape}:\n{reason.errors[-2000:]}")
            if isinstance(reason, LimitReached):
                self.too_slow[name] = num_tokens
            self.notes.append(f"{name}, {shape}: {reason}.")
            return None
        row = Row(
            shape=shape,
            contender=name,
            dtype=dtype,
            num_tokens=num_tokens,
            seconds=min(result["seconds"]),
            peak_bytes=result["peak_bytes"],
            loaded_bytes=result["loaded_bytes"],
            losses=result["losses"],
            adapter=Path(job.save_to),
        )
        print(f"{shape}, {dtype}: {name}: {row.tokens_s:.0f} tokens/s", file=sys.stderr, flush=True)
        return row

    def _result(self, name: str, job: Job) -> dict[str, Any]:
        """What the contender's process replies. Raises Unavailable."""
        kind, replies = CONTENDERS[name], []
        python = python_of(self.peers, kind.environment) if kind.environment else sys.executable
        ours = engine_environment() if name in (OURS, OURS_NARROW) else {}
        script = Script(kind.module, Path(python), self.through, ours)
        script.run(asdict(job), self.limit_s, replies.append)
        return replies[-1]

    def _repeats(self, lengths: Sequence[int]) -> int:
        """A batch of minutes is long enough once."""
        return self.repeats if sum(lengths) <= LONG_TOKENS else 1

    def _job(self, name: str, lengths: Sequence[int], dtype: str) -> Job:
        start, generator = self.starts[CONTENDERS[name].unembedding], np.random.default_rng(0)

        def ids(length: int) -> list[int]:
            return generator.integers(0, start.config.vocab_size, length + 1).tolist()

        return Job(
            model=str(start.model),
            adapter=str(start.adapter),
            batch=[ids(length) for length in lengths],
            warm_up=[ids(min(lengths[0], 64))],
            repeats=self._repeats(lengths),
            threads=usable_cores(),
            learning_rate=LEARNING_RATE,
            variant=CONTENDERS[name].variant,
            dtype=dtype,
            peers=str(self.peers),
            save_to=tempfile.mkdtemp(dir=self.root),
        )


def compare(start: Start, rows: Sequence[Row]) -> None:
    """All contenders of one shape and start: the same losses, and updates that differ little."""
    if len(rows) < 2:
        return
    for row in rows[:-1]:
        np.testing.assert_allclose(row.losses, rows[-1].losses, rtol=LOSS_TOLERANCE[row.dtype])
        apart = start.apart(row.adapter, rows[-1].adapter)
        difference = f"{row.contender}, {row.shape}, {row.dtype}: updates {apart:.3f} apart"
        assert apart < UPDATE_TOLERANCE[row.dtype], difference


@dataclass(frozen=True)
class Scale:
    """What a speed is held against. limits: GFLOP/s of matrix products, by batch and number type.
    flop_per_token: of weights, by whether the adapter is on the unembedding too. attention: of the
    batches by their names, operations of a step."""

    limits: Mapping[tuple[str, str], float]
    flop_per_token: Mapping[bool, float]
    attention: Mapping[str, float]

    def share_of(self, row: Row) -> float:
        """Of the matrix limit."""
        flop = row.num_tokens * self.flop_per_token[row.kind.unembedding]
        flop += self.attention[row.shape]
        return flop / row.seconds / (self.limits[row.shape, row.dtype] * 1e9)


def cells(row: Row, rows: Sequence[Row], scale: Scale) -> tuple[Cell, ...]:
    """Times are relative to ours with the same adapter."""
    name = OURS if row.kind.unembedding else OURS_NARROW
    ours = next((other for other in rows if other.contender == name), None)
    above = row.peak_bytes - row.loaded_bytes
    return (
        *(row.shape, row.num_tokens, row.contender, row.dtype, round(row.tokens_s, 1)),
        *(f"{scale.share_of(row):.0%}", round(row.peak_bytes / 1e9, 2)),
        *(round(above / 1e9, 2), f"{row.seconds / ours.seconds:.2f}" if ours else "-"),
    )


def targets(rows: Sequence[Row], scale: Scale, in_use: str) -> list[Target]:
    """Of one batch and number type. in_use: the kernels' instruction set."""
    by_name = {row.contender: row for row in rows}
    ours, goals = by_name.get(OURS), list[Target]()
    if ours is None:
        return []
    case = f"{ours.shape}, {ours.dtype}"
    peft = max((by_name[name].tokens_s for name in PEFT if name in by_name), default=None)
    if ours.dtype == "float32":
        share = scale.share_of(ours)
        goals.append(Target.at_least(f"{case}: share of the matrix limit", share, SHARE))
    elif peft is not None:
        goal = AHEAD_WITH_AMX if in_use == AMX.name else AHEAD
        goals.append(
            Target.at_least(f"{case}: tokens/s over PEFT's best", ours.tokens_s / peft, goal)
        )
    if peer := by_name.get(BEST):
        memory = ours.peak_bytes / peer.peak_bytes
        goals.append(Target.at_most(f"{case}: peak memory over PEFT, best", memory, MEMORY))
    return goals


def make_parser() -> BenchmarkParser:
    parser = BenchmarkParser(
        "training", __doc__, quick="a small batch, ours and PEFT, under a minute"
    )
    parser.add_peers(SHORT)
    parser.add_argument("--dtype", choices=DTYPES, help="of frozen weights [both; quick: float32]")
    parser.add_argument("--repeats", type=int, default=2, help="steps of each contender [2]")
    parser.add_argument(
        "--limit-s", type=float, default=600.0, help="seconds of a contender for one batch [600]"
    )
    parser.add_argument(
        "--through", default="", help="run every contender through this command: 'taskset -c 0,1'"
    )
    return parser


def chosen(options: argparse.Namespace) -> list[str]:
    """Ours without an adapter on the unembedding runs where peers that have none there run."""
    short_names = (options.only or ",".join(SHORT)).split(",")
    names = [name for short in SHORT if short in short_names for name in SHORT[short]]
    if options.quick and options.only is None:
        names = [name for name in names if name not in NOT_QUICK]
    narrow = TRL in names or SKYRL in names
    return [name for name in CONTENDERS if name in names and (narrow or name != OURS_NARROW)]


def main() -> int:
    parser = make_parser()
    options = parser.parse_args()
    prepare_process()
    torch.set_num_threads(usable_cores())
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        model = ensure_hf_folder(weights(), root / "model")
        starts = {kind: prepare(root, model, unembedding=kind) for kind in (True, False)}
        bench = Bench(
            root=root,
            peers=options.peers.absolute(),
            starts=starts,
            contenders=chosen(options),
            repeats=options.repeats,
            through=shlex.split(options.through),
            limit_s=options.limit_s,
            runs=1 if options.quick else RUNS,
            products_s=0.5 if options.quick else 2.0,
        )
        dtypes = dtypes_of(options)
        shapes = QUICK if options.quick else SHAPES
        groups = [
            bench.measure(shape, lengths, dtype)
            for shape, lengths in shapes.items()
            for dtype in dtypes
        ]
        config = starts[True].config
        attention = {
            shape: attention_flop(config, map(num_pairs, lengths), TRAINING)
            for shape, lengths in shapes.items()
        }
        scale = Scale(
            bench.limits, {kind: start.flop_per_token for kind, start in starts.items()}, attention
        )
        result = report(bench, groups, scale, parser.command(options))
    result.publish(options.json, by_instruction_set=True)
    return 0


def dtypes_of(options: argparse.Namespace) -> Sequence[str]:
    if options.dtype is not None:
        return (options.dtype,)
    return DTYPES if native_bfloat16() and not options.quick else DTYPES[:1]


def report(bench: Bench, groups: Sequence[Sequence[Row]], scale: Scale, command: str) -> Report:
    """groups: the rows of each batch and number type."""
    limit = LIMIT.format(limits=limits_of(scale), flop=scale.flop_per_token[True] / 1e6)
    contenders = {row.contender for rows in groups for row in rows}
    peers = [name for name, row in (("trl", TRL), ("skyrl", SKYRL)) if row in contenders]
    numbers = versions("tinkercloud", "torch", "peft", "transformers")
    return Report(
        title="Training",
        about=about(ABOUT, limit, left_out=bench.notes),
        command=command,
        columns=COLUMNS,
        rows=[cells(row, rows, scale) for rows in groups for row in rows],
        versions=numbers | versions_of(bench.peers, peers),
        targets=[goal for rows in groups for goal in targets(rows, scale, instruction_set())],
    )


def limits_of(scale: Scale) -> str:
    """By number type, in the order of the batches."""
    rates: dict[str, list[str]] = {}
    for (_, dtype), rate in scale.limits.items():
        rates.setdefault(dtype, []).append(f"{rate:.0f}")
    return " and ".join(f"{', '.join(each)} GFLOP/s in {dtype}" for dtype, each in rates.items())


ABOUT = """\
SmolLM2-135M, its frozen weights in float32 and, where the processor multiplies it, in bfloat16; a
LoRA adapter of rank 32 on all linear layers, in float32 as its optimizer is; one forward_backward
and one optimizer step of AdamW; all tokens are trained on; the shortest step of three alternating
runs counts, of *PEFT, checkpoints*, TRL and SkyRL of one run. *PEFT, padded*: PEFT and
`transformers` with sdpa, micro-batches of 8 in the given order. *PEFT, best*: sorted by length,
micro-batches of about 1024 tokens. *PEFT, checkpoints*: the same with gradient checkpointing. *TRL,
packed*: SFTTrainer, packing by best fit, free of padding, its loss in chunks. All start from one
adapter; losses agree
to 1e-5 (in bfloat16 2e-3) and the updates to 3 % of their norm (in bfloat16 to half of it: Adam's
first step is the gradient's sign, and near zero that is rounding), or there is no report. TRL's
loss reads past an adapter on the unembedding and SkyRL's server trains none there, so these two are
compared with *Tinkercloud, no unembedding*, which has theirs. SkyRL draws its adapter itself, and
its gradient is a mean over each sequence; only its first loss is checked, against the base model's,
to 1e-4; its step is timed through its HTTP API, after one of the same shape. *Above loaded* is the
peak of resident memory, of all processes, over that before the first step. *x our time*: a step's
time by ours with the same adapter."""

LIMIT = """\
The matrix limit is the best product in that number type right before our steps of a batch and right
after them, {limits} from batch to batch; a token counts {flop:.0f} MFLOP: 4 per frozen weight, 6
per weight of the adapter; to which come 12 per head dimension of each query and each key that it
sees (model FLOPs utilization: nothing for what is computed twice)."""

if __name__ == "__main__":
    sys.exit(main())
