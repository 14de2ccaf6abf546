"""What a check is and what it says.

Facts map a probe's name to its answer; {"error": ...} where the probe failed, {"skipped": ...}
where it was not run.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tinkercloud.doctor.target import Target

Status = Literal["ok", "warning", "missing"]
Facts = Mapping[str, Mapping[str, Any]]

GIB = 1024**3


@dataclass(frozen=True, slots=True)
class Finding:
    """remedy: what to do, empty when nothing. brief: the fact in few words for the short report,
    None: as it is, "": not worth a word there."""

    status: Status
    fact: str
    remedy: str = ""
    brief: str | None = None


@dataclass(frozen=True, slots=True)
class Check:
    """purpose: what having it means. needed_by: the backends that cannot run without. reads: the
    facts that `look` uses; it may use them only."""

    name: str
    purpose: str
    needed_by: tuple[str, ...]
    reads: tuple[str, ...]
    look: Callable[[Target, Facts], Finding]


def unknown(what: str) -> Finding:
    """Nothing to judge: something else is missing, and has a line of its own."""
    return Finding("ok", f"not known without {what}", brief="")
