"""Operations as traces, sent by OTLP over HTTP to a collector (OpenTelemetry).

A span for each operation from its acknowledgement until its outcome is on record, and in it one for
each phase. They are made when the operation has ended, of the times that it has anyway.
"""

import asyncio

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode

from tinkercloud.core.pending import Pending
from tinkercloud.core.task_manager import TaskManager
from tinkercloud.logs import session_of
from tinkercloud.services.observability.operation_metrics import outcome_of, phases_of

TIMEOUT_S = 5.0


class SpanExport:
    """endpoint: of the collector, such as http://127.0.0.1:4318."""

    def __init__(self, endpoint: str, tasks: TaskManager):
        exporter = OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces", timeout=TIMEOUT_S)
        self._provider = TracerProvider(resource=Resource.create({"service.name": "tinkercloud"}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("tinkercloud")
        tasks.when_finished(self._export)

    def _export(self, pending: Pending) -> None:
        assert pending.outcome is not None
        outcome, phases = outcome_of(pending.outcome), phases_of(pending)
        span = self._tracer.start_span(
            pending.ticket.kind,
            Context(),  # of its own: the task that ends it may be working for another request
            SpanKind.SERVER,
            _attributes(pending, outcome),
            start_time=_ns(phases[0].began_at),
        )
        if outcome == "failed_server":
            span.set_status(Status(StatusCode.ERROR))
        inside = trace.set_span_in_context(span, Context())
        for phase in phases:
            child = self._tracer.start_span(phase.name, inside, start_time=_ns(phase.began_at))
            child.end(_ns(phase.ended_at))
        span.end(_ns(phases[-1].ended_at))

    async def close(self) -> None:
        """Send what is left, as far as the collector takes it in time."""
        await asyncio.to_thread(self._provider.shutdown)


def _attributes(pending: Pending, outcome: str) -> dict[str, str | int]:
    ticket = pending.ticket
    attributes = {
        "tinkercloud.request_id": pending.request_id,
        "tinkercloud.user": ticket.user,
        "tinkercloud.outcome": outcome,
        "tinkercloud.model_id": ticket.model_id,
        "tinkercloud.sampler_id": ticket.sampler_id,
        "tinkercloud.session_id": session_of(ticket.model_id or ticket.sampler_id),
        "tinkercloud.seq_id": ticket.seq_id,
    }
    return {name: value for name, value in attributes.items() if value is not None}


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
