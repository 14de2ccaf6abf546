"""Which importance weights keep REINFORCE stable off-policy: truncated, masked, or by sequence.

Small policies learn a task by RL from samples of other weights: 1 to 16 steps old, or with numerics
that differ from the trainer's (bfloat16, weights rounded to 4 and 3 bits). With each loss the
rewards after training and the norms of gradients are measured, and at one point of training the
bias and the noise of the gradient against the true one. The baselines are importance_sampling, ppo,
and no correction at all.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean

import torch

from benchmarks.lib.arguments import BenchmarkParser
from benchmarks.lib.machine import versions
from benchmarks.lib.off_policy import CANDIDATES, Setting, estimate, pair_of, train
from benchmarks.lib.report import Cell, Report, Target
from benchmarks.lib.tiny_policy import Weights, in_bfloat16, pretrained, quantised

CHOSEN = "truncated at 2"
STALENESS = (1, 2, 4, 8, 16)
SETTINGS = (
    *(Setting(f"{steps} steps old", steps) for steps in STALENESS),
    Setting("bfloat16", 0, in_bfloat16),
    Setting("4 bits", 0, quantised),
    Setting("3 bits", 0, partial(quantised, bits=3)),
)
COLUMNS = (
    *("samples", "loss", "reward", "lowest reward", "norm, median", "norm, largest"),
    *("bias", "noise", "cosine"),
)
SEED, LEARNING_RATE = 0, 3e-3


@dataclass(frozen=True)
class Sizes:
    """num_batches: for each estimate of a gradient; the true one has four times as many, twice."""

    num_policies: int
    num_steps: int
    num_batches: int


FULL, QUICK = Sizes(4, 80, 12), Sizes(2, 4, 4)


def measure(setting: Setting, first: Weights, sizes: Sizes) -> list[tuple[Cell, ...]]:
    """A row for each loss."""
    halfway = max(sizes.num_steps // 4, setting.staleness + 1)
    pair = pair_of(setting, first, halfway, 4 * sizes.num_batches)
    rows: list[tuple[Cell, ...]] = []
    for name, loss in CANDIDATES.items():
        trained = train(first, loss, setting, sizes.num_steps, LEARNING_RATE)
        estimated = estimate(pair, loss, sizes.num_batches)
        figures = (
            *(trained.rewards.mean(), trained.rewards.min()),
            *(trained.norms.median(), trained.norms.max()),
            *(estimated.bias, estimated.noise, estimated.cosine),
        )
        rows.append((setting.name, name, *(round(float(figure), 3) for figure in figures)))
        print(*rows[-1], sep="\t", flush=True)
    return rows


def rewards(rows: Sequence[Sequence[Cell]]) -> dict[str, list[float]]:
    """Of each loss, in every setting."""
    return {name: [float(row[2]) for row in rows if row[1] == name] for name in CANDIDATES}


def targets(rows: Sequence[Sequence[Cell]]) -> list[Target]:
    """The chosen one beside what is not truncated by token: in the mean of all settings, and in the
    one where each is worst."""
    claims = []
    for text, reduce in (("mean of all settings", fmean), ("worst setting", min)):
        values = {name: reduce(column) for name, column in rewards(rows).items()}
        others = {n: v for n, v in values.items() if not n.startswith("truncated")}
        best = max(others, key=lambda name: others[name])
        text = f"reward of *{CHOSEN}*, {text}, beside *{best}*"
        claims.append(Target.at_least(text, values[CHOSEN], round(others[best], 3), 3))
    return claims


def draw(rows: Sequence[Sequence[Cell]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    names = [setting.name for setting in SETTINGS]
    for number, loss in enumerate(CANDIDATES):
        points = [next(r for r in rows if (r[0], r[1]) == (name, loss)) for name in names]
        style = {"color": f"C{number}", "marker": "o", "markersize": 4,
                 "linewidth": 2.4 if loss == CHOSEN else 1.1, "label": loss}  # fmt: skip
        for axis, column in zip(axes, (2, 5), strict=True):
            values = [float(point[column]) for point in points]
            stale = len(STALENESS)
            axis.plot(range(stale), values[:stale], **style)
            axis.plot(range(stale, len(names)), values[stale:], **{**style, "label": None})
    axes[0].set(title="Reward after training, mean of seeds", ylim=(0.2, 1))
    axes[1].set(title="Largest norm of the gradient", yscale="log")
    for axis in axes:
        axis.set_xticks(range(len(names)), [name.removesuffix(" steps old") for name in names])
        axis.set_xlabel("samples: of weights so many steps old, or in these numerics")
        axis.axvline(len(STALENESS) - 0.5, color="gray", linewidth=0.8)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8, loc="lower left")
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


def main() -> int:
    parser = BenchmarkParser("stable_reinforce", __doc__, quick="a few steps, seconds")
    parser.add_argument("--plot", type=Path, help="draw the result here")
    options = parser.parse_args()
    torch.set_num_threads(1)  # at this size threads only wait for each other
    sizes = QUICK if options.quick else FULL
    first = pretrained(sizes.num_policies, SEED, 10 if options.quick else 300)
    rows = [row for setting in SETTINGS for row in measure(setting, first, sizes)]
    options.plot, plot = None, options.plot
    report = Report(
        title="Off-policy losses: what stable_reinforce is made of",
        about=ABOUT.format(sizes=sizes),
        command=parser.command(options),
        columns=COLUMNS,
        rows=rows,
        versions=versions("torch"),
        targets=() if options.quick else targets(rows),
    )
    report.publish(options.json)
    if plot is not None:
        draw(rows, plot)
    return 0


ABOUT = """\
Policies of two layers (25,000 parameters) continue sequences of numbers by a step that the prompt
names; the reward is the share of right tokens, 0.3 before training. A step has 8 prompts with 8
samples of 8 tokens each, advantages are rewards above their group's mean, Adam's learning rate is
0.003. Each figure is of {sizes.num_policies} seeds after {sizes.num_steps} steps.

*samples*: whose they are. Weights some steps old; or the trainer's own weights, computed in
bfloat16 or rounded to 4 or 3 bits, while the trainer computes in float32. *reward*: the mean of the
seeds, and the lowest seed's. *norm*: of the gradient, all steps of all seeds. *bias*, *noise*,
*cosine*: the mean gradient's distance from the true one, a batch's spread around its mean (both by
the true one's norm), and the cosine of the mean and the true one, at a quarter of the training;
medians of the seeds, from {sizes.num_batches} batches, so that a bias below 0.3 may be none.

*truncated at c* is `stable_reinforce` with that bound: weights min(r, c) by token. *masked by
token*: r where it lies between 1/2 and 2, else 0. *sequence, product* and *sequence, mean*: one
weight for all tokens of a sequence, the product or the geometric mean of its ratios, at most 2."""

if __name__ == "__main__":
    sys.exit(main())
