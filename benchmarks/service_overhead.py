"""What the service itself costs: the fake backend computes next to nothing, so the rest is ours.

A server in a process of its own; each operation is submitted and its result retrieved, one at a
time and with 32 in flight, by the official SDK and by plain HTTP over kept-alive connections.
Two baselines come in the same run: a health check over the same connections (what HTTP costs
here), and the fake backend called directly (what it computes).
"""

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from report import Report, versions

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.serving import Server, start_server  # noqa: E402
from tinkercloud.backends.fake import FakeBackend  # noqa: E402
from tinkercloud.config import Config  # noqa: E402
from tinkercloud.core.types import (  # noqa: E402
    AdamParams,
    Datum,
    FromModel,
    LoraSpec,
    SampleRequest,
    SamplingParams,
    TrainBatch,
)
from tinkercloud.wire import codec  # noqa: E402

PROTO = "application/x-protobuf"
NUM_TOKENS = 16
MAX_TOKENS = 4
IN_FLIGHT = 32
COLUMNS = ("client", "operation", "in flight", "count", "failed", "p50 ms", "p99 ms", "per second")

Operation = Callable[[], Awaitable[None]]
"""Submits once and waits for the result; raises when it failed."""


@dataclass(frozen=True)
class Volume:
    """How many operations each figure rests on."""

    warm_up: int
    sequential: int
    concurrent: int


@dataclass(frozen=True)
class Row:
    client: str
    operation: str
    in_flight: int
    latencies_s: list[float]
    failed: int
    wall_s: float

    def cells(self) -> tuple[str | int | float, ...]:
        done = len(self.latencies_s)
        p50, p99 = (np.quantile(self.latencies_s, (0.5, 0.99)) * 1e3) if done else (np.nan,) * 2
        rate = done / self.wall_s
        total = done + self.failed
        cells = (self.client, self.operation, self.in_flight, total, self.failed)
        return (*cells, round(float(p50), 3), round(float(p99), 3), round(rate, 1))


async def measure(client: str, name: str, operation: Operation, volume: Volume) -> list[Row]:
    """One row one at a time, one with IN_FLIGHT at once."""
    for _ in range(volume.warm_up):
        await operation()
    return [
        await timed(client, name, operation, volume.sequential, 1),
        await timed(client, name, operation, volume.concurrent, IN_FLIGHT),
    ]


async def timed(client: str, name: str, operation: Operation, total: int, in_flight: int) -> Row:
    latencies: list[float] = []
    failures: list[Exception] = []
    remaining = iter(range(total))

    async def worker() -> None:
        for _ in remaining:
            began = time.perf_counter()
            try:
                await operation()
            except Exception as failure:  # noqa: BLE001 - counted and shown; none is left out
                failures.append(failure)
            else:
                latencies.append(time.perf_counter() - began)

    began = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(in_flight)))
    wall_s = time.perf_counter() - began
    if failures:
        print(f"{client} {name}: {len(failures)} failed, first: {failures[0]!r}", file=sys.stderr)
    return Row(client, name, in_flight, latencies, len(failures), wall_s)


async def through_http(server: Server, base_model: str, volume: Volume) -> list[Row]:
    limits = httpx.Limits(max_connections=2 * IN_FLIGHT, max_keepalive_connections=2 * IN_FLIGHT)
    headers = {"X-API-Key": server.api_key}
    async with httpx.AsyncClient(
        base_url=server.base_url, headers=headers, limits=limits, timeout=60, trust_env=False
    ) as http:
        client = await HttpClient.connect(http, base_model)
        rows = await measure("HTTP", "health check (baseline)", client.health, volume)
        rows += await measure("HTTP", "optim_step", client.optim_step, volume)
        rows += await measure("HTTP", "forward_backward", client.forward_backward, volume)
        rows += await measure("HTTP", "sample", client.sample, volume)
    return rows


