"""Sessions: each is one client, alive while its heartbeats come."""

import uuid
from collections.abc import Awaitable, Callable, Mapping

from tinkercloud.errors import InvalidRequest, SessionFinished, SessionNotFound, UserError
from tinkercloud.storage.audit_log import AuditLog
from tinkercloud.storage.session_storage import Session, SessionStorage

MAX_PROJECT_CHARS = 128

OnFinish = Callable[[str, str], Awaitable[None]]


def check_project(project_id: str) -> None:
    if not 1 <= len(project_id) <= MAX_PROJECT_CHARS or not project_id.isprintable():
        raise InvalidRequest(
            f"project_id must be 1 to {MAX_PROJECT_CHARS} printable characters, such as my-project"
        )


class SessionService:
    """on_finish listeners get (user, session_id) once a session has ended."""

    def __init__(self, sessions: SessionStorage, audit: AuditLog):
        self._sessions = sessions
        self._audit = audit
        self._open: set[tuple[str, str]] = set()  # read from the database once, not at each request
        self._on_finish: list[OnFinish] = []

    def when_finished(self, listener: OnFinish) -> None:
        self._on_finish.append(listener)

    async def create(self, user: str, details: Mapping[str, object]) -> str:
        # No slash: it becomes part of checkpoint paths (wire specification, section 2.3).
        session_id = str(uuid.uuid4())
        if details.get("project_id") is not None:
            check_project(str(details["project_id"]))
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
