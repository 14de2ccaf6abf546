"""A picture of how often drafted tokens stood, over time. Needs matplotlib, the extra `plot`."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from tinkercloud.errors import UserError
from tinkercloud.speculative.observability.acceptance_log import Line

INCHES, DPI = (8.0, 4.2), 130
INK, GREY, BLUE = "#22272e", "#9aa3af", "#2563eb"
SMOOTH = 8  # moments of the running mean
MOST_TOLD = 12  # drafts whose names are written


def draw(lines: Sequence[Line], path: Path, title: str) -> None:
    """A PNG: a dot for each moment, their running mean, and where another draft came into use.
    Raises UserError where there is nothing to draw, or nothing to draw with."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator, PercentFormatter
    except ImportError:
        raise UserError("the plot needs matplotlib: pip install 'tinkercloud[plot]'") from None
    moments = _moments(lines)
    if not moments:
        raise UserError("no draft was verified yet: there is nothing to draw")
    rates = np.array([accepted / proposed for _, proposed, accepted in moments])
    weights = np.array([proposed for _, proposed, _ in moments], np.float64)
    figure = Figure(figsize=INCHES, dpi=DPI, layout="constrained")
    axes = figure.subplots()
    axes.plot(rates, ".", color=GREY, markersize=5, label="a policy step, or a minute")
    axes.plot(_running(rates, weights), color=BLUE, linewidth=2, label=f"mean of {SMOOTH}")
    drafts = [draft for draft, _, _ in moments]
    changes = [i + 1 for i, (one, then) in enumerate(pairwise(drafts)) if one != then]
    for at in changes:
        axes.axvline(at - 0.5, color=GREY, linewidth=0.8, linestyle=":")
        if len(changes) <= MOST_TOLD:
            axes.text(at - 0.4, 1.0, drafts[at], rotation=90, va="top", fontsize=7, color=INK)
    axes.set_title(title, fontsize=11, color=INK)
    axes.set_xlabel("moments, oldest first; dotted: another draft")
    axes.set_ylabel("drafted tokens that stood")
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right", fontsize=8)
    figure.savefig(path, format="png")


def _moments(lines: Sequence[Line]) -> list[tuple[str, int, int]]:
    """Draft, proposed and accepted tokens; categories of one moment together."""
    found: dict[float, tuple[str, int, int]] = {}
    for line in lines:
        _, proposed, accepted = found.get(line.time, ("", 0, 0))
        found[line.time] = (line.draft, proposed + line.proposed, accepted + line.accepted)
    return [moment for _, moment in sorted(found.items()) if moment[1]]


def _running(rates: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Of the last SMOOTH moments, by their tokens."""
    ends = np.arange(1, len(rates) + 1)
    starts = np.maximum(ends - SMOOTH, 0)
    stood, told = np.cumsum(np.r_[0.0, rates * weights]), np.cumsum(np.r_[0.0, weights])
    return (stood[ends] - stood[starts]) / (told[ends] - told[starts])
