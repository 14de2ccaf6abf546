"""The client of servers with a completion endpoint, against servers that answer as these do."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers.sampling_common import Load
from benchmarks.peers.sampling_servers import (
    STREAMED_TOKENS,
    Completions,
    Dialect,
    LlamaDialect,
    VllmDialect,
)

Answer = Callable[[dict[str, Any]], tuple[Any, list[Any]]]
"""The whole answer to a body, and the events of a streamed one."""


def llama(body: dict[str, Any]) -> tuple[Any, list[Any]]:
    tokens = list(range(body["n_predict"]))
    samples = [{"index": i, "tokens": tokens} for i in range(body["n_cmpl"])]
    events = [{"index": i, "tokens": [t]} for t in tokens for i in range(body["n_cmpl"])]
    return samples if len(samples) > 1 else samples[0], [*events, {"index": 0, "tokens": []}]


def vllm(body: dict[str, Any]) -> tuple[Any, list[Any]]:
    assert body["model"] == "model"
    tokens, indices = list(range(body["max_tokens"])), range(body["n"])
    choices = [{"index": i, "token_ids": tokens} for i in indices]
    events = [{"choices": [{"index": i, "token_ids": [t]}]} for t in tokens for i in indices]
    return {"choices": choices}, [*events, {"choices": []}]


@contextmanager
def server(answer: Answer, path: str) -> Iterator[int]:
    """Its port. A prompt that begins with 0 fails."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == path
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            whole, events = answer(body)
            self.send_response(500 if body["prompt"][0] == 0 else 200)
            self.end_headers()
            if body.get("stream"):
                lines = [f"data: {json.dumps(event)}\n\n" for event in events]
                self.wfile.write("".join([*lines, "data: [DONE]\n\n"]).encode())
            else:
                self.wfile.write(json.dumps(whole).encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield http.server_port
        finally:
            http.shutdown()
            thread.join()


SERVERS = pytest.mark.parametrize(
    ("answer", "dialect"), [(llama, LlamaDialect()), (vllm, VllmDialect(Path("model")))]
)


@SERVERS
@pytest.mark.parametrize("num_samples", [1, 3])
async def test_samples_and_failures_of_a_load_are_counted(
    answer: Answer, dialect: Dialect, num_samples: int
):
    load = Load(((1, 2), (0, 2), (3, 4)), max_tokens=5, num_samples=num_samples)
    with server(answer, dialect.path) as port:
        client = Completions(port, dialect)
        outcome = await client.generate(load)
        await client.close()
    assert outcome.samples == [list(range(5))] * (2 * num_samples)
    assert outcome.failed == num_samples
    assert outcome.wall_s > 0


@SERVERS
async def test_a_streamed_load_has_a_first_token_and_gaps_of_each_sample(
    answer: Answer, dialect: Dialect
):
    load = Load(((1, 2), (0, 2)), max_tokens=50, num_samples=2)
    with server(answer, dialect.path) as port:
        client = Completions(port, dialect)
        outcome = await client.latency(load)
        await client.close()
    assert len(outcome.first_s) == 2
    assert len(outcome.gaps_s) == 2 * (STREAMED_TOKENS - 1)
    assert outcome.failed == 2
