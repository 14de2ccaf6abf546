"""Timelines of sessions."""

from fastapi import APIRouter, Request, Response

from tinkercloud.routers.deps import SIGNED_PREFIX, OwnerDep, ServicesDep, json_answer
from tinkercloud.routers.downloads import base_url

router = APIRouter(prefix="/api/v1")
signed = APIRouter()


@router.get("/sessions/{session_id}/trace_export")
async def trace_export(
    session_id: str, user: OwnerDep, services: ServicesDep, request: Request
) -> Response:
    """Ready at once: the file is made when it is fetched."""
    path = await services.traces.url_path(user, session_id)
    return json_answer({"status": "ready", "url": base_url(services, request) + path})


@signed.get(SIGNED_PREFIX + "traces/{session_id}")
async def trace(
    session_id: str,
    services: ServicesDep,
    reader: str = "",
    expires: str = "",
    signature: str = "",
) -> Response:
    content = await services.traces.open(session_id, reader, expires, signature)
    name = {"Content-Disposition": 'attachment; filename="trace.json"'}
    return Response(content, media_type="application/json", headers=name)
