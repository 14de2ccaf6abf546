"""Usage and the audit log, each of the caller; an administrator reads everybody's."""

from datetime import UTC, date, datetime, time, timedelta
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Response
from pydantic import AwareDatetime

from tinker_gmi.types import AuditLogEntry, AuditLogResponse
from tinkercloud.routers.deps import AudienceDep, ServicesDep, answer
from tinkercloud.storage.audit_log import AuditEntry

router = APIRouter(prefix="/api/v1")

EventType = Literal["all", "checkpoints", "projects", "teams", "organizations"]


@router.get("/billing/usage/events")
async def usage_events(
    starting_on: Annotated[AwareDatetime, Query()],
    ending_before: Annotated[AwareDatetime, Query()],
    user: AudienceDep,
    services: ServicesDep,
) -> Response:
    return answer(await services.billing.events(user, starting_on, ending_before))


@router.get("/billing/usage/checkpoints/current")
async def stored_checkpoints(
    user: AudienceDep, services: ServicesDep, project_id: str | None = None
) -> Response:
    return answer(await services.billing.stored_now(user, project_id))


@router.get("/audit")
async def audit(
    user: AudienceDep, services: ServicesDep, event_type: EventType = "all", day: date | None = None
) -> Response:
    """day: in UTC; today, where none is named. There are no teams here, so none of their events."""
    if event_type == "teams":
        return answer(AuditLogResponse(entries=[]))
    begin = datetime.combine(day or datetime.now(UTC).date(), time.min, UTC)
    resource = None if event_type == "all" else event_type
    entries = await services.audit.entries(
        user, resource, begin.timestamp(), (begin + timedelta(days=1)).timestamp()
    )
    views = [_view(entry, name_owner=user is None) for entry in entries]
    return answer(AuditLogResponse(entries=views))


def _view(entry: AuditEntry, *, name_owner: bool) -> AuditLogEntry:
    path = entry.details.get("tinker_path")
    return AuditLogEntry(
        timestamp=datetime.fromtimestamp(entry.at, UTC),
        event=entry.event,
        event_details={**entry.details, **({"user": entry.user} if name_owner else {})},
        model_id=None if path is None else path.split("/")[2],
        tinker_path=path,
    )
