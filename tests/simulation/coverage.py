"""Where crashes met the service, and how often: every await that was suspended, every flush, writes
of the disk and messages of the engine."""

import ast
import gc
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from types import AsyncGeneratorType, CodeType, FrameType
from typing import Any

from tests.simulation.beyond import FLUSHES_BEYOND, reason
from tests.simulation.flushes import all_flushes, flush_site, flushes_in
from tests.simulation.loop import Process

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("services", "core", "storage")
_LINE = re.compile(r"(tinkercloud/\S+\.py):(\d+)$")
_PREFIXES = tuple(f"{ROOT}/tinkercloud/{room}/" for room in ROOMS)


class Coverage:
    """crashed: "tinkercloud/core/lane.py:12", one of `all_flushes` or "write of files in ..." ->
    times. met: awaits and flushes that runs came to while crashes at such were still to come."""

    def __init__(self) -> None:
        self.crashed: Counter[str] = Counter()
        self.met: set[str] = set()

    def crashed_at_awaits(self, process: Process) -> None:
        places = {place for task in process.unfinished() for place in suspended_at(task)}
        self.crashed.update(places)

    def crashed_at(self, label: str) -> None:
        """A change of the disk, or a message to the engine."""
        self.crashed[label] += 1

    def add(self, other: "Coverage") -> None:
        self.crashed += other.crashed
        self.met |= other.met


def suspended_at(task: Any) -> Iterable[str]:
    """The awaits of services, core and storage that it is in; the outermost first."""
    awaited = task.get_coro()
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "ag_frame", None)
        if frame is not None and frame.f_code.co_filename.startswith(_PREFIXES):
            place = await_of(frame.f_code, frame.f_lineno)
            if place is not None:
                yield place
        awaited = _awaited_by(awaited)


def _awaited_by(outer: Any) -> Any:
    """What a coroutine or a generator waits for."""
    inner = getattr(outer, "cr_await", None) or getattr(outer, "ag_await", None)
    if type(inner).__name__ not in ("async_generator_asend", "async_generator_athrow"):
        return inner
    generators = (each for each in gc.get_referents(inner) if isinstance(each, AsyncGeneratorType))
    return next(generators, None)


def places_on_disk(label: str, name: str, changes: Iterable[str]) -> list[str]:
    """Where a change of a file comes from. changes: of the database's last transaction."""
    if name == "tinkercloud.db-wal" and "fsync" in label and changes:
        return [f"{label} of a commit: {change}" for change in sorted(changes)]
    site = flush_site(sys._getframe(1)) if "fsync" in label else None
    if site is not None:
        return [f"{label} at {site}"]
    kind = name if name.startswith("tinkercloud.db") else "files"
    return [f"{label} of {kind} in {caller_in_product()}"]


def caller_in_product(frame: FrameType | None = None) -> str:
    """The nearest function of tinkercloud/ on the stack, for a change of the disk."""
    frame = sys._getframe(1) if frame is None else frame
    while frame is not None:
        name = frame.f_code.co_filename
        if "/tinkercloud/" in name and "/tests/" not in name:
            return f"{name.rpartition('/tinkercloud/')[2]}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "sqlite3"


@cache
def awaits_of(filename: str) -> tuple[tuple[int, int], ...]:
    """(first, last) line of each await of a file, the shortest first."""
    tree = ast.parse(Path(filename).read_text(encoding="utf-8"))
    kinds = (ast.Await, ast.AsyncWith, ast.AsyncFor)
    spans: set[tuple[int, int]] = set()
    for node in ast.walk(tree):
        if isinstance(node, kinds):
            inner = node.value if isinstance(node, ast.Await) else None
            last = node.end_lineno if inner is not None else node.body[0].lineno - 1
            spans.add((node.lineno, max(last or node.lineno, node.lineno)))
    return tuple(sorted(spans, key=lambda span: (span[1] - span[0], span)))


@cache
def await_of(code: CodeType, line: int) -> str | None:
    for first, last in awaits_of(code.co_filename):
        if first <= line <= last:
            return f"{Path(code.co_filename).relative_to(ROOT)}:{first}"
    return None


