"""Pictures of runs, without a display."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from lib.run import Run

INK, GREY = "#22272e", "#6b7280"
COLOURS = {
    "sft": "#2563eb",
    "rl": "#059669",
    "agent": "#d97706",
    "dpo": "#7c3aed",
    "prompt_distillation": "#0891b2",
    "custom_loss": "#be185d",
    "rl_multiturn": "#0f766e",
    "rl_async": "#4d7c0f",
    "distill_on_policy": "#b45309",
}
HEADINGS = {
    "sft": "SFT: one-digit sums, by examples",
    "rl": "RL: which number is larger, by reward",
    "agent": "An agent on the openai package, by reward",
    "dpo": "DPO: JSON preferred to a sentence",
    "prompt_distillation": "A prompt with examples, learned",
    "distill_on_policy": "A student corrected by its teacher",
    "rl_async": "RL on samples of older weights",
    "rl_multiturn": "Guess a number by hints, by reward",
    "custom_loss": "The right sum likely, the one beside it unlikely",
}
STYLE = {
    "font.size": 10.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#c4c9d1",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "axes.grid": True,
    "grid.color": "#eceef1",
    "axes.axisbelow": True,
}
PANEL_INCHES = (5.0, 4.0)
DPI = 130


@contextmanager
def _figure(path: Path, num_panels: float = 1) -> Iterator[Figure]:
    """To draw on, so many panels wide; a PNG once the block ends."""
    width, height = PANEL_INCHES
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(width * num_panels, height), dpi=DPI, layout="constrained")
        yield figure
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)


def draw(path: Path, runs: list[Run], title: str | None = None) -> Path:
    """A panel for each run, side by side, as a PNG."""
    with _figure(path, len(runs)) as figure:
        figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1, wspace=0.06)
        if title is not None:
            figure.suptitle(title, fontsize=13, fontweight="bold")
        panels = np.atleast_1d(figure.subplots(1, len(runs)))
        for axes, run in zip(panels, runs, strict=True):
            _panel(axes, run)
    return path


def _panel(axes: Any, run: Run) -> None:
    steps = np.arange(len(run.values))  # a value is measured before its step's update
    values = np.array(run.values)
    colour = COLOURS[run.name]
    axes.plot(
        steps,
        values,
        color=colour,
        linewidth=2,
        marker="o",
        markersize=4,
        label="a step",
        clip_on=False,
    )
    axes.set_title(HEADINGS[run.name], loc="left", fontsize=11.5, pad=24)
    axes.text(0, 1.03, _change(run), transform=axes.transAxes, color=GREY)
    axes.set_xlabel("optimizer steps taken")
    axes.set_ylabel(run.measure)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if run.spread is None:
        axes.set_ylim(bottom=0)
    else:
        _add_rewards(axes, run, steps, values)


def _add_rewards(axes: Any, run: Run, steps: np.ndarray, values: np.ndarray) -> None:
    """The band, and held-out accuracy: the mean reward on problems that are never trained on."""
    spread = np.array(run.spread)
    axes.fill_between(
        steps, values - spread, values + spread, color=COLOURS[run.name], alpha=0.15,
        linewidth=0, label="± standard error over its problems",
    )  # fmt: skip
    axes.plot(
        [0, len(steps)], [run.before.accuracy, run.after.accuracy], linestyle="none", color=INK,
        marker="D", markersize=7, clip_on=False, zorder=3, label="judged before and after",
    )  # fmt: skip
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.legend(loc="lower right", frameon=False, fontsize=9)


def _change(run: Run) -> str:
    return f"{run.before.counted}: {run.before.accuracy:.0%} → {run.after.accuracy:.0%}"


def draw_sweep(path: Path, curves: dict[float, list[float]], ends: dict[float, float]) -> Path:
    """The loss of every learning rate by step, and what each ends with, as a PNG."""
    colours = mpl.colormaps["viridis"](np.linspace(0.0, 0.92, len(curves)))
    with _figure(path, 2.3) as figure:
        left, right = figure.subplots(1, 2)
        for colour, (rate, losses) in zip(colours, curves.items(), strict=True):
            left.plot(losses, color=colour, linewidth=1.8, label=f"{rate:g}")
        left.set_title("Loss by learning rate", loc="left", fontsize=11.5)
        left.set_xlabel("optimizer steps taken")
        left.set_ylabel("loss per answer token (nats)")
        left.xaxis.set_major_locator(MaxNLocator(integer=True))
        left.legend(  # beside it: curves are everywhere
            title="learning rate", frameon=False, fontsize=9, title_fontsize=9,
            loc="center left", bbox_to_anchor=(1.0, 0.5),
        )  # fmt: skip
        rates, values = list(ends), list(ends.values())
        right.plot(rates, values, color=GREY, linewidth=1, zorder=1)
        right.scatter(rates, values, color=colours, s=55, zorder=2, clip_on=False)
        best = int(np.argmin(values))
        right.annotate(
            f"{rates[best]:g}", (rates[best], values[best]), xytext=(4, 12),
            textcoords="offset points", ha="right", fontweight="bold",
        )  # fmt: skip
        right.set_xscale("log")
        # A rate that is too high leaves the picture, not the others' curves a line at its foot.
        left.set_ylim(0, 1.3 * max(losses[0] for losses in curves.values()))
        right.set_ylim(bottom=0)
        right.set_title("Loss of the last steps", loc="left", fontsize=11.5)
        right.set_xlabel("learning rate")
        right.set_ylabel("mean loss (nats)")
    return path


def draw_bars(path: Path, table: dict[str, dict[str, float]]) -> Path:
    """Held-out accuracy of each model, a group of bars for each task, as a PNG."""
    groups = list(next(iter(table.values())))
    colours = [GREY, *mpl.colormaps["viridis"](np.linspace(0.15, 0.8, len(table) - 1))]
    with _figure(path, 1.4) as figure:
        axes = figure.subplots()
        size = min(0.25, 0.8 / len(table))
        for i, (name, values) in enumerate(table.items()):
            places = np.arange(len(groups)) + (i - (len(table) - 1) / 2) * size
            bars = axes.bar(
                places, list(values.values()), size * 0.92, color=colours[i], label=name
            )
            axes.bar_label(bars, fmt="{:.0%}", padding=2, fontsize=9)
        axes.set_xticks(np.arange(len(groups)), groups)
        axes.set_xlim(-0.5, len(groups) - 0.5)
        axes.set_ylim(0, 1.08)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.grid(visible=False, axis="x")
        axes.set_title("Held-out answers right", loc="left", fontsize=11.5)
        # Below: inside it would lie on the bars of a task that every model solves.
        figure.legend(
            loc="outside lower center", ncols=min(3, len(table)), frameon=False, fontsize=9
        )
    return path


def draw_kill(path: Path, plain: list[float], killed: list[float], kill_at: int) -> Path:
    """Both runs over each other, with the place of the kill, as a PNG."""
    with _figure(path) as figure:
        axes = figure.subplots()
        steps = np.arange(1, len(plain) + 1)
        axes.plot(steps, plain, color=GREY, linewidth=5, alpha=0.45, label="without a kill")
        axes.plot(steps, killed, color=COLOURS["sft"], linewidth=1.6, marker="o", markersize=4,
                  label="with one")  # fmt: skip
        axes.axvline(kill_at, color="#dc2626", linestyle="--", linewidth=1.2)
        axes.annotate(
            " SIGKILL", (kill_at, max(plain)), color="#dc2626", va="top", fontweight="bold"
        )
        axes.set_ylim(bottom=0)
        axes.set_xlabel("step")
        axes.set_ylabel("loss per answer token (nats)")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_title("The same run, killed once", loc="left", fontsize=11.5)
        axes.legend(frameon=False)
    return path


def draw_drafts(path: Path, shares: list[float], losses: list[float]) -> Path:
    """The share of drafted tokens that each step's weights accepted, and the loss beside it, as a
    PNG."""
    steps = np.arange(1, len(shares) + 1)
    with _figure(path, 2) as figure:
        left, right = figure.subplots(1, 2)
        left.plot(steps, shares, color=COLOURS["rl"], linewidth=2, marker="o", markersize=4)
        left.set_title("Drafted tokens accepted", loc="left", fontsize=11.5)
        left.set_ylim(0, 1.02)
        left.yaxis.set_major_formatter(PercentFormatter(1.0))
        right.plot(steps, losses, color=COLOURS["sft"], linewidth=2, marker="o", markersize=4)
        right.set_title("What the policy learns meanwhile", loc="left", fontsize=11.5)
        right.set_ylabel("loss per answer token (nats)")
        right.set_ylim(bottom=0)
        for axes in (left, right):
            axes.set_xlabel("optimizer steps taken")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return path
