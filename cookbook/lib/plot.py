"""Pictures of runs, without a display."""

from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from lib.run import Run

INK, GREY = "#22272e", "#6b7280"
COLOURS = {"sft": "#2563eb", "rl": "#059669", "agent": "#d97706"}
HEADINGS = {
    "sft": "SFT: one-digit sums, by examples",
    "rl": "RL: which number is larger, by reward",
    "agent": "An agent on the openai package, by reward",
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


def draw(path: Path, runs: list[Run], title: str | None = None) -> Path:
    """A panel for each run, side by side, as a PNG."""
    width, height = PANEL_INCHES
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(width * len(runs), height), dpi=DPI, layout="constrained")
        figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1, wspace=0.06)
        if title is not None:
            figure.suptitle(title, fontsize=13, fontweight="bold")
        panels = np.atleast_1d(figure.subplots(1, len(runs)))
        for axes, run in zip(panels, runs, strict=True):
            _panel(axes, run)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
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
        marker="D", markersize=7, clip_on=False, zorder=3, label="held-out, before and after",
    )  # fmt: skip
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.legend(loc="lower right", frameon=False, fontsize=9)


def _change(run: Run) -> str:
    return f"held-out answers right: {run.before.accuracy:.0%} → {run.after.accuracy:.0%}"
