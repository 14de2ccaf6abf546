"""A server without a service: it answers the Tinker API's calls at once, with constant bodies. What
a client needs on it is the client's own time."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from benchmarks.lib.machine import ROOT
from benchmarks.lib.wire_client import JSON, PROTO
from tinkercloud.core.types import SampledSequence, SampleOutput, TrainOutput
from tinkercloud.wire.codec import encode_sample_output, encode_train_output

TRAIN, STEP, SAMPLE, CREATE = "train-pass", "train-step", "sample-one", "train-create"
"""Request ids: what a poll asks for is seen from its body."""


def _json(**body: Any) -> bytes:
    return _answer(json.dumps(body).encode(), JSON)


def _answer(body: bytes, content_type: str) -> bytes:
    head = f"HTTP/1.1 200 OK\r\ncontent-type: {content_type}\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


class ConstantServer:
    """base_model: the only one that it lists. num_tokens: of a datum; max_tokens: of a sample."""

    def __init__(self, base_model: str, num_tokens: int, max_tokens: int):
        zeros = np.zeros(num_tokens, dtype=np.float32)
        metrics = {"loss:sum": 0.0}
        passed = encode_train_output(TrainOutput(({"logprobs": zeros},), metrics))
        ones = np.ones(max_tokens, dtype=np.int32)
        sequence = SampledSequence(ones, zeros[:max_tokens], "length")
        self._results = {
            CREATE.encode(): _json(model_id="s:train:0", type="create_model"),
            STEP.encode(): _json(metrics={"unclipped_grad_l2:mean": 1.0}, type="optim_step"),
            TRAIN.encode(): _answer(passed, PROTO),
            SAMPLE.encode(): _answer(encode_sample_output(SampleOutput((sequence,))), PROTO),
        }
        model = {"model_name": base_model, "max_context_length": 1024}
        self._calls = {
            "client/config": _json(),
            "get_server_capabilities": _json(supported_models=[model]),
            "create_session": _json(session_id="s", type="create_session"),
            "create_model": _json(request_id=CREATE),
            "get_info": _json(model_id="s:train:0", model_data={"model_name": base_model}),
            "create_sampling_session": _json(sampling_session_id="s:sample:0"),
            "forward_backward": _json(request_id=TRAIN),
            "optim_step": _json(request_id=STEP),
            "asample": _json(request_id=SAMPLE, sample_sequence_ids=[f"{SAMPLE}:0"]),
        }

    def answer(self, path: str, body: bytes) -> bytes:
        call = path.removeprefix("/api/v1/")
        if call == "retrieve_future":
            return next(result for name, result in self._results.items() if name in body)
        return self._calls.get(call, _json())


class _Connection(asyncio.Protocol):
    def __init__(self, server: ConstantServer):
        self._server = server
        self._received = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        end = self._received.find(b"\r\n\r\n")
        if end < 0:
            return
        lines = bytes(self._received[:end]).split(b"\r\n")
        headers = dict(line.lower().split(b": ", 1) for line in lines[1:])
        whole = end + 4 + int(headers.get(b"content-length", b"0"))
        if len(self._received) < whole:
            return
        body = bytes(self._received[end + 4 : whole])
        del self._received[:whole]
        self._transport.write(self._server.answer(lines[0].split()[1].decode(), body))


@contextmanager
def constant_server(base_model: str, num_tokens: int, max_tokens: int) -> Iterator[str]:
    """Its URL, for the length of the block; it runs in a process of its own."""
    command = [sys.executable, "-m", __name__, base_model, str(num_tokens), str(max_tokens)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


async def _serve(base_model: str, num_tokens: int, max_tokens: int) -> None:
    constant = ConstantServer(base_model, num_tokens, max_tokens)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Connection(constant), "127.0.0.1", 0)
    print("http://{}:{}".format(*server.sockets[0].getsockname()), flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
