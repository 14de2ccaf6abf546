"""A whole step of RL: samples, rewards, forward_backward, optim_step, publish; ours through the
official SDK against our real server, beside peers on the same machine.

Before a time is reported: every sample has the wanted number of tokens, the trainer's
log-probabilities of the sampled tokens are the sampler's, the loss is finite, the weights changed.
"""

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from limits import native_bfloat16
from report import Cell, Report, versions
from smollm2 import weights
from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from peers.rl_common import PHASES, Diary, Scale, Work  # noqa: E402
from peers.rl_tinker import ours, skyrl  # noqa: E402
from peers.rl_trl import trl  # noqa: E402
from peers.sampling_common import Unavailable, python_of, version_of  # noqa: E402

from tinkercloud.embedded.model.device import usable_cores  # noqa: E402
from tinkercloud.weights.huggingface import ensure_hf_folder  # noqa: E402

OURS, SKYRL, TRL = "tinkercloud", "SkyRL tinker", "TRL GRPO"
OURS_NARROW = "tinkercloud, bfloat16"
SHORT = {"tinkercloud": OURS, "bfloat16": OURS_NARROW, "skyrl": SKYRL, "trl": TRL}
FULL = Scale()
QUICK = Scale(prompts=4, samples=4, tokens=16)
MAX_BATCH = 128
TIMES_SKYRL = 3.0
COLUMNS = (
    *("contender", "seconds per step", "first step s", "new tokens/s"),
    *(*(f"{phase} %" for phase in PHASES), "log-probability gap", "steps", "note"),
)


@dataclass(frozen=True)
class Row:
    contender: str
    diary: Diary
    scale: Scale

    @property
    def least_s(self) -> float | None:
        """Seconds per step, or what a step takes at least, where none was whole that counts."""
        if self.diary.fault:
            return None
        return self.diary.unfinished_s if self.diary.step_s is None else self.diary.step_s

    def cells(self) -> tuple[Cell, ...]:
        diary = self.diary
        first = f"{sum(diary.steps[0].values()):.1f}" if diary.steps else "-"
        seconds, speed = "-", "-"
        if self.least_s is not None:
            seconds = f"> {self.least_s:.0f}"
        if diary.step_s is not None and not diary.fault:
            seconds, speed = f"{diary.step_s:.2f}", f"{self.scale.new_tokens / diary.step_s:.1f}"
        shares = (f"{100 * diary.share(phase):.1f}" if diary.steps else "-" for phase in PHASES)
        gap = f"{diary.gap:.1e}" if diary.gap is not None else "-"
        note = "; ".join(filter(None, (f"WRONG: {diary.fault}" * bool(diary.fault), diary.stopped)))
        return (self.contender, seconds, first, speed, *shares, gap, len(diary.counted), note)


