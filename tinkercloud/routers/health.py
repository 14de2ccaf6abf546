"""Liveness, health and metrics."""

import re

from fastapi import APIRouter, Response

from tinker_gmi.types import HealthResponse
from tinkercloud.routers.deps import ServicesDep, answer, json_answer

router = APIRouter()


@router.get("/api/v1/healthz")
async def healthz() -> Response:
    return answer(HealthResponse())


@router.get("/health")
async def health(services: ServicesDep) -> Response:
    stats = services.backend.stats()
    trouble = services.backend.trouble()
    status = {"status": "ok"} if trouble is None else {"status": "degraded", "reason": trouble}
    health = {**status, "num_pending": services.tasks.num_pending, "backend": stats}
    speculation = services.backend.speculation()
    return json_answer({**health, "speculation": speculation} if speculation else health)


@router.get("/metrics")
async def metrics(services: ServicesDep) -> Response:
    """In Prometheus' text format."""
    gauges = {
        "requests_pending": services.tasks.num_pending,
        **services.on_policy.stats(),
        **services.snapshots.stats(),
        **services.recovery.stats(),
        **services.backend.stats(),
    }
    lines = [
        line
        for name, value in gauges.items()
        if isinstance(value, int | float)
        for line in (f"# TYPE {_metric(name)} gauge", f"{_metric(name)} {float(value)!r}")
    ]
    body = "\n".join([*lines, *services.backend.metrics(), ""])
    return Response(body, media_type="text/plain; version=0.0.4")


def _metric(name: str) -> str:
    return "tinkercloud_" + re.sub(r"[^a-zA-Z0-9_]+", "_", name)
