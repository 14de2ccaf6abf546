"""Usage as the official client shows it: rows by the hour, and checkpoints kept now. No prices."""

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

from tinker_gmi.types import (
    BillingEventInfo,
    BillingUsageEvent,
    BillingUsageResponse,
    BillingUsageSession,
    CurrentCheckpointStorageUsageItem,
    CurrentCheckpointStorageUsageResponse,
)
from tinkercloud.errors import UserError
from tinkercloud.services.accounts.account_service import user_urn
from tinkercloud.services.accounts.session_search import metadata_of
from tinkercloud.services.accounts.usage_recorder import HOUR_S, UsageRecorder
from tinkercloud.storage.session_storage import SessionStorage
from tinkercloud.storage.usage_storage import StoragePeriod, TokenKind, UsageKey, UsageStorage

MAX_WINDOW_S = 14 * 24 * HOUR_S
GIGABYTE = 1e9

_INFO: dict[TokenKind, dict[str, Any]] = {
    "training": {"type": "training"},
    "prefill": {"type": "sampling_prefill", "cached": False},
    "cached_prefill": {"type": "sampling_prefill", "cached": True},
    "sample": {"type": "sampling_sample"},
}


class _Place(NamedTuple):
    """What a row is about. hour: its first second since the epoch."""

    hour: int
    user: str
    session_id: str | None
    base_model: str


@dataclass(frozen=True, slots=True)
class _Row:
    place: _Place
    info: Mapping[str, Any]

    @property
    def order(self) -> tuple[int, int]:
        """By hour, then by tokens, most first."""
        return self.place.hour, -self.info.get("token_count", 0)


class BillingService:
    """Users see their own usage, an administrator everybody's: user None."""

    def __init__(self, usage: UsageStorage, recorder: UsageRecorder, sessions: SessionStorage):
        self._usage = usage
        self._recorder = recorder
        self._sessions = sessions

    async def events(
        self, user: str | None, first: datetime, end: datetime
    ) -> BillingUsageResponse:
        """One row for each hour, user, kind, base model and session. Raises UserError."""
        first_s, end_s = _window(first, end)
        await self._recorder.flush()  # what was counted a moment ago too
        tokens = await self._usage.tokens(user, first_s, end_s)
        periods = await self._usage.storage_periods(user, first_s, end_s)
        rows = [_token_row(key, num_tokens) for key, num_tokens in tokens]
        rows += await asyncio.to_thread(_storage_rows, periods, (first_s, end_s))
        owners = {row.place.session_id: row.place.user for row in rows if row.place.session_id}
        projects = await self._usage.projects(user, sorted(owners))
        events = [
            _event(row, projects.get(row.place.session_id or ""))
            for row in sorted(rows, key=lambda row: row.order)
        ]
        return BillingUsageResponse(data=events, sessions=await self._metadata(owners))

    async def _metadata(self, owners: Mapping[str, str]) -> dict[str, BillingUsageSession]:
        views: dict[str, BillingUsageSession] = {}
        for session_id, user in sorted(owners.items()):
            session = await self._sessions.get(session_id, user)
            if session is not None:
                views[session_id] = BillingUsageSession(user_metadata=metadata_of(session))
        return views

    async def stored_now(
        self, user: str | None, project_id: str | None
    ) -> CurrentCheckpointStorageUsageResponse:
        """By user and project."""
        items = [
            CurrentCheckpointStorageUsageItem(
                project_id=stored.project_id,
                org_user_urn=user_urn(stored.user),
                user_email=stored.user if "@" in stored.user else None,
                user_name=stored.user,
                checkpoint_count=stored.num_checkpoints,
                size_bytes=stored.num_bytes,
                size_gigabytes=stored.num_bytes / GIGABYTE,
            )
            for stored in await self._usage.stored_now(user, project_id)
        ]
        return CurrentCheckpointStorageUsageResponse(data=items)


def _window(first: datetime, end: datetime) -> tuple[int, int]:
    """In seconds since the epoch."""
    first_s, end_s = first.timestamp(), end.timestamp()
    if first_s % HOUR_S or end_s % HOUR_S:
        raise UserError("starting_on and ending_before must be whole UTC hours")
    if not 0 < end_s - first_s <= MAX_WINDOW_S:
        raise UserError("ending_before must be later than starting_on, by 14 days at most")
    if first_s > time.time():
        raise UserError("starting_on lies in the future")
    return int(first_s), int(end_s)


def _token_row(key: UsageKey, num_tokens: int) -> _Row:
    place = _Place(key.hour, key.user, key.session_id or None, key.base_model)
    return _Row(place, {**_INFO[key.kind], "token_count": num_tokens})


def _event(row: _Row, project_id: str | None) -> BillingUsageEvent:
    return BillingUsageEvent(
        bucket_start=datetime.fromtimestamp(row.place.hour, UTC),
        bucket_end=datetime.fromtimestamp(row.place.hour + HOUR_S, UTC),
        base_model=row.place.base_model,
        user_id=user_urn(row.place.user),
        user_name=row.place.user,
        session_id=row.place.session_id,
        project_id=project_id,
        event_info=BillingEventInfo.model_validate(dict(row.info)),
    )


def _storage_rows(periods: Sequence[StoragePeriod], window: tuple[int, int]) -> list[_Row]:
    """How many checkpoints were made, and the gigabyte-hours of all, by hour and session."""
    now = time.time()
    num_made: Counter[_Place] = Counter()
    byte_seconds: Counter[_Place] = Counter()
    for period in periods:
        if period.began_at >= window[0]:
            num_made[_place(period, period.began_at)] += 1
        begin = max(period.began_at, window[0])
        end = min(now if period.ended_at is None else period.ended_at, window[1])
        while begin < end:
            place = _place(period, begin)
            overlap_s = min(end, place.hour + HOUR_S) - begin
            byte_seconds[place] += int(overlap_s * period.size_bytes)
            begin = place.hour + HOUR_S
    created = [_Row(place, {"type": "checkpoint", "count": num}) for place, num in num_made.items()]
    stored = [
        _Row(place, {"type": "storage", "free": False, "gigabyte_hours": num / GIGABYTE / HOUR_S})
        for place, num in byte_seconds.items()
    ]
    return created + stored


def _place(period: StoragePeriod, at: float) -> _Place:
    return _Place(int(at) // HOUR_S * HOUR_S, period.user, period.session_id, period.base_model)
