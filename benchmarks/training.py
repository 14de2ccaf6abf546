"""Training speed and memory: forward_backward and optim_step of LoRA on SmolLM2, beside peers.

Every contender trains an adapter of rank 32 from the same start on the same tokens, in a process of
its own, with all cores. Losses and trained weights are compared before any speed is reported.
"""

import argparse
import json
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from limits import matrix_gflop_s, native_bfloat16
from report import Cell, Report, versions
from smollm2 import weights

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / "benchmarks" / "peers"
sys.path.insert(0, str(ROOT))

from peers.sampling_common import (  # noqa: E402
    Unavailable,
    peer_environment,
    python_of,
    version_of,
)
from peers.training_common import Job, ragged, tokens_of  # noqa: E402
from peers.training_start import Start, prepare  # noqa: E402

from tinkercloud.embedded.model.device import usable_cores  # noqa: E402
from tinkercloud.weights.huggingface import ensure_hf_folder  # noqa: E402

LEARNING_RATE = 1e-4
SHAPES: Mapping[str, Sequence[int]] = {
    "8 x 256": [256] * 8,
    "32 x 512": [512] * 32,
    "ragged 32 x <= 512": ragged(32, 512, seed=0),
}
QUICK: Mapping[str, Sequence[int]] = {"ragged 8 x <= 96": ragged(8, 96, seed=0)}


