"""What the service itself costs: each operation is submitted and its result retrieved, on the fake
backend, which computes next to nothing."""

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lib.constant_server import constant_server
from benchmarks.lib.report import Cell, Target
from benchmarks.lib.server import Served, our_server, sdk_datum, sdk_for
from benchmarks.lib.timing import quantile
from benchmarks.lib.tinker_http import PROTO, SDK_VERSION, text_prompt
from benchmarks.lib.training_http import ADAM
from benchmarks.lib.wire_client import WireClient
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

MOST_MS, LEAST_SAMPLES_PER_S = 3.0, 500.0
STEP_TARGET = "optim_step by {}, submitted and retrieved: p50 in ms"
SAMPLES_TARGET = "samples a second by {}"
NUM_TOKENS = 16
MAX_TOKENS = 4
IN_FLIGHT = 32
HTTP, SDK = "HTTP", "SDK"
DISK, MEMORY, CONSTANT = "", ", data in memory", ", constant answers"
"""After a client's name: what it talks to."""
IN_MEMORY = Path("/dev/shm")
FLUSH = "overwrite and flush of 4 kB (baseline)"
BASELINE = "{} (baseline)"
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

    @property
    def p50_ms(self) -> float:
        return 1e3 * quantile(self.latencies_s, 0.5)

    @property
    def per_second(self) -> float:
        return len(self.latencies_s) / self.wall_s

    def cells(self) -> tuple[Cell, ...]:
        count = len(self.latencies_s) + self.failed
        p99_ms = 1e3 * quantile(self.latencies_s, 0.99)
        return (
            *(self.client, self.operation, self.in_flight, count, self.failed),
            *(round(self.p50_ms, 3), round(p99_ms, 3), round(self.per_second, 1)),
        )


async def rows_of(client: str, name: str, operation: Operation, volume: Volume) -> list[Row]:
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


async def through_http(name: str, server: Server, base_model: str, volume: Volume) -> list[Row]:
    client = await HttpClient.connect(server, base_model)
    operations = {
        "health check (baseline)": client.health,
        "optim_step": client.optim_step,
        "forward_backward": client.forward_backward,
        "sample": client.sample,
    }
    rows = []
    for operation_name, operation in operations.items():
        rows += await rows_of(name, operation_name, operation, volume)
    client.api.close()
    return rows


class HttpClient:
    """The SDK's requests without the SDK (wire specification, section 17)."""

    def __init__(self, api: WireClient, model_id: str, sampler_id: str):
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
        api = WireClient(server.base_url, server.api_key)
        session = await api.post(
            "create_session", sdk_version=SDK_VERSION, tags=[], user_metadata={}
        )
        session_id = session["session_id"]
        model = await api.result(
            "create_model",
            session_id=session_id,
            base_model=base_model,
            model_seq_id=0,
            lora_config={"rank": 8},
        )
        sampler = await api.post(
            "create_sampling_session",
            session_id=session_id,
            sampling_session_seq_id=0,
            base_model=base_model,
        )
        return cls(api, model["model_id"], sampler["sampling_session_id"])

    async def health(self) -> None:
        answer = await self.api.call("/api/v1/healthz")
        assert answer.status == 200

    async def optim_step(self) -> None:
        async with self._order:
            seq_id = next(self._training_seq)
            submitted = await self.api.post(
                "optim_step", model_id=self._model_id, seq_id=seq_id, adam_params=ADAM
            )
        result = await self.api.retrieve(submitted["request_id"])
        assert np.isfinite(result.json()["metrics"]["unclipped_grad_l2:mean"])

    async def forward_backward(self) -> None:
        datum = codec.WireDatum((tokens(),), inputs())
        async with self._order:
            seq_id = next(self._training_seq)
            request = codec.ForwardBackwardRequest(
                model_id=self._model_id, seq_id=seq_id, data=(datum,), loss_fn="cross_entropy"
            )
            body = codec.encode_forward_backward_request(request)
            answer = await self.api.call("/api/v1/forward_backward", body, PROTO)
            assert answer.status == 200, answer
        result = await self.api.retrieve(answer.json()["request_id"], PROTO)
        output = codec.decode_train_output(result.body)
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
        assert len(codec.decode_sample_output(result.body).sequences) == 1


async def through_sdk(name: str, service: Any, base_model: str, volume: Volume) -> list[Row]:
    """service: the SDK's client of a server."""
    import tinker

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

    operations = {"optim_step": optim_step, "forward_backward": forward_backward, "sample": sample}
    label = BASELINE if name.endswith(CONSTANT) else "{}"
    rows = []
    for operation_name, operation in operations.items():
        rows += await rows_of(name, label.format(operation_name), operation, volume)
    await service.close("success")
    return rows


