"""Whether the server lives."""

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
    return json_answer(
        {"status": "ok", "num_pending": services.tasks.num_pending, "backend": stats}
    )