@dataclass(frozen=True)
class Contender:
    """script: in peers/. unembedding: whether its adapter is on that too. environment: whose
    interpreter runs it, below --peers; "" is ours. own_start: it draws its adapter itself. dtypes:
    of the frozen weights, that it is measured in."""

    script: str
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
    OURS: Contender("training_tinkercloud.py", dtypes=DTYPES),
    PLAIN: Contender("training_peft.py", "plain", dtypes=DTYPES),
    BEST: Contender("training_peft.py", "best", dtypes=DTYPES),
    LEAN: Contender("training_peft.py", "lean"),
    OURS_NARROW: Contender("training_tinkercloud.py", "no unembedding", unembedding=False),
    TRL: Contender("training_trl.py", unembedding=False, environment="trl"),
    SKYRL: Contender("training_skyrl.py", unembedding=False, own_start=True),
}
SHORT = {
    "tinkercloud": (OURS, OURS_NARROW),
    "peft": (PLAIN, BEST, LEAN),
    "trl": (TRL,),
    "skyrl": (SKYRL,),
}
NOT_QUICK = (LEAN, TRL, SKYRL)
SHORT_TOKENS, SHORT_TURNS = 4096, 3
"""A batch that takes seconds is measured in turns: the machine may be slower in one minute than in
the next."""
LONG_TOKENS = 8192
ONE_TURN = (LEAN, TRL, SKYRL)
COLUMNS = (
    *("batch", "tokens", "contender", "dtype", "tokens/s", "of the matrix limit"),
    *("peak GB", "peak GB above loaded", "x our time"),
)
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
    contender is run through. limit_s: of each contender's process. short_turns: of a short
    batch."""

    root: Path
    peers: Path
    starts: Mapping[bool, Start]
    contenders: Sequence[str]
    repeats: int
    through: Sequence[str]
    limit_s: float
    short_turns: int
    notes: list[str] = field(default_factory=list)
    too_slow: dict[str, int] = field(default_factory=dict)

    def measure(self, shape: str, lengths: Sequence[int], dtype: str) -> list[Row]:
        """All contenders, their results compared; raises AssertionError where they differ."""
        best: dict[str, Row] = {}
        for turn in range(self.short_turns if sum(lengths) <= SHORT_TOKENS else 1):
            for name in self.contenders:
                again = turn == 0 or (name in best and name not in ONE_TURN)
                if again and dtype in CONTENDERS[name].dtypes:
                    self._take(name, shape, lengths, dtype, best)
        rows = list(best.values())
        for unembedding, start in self.starts.items():
            same = [row for row in rows if row.kind.unembedding == unembedding]
            compare(start, [row for row in same if not row.kind.own_start])
        return rows

    def _take(
        self, name: str, shape: str, lengths: Sequence[int], dtype: str, best: dict[str, Row]
    ) -> None:
        """One turn of a contender; the better one is kept."""
        if sum(lengths) >= self.too_slow.get(name, sum(lengths) + 1):
            self.notes.append(f"{name}, {shape}: a smaller batch took too long already.")
            return
        try:
            row = self._contend(name, shape, lengths, dtype)
        except Unavailable as reason:
            self.notes.append(f"{name}, {shape}: {reason}.")
            return
        said = f"{shape}, {dtype}: {name}: {row.tokens_s:.0f} tokens/s"
        print(said, file=sys.stderr, flush=True)
        if name not in best or row.seconds < best[name].seconds:
            best[name] = row

    def _contend(self, name: str, shape: str, lengths: Sequence[int], dtype: str) -> Row:
        work = self._job(name, lengths, dtype)
        told = Path(work.save_to) / "job.json"
        told.write_text(json.dumps(asdict(work)), encoding="utf-8")
        status, output, said = self._run(name, told, sum(lengths))
        if status != 0:
            last = (said.strip().splitlines() or ["it said nothing"])[-1][:200]
            if name in (OURS, OURS_NARROW):
                sys.exit(f"{name} failed on {shape}:\n{said[-2000:]}")
            raise Unavailable(last.removesuffix("."))
        found = json.loads(output.splitlines()[-1])
        return Row(
            shape, name, dtype, tokens_of(work.batch), min(found["seconds"]), found["peak_bytes"],
            found["loaded_bytes"], found["losses"], Path(work.save_to),
        )  # fmt: skip

    def _run(self, name: str, told: Path, num_tokens: int) -> tuple[int, str, str]:
        """Exit status, output and errors of a contender's process. Raises Unavailable."""
        kind = CONTENDERS[name]
        python = python_of(self.peers, kind.environment) if kind.environment else sys.executable
        ours = {"OMP_WAIT_POLICY": "PASSIVE"} if name in (OURS, OURS_NARROW) else {}
        process = subprocess.Popen(
            [*self.through, str(python), "-W", "ignore", str(PEERS / kind.script), str(told)],
            env=peer_environment() | ours,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            output, said = process.communicate(timeout=self.limit_s)
        except subprocess.TimeoutExpired:
            self.too_slow[name] = num_tokens
            raise Unavailable(f"not done in {self.limit_s:.0f} s") from None
        finally:
            process.terminate()
            process.communicate()
        return process.returncode, output, said

    def _repeats(self, lengths: Sequence[int]) -> int:
        """A batch of minutes is long enough once."""
        return self.repeats if sum(lengths) <= LONG_TOKENS else 1

    def _job(self, name: str, lengths: Sequence[int], dtype: str) -> Job:
        start, generator = self.starts[CONTENDERS[name].unembedding], np.random.default_rng(0)

        def ids(length: int) -> list[int]:
            return generator.integers(0, start.config.vocab_size, length + 1).tolist()

        return Job(
            str(start.model), str(start.adapter), [ids(n) for n in lengths],
            [ids(min(lengths[0], 64))], self._repeats(lengths), usable_cores(), LEARNING_RATE,
            CONTENDERS[name].variant, dtype, str(self.peers), tempfile.mkdtemp(dir=self.root),
        )  # fmt: skip


def compare(start: Start, rows: Sequence[Row]) -> None:
    """All contenders of one shape and start: the same losses, and updates that differ little."""
    if len(rows) < 2:
        return
    for row in rows[:-1]:
        np.testing.assert_allclose(row.losses, rows[-1].losses, rtol=LOSS_TOLERANCE[row.dtype])
        apart = start.apart(row.adapter, rows[-1].adapter)
        said = f"{row.contender}, {row.shape}, {row.dtype}: updates {apart:.3f} apart"
        assert apart < UPDATE_TOLERANCE[row.dtype], said


Limits = Mapping[str, float]  # GFLOP/s of matrix products, by number type


def share_of(row: Row, bench: Bench, limits: Limits) -> float:
    flop = bench.starts[row.kind.unembedding].flop_per_token
    return row.tokens_s * flop / (limits[row.dtype] * 1e9)


def cells(row: Row, rows: Sequence[Row], bench: Bench, limits: Limits) -> tuple[Cell, ...]:
    """Times are held against ours with the same adapter."""
    own = OURS if row.kind.unembedding else OURS_NARROW
    ours = next((one for one in rows if one.contender == own), None)
    above = row.peak_bytes - row.loaded_bytes
    return (
        *(row.shape, row.num_tokens, row.contender, row.dtype, round(row.tokens_s, 1)),
        *(f"{share_of(row, bench, limits):.0%}", round(row.peak_bytes / 1e9, 2)),
        *(round(above / 1e9, 2), f"{row.seconds / ours.seconds:.2f}" if ours else "-"),
    )


def targets(rows: Sequence[Row], bench: Bench, limits: Limits) -> list[dict[str, Cell]]:
    """Against PEFT as it is used plainly and with its best settings, where these were measured."""
    by_name = {row.contender: row for row in rows}
    ours, found = by_name.get(OURS), []
    if ours is None:
        return []

    def one(name: str, value: float, goal: float, *, least: bool) -> None:
        met = value >= goal if least else value <= goal
        found.append(
            {
                "name": f"{ours.shape}, {ours.dtype}: {name}", "value": round(value, 2),
                "target": f"{'>=' if least else '<='} {goal:g}", "met": met,
            }
        )  # fmt: skip

    for name in (PLAIN, BEST):
        if peer := by_name.get(name):
            one(f"tokens/s over {name}", ours.tokens_s / peer.tokens_s, 2.0, least=True)
            one(f"peak memory over {name}", ours.peak_bytes / peer.peak_bytes, 0.6, least=False)
    one("share of the matrix limit", share_of(ours, bench, limits), 0.5, least=True)
    return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument(
        "--quick", action="store_true", help="a small batch, ours and PEFT, under a minute"
    )
    parser.add_argument("--repeats", type=int, default=2, help="steps of each contender [2]")
    parser.add_argument(
        "--peers", type=Path, default=ROOT / ".peers", help="their environments (peers.md)"
    )
    parser.add_argument("--only", help=f"contenders, of {','.join(SHORT)}")
    parser.add_argument(
        "--limit-s", type=float, default=600.0, help="seconds of a contender for one batch [600]"
    )
    parser.add_argument(
        "--through", default="", help="run every contender through this command: 'taskset -c 0,1'"
    )
    return parser.parse_args()


def chosen(given: argparse.Namespace) -> list[str]:
    """Ours without an adapter on the unembedding runs beside the peers that have none there."""
    asked = (given.only or ",".join(SHORT)).split(",")
    names = [name for short in SHORT if short in asked for name in SHORT[short]]
    if given.quick and given.only is None:
        names = [name for name in names if name not in NOT_QUICK]
    narrow = TRL in names or SKYRL in names
    return [name for name in CONTENDERS if name in names and (narrow or name != OURS_NARROW)]


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # and its processes with it
    given = arguments()
    gguf = weights()
    torch.set_num_threads(usable_cores())
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        model = ensure_hf_folder(gguf, root / "model")
        starts = {kind: prepare(root, model, unembedding=kind) for kind in (True, False)}
        bench = Bench(
            root, given.peers.absolute(), starts, chosen(given), given.repeats,
            shlex.split(given.through), given.limit_s, 1 if given.quick else SHORT_TURNS,
        )  # fmt: skip
        seconds = 0.5 if given.quick else 2.0
        dtypes = DTYPES if native_bfloat16() and not given.quick else DTYPES[:1]
        before = products(dtypes, seconds)
        shapes = QUICK if given.quick else SHAPES
        found = [
            bench.measure(shape, lengths, dtype)
            for shape, lengths in shapes.items()
            for dtype in dtypes
        ]
        after = products(dtypes, seconds)
        limits = {dtype: max(before[dtype], after[dtype]) for dtype in dtypes}
        result = report(bench, found, limits, quick=given.quick)
    print(f"{result.about}\n")
    result.publish(given.json)
    return 0


def products(dtypes: Sequence[str], seconds: float) -> dict[str, float]:
    return {dtype: matrix_gflop_s(getattr(torch, dtype), seconds) for dtype in dtypes}


def report(bench: Bench, found: Sequence[Sequence[Row]], limits: Limits, *, quick: bool) -> Report:
    limit = " and ".join(f"{limits[dtype]:.0f} GFLOP/s in {dtype}" for dtype in limits)
    said = [ABOUT.format(limit=limit, flop=bench.starts[True].flop_per_token / 1e6)]
    said += ["Not measured:\n\n" + "\n".join(f"- {note}" for note in bench.notes)] * bool(
        bench.notes
    )
    return Report(
        title="Training",
        about="\n\n".join(said),
        command="python benchmarks/training.py" + (" --quick" if quick else ""),
        columns=COLUMNS,
        rows=[cells(row, rows, bench, limits) for rows in found for row in rows],
        versions=versions("tinkercloud", "torch", "peft", "transformers") | theirs(bench, found),
        targets=[target for rows in found for target in targets(rows, bench, limits)],
    )


def theirs(bench: Bench, found: Sequence[Sequence[Row]]) -> dict[str, str]:
    """The versions of the peers that were measured and have environments of their own."""
    measured = {row.contender for rows in found for row in rows}
    return {
        name: version_of(python_of(bench.peers, name), name)
        for name, row in (("trl", TRL), ("skyrl", SKYRL))
        if row in measured
    }


ABOUT = """\
SmolLM2-135M, its frozen weights in float32 and, where the processor multiplies it, in bfloat16; a
LoRA adapter of rank 32 on all linear layers, in float32 as its optimizer is; one forward_backward
and one optimizer step of AdamW; all tokens are trained on; the shortest step counts, for the
smallest batch of three turns. *PEFT, padded*: PEFT and `transformers` with sdpa, micro-batches of 8
in the given order. *PEFT, best*: sorted by length, micro-batches of about 1024 tokens. *PEFT,
checkpoints*: the same with gradient checkpointing. *TRL, packed*: SFTTrainer, packing by best fit,
free of padding, its loss in chunks. All start from one adapter; losses agree to 1e-5 (in bfloat16
5e-4) and the updates to 3 % of their norm (in bfloat16 to half of it: Adam's first step is the
gradient's sign, and near zero that is rounding), or there is no report. TRL's loss reads past an
adapter on the unembedding and SkyRL's server trains none there, so these two are held against
*Tinkercloud, no unembedding*, which has theirs. SkyRL draws its adapter itself, and its gradient is
a mean over each sequence; only its first loss is checked, against the base model's, to 1e-4; its
step is timed through its HTTP API, after one of the same shape. *Above loaded* is the peak of
resident memory, of all processes, over that before the first step. *x our time*: a step's time by
ours with the same adapter. The matrix limit is the best product of the run in that number type,
{limit}; a token counts {flop:.0f} MFLOP: 4 per frozen weight, 6 per weight of the adapter, nothing
for attention or what is computed twice."""

if __name__ == "__main__":
    sys.exit(main())
