"""The form of a benchmark's result: a table with the machine and the versions it was made on."""

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

Cell = str | int | float


def machine() -> dict[str, Cell]:
    """What the figures depend on."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_bytes / 1024**3),
        "system": f"{platform.system()} {platform.machine()}",
    }


def versions(*packages: str) -> dict[str, str]:
    """The Python version and those of the packages that are installed."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """Of the sources that were measured; "+" where files differ from it, "" outside a checkout."""
    git = ("git", "-C", str(Path(__file__).resolve().parent))
    try:
        head = _said(*git, "rev-parse", "--short=10", "HEAD").strip()
        changed = _said(
            *git, "status", "--porcelain", "--untracked-files=no", "--", ":/*.py", ":/*.c"
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return f"{head}+" if changed else head


def _said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "unknown"


@dataclass(frozen=True)
class Report:
    """about: Markdown paragraphs. rows: one cell for each column. targets: what was aimed at, each
    with name, value, target (a text) and met."""

    title: str
    about: str
    command: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    versions: Mapping[str, str]
    machine: Mapping[str, Cell] = field(default_factory=machine)
    date: str = field(default_factory=lambda: datetime.now(UTC).strftime("%Y-%m-%d"))
    commit: str = field(default_factory=commit)
    targets: Sequence[Mapping[str, Cell]] = ()

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    def publish(self, path: Path | None, unit: str = "") -> None:
        """Prints the table and the targets, whose values are in `unit`; writes where a path is."""
        print(self.table())
        for one in self.targets:
            met = "met" if one["met"] else "MISSED"
            print(f"{met}: {one['name']}: {one['value']}{unit}")
        if path is not None:
            self.write(path)

    @classmethod
    def read(cls, path: Path) -> "Report":
        return cls(**{"commit": ""} | json.loads(path.read_text(encoding="utf-8")))

    def table(self) -> str:
        """Markdown, aligned so that it reads in a terminal too."""
        cells = [list(self.columns), *([_shown(cell) for cell in row] for row in self.rows)]
        widths = [max(len(row[i]) for row in cells) for i in range(len(self.columns))]
        numeric = [
            all(not isinstance(row[i], str) for row in self.rows) for i in range(len(widths))
        ]
        rule = ["-" * (w - 1) + (":" if n else "-") for w, n in zip(widths, numeric, strict=True)]
        lines = [cells[0], rule, *cells[1:]]
        return "\n".join(_line(line, widths, numeric) for line in lines)


def _line(cells: Sequence[str], widths: Sequence[int], numeric: Sequence[bool]) -> str:
    placed = (
        cell.rjust(width) if right else cell.ljust(width)
        for cell, width, right in zip(cells, widths, numeric, strict=True)
    )
    return f"| {' | '.join(placed)} |"


def _shown(cell: Cell) -> str:
    if isinstance(cell, float):
        return f"{cell:.2f}" if abs(cell) < 100 else f"{cell:.0f}"
    return str(cell)
