"""The trainer's weights in a live SGLang server: by handle, by broadcast, by disk; and what it
serves when a sync fails."""

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from tests.cluster.cpu import recorder
from tests.cluster.cpu.engines import (
    arguments,
    logprobs,
    processes,
    settings,
    sglang_command,
    wait_until_ended,
    write_served_model,
)
from tests.cluster.ray_cluster import one_node
from tests.embedded.tiny import ask, random_prompt, reference
from tinkercloud.cluster.rollout.manager import RolloutManager
from tinkercloud.cluster.rollout.weight_sync import (
    Route,
    Sent,
    Transfer,
    load_weights,
    send_weights,
)
from tinkercloud.cluster.weights import sender as weight_sender
from tinkercloud.cluster.weights.tensor_digest import tensor_digest
from tinkercloud.errors import EngineDied, VersionLost

pytestmark = pytest.mark.asyncio(loop_scope="module")

LIMIT = 2e-5
PROMPT = random_prompt(40, seed=4)
Bucket = list[tuple[str, Tensor]]


@dataclass
class Bench:
    """folders: the model's weights under other names, each a Hugging Face folder."""

    manager: RolloutManager
    base: Path
    record: Path
    folders: dict[str, Path] = field(default_factory=dict)

    async def scores(self, weights: str | None = None) -> np.ndarray:
        request = ask(PROMPT, max_tokens=1, prompt_logprobs=True)
        output = await self.manager.generate(None, request, weights)
        assert output.prompt_logprobs is not None
        return output.prompt_logprobs[1:]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with one_node():
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Bench]:
    logs = tmp_path_factory.mktemp("logs")
    base = write_served_model(tmp_path_factory.mktemp("model"))
    record = logs / "calls.jsonl"
    folders: dict[str, Path] = {}

    async def restore(weights: str) -> Path:
        return folders[weights]

    plain = arguments(enable_lora=False, max_lora_rank=None, max_loras_per_batch=None)
    told = settings(
        base, logs, command=recorder.recorded(record, sglang_command()), arguments=plain,
        router=False,
    )  # fmt: skip
    manager = RolloutManager(told, [()], restore)
    await manager.start()
    yield Bench(manager, base, record, folders)
    await manager.stop()


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """A folder with other weights by seed."""
    return lambda seed: write_served_model(tmp_path_factory.mktemp("other"), seed)


def buckets_of(model: LlamaForCausalLM, size: int = 5) -> list[Bucket]:
    tensors = [(name, tensor) for name, tensor in model.state_dict().items()]
    return [tensors[i : i + size] for i in range(0, len(tensors), size)]


def sender(buckets: Iterable[Bucket]) -> Callable[[Transfer], Awaitable[Sent]]:
    """One training rank, in a thread."""
    return lambda transfer: asyncio.to_thread(weight_sender.send, buckets, transfer)


def route(how: str) -> Route:
    return Route(how, tp=1, first_ranks={0: 0}, backend="gloo", timeout_s=60)


@pytest.mark.parametrize(("how", "seed"), [("tensor", 11), ("broadcast", 12), ("disk", 13)])
async def test_after_a_sync_the_engines_scores_are_those_of_the_new_weights(
    bench, other, how, seed
):
    folder, old = other(seed), bench.manager.weight_version()
    bench.folders[how] = folder
    model = reference(folder)
    before = await bench.scores(old)
    if how == "disk":
        await load_weights(bench.manager, how, folder)
    else:
        sent = await send_weights(bench.manager, how, route(how), sender(buckets_of(model)))
        assert sent.num_bytes == sum(t.nbytes for t in model.state_dict().values())
    assert bench.manager.weight_version() == how
    after = await bench.scores(how)
    np.testing.assert_allclose(after, logprobs(model, PROMPT), atol=LIMIT, rtol=0)
    assert np.abs(after - before).max() > 0.1
    with pytest.raises(VersionLost):
        await bench.scores(old)
    answers = recorder.calls(bench.record, "/update_weight_version")
    assert answers[-1]["body"]["new_version"] == how


async def test_weights_of_another_dtype_arrive_in_that_dtype(bench):
    """Tensors of several widths in one bucket, the odd one in the middle."""
    model = reference(bench.base)
    mixed = [
        (name, tensor.bfloat16() if i % 2 else tensor)
        for i, (name, tensor) in enumerate(model.state_dict().items())
    ]
    sent = await send_weights(bench.manager, "mixed", route("broadcast"), sender([mixed]))
    assert sum(digest.startswith("bfloat16") for digest in sent.digests.values()) > 5
    model.load_state_dict({name: tensor.float() for name, tensor in mixed})
    np.testing.assert_allclose(await bench.scores(), logprobs(model, PROMPT), atol=LIMIT, rtol=0)


