"""Facts judged: whether the chosen backend can run here. Pure functions of the facts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tinkercloud.doctor.checks import BY_NAME, CHECKS, ROWS, Row
from tinkercloud.doctor.finding import Check, Facts, Finding
from tinkercloud.doctor.target import Target

ALL_FACTS = tuple(dict.fromkeys(name for check in CHECKS for name in check.reads))


@dataclass(frozen=True, slots=True)
class Line:
    """blocks: the chosen backend cannot run because of it."""

    name: str
    purpose: str
    finding: Finding
    blocks: bool

    def to_json(self) -> dict[str, Any]:
        finding = self.finding
        return {
            "name": self.name,
            "purpose": self.purpose,
            "status": finding.status,
            "found": finding.fact,
            "remedy": finding.remedy,
            "blocks": self.blocks,
        }


@dataclass(frozen=True, slots=True)
class Diagnosis:
    backend: str
    lines: tuple[Line, ...]

    @property
    def can_run(self) -> bool:
        return not any(line.blocks for line in self.lines)

    def of(self, row: Row) -> list[Line]:
        """The lines of the row's checks, in its order."""
        by_name = {line.name: line for line in self.lines}
        return [by_name[name] for name in row.checks]


def brief_checks(backend: str) -> tuple[Check, ...]:
    """Those in the backend's short report; among them all that it cannot do without."""
    return tuple(BY_NAME[name] for row in ROWS[backend] for name in row.checks)


def facts_of(checks: Sequence[Check]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for check in checks for name in check.reads))


def diagnose(target: Target, facts: Facts, checks: Sequence[Check] = CHECKS) -> Diagnosis:
    return Diagnosis(target.backend, tuple(_line(check, target, facts) for check in checks))


def _line(check: Check, target: Target, facts: Facts) -> Line:
    finding = check.look(target, facts)
    blocks = finding.status == "missing" and target.backend in check.needed_by
    if finding.status == "missing" and not blocks:
        finding = replace(finding, status="warning")
    return Line(check.name, check.purpose, finding, blocks)
