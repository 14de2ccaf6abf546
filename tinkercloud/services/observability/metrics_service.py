"""The metrics of one server, in a registry of its own, as Prometheus reads them."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Metric, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from tinkercloud.backends.base import Backend
from tinkercloud.core.task_manager import TaskManager
from tinkercloud.services.observability.operation_metrics import OperationMetrics
from tinkercloud.services.observability.stats_metrics import (
    LinesCollector,
    Stats,
    StatsCollector,
    Tokens,
    TokensCollector,
)

USER_LABEL = "user"


@dataclass(frozen=True, slots=True)
class MetricSources:
    """stats: snapshots of services. tokens: by user, base model and kind, since the start."""

    backend: Backend
    tasks: TaskManager
    stats: Sequence[Callable[[], Stats]]
    tokens: Tokens


class MetricsService:
    content_type = CONTENT_TYPE_PLAIN_0_0_4

    def __init__(self, sources: MetricSources):
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        OperationMetrics(sources.tasks, self._registry)
        self._registry.register(TokensCollector(sources.tokens))
        self._tasks = sources.tasks
        for stats in (self._pending, *sources.stats, sources.backend.stats):
            self._registry.register(StatsCollector(stats))
        self._registry.register(LinesCollector(sources.backend.metrics))

    def _pending(self) -> Stats:
        return {"requests_pending": self._tasks.num_pending}

    def num_pending(self, user: str | None) -> int:
        """Operations that have not ended, of this user; None: of all."""
        if user is None:
            return self._tasks.num_pending
        return sum(pending.ticket.user == user for pending in self._tasks.pending())

    def readings(self, user: str | None) -> list[tuple[str, Mapping[str, str], float]]:
        """(name, labels, value) of the series of this user; None: all. Without the buckets of
        histograms, and what is no number."""
        return [
            (sample.name, sample.labels, sample.value)
            for family in _Seen(self._registry, user).collect()
            for sample in family.samples
            if not sample.name.endswith("_bucket") and math.isfinite(sample.value)
        ]

    def exposition(self, user: str | None) -> bytes:
        """In Prometheus' text format: the series of this user; None: all."""
        return generate_latest(_Seen(self._registry, user))


class _Seen(Collector):
    """The series of the user (None: of everybody and of the server), without the times at which
    each began: they double their number."""

    def __init__(self, registry: CollectorRegistry, user: str | None):
        self._registry = registry
        self._user = user

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            seen = Metric(family.name, family.documentation, family.type, family.unit)
            seen.samples = [sample for sample in family.samples if self._shows(sample)]
            if self._user is None or seen.samples:
                yield seen

    def _shows(self, sample: Sample) -> bool:
        if sample.name.endswith("_created"):
            return False
        return self._user is None or sample.labels.get(USER_LABEL) == self._user
