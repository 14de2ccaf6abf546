"""Waiting until something holds that nothing announces: in another process, thread or task."""

import asyncio
import inspect
import re
import subprocess
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar, cast

LIMIT_S = 240.0  # of a busy machine; what holds at once takes no longer for it
POLL_S = 0.01

T = TypeVar("T")


def wait_for(
    what: str,
    read: Callable[[], T],
    holds: Callable[[T], object] = bool,
    *,
    limit_s: float = LIMIT_S,
    poll_s: float = POLL_S,
) -> T:
    """The first value of `read` that `holds`; AssertionError after limit_s with the last one.

    what: a sentence that is true then, for that error.
    """
    deadline = time.monotonic() + limit_s
    while not holds(seen := read()):
        _assert_in_time(deadline, limit_s, what, seen)
        time.sleep(poll_s)
    return seen


async def async_wait_for(
    what: str,
    read: Callable[[], T | Awaitable[T]],
    holds: Callable[[T], object] = bool,
    *,
    limit_s: float = LIMIT_S,
    poll_s: float = POLL_S,
) -> T:
    """As `wait_for`, without holding the event loop; `read` may be a coroutine function."""
    deadline = time.monotonic() + limit_s
    while True:
        value = read()
        seen = cast(T, await value if inspect.isawaitable(value) else value)
        if holds(seen):
            return seen
        _assert_in_time(deadline, limit_s, what, seen)
        await asyncio.sleep(poll_s)


def wait_for_line(
    pattern: str, log: Path, process: "subprocess.Popen[bytes] | None" = None
) -> re.Match[str]:
    """The pattern's first match in the log; AssertionError with the log where `process`, which
    writes it, has ended without one."""

    def read() -> tuple[re.Match[str] | None, str]:
        has_ended = process is not None and process.poll() is not None
        text = log.read_text(errors="replace")
        match = re.search(pattern, text, re.M)
        assert match or not has_ended, f"it ended without {pattern!r}; it wrote:\n{text}"
        return match, text

    match, _ = wait_for(f"the log has {pattern!r}", read, lambda seen: seen[0])
    assert match is not None
    return match


def _assert_in_time(deadline: float, limit_s: float, what: str, seen: object) -> None:
    if time.monotonic() > deadline:
        raise AssertionError(f"not within {limit_s:g} s: {what}; last seen: {seen!r}")