class HttpClient:
    """The SDK's requests without the SDK (wire specification, section 17)."""

    def __init__(self, http: httpx.AsyncClient, model_id: str, sampler_id: str):
        self._http = http
        self._model_id = model_id
        self._sampler_id = sampler_id
        self._training_seq = count(1)
        self._sampling_seq = count()
        # Numbers must arrive in order: a request that is not forward_backward, and comes early,
        # tells the server that the missing ones are lost.
        self._turn = asyncio.Lock()

    @classmethod
    async def connect(cls, http: httpx.AsyncClient, base_model: str) -> "HttpClient":
        session = await post(http, "create_session", sdk_version="0.38.0", tags=[])
        addressed = {"session_id": session["session_id"], "base_model": base_model}
        created = await post(
            http, "create_model", **addressed, model_seq_id=0, lora_config={"rank": 8}
        )
        model = (await retrieve(http, created["request_id"])).json()
        sampler = await post(
            http, "create_sampling_session", **addressed, sampling_session_seq_id=0
        )
        return cls(http, model["model_id"], sampler["sampling_session_id"])

    async def health(self) -> None:
        (await self._http.get("/api/v1/healthz")).raise_for_status()

    async def optim_step(self) -> None:
        async with self._turn:
            adam = {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12}
            seq_id = next(self._training_seq)
            submitted = await post(
                self._http,
                "optim_step",
                model_id=self._model_id,
                seq_id=seq_id,
                adam_params={**adam, "weight_decay": 0.0, "grad_clip_norm": 0.0},
            )
        metrics = (await retrieve(self._http, submitted["request_id"])).json()["metrics"]
        assert np.isfinite(metrics["unclipped_grad_l2:mean"])

    async def forward_backward(self) -> None:
        datum = codec.WireDatum((tokens(),), inputs())
        async with self._turn:
            seq_id = next(self._training_seq)
            request = codec.ForwardBackwardRequest(
                model_id=self._model_id, seq_id=seq_id, data=(datum,), loss_fn="cross_entropy"
            )
            answer = await self._http.post(
                "/api/v1/forward_backward",
                content=codec.encode_forward_backward_request(request),
                headers={"Content-Type": PROTO},
            )
            answer.raise_for_status()
        result = await retrieve(self._http, answer.json()["request_id"], accept=PROTO)
        output = codec.decode_train_output(result.content)
        assert output.outputs[0]["logprobs"].shape == (NUM_TOKENS,)

    async def sample(self) -> None:
        seq_id = next(self._sampling_seq)
        submitted = await post(
            self._http,
            "asample",
            sampling_session_id=self._sampler_id,
            seq_id=seq_id,
            num_samples=1,
            prompt={"chunks": [{"type": "encoded_text", "tokens": tokens().tolist()}]},
            sampling_params={"max_tokens": MAX_TOKENS, "seed": seq_id, "temperature": 1.0},
        )
        result = await retrieve(self._http, submitted["request_id"], accept=PROTO)
        assert len(codec.decode_sample_output(result.content).sequences) == 1


async def post(http: httpx.AsyncClient, call: str, **body: Any) -> dict[str, Any]:
    answer = await http.post(f"/api/v1/{call}", json=body)
    answer.raise_for_status()
    return answer.json()


async def retrieve(
    http: httpx.AsyncClient, request_id: str, *, accept: str = "application/json"
) -> httpx.Response:
    body = {"request_id": request_id, "allow_metadata_only": False}
    while True:
        answer = await http.post("/api/v1/retrieve_future", json=body, headers={"Accept": accept})
        if answer.status_code == 408:
            continue
        answer.raise_for_status()
        if answer.headers["content-type"].startswith("application/json"):
            assert "error" not in answer.json(), answer.text
        return answer


