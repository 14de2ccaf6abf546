"""Listings: what `RestClient` and the `tinker` command line read and change."""

from typing import Annotated

from fastapi import APIRouter, Depends, Response

from tinker_gmi.bodies.reported import ReportMetricsRequest
from tinker_gmi.types import GetServerCapabilitiesResponse, SetTtlRequest, SupportedModel
from tinkercloud.routers.deps import (
    AudienceDep,
    CheckpointPathDep,
    LimitDep,
    OffsetDep,
    OwnerDep,
    ServicesDep,
    UserDep,
    answer,
    json_answer,
)
from tinkercloud.routers.http.json_route import JsonRoute
from tinkercloud.services.accounts.session_search import metadata_of, state_of
from tinkercloud.services.results.reported_curves import described
from tinkercloud.services.results.rest_service import MAX_LIMIT, AccessScope, RunQuery

router = APIRouter(prefix="/api/v1", route_class=JsonRoute)


@router.get("/get_server_capabilities")
async def capabilities(services: ServicesDep) -> Response:
    models = [
        SupportedModel(
            model_name=served.name,
            max_context_length=served.max_context_length,
            trainable=True,
            sampleable=True,
        )
        for served in services.catalog
    ]
    return answer(GetServerCapabilitiesResponse(supported_models=models))


async def run_query(
    limit: LimitDep = 20,
    offset: OffsetDep = 0,
    access_scope: AccessScope = "owned",
    project_id: str | None = None,
    *,
    audience: AudienceDep,
) -> RunQuery:
    return RunQuery(limit, offset, access_scope, project_id, everybody=audience is None)


RunQueryDep = Annotated[RunQuery, Depends(run_query)]


@router.get("/training_runs")
async def training_runs(query: RunQueryDep, user: UserDep, services: ServicesDep) -> Response:
    return answer(await services.rest.training_runs(user, query))


@router.get("/training_runs/{run_id}")
async def training_run(
    run_id: str, user: OwnerDep, services: ServicesDep, access_scope: AccessScope = "owned"
) -> Response:
    return answer(await services.rest.training_run(user, run_id, access_scope))


@router.get("/training_runs/{run_id}/checkpoints")
async def checkpoints_of_run(run_id: str, user: OwnerDep, services: ServicesDep) -> Response:
    return answer(await services.rest.checkpoints_of_run(user, run_id))


@router.post("/training_runs/{run_id}/metrics")
async def report_metrics(
    run_id: str, body: ReportMetricsRequest, user: OwnerDep, services: ServicesDep
) -> Response:
    """Our own: no official client has it."""
    points = [(point.step, point.metrics) for point in body.points]
    await services.reported_curves.report(user, run_id, points)
    return Response(status_code=204)


@router.get("/training_runs/{run_id}/metrics")
async def reported_metrics(
    run_id: str,
    user: OwnerDep,
    services: ServicesDep,
    after: OffsetDep = 0,
    limit: LimitDep = MAX_LIMIT,
) -> Response:
    """after: the highest number that the caller has."""
    points = await services.reported_curves.points(user, run_id, after, limit)
    return json_answer({"points": [described(point) for point in points]})


@router.get("/checkpoints")
async def checkpoints(
    user: UserDep, services: ServicesDep, limit: LimitDep = 100, offset: OffsetDep = 0
) -> Response:
    return answer(await services.rest.checkpoints(user, limit, offset))


# {segment}/{name}: a checkpoint id has a slash, and clients send it raw (wire specification,
# section 0).
@router.delete("/training_runs/{run_id}/checkpoints/{segment}/{name}")
async def delete_checkpoint(
    path: CheckpointPathDep, user: OwnerDep, services: ServicesDep
) -> Response:
    await services.checkpoints.delete(user, path)
    return Response(status_code=204)


@router.post("/training_runs/{run_id}/checkpoints/{segment}/{name}/publish")
async def publish(path: CheckpointPathDep, user: UserDep, services: ServicesDep) -> Response:
    await services.checkpoints.publish(user, path)
    return Response(status_code=204)


# One part longer than the path that deletes, which therefore does not shadow it.
@router.delete("/training_runs/{run_id}/checkpoints/{segment}/{name}/publish")
async def unpublish(path: CheckpointPathDep, user: UserDep, services: ServicesDep) -> Response:
    await services.checkpoints.unpublish(user, path)
    return Response(status_code=204)


@router.put("/training_runs/{run_id}/checkpoints/{segment}/{name}/ttl")
async def set_ttl(
    path: CheckpointPathDep, body: SetTtlRequest, user: OwnerDep, services: ServicesDep
) -> Response:
    await services.checkpoints.set_ttl(user, path, body.ttl_seconds)
    return Response(status_code=204)


@router.get("/sessions")
async def sessions(
    user: UserDep, services: ServicesDep, limit: LimitDep = 20, offset: OffsetDep = 0
) -> Response:
    sessions = await services.sessions.list(user, limit, offset)
    states = await services.session_search.states(sessions)
    return json_answer({"sessions": list(states), "states": states})


@router.get("/sessions/{session_id}")
async def session(session_id: str, user: OwnerDep, services: ServicesDep) -> Response:
    session = await services.sessions.get(user, session_id)
    runs, samplers = await services.rest.session_contents(user, session_id)
    view = {"training_run_ids": runs, "sampler_ids": samplers}
    status = await services.session_search.status(session)
    extras = {
        "user_metadata": metadata_of(session) or None,
        "display_name": session.details.get("display_name"),
        "project_id": session.project_id,
        "status": None if status is None else status.model_dump(mode="json"),
        "state": state_of(status),
    }
    return json_answer(view | {name: value for name, value in extras.items() if value is not None})
