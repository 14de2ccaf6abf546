"""A request that was acknowledged and has no outcome on record yet."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from tinkercloud.storage.futures import Outcome, Ticket

Work = Callable[[], Awaitable[Outcome]]
Resume = Callable[[Ticket, bytes], Awaitable[Work]]
"""Makes the work of a request again, from its ticket and from what was kept of it."""


class Admission(Protocol):
    """Who may have how much underway."""

    def require(self, user: str) -> None:
        """Before a request is acknowledged. Raises UserError: it is not."""
        ...

    def enter(self, ticket: Ticket) -> None: ...

    def leave(self, ticket: Ticket) -> None:
        """Once for each that entered."""
        ...


class EverybodyAdmitted:
    def require(self, user: str) -> None:
        return

    def enter(self, ticket: Ticket) -> None:
        return

    def leave(self, ticket: Ticket) -> None:
        return


@dataclass(slots=True, eq=False)
class Pending:
    """subject: the model or version that it is for. request: as it is on record, empty for an
    operation of a lane; None: nothing was kept. task: of work in no lane, which can be cancelled
    alone. accepted_at, started_at, ended_at: in seconds since the epoch; of one that an earlier
    process acknowledged, accepted_at is when this one began with it."""

    request_id: str
    ticket: Ticket
    acknowledged: asyncio.Future[str] = field(repr=False)
    finished: asyncio.Event = field(default_factory=asyncio.Event, repr=False)
    outcome: Outcome | None = field(default=None, repr=False)
    subject: str | None = None
    accepted_at: float = field(default_factory=lambda: time.time())  # a simulation's clock, too
    started_at: float | None = None
    ended_at: float | None = None
    request: bytes | None = field(default=None, repr=False)
    task: asyncio.Task[None] | None = None
    position: int | None = None
    """Of an operation that its model's journal keeps, once it has ended: how many ran before."""