async def test_the_calls_of_a_sync_come_in_order_while_no_request_runs(bench, other):
    model = reference(other(14))
    underway = asyncio.create_task(bench.manager.generate(None, ask(PROMPT, 1, 200, use_eos=False)))
    await asyncio.sleep(0.1)
    seen = len(recorder.calls(bench.record))
    buckets = buckets_of(model, size=8)
    await send_weights(bench.manager, "ordered", route("tensor"), sender(buckets))
    assert underway.done()
    asked = [call["path"] for call in recorder.calls(bench.record)[seen:]]
    assert asked == [
        "/generate",
        "/pause_generation",
        "/begin_weight_update",
        *["/update_weights_from_tensor"] * len(buckets),
        "/end_weight_update",
        "/weights_checker",
        "/flush_cache",
        "/update_weight_version",
        "/continue_generation",
    ]


async def test_weights_are_updated_while_cache_and_graphs_are_released(bench, other):
    """The order of a colocated step: weights up, update, then graphs and cache."""
    folder = other(15)
    bench.folders["colocated"] = folder
    await bench.manager.offload()
    await bench.manager.onload(["weights"])
    await send_weights(
        bench.manager, "colocated", route("tensor"), sender(buckets_of(reference(folder)))
    )
    waiting = asyncio.create_task(bench.scores("colocated"))
    await bench.manager.onload(["cuda_graph"])
    assert not waiting.done()
    await bench.manager.onload(["kv_cache"])
    expected = logprobs(reference(folder), PROMPT)
    np.testing.assert_allclose(await waiting, expected, atol=LIMIT, rtol=0)


@pytest.mark.slow
async def test_a_server_that_dies_restarts_with_the_weights_it_had(bench):
    weights = bench.manager.weight_version()
    engine = processes(bench.manager)
    before = await bench.scores(weights)
    server = next(p for p in engine[2:] if "cluster.sglang.entry" in " ".join(p.cmdline()))
    restarts = bench.manager.stats()["engine_restarts"]
    server.send_signal(signal.SIGKILL)
    await wait_until_ended(engine[3:])
    np.testing.assert_array_equal(await bench.scores(weights), before)
    assert bench.manager.stats()["engine_restarts"] == restarts + 1


@pytest.mark.parametrize("fault", ["shape", pytest.param("bytes", marks=pytest.mark.slow)])
async def test_after_a_failed_sync_the_engines_have_the_weights_from_before(bench, other, fault):
    """Half of the new weights were loaded; the engine does not serve them for a moment."""
    before, old = await bench.scores(), bench.manager.weight_version()
    if old not in bench.folders:
        bench.folders[old] = bench.base
    restarts = bench.manager.stats()["engine_restarts"]
    buckets = buckets_of(reference(other(16)))
    if fault == "shape":
        name, tensor = buckets[-1][-1]
        buckets[-1][-1] = (name, torch.zeros(3, *tensor.shape[1:]))
        send = sender(buckets)
    else:
        send = corrupted(buckets)
    underway = asyncio.create_task(send_weights(bench.manager, "never", route("tensor"), send))
    await asyncio.sleep(0)
    waiting = asyncio.create_task(bench.scores())
    with pytest.raises(EngineDied, match=r"load the weights|otherwise than they were sent"):
        await underway
    np.testing.assert_array_equal(await waiting, before)
    assert bench.manager.weight_version() == old
    assert bench.manager.stats()["engine_restarts"] > restarts


def corrupted(buckets: list[Bucket]) -> Callable[[Transfer], Awaitable[Sent]]:
    """Sends these buckets with one bit of one tensor turned on the way."""
    honest = {name: tensor_digest(tensor) for bucket in buckets for name, tensor in bucket}
    name, tensor = buckets[1][0]
    bits = tensor.clone().view(torch.int32)
    bits.view(-1)[7] ^= 1
    buckets[1][0] = (name, bits.view(torch.float32))

    async def send(transfer: Transfer) -> Sent:
        sent = await asyncio.to_thread(weight_sender.send, buckets, transfer)
        return Sent(sent.num_bytes, honest)

    return send


async def test_a_digest_changes_with_one_bit_and_with_swapped_values():
    tensor = torch.arange(1003, dtype=torch.float32)
    exchanged = tensor.clone()
    exchanged[[3, 900]] = tensor[[900, 3]]
    flipped = tensor.clone()
    flipped.view(torch.int32)[-1] ^= 1
    digests = [tensor_digest(t) for t in (tensor, exchanged, flipped, tensor.view(17, 59))]
    digests += [tensor_digest(tensor.bfloat16()), tensor_digest(tensor[:0])]
    assert len(set(digests)) == len(digests)
    assert tensor_digest(tensor.clone()) == digests[0]
    transposed = tensor.view(17, 59).T
    assert tensor_digest(transposed) == tensor_digest(transposed.contiguous())
