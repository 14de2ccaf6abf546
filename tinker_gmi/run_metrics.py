"""What a training script says of its run: rewards above all, which the server cannot know. The
console draws it."""

import math
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote

from tinker_gmi.bodies.reported import MAX_POINTS
from tinker_gmi.connection.json_client import JsonClient

Point = tuple[int, Mapping[str, float]]


class RunMetrics(JsonClient):
    """run_id: `model_id` of a training client, of this project's or of the official one."""

    def report(self, run_id: str, step: int, **metrics: float) -> None:
        """step: as the script counts. What is reported of a step again is added to it, and replaces
        what has the same name. Numbers that are not finite are left out."""
        self.report_many(run_id, [(step, metrics)])

    def report_many(self, run_id: str, points: Iterable[Point]) -> None:
        """The same of several steps, and with any names."""
        finite = [(step, _finite(metrics)) for step, metrics in points]
        bodies = [{"step": step, "metrics": metrics} for step, metrics in finite if metrics]
        for first in range(0, len(bodies), MAX_POINTS):
            body = {"points": bodies[first : first + MAX_POINTS]}
            self._request("POST", f"/training_runs/{quote(run_id)}/metrics", body)

    def reported(self, run_id: str, after: int = 0) -> list[dict[str, Any]]:
        """What was reported, a page in the order of `number`, which counts changes; `after` the
        highest that the caller has."""
        path = f"/training_runs/{quote(run_id)}/metrics"
        return self._request("GET", path, params={"after": after})["points"]


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
