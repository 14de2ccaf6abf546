"""What training scripts report of their runs, for the console: a point for each of their steps."""

from collections.abc import Sequence
from typing import Any

from tinkercloud.errors import ModelNotFound, TooManyMetrics
from tinkercloud.storage.metadata import MetadataStorage
from tinkercloud.storage.reported_metrics import Metrics, ReportedMetricsStorage, ReportedPoint

KEPT_POINTS = 10_000  # of a run, those of the highest steps
MAX_CHARACTERS = 64 * 1024**2  # of all metrics of a user


class ReportedCurves:
    def __init__(self, storage: ReportedMetricsStorage, metadata: MetadataStorage):
        self._storage = storage
        self._metadata = metadata

    async def report(self, user: str, model_id: str, points: Sequence[tuple[int, Metrics]]) -> None:
        """Raises ModelNotFound, TooManyMetrics."""
        await self._require(user, model_id)
        if await self._storage.num_characters(user) > MAX_CHARACTERS:
            raise TooManyMetrics(
                f"the metrics that were reported of your runs have {MAX_CHARACTERS} characters "
                "already; they are kept for result_ttl_s after the last report of their step"
            )
        await self._storage.add(user, model_id, points, keep=KEPT_POINTS)

    async def points(self, user: str, model_id: str, after: int, limit: int) -> list[ReportedPoint]:
        """Those with a higher number than `after`, in its order. Raises ModelNotFound."""
        await self._require(user, model_id)
        return await self._storage.points(user, model_id, after, limit)

    async def _require(self, user: str, model_id: str) -> None:
        model = await self._metadata.model(model_id, user)
        if model is None or model.state == "failed":
            raise ModelNotFound(model_id)


def described(point: ReportedPoint) -> dict[str, Any]:
    return {"step": point.step, "number": point.number, "metrics": dict(point.metrics)}
