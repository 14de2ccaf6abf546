"""The search for sessions, and what state each is in."""

import json
import time
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, cast

from tinker_gmi.types import (
    ClientSessionFinished,
    SessionActive,
    SessionCancelled,
    SessionFailed,
    SessionFailedRequestReason,
    SessionSearchCursor,
    SessionSearchRequest,
    SessionSearchResponse,
    SessionState,
    SessionStatus,
    SessionStatusQuery,
    SessionSummary,
)
from tinkercloud.services.accounts.account_service import user_of_urn, user_urn
from tinkercloud.services.common.user_metadata import stringified
from tinkercloud.storage.session_storage import PagePlace, Session, SessionStorage, Stored

ALIVE_S = 120.0  # clients send a heartbeat every ten seconds, and warn after this long without one
BATCH = 200
FINISH_REASONS = ("success", "errored", "interrupted")  # what clients report, and understand
_STATES: dict[str, SessionState] = {
    "active": "active",
    "cancelled": "expired",
    "client_finished": "finished",
    "failed": "failed",
}
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


class SessionSearch:
    """Users find their own sessions only, whatever owner is asked for; an administrator finds
    those of the users that are named, or everybody's (`accessible`)."""

    def __init__(self, sessions: SessionStorage):
        self._sessions = sessions

    async def search(
        self, user: str, body: SessionSearchRequest, *, everybody: bool
    ) -> SessionSearchResponse:
        """One page, newest first. everybody: the caller may see all sessions."""
        owners = _owners(body, user, everybody=everybody)
        place = None if body.cursor is None else _place(body.cursor)
        matches: list[tuple[PagePlace, Session, SessionStatus | None]] = []
        # One more than asked for: whether there is a next page.
        while len(matches) <= body.limit:
            batch = await self._sessions.page(owners, place, BATCH)
            for place, session in batch:
                if not _matches(session, body):
                    continue
                status = await self.status(session)
                if body.statuses is None or any(_is(status, query) for query in body.statuses):
                    matches.append((place, session, status))
            if len(batch) < BATCH:
                break
        page = matches[: body.limit]
        stored = await self._sessions.stored([session.session_id for _, session, _ in page])
        return SessionSearchResponse(
            sessions=[_summary(s, status, stored.get(s.session_id)) for _, s, status in page],
            next_cursor=_cursor(page[-1][0]) if len(matches) > body.limit else None,
        )

    async def states(self, sessions: Iterable[Session]) -> dict[str, SessionState]:
        """By id."""
        return {each.session_id: state_of(await self.status(each)) for each in sessions}

    async def status(self, session: Session) -> SessionStatus | None:
        """active: its heartbeats come. cancelled: it has expired, in words that clients know.
        client_finished: its client said so. failed: its client went away without a word after a
        request of it had failed. None: it went away otherwise."""
        if session.finished_at is not None:
            is_ours = session.finish_reason in FINISH_REASONS  # not that of a copy's own session
            reason = {"type": session.finish_reason if is_ours else "success"}
            detail = session.details.get("finish_detail")
            return ClientSessionFinished.model_validate({"reason": reason, "detail": detail})
        if session.expired_at is not None:
            at = datetime.fromtimestamp(session.expired_at, UTC).isoformat(timespec="seconds")
            detail = f"expired at {at} for want of heartbeats; the next one resumes it"
            return SessionCancelled(detail=detail)
        if session.heartbeat_at > time.time() - ALIVE_S:
            return SessionActive()
        last = await self._sessions.last_result(session.user, session.session_id)
        if last is None or last.body is None:
            return None
        failure = json.loads(last.body)
        return SessionFailed(
            category="user" if failure["category"] == "user" else "internal",
            reason=SessionFailedRequestReason(request_id=last.request_id, request_type=last.kind),
            message=failure["error"],
        )


def state_of(status: SessionStatus | None) -> SessionState:
    """In one word. Clients of the protocol have none for an expired session but "cancelled"."""
    return "silent" if status is None else _STATES[status.type]


def _owners(body: SessionSearchRequest, user: str, *, everybody: bool) -> list[str] | None:
    """Those that are asked for, as far as the caller may see them; None: all."""
    if body.owner.type == "user":
        names = {user_of_urn(urn) for urn in body.owner.owner_urns}
        return sorted(names if everybody else names & {user})
    return None if everybody and body.owner.type == "accessible" else [user]


def _matches(session: Session, body: SessionSearchRequest) -> bool:
    if body.project_ids is not None and session.project_id not in body.project_ids:
        return False
    metadata = metadata_of(session)
    if any(metadata.get(name) != value for name, value in body.user_metadata.items()):
        return False
    if body.session_id is None and body.display_name is None:
        return True
    # Either will do, where both are asked for.
    name = str(session.details.get("display_name") or "").lower()
    words = (body.display_name or "").lower().split()
    named = bool(words) and all(word in name for word in words)
    return named or session.session_id == body.session_id


def metadata_of(session: Session) -> dict[str, str]:
    """As strings: clients send any JSON (wire specification, section 0)."""
    metadata = session.details.get("user_metadata")
    return stringified(cast("Mapping[str, Any]", metadata)) if isinstance(metadata, dict) else {}


def _is(status: SessionStatus | None, query: SessionStatusQuery) -> bool:
    if status is None or query.type not in (status.type, state_of(status)):
        return False
    if query.reasons is None:
        return True
    return isinstance(status, ClientSessionFinished) and status.reason.type in query.reasons


def _summary(
    session: Session, status: SessionStatus | None, stored: Stored | None
) -> SessionSummary:
    return SessionSummary(
        session_id=session.session_id,
        created_at=datetime.fromtimestamp(session.created_at, UTC),
        owner=user_urn(session.user),
        project_id=session.project_id,
        status=status,
        state=state_of(status),
        checkpoints_count=0 if stored is None else stored.num_checkpoints,
        display_name=None
        if session.details.get("display_name") is None
        else str(session.details["display_name"]),
        user_metadata=metadata_of(session),
        checkpoint_storage_bytes=0 if stored is None else stored.num_bytes,
    )


def _place(cursor: SessionSearchCursor) -> PagePlace:
    return PagePlace((cursor.last_created_at - _EPOCH) // _MICROSECOND, cursor.last_session_id)


def _cursor(place: PagePlace) -> SessionSearchCursor:
    created_at = _EPOCH + timedelta(microseconds=place.created_us)
    return SessionSearchCursor(last_created_at=created_at, last_session_id=place.session_id)
