"""What Ray and the service cost on top of Megatron's own time, on two ranks without a GPU.

The same forward_backward, one at a time, through the backend in this process (Ray alone), and
through a server by plain HTTP (Ray and service). Megatron's own time is the slower rank's, measured
inside the ranks in the same run; the rest of the wall time is the overhead. Log-probabilities are
compared with transformers' first.
"""

import asyncio
import json
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPConnection
from itertools import count
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np

from benchmarks.lib.arguments import BenchmarkParser
from benchmarks.lib.machine import versions
from benchmarks.lib.processes import prepare_process
from benchmarks.lib.report import Cell, Report, Target
from benchmarks.lib.server import our_server
from benchmarks.lib.timing import quantile
from benchmarks.lib.tinker_http import JSON, PROTO, SDK_VERSION
from tests.cluster.cpu.serving import cluster_arguments
from tests.cluster.cpu.tiny import write_model
from tests.serving import Server
from tinkercloud.cluster.backend import ClusterBackend
from tinkercloud.config import load_config
from tinkercloud.core.types import Datum, LoraSpec, TrainBatch
from tinkercloud.wire import codec

MODEL, RANK = "tiny", 8
SHAPES = ((1, 32), (8, 64), (64, 128))  # datums, tokens of each
COLUMNS = (
    *("through", "datums", "tokens", "count", "wall p50 ms", "ranks p50 ms"),
    *("overhead p50 ms", "overhead p99 ms"),
)
TARGET_MS = 10.0
IDLE_S = 0.02
WARM_UPS = 3


@dataclass(frozen=True)
class Row:
    through: str
    datums: int
    tokens: int
    wall_ms: np.ndarray
    ranks_ms: np.ndarray

    @property
    def overhead_ms(self) -> np.ndarray:
        return self.wall_ms - self.ranks_ms

    def cells(self) -> tuple[Cell, ...]:
        medians = (round(quantile(times, 0.5), 2) for times in (self.wall_ms, self.ranks_ms))
        overheads = (round(quantile(self.overhead_ms, share), 2) for share in (0.5, 0.99))
        counts = (self.datums, self.tokens, len(self.wall_ms))
        return (self.through, *counts, *medians, *overheads)


def batch(datums: int, length: int) -> TrainBatch:
    generator = np.random.default_rng(datums)
    data = []
    for _ in range(datums):
        tokens = generator.integers(3, 250, length + 1).astype(np.int32)
        inputs = {
            "target_tokens": tokens[1:].astype(np.int64),
            "weights": np.ones(length, np.float32),
        }
        data.append(Datum(tokens[:-1], inputs))
    return TrainBatch(tuple(data), "cross_entropy")


NOTHING = TrainBatch((), "cross_entropy")


async def measured(
    through: str,
    work: TrainBatch,
    operation: Callable[[], Awaitable[None]],
    busy_ms: Callable[[], Awaitable[float]],
    repeats: int,
) -> Row:
    walls, ranks = [], []
    for i in range(repeats + WARM_UPS):
        before = await busy_ms()
        start = time.perf_counter()
        await operation()
        wall = 1e3 * (time.perf_counter() - start)
        if i >= WARM_UPS:
            walls.append(wall)
            ranks.append(await busy_ms() - before)
    tokens = sum(len(datum.tokens) for datum in work.data)
    return Row(through, len(work.data), tokens, np.array(walls), np.array(ranks))


async def through_ray(folder: Path, data_dir: Path, repeats: int) -> list[Row]:
    flags = dict(flag.removeprefix("--").split("=", 1) for flag in cluster_arguments(ranks=2, dp=2))
    names = {"backend": flags.pop("backend")} | {
        f"cluster.{name.removeprefix('cluster-').replace('-', '_')}": value
        for name, value in flags.items()
    }
    config = load_config({**names, "models": [f"{MODEL}={folder}"], "data_dir": data_dir}, {})
    backend = ClusterBackend(config)
    await backend.start()
    rows = []
    try:
        await backend.create_model("m", MODEL, LoraSpec(rank=RANK, seed=1))

        async def busy_ms() -> float:
            return float(backend.stats()[f"{MODEL}: rank_busy_ms"])

        for shape in SHAPES:
            work = batch(*shape)
            output = await backend.forward_backward("m", work)
            check(folder, work, [each["logprobs"] for each in output.outputs])

            async def operation(work: TrainBatch = work) -> None:
                await backend.forward_backward("m", work)

            rows.append(await measured("Ray", work, operation, busy_ms, repeats))
        rows.append(await empty_calls(repeats))
    finally:
        await backend.stop()
    return rows


async def empty_calls(repeats: int) -> Row:
    """The baseline of Ray itself: two actors that wait a while each, and compute nothing."""
    import ray

    class Idle:
        def wait(self, request: bytes) -> bytes:
            time.sleep(IDLE_S)
            return request

    actors = [ray.remote(num_cpus=0)(Idle).remote() for _ in range(2)]
    waited = 0.0

    async def operation() -> None:
        nonlocal waited
        await asyncio.gather(*(actor.wait.remote(bytes(600)) for actor in actors))
        waited += 1e3 * IDLE_S

    async def busy_ms() -> float:
        return waited

    row = await measured("Ray, two empty calls", NOTHING, operation, busy_ms, repeats)
    for actor in actors:
        ray.kill(actor)
    return row