@cache
def name_of(place: str) -> str:
    """The same by its function instead of its line, so that it stays when other lines change."""
    found = _LINE.search(place)
    if found is None:
        return place
    path = ROOT / found[1]
    return f"{place[: found.start()]}{found[1]}, {named(path, int(found[2]))}"


def named(path: Path, line: int) -> str:
    """An await or a flush by its function and its number in there, from 1 on."""
    functions, lines = _outline(path)
    name = _innermost(functions, line)
    before = [each for each in lines if each <= line and _innermost(functions, each) == name]
    return f"{name} {len(before)}"


@cache
def _outline(path: Path) -> tuple[list[tuple[int, int, str]], frozenset[int]]:
    """Functions, and lines of awaits and flushes."""
    lines = {first for first, _ in awaits_of(str(path))} | set(flushes_in(path))
    return _functions(ast.parse(path.read_text(encoding="utf-8"))), frozenset(lines)


def _functions(node: ast.AST, prefix: str = "") -> list[tuple[int, int, str]]:
    """(first line, last line, name with those around it), outer ones first."""
    found: list[tuple[int, int, str]] = []
    for child in ast.iter_child_nodes(node):
        inner = prefix
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{prefix}.{child.name}".lstrip(".")
            found.append((child.lineno, child.end_lineno or child.lineno, inner))
        found += _functions(child, inner)
    return found


def _innermost(functions: list[tuple[int, int, str]], line: int) -> str:
    around = [name for first, last, name in functions if first <= line <= last]
    return around[-1] if around else ""


@cache
def all_awaits() -> tuple[str, ...]:
    """Of services, core and storage."""
    return tuple(
        f"{path.relative_to(ROOT)}:{first}"
        for room in ROOMS
        for path in sorted((ROOT / "tinkercloud" / room).rglob("*.py"))
        for first, _ in sorted(awaits_of(str(path)))
    )


@cache
def beyond() -> Mapping[str, str]:
    """Of the awaits those at which no crash can come, and why."""
    reasons = {place: _why_beyond(place) for place in all_awaits()}
    return {place: why for place, why in reasons.items() if why is not None}


def flush_beyond(place: str) -> str | None:
    """Why no crash can come at a flush; None: one can."""
    return next((why for part, why in FLUSHES_BEYOND.items() if part in place), None)


def _why_beyond(place: str) -> str | None:
    file, _, number = place.rpartition(":")
    text = (ROOT / file).read_text(encoding="utf-8")
    functions = (
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.AsyncFunctionDef) and node.lineno <= int(number)
    )
    innermost = max(functions, key=lambda node: node.lineno)
    return reason(file, innermost.name, text.splitlines()[int(number) - 1])


def summary(coverage: Coverage) -> str:
    """Places that were crashed at."""
    hit = {place for place, num in coverage.crashed.items() if num}
    num_awaits, num_flushes = (len(hit & set(each)) for each in (all_awaits(), all_flushes()))
    flushes_beyond = [place for place in all_flushes() if flush_beyond(place)]
    others = hit - {*all_awaits(), *all_flushes()}
    return (
        f"crashed at {num_awaits} of {len(all_awaits())} awaits ({len(beyond())} are beyond the "
        f"simulation), before or after {num_flushes} of {len(all_flushes())} flushes "
        f"({len(flushes_beyond)}), at {len(others)} other writes and messages"
    )


def report(coverage: Coverage) -> str:
    """Awaits and flushes with how often a crash came there, and where none did, why."""
    places = [(place, beyond().get(place)) for place in all_awaits()]
    places += [(place, flush_beyond(place)) for place in all_flushes()]
    reasons = {
        place: why or ("no crash was drawn" if place in coverage.met else "no run came here")
        for place, why in places
        if not coverage.crashed[place]
    }
    rest = sorted(set(coverage.crashed) - {place for place, _ in places})
    lines = [
        f"{coverage.crashed[place]:7d}  {place}  {reasons.get(place, '')}".rstrip()
        for place in [*(place for place, _ in places), *rest]
    ]
    return "\n".join([*lines, summary(coverage)])
