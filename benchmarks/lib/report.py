"""A benchmark's result: a table with its targets, the machine and the versions."""

import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.lib.machine import commit, machine
from benchmarks.lib.result_name import path_for

Cell = str | int | float


@dataclass(frozen=True)
class Target:
    """What was aimed at. value: as measured, rounded. target: the goal as a text."""

    name: str
    value: Cell
    target: str
    met: bool

    @classmethod
    def at_least(cls, name: str, value: float, goal: float, digits: int = 2) -> "Target":
        return cls(name, round(value, digits), f">= {goal:g}", value >= goal)

    @classmethod
    def at_most(cls, name: str, value: float, goal: float, digits: int = 2) -> "Target":
        return cls(name, round(value, digits), f"<= {goal:g}", value <= goal)

    @classmethod
    def between(cls, name: str, value: float, low: float, high: float) -> "Target":
        return cls(name, round(value, 2), f"{low:g} to {high:g}", low <= value <= high)

    def line(self) -> str:
        """In Markdown; a miss is loud."""
        verdict = "met" if self.met else "**missed**"
        return f"- {verdict}: {self.name}, {self.value} (target {self.target})"


@dataclass(frozen=True)
class Report:
    """about: Markdown paragraphs. command: what measures it. rows: a cell for each column."""

    title: str
    about: str
    command: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    versions: Mapping[str, str]
    machine: Mapping[str, Cell] = field(default_factory=machine)
    date: str = field(default_factory=lambda: datetime.now(UTC).strftime("%Y-%m-%d"))
    commit: str = field(default_factory=commit)
    targets: Sequence[Target] = ()

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    def publish(self, path: Path | None, *, by_instruction_set: bool = False) -> None:
        """Prints everything; writes it where a path is, in a file of the machine's instruction set
        if there is to be one for each."""
        print(f"{self.about}\n\n{self.table()}\n")
        for target in self.targets:
            print(target.line())
        if path is not None and by_instruction_set:
            path = path_for(path, self.instruction_set)
        if path is not None:
            self.write(path)

    @property
    def instruction_set(self) -> str:
        """Of our kernels; "" in a result that was measured before this was recorded."""
        return str(self.machine.get("instruction_set", ""))

    @property
    def host(self) -> str:
        return f"{self.machine['processor']}, {self.machine['cores']} cores"

    @classmethod
    def read(cls, path: Path) -> "Report":
        fields = {"commit": "", "targets": ()} | json.loads(path.read_text(encoding="utf-8"))
        return cls(**fields | {"targets": [Target(**each) for each in fields["targets"]]})

    def table(self) -> str:
        """Markdown, aligned so that it reads in a terminal too."""
        numeric = [
            all(not isinstance(row[i], str) for row in self.rows) for i in range(len(self.columns))
        ]
        return table(self.columns, self.rows, numeric)


def table(columns: Sequence[str], rows: Sequence[Sequence[Cell]], numeric: Sequence[bool]) -> str:
    """numeric: which columns are aligned at the right."""
    cells = [list(columns), *([shown(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    rule = ["-" * (w - 1) + (":" if n else "-") for w, n in zip(widths, numeric, strict=True)]
    lines = [cells[0], rule, *cells[1:]]
    return "\n".join(_line(line, widths, numeric) for line in lines)


def _line(cells: Sequence[str], widths: Sequence[int], numeric: Sequence[bool]) -> str:
    aligned = (
        cell.rjust(width) if right else cell.ljust(width)
        for cell, width, right in zip(cells, widths, numeric, strict=True)
    )
    return f"| {' | '.join(aligned)} |"


def shown(cell: Cell) -> str:
    if isinstance(cell, float):
        return f"{cell:.2f}" if abs(cell) < 100 else f"{cell:.0f}"
    return str(cell)


def about(*texts: str, left_out: Sequence[str] = ()) -> str:
    """A report's `about`: paragraphs of prose are filled anew, since figures of any width were put
    into them. left_out: what was not measured, each with the reason."""
    paragraphs = [_filled(paragraph) for text in texts for paragraph in text.split("\n\n")]
    reasons = "\n".join(f"- {reason}" for reason in left_out)
    return "\n\n".join([*paragraphs, *([f"Not measured:\n\n{reasons}"] if left_out else [])])


def _filled(paragraph: str) -> str:
    if paragraph.startswith(("|", "-")):  # a table, or a list
        return paragraph
    return textwrap.fill(paragraph, 100, break_long_words=False, break_on_hyphens=False)
