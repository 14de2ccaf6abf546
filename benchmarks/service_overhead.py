"""What the service itself costs: the fake backend computes next to nothing, so the rest is ours.

A server in a process of its own; each operation is submitted and its result retrieved, one at a
time and with 32 in flight, by the official SDK and by plain HTTP over kept-alive connections.
Two baselines come in the same run: a health check over the same connections (what HTTP costs
here), and the fake backend called directly (what it computes).
"""

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

from benchmarks.lib.arguments import BenchmarkParser
from benchmarks.lib.machine import versions
from benchmarks.lib.processes import prepare_process
from benchmarks.lib.report import Cell, Report
from benchmarks.lib.server import our_server, sdk_datum, sdk_for
from benchmarks.lib.timing import quantile
from benchmarks.lib.tinker_http import PROTO, TinkerHttp, text_prompt
from tests.serving import Server
from tinkercloud.backends.fake import FakeBackend
from tinkercloud.config import Config
from tinkercloud.core.types import (
    AdamParams,
    Datum,
    FromModel,
    LoraSpec,
    SampleRequest,
    SamplingParams,
    TrainBatch,
)
from tinkercloud.wire import codec

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


FULL = Volume(50, 300, 1000)
QUICK = Volume(5, 50, 200)


@dataclass(frozen=True)
class Row:
    client: str
    operation: str
    in_flight: int
    latencies_s: list[float]
    failed: int
    wall_s: float

    def cells(self) -> tuple[Cell, ...]:
        done = len(self.latencies_s)
        times_ms = (round(1e3 * quantile(self.latencies_s, share), 3) for share in (0.5, 0.99))
        cells = (self.client, self.operation, self.in_flight, done + self.failed, self.failed)
        return (*cells, *times_ms, round(done / self.wall_s, 1))


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
            start = time.perf_counter()
            try:
                await operation()
            except Exception as failure:  # noqa: BLE001 - counted and shown; none is left out
                failures.append(failure)
            else:
                latencies.append(time.perf_counter() - start)

    start = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(in_flight)))
    wall_s = time.perf_counter() - start
    if failures:
        print(f"{client} {name}: {len(failures)} failed, first: {failures[0]!r}", file=sys.stderr)
    return Row(client, name, in_flight, latencies, len(failures), wall_s)


async def through_http(server: Server, base_model: str, volume: Volume) -> list[Row]:
    client = await HttpClient.connect(server, base_model)
    operations = {
        "health check (baseline)": client.health,
        "optim_step": client.optim_step,
        "forward_backward": client.forward_backward,
        "sample": client.sample,
    }
    rows = []
    for name, operation in operations.items():
        rows += await measure("HTTP", name, operation, volume)
    await client.api.close()
    return rows


class HttpClient:
    """The SDK's requests without the SDK (wire specification, section 17)."""

    def __init__(self, api: TinkerHttp, model_id: str, sampler_id: str):
        self.api = api
        self._model_id = model_id
        self._sampler_id = sampler_id
        self._training_seq = count(1)
        self._sampling_seq = count()
        # Numbers must arrive in order: a request that is not forward_backward, and comes early,
        # tells the server that the missing ones are lost.
        self._order = asyncio.Lock()

    @classmethod
    async def connect(cls, server: Server, base_model: str) -> "HttpClient":
        api = TinkerHttp.connect(server.base_url, server.api_key, timeout_s=60)
        session_id = await api.create_session()
        model = await api.result(
            "create_model",
            session_id=session_id,
            base_model=base_model,
            model_seq_id=0,
            lora_config={"rank": 8},
        )
        return cls(api, model["model_id"], await api.create_sampler(session_id, base_model))

    async def health(self) -> None:
        (await self.api.http.get("/api/v1/healthz")).raise_for_status()

    async def optim_step(self) -> None:
        async with self._order:
            adam = {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12}
            seq_id = next(self._training_seq)
            submitted = await self.api.post(
                "optim_step",
                model_id=self._model_id,
                seq_id=seq_id,
                adam_params={**adam, "weight_decay": 0.0, "grad_clip_norm": 0.0},
            )
        result = await self.api.retrieve(submitted["request_id"])
        metrics = result.json()["metrics"]
        assert np.isfinite(metrics["unclipped_grad_l2:mean"])

    async def forward_backward(self) -> None:
        datum = codec.WireDatum((tokens(),), inputs())
        async with self._order:
            seq_id = next(self._training_seq)
            request = codec.ForwardBackwardRequest(
                model_id=self._model_id, seq_id=seq_id, data=(datum,), loss_fn="cross_entropy"
            )
            answer = await self.api.http.post(
                "/api/v1/forward_backward",
                content=codec.encode_forward_backward_request(request),
                headers={"Content-Type": PROTO},
            )
            answer.raise_for_status()
        result = await self.api.retrieve(answer.json()["request_id"], PROTO)
        output = codec.decode_train_output(result.content)
        assert output.outputs[0]["logprobs"].shape == (NUM_TOKENS,)

    async def sample(self) -> None:
        seq_id = next(self._sampling_seq)
        submitted = await self.api.post(
            "asample",
            sampling_session_id=self._sampler_id,
            seq_id=seq_id,
            num_samples=1,
            prompt=text_prompt(tokens().tolist()),
            sampling_params={"max_tokens": MAX_TOKENS, "seed": seq_id, "temperature": 1.0},
        )
        result = await self.api.retrieve(submitted["request_id"], PROTO)
        assert len(codec.decode_sample_output(result.content).sequences) == 1


async def through_sdk(tinker: Any, base_model: str, volume: Volume) -> list[Row]:
    service = tinker.ServiceClient()
    training = await service.create_lora_training_client(base_model=base_model, rank=8)
    sampling = await service.create_sampling_client(base_model=base_model)
    adam = tinker.AdamParams(learning_rate=1e-4)
    prompt = tinker.ModelInput.from_ints(tokens().tolist())
    datum = sdk_datum(tinker, tokens(), inputs())
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
    with our_server("--backend", "fake") as server:
        rows += await through_http(server, base_model, volume)
        rows += await through_sdk(sdk_for(server), base_model, volume)
    return rows


def main() -> int:
    parser = BenchmarkParser("service_overhead", __doc__, quick="a tenth of the operations")
    options = parser.parse_args()
    prepare_process()
    rows = asyncio.run(run(QUICK if options.quick else FULL))
    report = Report(
        title="Service overhead",
        about=ABOUT,
        command=parser.command(options),
        columns=COLUMNS,
        rows=[row.cells() for row in rows],
        versions=versions("tinkercloud", "tinker", "fastapi", "uvicorn", "httpx", "numpy"),
    )
    report.publish(options.json)
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
