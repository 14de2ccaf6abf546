"""Sessions: each is one client, alive while its heartbeats come."""

import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast

from tinkercloud.errors import InvalidRequest, SessionFinished, SessionNotFound, UserError
from tinkercloud.services.common.user_metadata import check_metadata
from tinkercloud.storage.audit_log import AuditLog
from tinkercloud.storage.session_storage import Session, SessionStorage

logger = logging.getLogger(__name__)

MAX_PROJECT_CHARS = 128

OnFinish = Callable[[str, str], Awaitable[None]]
OnExpire = Callable[[str, str], Awaitable[bool]]
"""False: not all is free yet; it is called again."""


def check_project(project_id: str) -> None:
    if not 1 <= len(project_id) <= MAX_PROJECT_CHARS or not project_id.isprintable():
        raise InvalidRequest(
            f"project_id must be 1 to {MAX_PROJECT_CHARS} printable characters, such as my-project"
        )


class SessionService:
    """on_finish listeners get (user, session_id) once a session has ended, on_expire listeners once
    it is closed until its client is heard of again. ttl_s: without a heartbeat or a request."""

    def __init__(self, sessions: SessionStorage, audit: AuditLog, ttl_s: float):
        self._sessions = sessions
        self._audit = audit
        self._ttl_s = ttl_s
        self._started_at = time.time()  # nobody could send a heartbeat before
        self._num_expired = 0
        self._on_expire: list[OnExpire] = []
        self._not_free: set[tuple[str, str]] = set()  # of those that have expired
        self._open: set[tuple[str, str]] = set()  # read from the database once, not at each request
        self._seen_at: dict[tuple[str, str], float] = {}  # monotonic
        self._on_finish: list[OnFinish] = []

    def when_finished(self, listener: OnFinish) -> None:
        self._on_finish.append(listener)

    def when_expired(self, listener: OnExpire) -> None:
        """The listener frees what the session holds in memory; nothing of it may get lost."""
        self._on_expire.append(listener)

    async def expire(self) -> None:
        """Close sessions whose clients have not been heard of for so long. Their owners go on with
        them as if nothing had happened."""
        before = time.time() - self._ttl_s
        if self._started_at > before:
            return
        for user, session_id in await self._sessions.silent_since(before):
            await self._sessions.expire(session_id)
            self._not_free.add((user, session_id))
            self._num_expired += 1
            logger.info("session %s has expired: no heartbeat for %g s", session_id, self._ttl_s)
        for user, session_id in sorted(self._not_free):
            if await self._is_free(user, session_id):
                self._not_free.discard((user, session_id))

    async def _is_free(self, user: str, session_id: str) -> bool:
        """Whether nothing of an expired session is left in memory; also where its client was heard
        of meanwhile, for then it shall stay."""
        session = await self._sessions.get(session_id, user)
        if session is None or session.expired_at is None or session.finished_at is not None:
            return True
        return all([await listener(user, session_id) for listener in self._on_expire])

    def stats(self) -> dict[str, float]:
        return {"sessions_expired_total": self._num_expired}

    async def create(self, user: str, details: Mapping[str, object]) -> str:
        # No slash: it becomes part of checkpoint paths (wire specification, section 2.3).
        session_id = str(uuid.uuid4())
        if details.get("project_id") is not None:
            check_project(str(details["project_id"]))
        check_metadata(cast("Mapping[str, Any] | None", details.get("user_metadata")))
        await self._sessions.add(session_id, user, dict(details))
        self._open.add((user, session_id))
        return session_id

    async def create_finished(
        self, user: str, session_id: str, details: Mapping[str, object], reason: str
    ) -> None:
        """A session that only holds what was copied or imported; nothing where there is one."""
        if await self._sessions.get(session_id, user) is None:
            await self._sessions.add(session_id, user, dict(details))
            await self._sessions.finish(session_id, reason)

    async def heartbeat(self, user: str, session_id: str) -> None:
        await self.require_open(user, session_id)
        await self._sessions.heartbeat(session_id)

    async def seen(self, user: str, session_id: str) -> None:
        """Something of an open session was used, perhaps by a client that sends no heartbeats and
        whose requests are not on record."""
        now, key = time.monotonic(), (user, session_id)
        if now - self._seen_at.get(key, float("-inf")) > self._ttl_s / 4:
            self._seen_at[key] = now
            await self._sessions.heartbeat(session_id)

    async def finish(
        self, user: str, session_id: str, reason: str, detail: str | None = None
    ) -> None:
        """The first reason counts: finishing again changes nothing (wire specification, 2.5)."""
        session = await self.get(user, session_id)
        if session.finished_at is None:
            detail = None if detail is None else detail[:1000]
            await self._sessions.finish(session_id, reason, detail)
        # Also when it is asked again: the server may have ended before the listeners had heard.
        self._open.discard((user, session_id))
        self._seen_at.pop((user, session_id), None)
        for listener in self._on_finish:
            await listener(user, session_id)

    async def get(self, user: str, session_id: str) -> Session:
        session = await self._sessions.get(session_id, user)
        if session is None:
            raise SessionNotFound(session_id)
        return session

    async def list(self, user: str, limit: int, offset: int) -> list[Session]:
        return await self._sessions.list(user, limit, offset)

    async def set_project(self, user: str, session_id: str, project_id: str | None) -> None:
        """Move a session, and all that belongs to it, into a project. Projects are the user's own
        names; one begins with its first session."""
        if not project_id:  # 400, as clients expect it (wire specification, section 12)
            raise UserError("project_id is missing; name the project to move the session to")
        check_project(project_id)
        await self.get(user, session_id)
        await self._sessions.set_project(session_id, user, project_id)
        await self._audit.record(
            *(user, "projects", "project_session_assigned"),
            project_id=project_id,
            session_id=session_id,
        )

    async def require_open(self, user: str, session_id: str) -> None:
        """Raises SessionNotFound or SessionFinished."""
        if (user, session_id) in self._open:
            return
        if (await self.get(user, session_id)).finished_at is not None:
            raise SessionFinished(session_id)
        self._open.add((user, session_id))