def check(folder: Path, work: TrainBatch, logprobs: list[np.ndarray]) -> None:
    """Against transformers: a fast wrong answer is worth nothing."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.from_numpy(np.stack([datum.tokens for datum in work.data]).astype(np.int64))
    targets = torch.from_numpy(np.stack([datum.inputs["target_tokens"] for datum in work.data]))
    with torch.no_grad():
        scores = torch.log_softmax(model(ids).logits, -1).gather(-1, targets[..., None])[..., 0]
    np.testing.assert_allclose(np.stack(logprobs), scores.numpy(), atol=1e-4)


class Connection:
    """By the standard library: little of the client's own time is in the figures."""

    def __init__(self, server: Server):
        address = urlsplit(server.base_url)
        self._connection = HTTPConnection(str(address.hostname), address.port, timeout=300)
        self._key = server.api_key

    def send(self, method: str, path: str, body: bytes = b"", **headers: str) -> bytes:
        """The answer's body; sent again while the answer is 408."""
        headers = {"X-API-Key": self._key, "Content-Type": JSON, **headers}
        while True:
            self._connection.request(method, path, body, headers)
            answer = self._connection.getresponse()
            content = answer.read()
            if answer.status != HTTPStatus.REQUEST_TIMEOUT:
                break
        assert answer.status == HTTPStatus.OK, content
        if answer.headers["Content-Type"] == JSON:
            assert "error" not in json.loads(content), content
        return content

    def post(self, call: str, **body: object) -> dict[str, str]:
        return json.loads(self.send("POST", f"/api/v1/{call}", json.dumps(body).encode()))

    def retrieve(self, request_id: str, accept: str = JSON) -> bytes:
        body = {"request_id": request_id, "allow_metadata_only": False}
        path = "/api/v1/retrieve_future"
        return self.send("POST", path, json.dumps(body).encode(), Accept=accept)


async def through_service(server: Server, repeats: int) -> list[Row]:
    connection = Connection(server)
    session = connection.post("create_session", sdk_version=SDK_VERSION, tags=[])
    created = connection.post(
        "create_model",
        session_id=session["session_id"],
        base_model=MODEL,
        model_seq_id=0,
        lora_config={"rank": RANK},
    )
    model_id = json.loads(connection.retrieve(created["request_id"]))["model_id"]
    numbers = count(1)

    async def busy_ms() -> float:
        stats = json.loads(connection.send("GET", "/health"))["backend"]
        return float(stats[f"{MODEL}: rank_busy_ms"])

    def forward_backward(work: TrainBatch) -> None:
        request = codec.ForwardBackwardRequest(
            model_id=model_id,
            seq_id=next(numbers),
            data=tuple(codec.WireDatum((d.tokens,), d.inputs) for d in work.data),
            loss_fn="cross_entropy",
        )
        body = codec.encode_forward_backward_request(request)
        path = "/api/v1/forward_backward"
        future = json.loads(connection.send("POST", path, body, **{"Content-Type": PROTO}))
        result = connection.retrieve(future["request_id"], PROTO)
        assert len(codec.decode_train_output(result).outputs) == len(work.data)

    rows = []
    for shape in SHAPES:
        work = batch(*shape)

        async def operation(work: TrainBatch = work) -> None:
            forward_backward(work)

        rows.append(await measured("Ray and service", work, operation, busy_ms, repeats))

    async def empty_requests() -> None:
        for _ in range(2):  # a result takes two requests as well
            connection.send("GET", "/api/v1/healthz")

    async def nothing() -> float:
        return 0.0

    rows.append(
        await measured("HTTP, two health checks", NOTHING, empty_requests, nothing, repeats)
    )
    return rows


async def run(repeats: int) -> list[Row]:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        folder = write_model("llama", root / "model")
        rows = await through_ray(folder, root / "ray", repeats)
        flags = ("--model", f"{MODEL}={folder}", "--dtype", "float32")
        with our_server(*flags, *cluster_arguments(ranks=2, dp=2)) as server:
            rows += await through_service(server, repeats)
    return rows


def main() -> None:
    parser = BenchmarkParser("cluster_overhead", __doc__, quick="a tenth of the operations")
    options = parser.parse_args()
    prepare_process()
    rows = asyncio.run(run(10 if options.quick else 100))
    report = Report(
        title="Cluster overhead",
        about=ABOUT,
        command=parser.command(options),
        columns=COLUMNS,
        rows=[row.cells() for row in rows],
        versions=versions("tinkercloud", "ray", "megatron-core", "torch", "transformers"),
        targets=[target(row) for row in rows if row.datums],
    )
    report.publish(options.json)


def target(row: Row) -> Target:
    median_ms = round(quantile(row.overhead_ms, 0.5), 2)
    name = f"{row.through}, {row.datums} datums: overhead p50"
    return Target(name, median_ms, f"< {TARGET_MS:g} ms", median_ms < TARGET_MS)


ABOUT = """\
A tiny Llama on two data-parallel Megatron ranks over gloo, each an actor of a Ray on the same
machine; forward_backward one at a time. *ranks* is the slower rank's own time, measured inside it;
the overhead is the rest of the wall time: the batch on its way to the ranks, the calls, the
results, and for the second half HTTP, SQLite and protobuf on both sides. Ranks, server and client
share the cores. Baselines of the same run, which no overhead can be below: two actors of Ray that
wait 20 ms and compute nothing, and two HTTP requests that do nothing."""

if __name__ == "__main__":
    main()
