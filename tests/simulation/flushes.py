"""Every flush that a run can come to: of files, where the sources call for one, and of the
database, by what is changed in it: a commit is flushed before anybody is told of it."""

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("services", "core", "storage", "backends/fake.py", "backends/fake_recovery.py")
"""The service, and the engine that is simulated."""
FLUSHING = ("flushing.flush", "flushing.flush_folder", "os.fsync")
MOMENTS = ("fsync", "after fsync")
_CHANGE = re.compile(
    r"\b(INSERT|UPDATE|DELETE)\b(?: OR [A-Z]+)?(?: INTO| FROM)? ([a-z_]+)", re.ASCII
)


@cache
def all_flushes() -> tuple[str, ...]:
    """As "fsync at tinkercloud/services/checkpoints/checkpoint_files.py:65" and "fsync of a commit:
    INSERT futures", each before and after it was done."""
    places = [f"at {place}" for place in sorted(_sites())]
    changes = sorted({change for path in _sources() for change in _changes_in(path)})
    places += [f"of a commit: {change}" for change in changes]
    return tuple(f"{moment} {place}" for place in places for moment in MOMENTS)


def flush_site(frame: FrameType | None) -> str | None:
    """The call on this stack that asked for a flush of a file: the outermost of those that are
    nested."""
    found = None
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(f"{ROOT}/tinkercloud/"):
            place = f"{name.removeprefix(f'{ROOT}/')}:{frame.f_lineno}"
            found = place if place in _sites() else found
        frame = frame.f_back
    return found


@cache
def change_of(sql: str) -> str | None:
    """What a statement changes, as "INSERT futures"; None: nothing."""
    found = _CHANGE.match(sql.lstrip())
    return None if found is None else f"{found[1]} {found[2]}"


@cache
def _sites() -> frozenset[str]:
    return frozenset(
        f"{path.relative_to(ROOT)}:{line}" for path in _sources() for line in flushes_in(path)
    )


def _sources() -> Iterator[Path]:
    for name in SOURCES:
        place = ROOT / "tinkercloud" / name
        yield from [place] if place.is_file() else sorted(place.rglob("*.py"))


def flushes_in(path: Path) -> Iterable[int]:
    """Lines of calls."""
    text = path.read_text(encoding="utf-8")
    if not any(name in text for name in FLUSHING):
        return
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in FLUSHING:
            yield node.lineno


def _changes_in(path: Path) -> Iterator[str]:
    """Of the SQL in a file; what is put together of several pieces begins with the first."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        first = node.values[0] if isinstance(node, ast.JoinedStr) and node.values else node
        if isinstance(first, ast.Constant) and isinstance(first.value, str):
            change = change_of(first.value)
            if change is not None:
                yield change
