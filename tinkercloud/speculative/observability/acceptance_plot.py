"""A plot of the acceptance of drafted tokens over time. Needs matplotlib, the extra `plot`."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from tinkercloud.errors import UserError
from tinkercloud.speculative.observability.acceptance_log import Counts, Line

INCHES, DPI = (8.0, 4.2), 130
INK, GREY, BLUE = "#22272e", "#9aa3af", "#2563eb"
SMOOTHED = 8  # moments of the running mean
MAX_LABELS = 12  # changes of the draft, beyond which their names are left out


def draw(moments: Sequence[Sequence[Line]], path: Path, title: str) -> None:
    """A PNG: a dot for each moment, their running mean, and where another draft came into use.
    Raises UserError where there is nothing to draw, or nothing to draw with."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator, PercentFormatter
    except ImportError:
        raise UserError("the plot needs matplotlib: pip install 'tinkercloud[plot]'") from None
    moments = [lines for lines in moments if any(line.proposed for line in lines)]
    if not moments:
        raise UserError("no draft was verified yet: there is nothing to draw")
    counts = [Counts.sum(Counts(line.proposed, line.accepted) for line in m) for m in moments]
    accepted = np.array([count.accepted for count in counts], np.float64)
    proposed = np.array([count.proposed for count in counts], np.float64)
    figure = Figure(figsize=INCHES, dpi=DPI, layout="constrained")
    axes = figure.subplots()
    dots = accepted / proposed
    axes.plot(dots, ".", color=GREY, markersize=5, label="a policy step, or a minute")
    mean = _running_sum(accepted) / _running_sum(proposed)
    axes.plot(mean, color=BLUE, linewidth=2, label=f"mean of {SMOOTHED}")
    drafts = [lines[-1].draft for lines in moments]
    changes = [i + 1 for i, (before, after) in enumerate(pairwise(drafts)) if before != after]
    for at in changes:
        axes.axvline(at - 0.5, color=GREY, linewidth=0.8, linestyle=":")
        if len(changes) <= MAX_LABELS:
            axes.text(at - 0.4, 1.0, drafts[at], rotation=90, va="top", fontsize=7, color=INK)
    axes.set_title(title, fontsize=11, color=INK)
    axes.set_xlabel("moments, oldest first; dotted: another draft")
    axes.set_ylabel("drafted tokens accepted")
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right", fontsize=8)
    figure.savefig(path, format="png")


def _running_sum(values: np.ndarray) -> np.ndarray:
    """Of the last SMOOTHED moments."""
    sums = np.cumsum(np.r_[np.zeros(SMOOTHED), values])
    return sums[SMOOTHED:] - sums[:-SMOOTHED]