async def flushes(folder: Path, total: int) -> Row:
    """What a commit of SQLite's log does to a disk, by itself."""
    page = bytes(4096)
    with tempfile.TemporaryFile(dir=folder) as file:

        async def flush() -> None:
            os.pwrite(file.fileno(), page, 0)
            os.fdatasync(file.fileno())

        await flush()  # the file has its length: the later ones write in place, as the log does
        return await timed("disk", FLUSH, flush, total, 1)


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
        label = BASELINE.format(name)
        rows.append(await timed("backend alone", label, operation, volume.sequential, 1))
    await backend.stop()
    return base_model, rows


def tokens() -> np.ndarray:
    return np.arange(1, NUM_TOKENS + 1, dtype=np.int32)


def inputs() -> dict[str, np.ndarray]:
    weights = np.ones(NUM_TOKENS, dtype=np.float32)
    return {"target_tokens": tokens().astype(np.int64), "weights": weights}


def run(offer: Served, volume: Volume) -> list[Row]:
    with ExitStack() as stack:
        servers = {DISK: stack.enter_context(our_server(*offer.flags))}
        if IN_MEMORY.is_dir():
            servers[MEMORY] = stack.enter_context(our_server(*offer.flags, parent=IN_MEMORY))
        return asyncio.run(measure(servers, volume))


async def measure(servers: Mapping[str, Server], volume: Volume) -> list[Row]:
    """servers: by what follows the client's name; they serve the fake backend."""
    base_model, rows = await directly(volume)
    rows.append(await flushes(servers[DISK].data_dir, volume.sequential))
    for where, server in servers.items():
        rows += await through_http(f"{HTTP}{where}", server, base_model, volume)
    tinker = sdk_for(servers[DISK])
    for where, server in servers.items():
        service = tinker.ServiceClient(base_url=server.base_url, api_key=server.api_key)
        rows += await through_sdk(f"{SDK}{where}", service, base_model, volume)
    with constant_server(base_model, NUM_TOKENS, MAX_TOKENS) as url:
        service = tinker.ServiceClient(base_url=url, api_key=servers[DISK].api_key)
        return rows + await through_sdk(f"{SDK}{CONSTANT}", service, base_model, volume)


def targets(rows: Sequence[Row]) -> list[Target]:
    by_case = {(row.client, row.operation, row.in_flight): row for row in rows}
    made = []
    for client in (f"{kind}{where}" for kind in (HTTP, SDK) for where in (DISK, MEMORY)):
        if (client, "sample", IN_FLIGHT) not in by_case:
            continue
        alone, many = by_case[client, "optim_step", 1], by_case[client, "sample", IN_FLIGHT]
        made.append(Target.at_most(STEP_TARGET.format(client), alone.p50_ms, MOST_MS))
        samples = SAMPLES_TARGET.format(client)
        made.append(Target.at_least(samples, many.per_second, LEAST_SAMPLES_PER_S, digits=0))
    failed = sum(row.failed for row in rows)
    return [*made, Target.at_most("operations that failed", failed, 0)]


def about(rows: Sequence[Row]) -> str:
    by_case = {(row.client, row.operation, row.in_flight): row for row in rows}
    step, sample = (BASELINE.format(name) for name in ("optim_step", "sample"))
    return ABOUT.format(
        in_flight=IN_FLIGHT,
        flush_ms=by_case["disk", FLUSH, 1].p50_ms,
        step_ms=by_case[f"{SDK}{CONSTANT}", step, 1].p50_ms,
        samples_per_s=by_case[f"{SDK}{CONSTANT}", sample, IN_FLIGHT].per_second,
    )


ABOUT = """\
*latency*: each operation is submitted and its result retrieved, from a client process to a server
process on the same machine, with the fake backend, which computes next to nothing; one at a time,
and with {in_flight} in flight. *HTTP*: the SDK's requests over bare sockets, whose client costs
little, so that the server is what is measured. *SDK*: the official SDK in one process. *Data in
memory*: the server's data folder is on no disk. Elsewhere each operation waits for two commits, as
its request and its outcome are on the disk before the client hears of either; one flush by itself
takes {flush_ms:.2g} ms here (*disk*). *Constant answers*: the
SDK on a server without a service, which answers at once with bodies that are ready: what the SDK
itself takes, {step_ms:.2g} ms for an optim_step and no more than {samples_per_s:.0f} samples a
second; no server makes that less. Training operations of one model run in order, so those in flight
queue behind each other and their latency is mostly that queue; the rate is what counts there. More
baselines of the same run: a health check over the same connections, and the fake backend called
directly. Client and server share the cores."""
