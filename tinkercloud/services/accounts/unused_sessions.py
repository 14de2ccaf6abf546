"""Sessions that their clients have left without a word: they end after some days.

Long before, such a session is closed until its next heartbeat (`SessionService.expire`): its models
and weights are on the disk then. They would stay there for ever, since a client that goes away for
good never says so.
"""

import logging
import time

from tinkercloud.services.accounts.session_service import SessionService
from tinkercloud.storage.session_storage import SessionStorage

logger = logging.getLogger(__name__)

DAY_S = 86400.0
CONFIRM_S = 3600.0
"""How long this process must have seen a session unused, or all its days where they are shorter:
where the wall clock was set ahead, clients that are there are heard from meanwhile."""


class UnusedSessions:
    """days: since the last request or heartbeat."""

    def __init__(self, storage: SessionStorage, sessions: SessionService, *, days: float):
        self._storage = storage
        self._sessions = sessions
        self._days = days
        self._unused_since: dict[tuple[str, str], float] = {}  # monotonic

    async def finish(self) -> None:
        """End those that have been unused for so long, as if their clients had finished them."""
        now = time.monotonic()
        confirm_s = min(CONFIRM_S, self._days * DAY_S)
        unused = await self._storage.unused_since(time.time() - self._days * DAY_S)
        self._unused_since = {key: self._unused_since.get(key, now) for key in unused}
        for (user, session_id), since in list(self._unused_since.items()):
            if now - since >= confirm_s:
                detail = f"the server had no request and no heartbeat for {self._days:g} days"
                logger.info("session %s of %s ends: %s", session_id, user, detail)
                await self._sessions.finish(user, session_id, "interrupted", detail)
                del self._unused_since[user, session_id]
