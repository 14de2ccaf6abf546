"""A diagnosis as text: ten lines of what matters to the backend in use, or everything."""

import textwrap
from collections.abc import Iterable
from typing import Any

from tinkercloud.doctor.capabilities import Capabilities
from tinkercloud.doctor.checks import ROWS, Row
from tinkercloud.doctor.diagnosis import Diagnosis, Line

MAX_LINES = 10
_MARK, _NAME = 8, 10  # widths of the short report's columns


def brief(diagnosis: Diagnosis, width: int) -> str:
    """At most MAX_LINES lines of `width` columns: the rows of the backend, those with a problem
    first and with what to do about it, then the verdict."""
    problems: list[list[str]] = []
    healthy: list[str] = []
    names: list[str] = []
    for row in ROWS[diagnosis.backend]:
        lines = diagnosis.of(row)
        if any(line.finding.status != "ok" for line in lines):
            problems.append(_problem(row, lines, width))
        elif text := _joined(lines):
            names.append(row.name)
            healthy.append(_cut(_columns("ok", row.name, text), width))
    room = MAX_LINES - 1
    if sum(map(len, problems)) + len(healthy) > room:
        healthy = [_cut(_columns("ok", "", ", ".join(names)), width)] if names else []
    shown = _fitting(problems, room - len(healthy))
    return "\n".join([*shown, *healthy, verdict(diagnosis) + " (All checks: --all)"])


def _fitting(problems: list[list[str]], room: int) -> list[str]:
    """Whole problems, those that block first; the last line counts the others."""
    ordered = sorted(problems, key=lambda lines: not lines[0].startswith("MISSING"))
    if sum(map(len, ordered)) <= room:
        return [line for lines in ordered for line in lines]
    shown: list[str] = []
    for number, lines in enumerate(ordered):
        if len(shown) + len(lines) > room - 1:
            return [*shown, f"{len(ordered) - number} more problems: tinkercloud doctor --all"]
        shown += lines
    return shown


def _problem(row: Row, lines: list[Line], width: int) -> list[str]:
    bad = [line for line in lines if line.finding.status != "ok"]
    mark = "MISSING" if any(line.blocks for line in bad) else "warning"
    remedies = dict.fromkeys(line.finding.remedy for line in bad if line.finding.remedy)
    # "no torch, no gguf" is "no torch, gguf": a line shorter on most terminals.
    text = f"{_joined(bad).replace(', no ', ', ')} -> {'; '.join(remedies)}"
    indent = " " * (_MARK + 1 + _NAME + 1)
    return textwrap.wrap(
        _columns(mark, row.name, text),
        max(width, 2 * len(indent)),
        subsequent_indent=indent,
        break_on_hyphens=False,
    )


def _joined(lines: Iterable[Line]) -> str:
    findings = [line.finding for line in lines]
    return ", ".join(filter(None, (f.fact if f.brief is None else f.brief for f in findings)))


def _columns(mark: str, name: str, text: str) -> str:
    return f"{mark:{_MARK}} {name:{_NAME}} {text}"


def _cut(line: str, width: int) -> str:
    return line if len(line) <= width else f"{line[: width - 3]}..."


def full(diagnosis: Diagnosis, abilities: Capabilities) -> str:
    """Each check with what to do about it, then what this installation can do."""
    lines: list[str] = []
    for line in diagnosis.lines:
        finding = line.finding
        mark = "MISSING" if line.blocks else finding.status
        lines.append(f"{mark:8} {line.name:19} {finding.fact} ({line.purpose})")
        if finding.remedy and finding.status != "ok":
            lines.append(f"{'':8} {'':19} -> {finding.remedy}")
    for group, items in abilities.items():
        lines.append(f"\n{group}")
        lines += [
            f"  {'yes' if item.available else 'no ':3} {name:22} {item.how}"
            for name, item in items.items()
        ]
    return "\n".join([*lines, f"\n{verdict(diagnosis)}"])


def verdict(diagnosis: Diagnosis) -> str:
    can = "can run" if diagnosis.can_run else "cannot run"
    return f"The backend {diagnosis.backend} {can} here."


def to_json(diagnosis: Diagnosis, abilities: Capabilities) -> dict[str, Any]:
    return {
        "backend": diagnosis.backend,
        "can_run": diagnosis.can_run,
        "checks": [line.to_json() for line in diagnosis.lines],
        "capabilities": {
            group: {n: {"available": c.available, "how": c.how} for n, c in items.items()}
            for group, items in abilities.items()
        },
    }
