"""Liveness, health and metrics."""

from fastapi import APIRouter, Response

from tinker_gmi.types import HealthResponse
from tinkercloud.routers.deps import (
    HEALTHZ_PATH,
    READYZ_PATH,
    ObservedDep,
    ServicesDep,
    answer,
    json_answer,
)

router = APIRouter()
open_router = APIRouter()


@router.get("/api/v1/healthz")
async def healthz() -> Response:
    return answer(HealthResponse())


@open_router.get(HEALTHZ_PATH)
async def alive() -> Response:
    """For supervisors: this process answers."""
    return json_answer({"status": "ok"})


@open_router.get(READYZ_PATH)
async def ready(services: ServicesDep) -> Response:
    """For load balancers: whether this server can do its work just now; else 503 with reasons."""
    readiness = await services.readiness.check()
    checks = {name: reason or "ok" for name, reason in readiness.reasons.items()}
    status = "ready" if readiness.is_ready else "not ready"
    return json_answer({"status": status, "checks": checks}, 200 if readiness.is_ready else 503)


@router.get("/health")
async def health(user: ObservedDep, services: ServicesDep) -> Response:
    trouble = services.backend.trouble()
    status = {"status": "ok"} if trouble is None else {"status": "degraded", "reason": trouble}
    health: dict[str, object] = {**status, "num_pending": services.metrics.num_pending(user)}
    if user is not None:
        return json_answer(health)
    health["backend"] = services.backend.stats()
    speculation = services.backend.speculation()
    return json_answer({**health, "speculation": speculation} if speculation else health)


@router.get("/metrics")
async def metrics(user: ObservedDep, services: ServicesDep) -> Response:
    """In Prometheus' text format."""
    content = services.metrics.exposition(user)
    return Response(content, media_type=services.metrics.content_type)
