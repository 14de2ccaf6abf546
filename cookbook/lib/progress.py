"""A progress bar, and samples as text."""

import shutil
import sys
import time

from lib.evaluation import Evaluation

BAR_WIDTH = 24
SHOWN_EXAMPLES = 4
SHOWN_CHARACTERS = 60


class Progress:
    """One line that redraws itself on a terminal; a line for each step elsewhere."""

    def __init__(self, title: str, num_steps: int):
        self._title = title
        self._num_steps = num_steps
        self._start_s = time.monotonic()
        self._live = sys.stdout.isatty()
        self._drawn = 0
        if self._live:
            self._draw(0, "")

    def step(self, done: int, **figures: float) -> None:
        """`done` steps of all are done; figures are shown with three decimals."""
        self._draw(done, "  ".join(f"{name} {value:.3f}" for name, value in figures.items()))
        if self._live and done == self._num_steps:
            print(flush=True)

    def _draw(self, done: int, figures: str) -> None:
        filled = BAR_WIDTH * done // self._num_steps
        bar = "█" * filled + "░" * (BAR_WIDTH - filled)
        line = f"{self._title} {bar} {done:>3}/{self._num_steps}  {figures}  {self._times(done)}"
        if self._live:
            # A line that wraps could not be redrawn; blanks cover what is left of a longer one.
            line = line[: shutil.get_terminal_size().columns - 1]
            print(f"\r{line.ljust(self._drawn)}", end="", flush=True)
            self._drawn = len(line)
        else:
            print(line.rstrip(), flush=True)

    def _times(self, done: int) -> str:
        if done == 0:
            return ""
        per_step_s = (time.monotonic() - self._start_s) / done
        return f"{per_step_s:.1f} s/step  {_clock(per_step_s * (self._num_steps - done))} left"


def show(when: str, evaluation: Evaluation) -> None:
    """The figure and the first few examples."""
    right = f"{evaluation.accuracy:.0%} of {evaluation.num_samples} {evaluation.counted}"
    print(f"{when}: {right}", flush=True)
    for question, answer, is_right in evaluation.examples[:SHOWN_EXAMPLES]:
        mark = "✓" if is_right else "✗"
        print(f"  {mark} {question}  ->  {_short(answer)}", flush=True)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= SHOWN_CHARACTERS else line[: SHOWN_CHARACTERS - 1] + "…"


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"