async def through_sdk(base_model: str, volume: Volume) -> list[Row]:
    import tinker  # here, because it reads the environment

    service = tinker.ServiceClient()
    training = await service.create_lora_training_client(base_model=base_model, rank=8)
    sampling = await service.create_sampling_client(base_model=base_model)
    adam = tinker.AdamParams(learning_rate=1e-4)
    prompt = tinker.ModelInput.from_ints(tokens().tolist())
    datum = tinker.Datum(model_input=prompt, loss_fn_inputs=sdk_inputs(tinker))
    params = tinker.SamplingParams(max_tokens=MAX_TOKENS, seed=1, temperature=1.0)

    async def optim_step() -> None:
        result = await training.optim_step(adam)
        assert np.isfinite(result.metrics["unclipped_grad_l2:mean"])

    async def forward_backward() -> None:
        result = await training.forward_backward([datum], "cross_entropy")
        assert "loss:sum" in result.metrics

    async def sample() -> None:
        result = await sampling.sample(prompt, num_samples=1, sampling_params=params)
        assert len(result.sequences) == 1

    rows = await measure("SDK", "optim_step", optim_step, volume)
    rows += await measure("SDK", "forward_backward", forward_backward, volume)
    return rows + await measure("SDK", "sample", sample, volume)


def sdk_inputs(tinker: Any) -> dict[str, Any]:
    return {name: tinker.TensorData.from_numpy(array) for name, array in inputs().items()}


async def directly(volume: Volume) -> tuple[str, list[Row]]:
    """The fake backend in this process, without a service; also the name of what it serves."""
    backend = FakeBackend(Config(backend="fake"))
    base_model = (await backend.start())[0].name
    await backend.create_model("m", base_model, LoraSpec(rank=8, seed=0))
    version = await backend.publish(FromModel("m"))
    batch = TrainBatch((Datum(tokens(), inputs()),), "cross_entropy")
    request = SampleRequest(tokens(), 1, SamplingParams(max_tokens=MAX_TOKENS, seed=1))

    async def optim_step() -> None:
        await backend.optim_step("m", AdamParams())

    async def forward_backward() -> None:
        await backend.forward_backward("m", batch)

    async def sample() -> None:
        await backend.sample(version, request)

    rows: list[Row] = []
    operations = {"optim_step": optim_step, "forward_backward": forward_backward, "sample": sample}
    for name, operation in operations.items():
        label = f"{name} (baseline)"
        rows.append(await timed("backend alone", label, operation, volume.sequential, 1))
    await backend.stop()
    return base_model, rows


def tokens() -> np.ndarray:
    return np.arange(1, NUM_TOKENS + 1, dtype=np.int32)


def inputs() -> dict[str, np.ndarray]:
    weights = np.ones(NUM_TOKENS, dtype=np.float32)
    return {"target_tokens": tokens().astype(np.int64), "weights": weights}


async def run(volume: Volume) -> list[Row]:
    base_model, rows = await directly(volume)
    with (
        tempfile.TemporaryDirectory() as folder,
        start_server("--backend", "fake", data_dir=Path(folder) / "data") as server,
    ):
        os.environ.update(server.sdk_environment)
        rows += await through_http(server, base_model, volume)
        rows += await through_sdk(base_model, volume)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--quick", action="store_true", help="a tenth of the operations")
    given = parser.parse_args()
    volume = Volume(5, 50, 200) if given.quick else Volume(50, 300, 1000)
    rows = asyncio.run(run(volume))
    report = Report(
        title="Service overhead",
        about=ABOUT,
        command="python benchmarks/service_overhead.py" + (" --quick" if given.quick else ""),
        columns=COLUMNS,
        rows=[row.cells() for row in rows],
        versions=versions("tinkercloud", "tinker", "fastapi", "uvicorn", "httpx", "numpy"),
    )
    report.publish(given.json)
    return 1 if any(row.failed for row in rows) else 0


ABOUT = """\
Each operation is submitted and its result retrieved, from a client process to a server process on
the same machine, with the fake backend, which computes next to nothing. Training operations of one
model run in order, so those in flight queue behind each other and their latency is mostly that
queue; the rate is what counts there. Baselines of the same run: a health check over the same
connections, and the fake backend called directly. The client's own work is included, and shares
the cores with the server."""

if __name__ == "__main__":
    sys.exit(main())
