"""A whole step of RL: samples, rewards, forward_backward, optim_step, publish; ours through the
official SDK against our real server, and peers on the same machine.

Before a time is reported: every sample has the requested number of tokens, the trainer's
log-probabilities of the sampled tokens are the sampler's, the loss is finite, the weights changed.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from benchmarks.lib.arguments import BenchmarkParser
from benchmarks.lib.limits import native_bfloat16
from benchmarks.lib.machine import versions
from benchmarks.lib.peers import Unavailable, versions_of
from benchmarks.lib.processes import prepare_process
from benchmarks.lib.report import Cell, Report, Target, about
from benchmarks.lib.server import MAX_BATCH
from benchmarks.lib.smollm2 import document_tokens, tokenizer_of, weights
from benchmarks.peers.rl_common import PHASES, Scale, StepLog, Work
from benchmarks.peers.rl_tinker import ours, skyrl
from benchmarks.peers.rl_trl import trl
from tinkercloud.embedded.model.device import usable_cores
from tinkercloud.weights.huggingface import ensure_hf_folder

OURS, SKYRL, TRL = "tinkercloud", "SkyRL tinker", "TRL GRPO"
OURS_NARROW = "tinkercloud, bfloat16"
SHORT = {"tinkercloud": OURS, "bfloat16": OURS_NARROW, "skyrl": SKYRL, "trl": TRL}
FULL = Scale()
QUICK = Scale(prompts=4, samples=4, tokens=16)
TIMES_SKYRL = {OURS: 3.0, OURS_NARROW: 5.0}
COLUMNS = (
    *("contender", "seconds per step", "first step s", "new tokens/s"),
    *(*(f"{phase} %" for phase in PHASES), "log-probability gap", "steps", "note"),
)


@dataclass(frozen=True)
class Row:
    contender: str
    log: StepLog
    scale: Scale

    @property
    def least_s(self) -> float | None:
        """Seconds per step, or what a step takes at least, where none was whole that counts."""
        if self.log.fault:
            return None
        return self.log.unfinished_s if self.log.step_s is None else self.log.step_s

    def cells(self) -> tuple[Cell, ...]:
        log = self.log
        first = f"{sum(log.steps[0].values()):.1f}" if log.steps else "-"
        seconds, speed = "-", "-"
        if self.least_s is not None:
            seconds = f"> {self.least_s:.0f}"
        if log.step_s is not None and not log.fault:
            seconds, speed = f"{log.step_s:.2f}", f"{self.scale.new_tokens / log.step_s:.1f}"
        shares = (f"{100 * log.share(phase):.1f}" if log.steps else "-" for phase in PHASES)
        gap = f"{log.gap:.1e}" if log.gap is not None else "-"
        note = "; ".join(filter(None, (f"WRONG: {log.fault}" * bool(log.fault), log.stopped)))
        return (self.contender, seconds, first, speed, *shares, gap, len(log.counted), note)


def prompts(folder: Path, scale: Scale) -> list[str]:
    """Parts of this project's documents, each of exactly `prompt_tokens` tokens when it is read
    again: a contender that takes texts trains on the same tokens as one that takes tokens."""
    tokenizer, ids = tokenizer_of(folder), document_tokens(folder)
    texts: list[str] = []
    for start in range(0, len(ids) - scale.prompt_tokens, scale.prompt_tokens // 2):
        text = tokenizer.decode(ids[start : start + scale.prompt_tokens])
        if len(tokenizer.encode(text).ids) == scale.prompt_tokens:
            texts.append(text)
        if len(texts) == scale.prompts:
            return texts
    sys.exit(f"the documents have only {len(texts)} prompts of {scale.prompt_tokens} tokens")


def measured(
    starts: Mapping[str, Callable[[], StepLog]], scale: Scale
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


def targets(rows: Sequence[Row]) -> list[Target]:
    by_name = {row.contender: row for row in rows}
    goals = []
    for name, what in ((OURS, ""), (OURS_NARROW, " in bfloat16, theirs in float32")):
        our_s, their_s = (by_name[n].least_s if n in by_name else None for n in (name, SKYRL))
        if not our_s or not their_s or by_name[name].log.stopped:
            continue
        bound = ", at least" if by_name[SKYRL].log.step_s is None else ""
        title = f"speed of a step, times SkyRL's{bound}{what}"
        goals.append(Target.at_least(title, their_s / our_s, TIMES_SKYRL[name]))
    return goals


def make_parser() -> BenchmarkParser:
    parser = BenchmarkParser(
        "rl_step", __doc__, quick="4 prompts, 4 samples, 16 tokens; ours alone"
    )
    parser.add_peers(SHORT)
    parser.add_argument(
        "--limit-s", type=float, default=900.0, help="seconds for each contender [900]"
    )
    parser.add_argument(
        "--max-batch", type=int, default=MAX_BATCH, help="sequences decoded at once"
    )
    for name in ("prompts", "samples", "tokens", "steps"):
        parser.add_argument(f"--{name}", type=int, help=f"instead of {getattr(FULL, name)}")
    return parser


def scale_of(options: argparse.Namespace) -> Scale:
    default = QUICK if options.quick else FULL
    sizes = {field.name: getattr(options, field.name, None) for field in fields(Scale)}
    return Scale(**{name: size or getattr(default, name) for name, size in sizes.items()})


def starters(
    options: argparse.Namespace, gguf: Path, work: Work
) -> dict[str, Callable[[], StepLog]]:
    default = "tinkercloud" if options.quick else ",".join(SHORT)
    names = [SHORT[name] for name in (options.only or default).split(",")]
    peers, limit_s = options.peers.absolute(), options.limit_s
    contenders: dict[str, Callable[[], StepLog]] = {
        OURS: lambda: ours(gguf, work, options.max_batch, limit_s, "float32"),
        OURS_NARROW: lambda: ours(gguf, work, options.max_batch, limit_s, "bfloat16"),
        SKYRL: lambda: skyrl(peers, work, options.max_batch, limit_s),
        TRL: lambda: trl(peers, work, limit_s),
    }
    if options.only is None and not native_bfloat16():
        del contenders[OURS_NARROW]
    return {name: start for name, start in contenders.items() if name in names}


def main() -> int:
    parser = make_parser()
    options, gguf = parser.parse_args(), weights()
    prepare_process()
    scale = scale_of(options)
    with tempfile.TemporaryDirectory() as scratch:
        folder = ensure_hf_folder(gguf, Path(scratch))
        work = Work(str(folder), prompts(folder, scale), scale, usable_cores())
        rows, notes = measured(starters(options, gguf, work), scale)
    names = {row.contender for row in rows}
    peers = [peer for peer, name in (("skyrl", SKYRL), ("trl", TRL)) if name in names]
    report = Report(
        title="A step of RL",
        about=about(ABOUT.format(scale=scale, limit=options.limit_s), left_out=notes),
        command=parser.command(options),
        columns=COLUMNS,
        rows=[row.cells() for row in rows],
        versions=versions("tinkercloud", "torch", "tinker")
        | versions_of(options.peers.absolute(), peers),
        targets=targets(rows),
    )
    report.publish(options.json, by_instruction_set=True)
    our_logs = [row.log for row in rows if row.contender in (OURS, OURS_NARROW)]
    return 1 if any(log.fault or log.stopped for log in our_logs) else 0


ABOUT = """\
SmolLM2-135M-Instruct in float32, or where it says so in bfloat16, which is what `--dtype auto` is
on a processor that multiplies it; a LoRA adapter of rank 32 on the attention and MLP layers. A
step: {scale.prompts} prompts of {scale.prompt_tokens} tokens, {scale.samples} samples of each,
{scale.tokens} new tokens of each sample at temperature 1; the reward is a text's share of vowels,
the advantage its excess over the group's mean; importance_sampling on the sampler's
log-probabilities; one update; the new weights published. One phase after the other. Seconds per
step are the mean of the steps that count, the first (which compiles and allocates) does not. Each
contender has {limit:.0f} s; one that ends no step that counts in it is shown with `>`, and with
what it had done. Ours runs through the official SDK; SkyRL's server answers samples in a form which
that SDK no longer reads, so its requests are plain HTTP; TRL is its GRPOTrainer with PEFT,
generating by transformers with the end token suppressed, in one process that has nothing to
publish. The log-probability gap is the mean difference of trainer and sampler on the sampled tokens
(TRL does not report its sampler's). Times count if every sample has its length, our gap is zero
(without compiled kernels below 1e-3, in bfloat16 0.1) and SkyRL's below 1e-3, the loss is finite,
and the published weights changed."""

if __name__ == "__main__":
    sys.exit(main())
