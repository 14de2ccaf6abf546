"""Start-up, heartbeats and the end of a client."""

from fastapi import APIRouter, Request, Response

from tinker_gmi.types import (
    ClientConfigRequest,
    ClientDynamicConfigResponse,
    CreateSessionRequest,
    CreateSessionResponse,
    FinishSessionRequest,
    FinishSessionResponse,
    SessionHeartbeatRequest,
    SessionHeartbeatResponse,
    SessionSearchRequest,
    SetProjectRequest,
    TelemetryResponse,
    TelemetrySendRequest,
)
from tinkercloud.routers.deps import (
    AudienceDep,
    OwnerDep,
    ReaderDep,
    ServicesDep,
    UserDep,
    answer,
    json_answer,
)
from tinkercloud.routers.downloads import base_url
from tinkercloud.routers.http.json_route import JsonRoute
from tinkercloud.services.common.client_flags import client_flags

router = APIRouter(prefix="/api/v1", route_class=JsonRoute)


@router.post("/client/config")
async def client_config(body: ClientConfigRequest, services: ServicesDep) -> Response:
    """The first request of every client; without its 200 none starts (wire specification, 2.1)."""
    return json_answer(client_flags(body.sdk_version, services.client_config))


@router.post("/client/dynamic_config")
async def dynamic_config(body: ClientConfigRequest, services: ServicesDep) -> Response:
    return answer(ClientDynamicConfigResponse.model_validate(services.client_config))


@router.post("/create_session")
async def create_session(
    body: CreateSessionRequest, user: UserDep, services: ServicesDep, request: Request
) -> Response:
    """Clients log the message: links that they build lead to another host (`console/links.py`)."""
    details = body.model_dump(include={"tags", "user_metadata", "project_id", "display_name"})
    session_id = await services.sessions.create(user, details)
    page = f"{base_url(services, request)}/sessions/{session_id}"
    message = f"this session's page, by your API key: {page}"
    return answer(CreateSessionResponse(session_id=session_id, info_message=message))


@router.post("/session_heartbeat")
async def heartbeat(
    body: SessionHeartbeatRequest, user: UserDep, services: ServicesDep
) -> Response:
    await services.sessions.heartbeat(user, body.session_id)
    return answer(SessionHeartbeatResponse())


@router.post("/sessions/{session_id}/finish")
async def finish(
    session_id: str, body: FinishSessionRequest, user: OwnerDep, services: ServicesDep
) -> Response:
    await services.sessions.finish(user, session_id, body.reason.type, body.detail)
    return answer(FinishSessionResponse())


@router.post("/sessions/search")
async def search(
    body: SessionSearchRequest, user: ReaderDep, audience: AudienceDep, services: ServicesDep
) -> Response:
    everybody = audience is None
    return answer(await services.session_search.search(user, body, everybody=everybody))


@router.put("/sessions/{session_id}/project")
async def set_project(
    session_id: str, body: SetProjectRequest, user: UserDep, services: ServicesDep
) -> Response:
    await services.sessions.set_project(user, session_id, body.project_id)
    return Response(status_code=204)


@router.post("/telemetry")
async def telemetry(body: TelemetrySendRequest) -> Response:
    """Accepted and dropped: a refusal would log a traceback at the user (wire specification, 2)."""
    return answer(TelemetryResponse())
