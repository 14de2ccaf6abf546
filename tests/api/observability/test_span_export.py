"""Traces of operations, as a collector gets them."""

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.api.harness import serving


@contextmanager
def collector() -> Iterator[tuple[str, list[Span]]]:
    """(its URL, the spans that have come)."""
    spans: list[Span] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            assert self.path == "/v1/traces"
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                for scope in resource.scope_spans:
                    spans.extend(scope.spans)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", spans
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


async def test_each_operation_is_a_trace_with_its_phases_and_ids(tmp_path: Path) -> None:
    with collector() as (url, spans):
        async with serving(tmp_path, otlp_endpoint=url) as api:
            model_id = await api.model()
            accepted = await api.forward_backward(model_id, 1)
            await api.result(accepted)
            await api.failure(await api.forward_backward(model_id, 2, loss_fn="no_such_loss"))
        # what was left was sent when the server stopped
        roots = {span.name: span for span in spans if not span.parent_span_id}
        assert set(roots) == {"CreateModel", "ForwardBackward"}
        root = next(s for s in spans if s.name == "ForwardBackward" and "completed" in str(s))
        attributes = {item.key: item.value.string_value for item in root.attributes}
        assert attributes["tinkercloud.request_id"] == accepted["request_id"]
        assert attributes["tinkercloud.model_id"] == model_id
        assert attributes["tinkercloud.session_id"] == model_id.partition(":")[0]
        assert attributes["tinkercloud.user"] == "ann"
        phases = [span for span in spans if span.parent_span_id == root.span_id]
        assert [span.name for span in phases] == ["waiting", "running", "recording"]
        assert {span.trace_id for span in phases} == {root.trace_id}
        assert phases[0].start_time_unix_nano == root.start_time_unix_nano
        assert phases[-1].end_time_unix_nano == root.end_time_unix_nano
        ends = [span.end_time_unix_nano for span in phases]
        assert ends == sorted(ends)


async def test_a_collector_that_is_not_there_keeps_nobody_waiting(tmp_path: Path) -> None:
    async with serving(tmp_path, otlp_endpoint="http://127.0.0.1:9") as api:
        model_id = await api.model()
        await api.train(model_id, 1)
