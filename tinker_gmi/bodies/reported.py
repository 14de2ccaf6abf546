"""Bodies about what training scripts report of their runs."""

from typing import Annotated

from pydantic import Field, FiniteFloat

from tinker_gmi.bodies.wire_model import WireModel

MAX_POINTS = 1000  # of one request
MetricName = Annotated[str, Field(min_length=1, max_length=128)]


class ReportedMetrics(WireModel):
    """step: as the script counts its own."""

    step: int = Field(ge=0, lt=2**53)
    metrics: dict[MetricName, FiniteFloat] = Field(min_length=1, max_length=256)


class ReportMetricsRequest(WireModel):
    """What is reported of a step again is added to it, and replaces what has the same name."""

    points: list[ReportedMetrics] = Field(min_length=1, max_length=MAX_POINTS)