def prompts(folder: Path, scale: Scale) -> list[str]:
    """Parts of this project's documents, each of exactly `prompt_tokens` tokens when it is read
    again: a contender that takes texts trains on the same tokens as one that takes tokens."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    pages = sorted((ROOT / "docs").glob("*.md"))
    ids = tokenizer.encode("\n".join(page.read_text(encoding="utf-8") for page in pages)).ids
    found: list[str] = []
    for start in range(0, len(ids) - scale.prompt_tokens, scale.prompt_tokens // 2):
        text = tokenizer.decode(ids[start : start + scale.prompt_tokens])
        if len(tokenizer.encode(text).ids) == scale.prompt_tokens:
            found.append(text)
        if len(found) == scale.prompts:
            return found
    sys.exit(f"the documents have only {len(found)} prompts of {scale.prompt_tokens} tokens")


def measured(
    starts: Mapping[str, Callable[[], Diary]], scale: Scale
) -> tuple[list[Row], list[str]]:
    """The rows, and what was not measured and why."""
    rows, notes = [], []
    for name, start in starts.items():
        try:
            row = Row(name, start(), scale)
        except Unavailable as reason:
            notes.append(f"{name}: {str(reason).removesuffix('.')}.")
            continue
        rows.append(row)
        print(f"{name}: {row.cells()[1]} s per step", file=sys.stderr, flush=True)
    return rows, notes


def targets(rows: Sequence[Row]) -> list[dict[str, Cell]]:
    by_name = {row.contender: row for row in rows}
    found = []
    for own, what in ((OURS, ""), (OURS_NARROW, " in bfloat16, theirs in float32")):
        mine, theirs = (by_name[n].least_s if n in by_name else None for n in (own, SKYRL))
        if not mine or not theirs or by_name[own].diary.stopped:
            continue
        whole = by_name[SKYRL].diary.step_s is not None
        times: Cell = round(theirs / mine, 2)
        name = f"speed of a step, times SkyRL's{', at least' * (not whole)}{what}"
        goal, met = f">= {TIMES_SKYRL:g}", theirs / mine >= TIMES_SKYRL
        found.append({"name": name, "value": times, "target": goal, "met": met})
    return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument(
        "--quick", action="store_true", help="4 prompts, 4 samples, 16 tokens; ours alone"
    )
    parser.add_argument(
        "--peers", type=Path, default=ROOT / ".peers", help="their environments (peers.md)"
    )
    parser.add_argument("--only", help=f"contenders, of {','.join(SHORT)}")
    parser.add_argument(
        "--limit-s", type=float, default=900.0, help="seconds for each contender [900]"
    )
    parser.add_argument(
        "--max-batch", type=int, default=MAX_BATCH, help="sequences decoded at once"
    )
    for name in ("prompts", "samples", "tokens", "steps"):
        parser.add_argument(f"--{name}", type=int, help=f"instead of {getattr(FULL, name)}")
    return parser.parse_args()


def scale_of(given: argparse.Namespace) -> Scale:
    usual = QUICK if given.quick else FULL
    asked = {name: getattr(given, name, None) for name in (one.name for one in fields(Scale))}
    return Scale(**{name: asked[name] or getattr(usual, name) for name in asked})


def starters(given: argparse.Namespace, gguf: Path, work: Work) -> dict[str, Callable[[], Diary]]:
    usual = "tinkercloud" if given.quick else ",".join(SHORT)
    names = [SHORT[name] for name in (given.only or usual).split(",")]
    peers, limit_s = given.peers.absolute(), given.limit_s
    every: dict[str, Callable[[], Diary]] = {
        OURS: lambda: ours(gguf, work, given.max_batch, limit_s, "float32"),
        OURS_NARROW: lambda: ours(gguf, work, given.max_batch, limit_s, "bfloat16"),
        SKYRL: lambda: skyrl(peers, work, given.max_batch, limit_s),
        TRL: lambda: trl(peers, work, limit_s),
    }
    if not native_bfloat16():
        del every[OURS_NARROW]
    return {name: start for name, start in every.items() if name in names}


def report(
    given: argparse.Namespace, scale: Scale, rows: Sequence[Row], notes: Sequence[str]
) -> Report:
    said = [ABOUT.format(scale=scale, limit=given.limit_s)]
    said += ["Not measured:\n\n" + "\n".join(f"- {note}" for note in notes)] * bool(notes)
    usual = QUICK if given.quick else FULL
    asked = [
        f"--{one.name} {getattr(scale, one.name)}"
        for one in fields(Scale)
        if getattr(scale, one.name) != getattr(usual, one.name)
    ]
    names = {row.contender for row in rows}
    theirs = {
        package: version_of(python_of(given.peers.absolute(), package), package)
        for package, name in (("skyrl", SKYRL), ("trl", TRL))
        if name in names
    }
    return Report(
        title="A step of RL",
        about="\n\n".join(said),
        command=" ".join(
            ["python benchmarks/rl_step.py", *(["--quick"] if given.quick else []), *asked]
        ),
        columns=COLUMNS,
        rows=[row.cells() for row in rows],
        versions=versions("tinkercloud", "torch", "tinker") | theirs,
        targets=targets(rows),
    )


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # and its servers with it
    given, gguf = arguments(), weights()
    scale = scale_of(given)
    with tempfile.TemporaryDirectory() as scratch:
        folder = ensure_hf_folder(gguf, Path(scratch))
        work = Work(str(folder), prompts(folder, scale), scale, usable_cores())
        rows, notes = measured(starters(given, gguf, work), scale)
    result = report(given, scale, rows, notes)
    print(f"{result.about}\n")
    result.publish(given.json)
    mine = [row for row in rows if row.contender in (OURS, OURS_NARROW)]
    return 1 if any(row.diary.fault or row.diary.stopped for row in mine) else 0


ABOUT = """\
SmolLM2-135M-Instruct in float32, or where it says so in bfloat16, which is what `--dtype auto` is
on a processor that multiplies it; a LoRA adapter of rank 32 on the attention and MLP layers. A
step: {scale.prompts} prompts of {scale.prompt_tokens} tokens, {scale.samples} samples of each,
{scale.tokens} new tokens of each sample at temperature 1; the reward is a text's share of vowels,
the advantage what is above the group's mean; importance_sampling on the sampler's
log-probabilities; one update; the new weights published. One phase after the other. Seconds per
step are the mean of the steps that count, the first (which compiles and allocates) does not. Each
contender has {limit:.0f} s; one that ends no step that counts in it is shown with `>`, and what it
had done. Ours runs through the official SDK; SkyRL's server answers samples in a form which that
SDK no longer reads, so it is asked by HTTP; TRL is its GRPOTrainer with PEFT, generating by
transformers with the end token suppressed, in one process that has nothing to publish. The
log-probability gap is the mean difference of trainer and sampler on the sampled tokens (TRL does
not tell its sampler's). Times count if every sample has its length, the gap is below 1e-3
(0.1 in bfloat16), the loss is finite, and the published weights changed."""

if __name__ == "__main__":
    sys.exit(main())
