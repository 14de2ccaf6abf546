"""Operations as they end: how many, of whom, how, and where their time went."""

import json
import time
from collections.abc import Iterator
from typing import Literal, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import GaugeMetricFamily
from prometheus_client.registry import Collector

from tinkercloud.core.pending import Pending
from tinkercloud.core.task_manager import CANCELLED, SESSION_ENDED, TaskManager
from tinkercloud.storage.futures import Outcome

# Seconds: from a poll that finds its sample done to an optimizer step of full weights.
BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25),
    *(0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0),
)


class OperationMetrics:
    def __init__(self, tasks: TaskManager, registry: CollectorRegistry):
        self._ended = Counter(
            "tinkercloud_operations",
            "Operations that ended: completed, failed_user, failed_server or cancelled.",
            ("kind", "user", "outcome"),
            registry=registry,
        )
        self._phases = Histogram(
            "tinkercloud_operation_phase_seconds",
            "Time of operations from their arrival: waiting, running, recording.",
            ("kind", "phase"),
            buckets=BUCKETS,
            registry=registry,
        )
        registry.register(_Queue(tasks))
        tasks.when_finished(self._count)

    def _count(self, pending: Pending) -> None:
        assert pending.outcome is not None
        ticket = pending.ticket
        self._ended.labels(ticket.kind, ticket.user, outcome_of(pending.outcome)).inc()
        for phase in phases_of(pending):
            took_s = max(phase.ended_at - phase.began_at, 0.0)  # clocks are set, also back
            self._phases.labels(ticket.kind, phase.name).observe(took_s)


class Phase(NamedTuple):
    """Times in seconds since the epoch."""

    name: Literal["waiting", "running", "recording"]
    began_at: float
    ended_at: float


def phases_of(pending: Pending) -> list[Phase]:
    """Of an operation whose outcome has just gone on record. One that never began did not run."""
    assert pending.ended_at is not None
    begun = pending.ended_at if pending.started_at is None else pending.started_at
    waiting = Phase("waiting", pending.accepted_at, begun)
    running = [] if pending.started_at is None else [Phase("running", begun, pending.ended_at)]
    return [waiting, *running, Phase("recording", pending.ended_at, time.time())]


def outcome_of(outcome: Outcome) -> str:
    """completed, failed_user, failed_server or cancelled."""
    if outcome.status == "completed":
        return "completed"
    if outcome.body in (CANCELLED.body, SESSION_ENDED.body):
        return "cancelled"
    return f"failed_{json.loads(outcome.body)['category']}"


class _Queue(Collector):
    """What is acknowledged and has not ended."""

    def __init__(self, tasks: TaskManager):
        self._tasks = tasks

    def collect(self) -> Iterator[GaugeMetricFamily]:
        depth: dict[tuple[str, str], int] = {}
        oldest: dict[str, float] = {}
        for pending in self._tasks.pending():
            kind = pending.ticket.kind
            phase = "waiting" if pending.started_at is None else "running"
            depth[kind, phase] = depth.get((kind, phase), 0) + 1
            if phase == "waiting":
                oldest[kind] = min(oldest.get(kind, pending.accepted_at), pending.accepted_at)
        operations = GaugeMetricFamily(
            "tinkercloud_queue_operations",
            "Operations that are acknowledged and have not ended.",
            labels=("kind", "phase"),
        )
        for labels, count in depth.items():
            operations.add_metric(labels, count)
        yield operations
        waits = GaugeMetricFamily(
            "tinkercloud_queue_oldest_seconds",
            "How long the operation that waits longest has waited.",
            labels=("kind",),
        )
        now = time.time()
        for kind, accepted_at in oldest.items():
            waits.add_metric((kind,), max(now - accepted_at, 0.0))
        yield waits
