"""Which samples of a sampling session have finished, for clients that poll by session.

A target is one client of a sampling session. The log of a target is in memory from its first poll
on; what finished before that, perhaps under an earlier process, is read from the database then. So
nothing is kept for clients that poll each request by itself.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

CLIENT_BLOCK = 10**9  # seq_ids of one client of a sampling session (wire specification, 3.4)
OVERLAP_S = 60.0  # a row's time is older than its cursor by as much as a commit takes
IDLE_S = 900.0  # a log that nobody has polled for so long is forgotten; the database has it all


class Target(NamedTuple):
    user: str
    sampler_id: str
    client: int

    @classmethod
    def of(cls, user: str, sampler_id: str, seq_id: int) -> "Target":
        return cls(user, sampler_id, seq_id // CLIENT_BLOCK)


@dataclass(frozen=True, slots=True)
class Completion:
    """num_bytes: of the result, where it did not fail."""

    request_id: str
    status: Literal["completed", "failed"]
    num_bytes: int


Recover = Callable[[Target, float], Awaitable[Sequence[Completion]]]


@dataclass(slots=True, eq=False)
class _Log:
    entries: list[tuple[int, Completion]] = field(default_factory=list)  # (cursor, completion)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    polled_at: float = field(default_factory=lambda: time.monotonic())  # a simulation's clock, too
    num_polls: int = 0  # underway


class CompletionLog:
    """recover(target, after): what finished later than `after` (seconds since the epoch)."""

    def __init__(self, recover: Recover):
        self._recover = recover
        self._logs: dict[Target, _Log] = {}
        self._cursor = 0

    def record(self, target: Target, completion: Completion) -> None:
        log = self._logs.get(target)
        if log is not None:
            log.entries.append((self._next_cursor(), completion))
            log.changed.set()

    async def after(
        self, target: Target, cursor: int, hold_s: float
    ) -> tuple[list[Completion], int]:
        """Completions later than cursor, waited for at most hold_s, and the cursor of the last.

        Those up to `cursor` are forgotten. After a restart some may come twice.
        """
        self._forget_idle()
        log = self._logs.get(target)
        if log is None:
            log = await self._open(target, cursor)
        else:
            log.entries = [entry for entry in log.entries if entry[0] > cursor]
        log.num_polls += 1
        try:
            if not log.entries and hold_s > 0:
                log.changed.clear()
                async with asyncio.timeout(hold_s):
                    await log.changed.wait()
        except TimeoutError:
            pass
        finally:
            log.num_polls -= 1
            log.polled_at = time.monotonic()
        last = log.entries[-1][0] if log.entries else cursor
        return [completion for _, completion in log.entries], last

    async def _open(self, target: Target, cursor: int) -> _Log:
        # In the table before the database is read: what finishes meanwhile is recorded.
        log = self._logs[target] = _Log()
        log.num_polls += 1
        try:
            earlier = await self._recover(target, cursor / 1e6 - OVERLAP_S)
        except BaseException:  # cancelled too: the next poll must read the database again
            self._logs.pop(target, None)
            raise
        finally:
            log.num_polls -= 1
        log.entries[:0] = [(self._next_cursor(), completion) for completion in earlier]
        log.entries.sort(key=lambda entry: entry[0])
        log.changed.set()
        return log

    def _next_cursor(self) -> int:
        """Microseconds since the epoch, so that cursors of an earlier process are smaller."""
        self._cursor = max(self._cursor + 1, int(time.time() * 1e6))
        return self._cursor

    def _forget_idle(self) -> None:
        oldest = time.monotonic() - IDLE_S
        idle = [t for t, log in self._logs.items() if not log.num_polls and log.polled_at < oldest]
        for target in idle:
            del self._logs[target]
