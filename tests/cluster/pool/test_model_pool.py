"""Pools of the backend on real Ray, with ranks of a model that can be checked by hand and engines
that cannot start: what fails leaves nothing, what waits gets its turn."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.cluster.ray_cluster import groups_alive, one_node, wait_until_settled
from tests.waiting import LIMIT_S, async_wait_for
from tinkercloud.cluster.backend import ClusterBackend
from tinkercloud.cluster.gpus import placement
from tinkercloud.core.types import (
    AdamParams,
    Datum,
    FromBase,
    LoraSpec,
    SampleRequest,
    SamplingParams,
    TrainBatch,
)
from tinkercloud.errors import CapacityTimeout, EngineDied, ModelStateLost, UserError

SPEC = LoraSpec(rank=4, seed=1)
FULL = LoraSpec(rank=0, seed=0)
ONE = Datum(
    np.ones(1, np.int32),
    {"target_tokens": np.full(1, 5, np.int64), "weights": np.ones(1, np.float32)},
)
BATCH = TrainBatch((ONE,), "cross_entropy")
SAMPLE = SampleRequest(np.ones(2, np.int32), 1, SamplingParams(max_tokens=1, seed=0))


@pytest.fixture(scope="module", autouse=True)
def ray() -> Iterator[None]:
    with one_node(cpus=2):
        yield


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    wait_until_settled()


async def train(backend: ClusterBackend, model_id: str) -> float:
    output = await backend.forward_backward(model_id, BATCH)
    await backend.optim_step(model_id, AdamParams(learning_rate=0.1))
    return output.metrics["loss:sum"]


async def until_waiting(backend: ClusterBackend, subject: str) -> None:
    await async_wait_for(
        "it says for what it waits",
        lambda: backend.queue_state(subject),
        lambda reason: reason == "waiting until 2 CPU bundles are free",
    )


@pytest.mark.parametrize(
    ("fault", "spec"),
    [
        pytest.param("placement", SPEC, marks=pytest.mark.slow),
        ("start-1-die", SPEC),
        pytest.param("start-0-raise", SPEC, marks=pytest.mark.slow),
        pytest.param("create-1-raise", SPEC, marks=pytest.mark.slow),
        ("placement", FULL),
        pytest.param("create-0-die", FULL, marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else f"rank {value.rank}",
)
async def test_a_fault_at_any_step_of_creation_leaves_no_process_and_the_next_creation_works(
    backend: ClusterBackend, faults: Path, monkeypatch, fault: str, spec: LoraSpec
):
    async def broken(*_: object) -> None:
        raise RuntimeError("injected")

    if fault != "placement":
        (faults / fault).touch()
    with monkeypatch.context() as patch:
        if fault == "placement":
            patch.setattr(placement, "_probe", broken)
        with pytest.raises((EngineDied, RuntimeError)):
            await backend.create_model("m", "a", spec)
    await asyncio.to_thread(wait_until_settled)
    with pytest.raises(ModelStateLost):
        await train(backend, "m")
    await backend.create_model("m", "a", spec)
    assert await train(backend, "m") > await train(backend, "m")


async def test_a_refused_model_does_not_disturb_others_in_its_pool(
    backend: ClusterBackend, faults: Path
):
    await backend.create_model("first", "a", SPEC)
    losses = [await train(backend, "first")]
    for rank in (0, 1):
        (faults / f"create-{rank}-refuse").touch()
    with pytest.raises(UserError, match="refused"):
        await backend.create_model("second", "a", SPEC)
    losses += [await train(backend, "first")]
    assert losses[1] < losses[0]
    assert backend.stats()["a: rank_restarts"] == 0


async def test_a_cancelled_creation_leaves_no_process(backend: ClusterBackend, faults: Path):
    (faults / "start-1-hang").touch()
    creating = asyncio.create_task(backend.create_model("m", "a", SPEC))
    await asyncio.sleep(3.0)
    creating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await creating
    await asyncio.to_thread(wait_until_settled)


async def test_a_model_waits_says_why_and_is_created_when_another_is_deleted(
    backend: ClusterBackend,
):
    await backend.create_model("first", "a", FULL)
    second = asyncio.create_task(backend.create_model("second", "b", SPEC))
    await until_waiting(backend, "second")
    await train(backend, "first")
    assert not second.done()
    await backend.delete_model("first")
    await asyncio.wait_for(second, LIMIT_S)
    assert backend.queue_state("second") is None
    await train(backend, "second")


async def test_a_sample_that_finds_no_gpus_says_what_it_waits_for(backend: ClusterBackend):
    await backend.create_model("first", "a", FULL)
    version = await backend.publish(FromBase("b"))
    prompt = np.array([1, 2, 3], np.int32)
    request = SampleRequest(prompt, 1, SamplingParams(max_tokens=1, seed=0))
    sampling = asyncio.create_task(backend.sample(version, request))
    await until_waiting(backend, version)
    sampling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sampling
    assert backend.queue_state(version) is None


@pytest.mark.parametrize("backend", [20.0], indirect=True)
async def test_a_model_that_waits_too_long_fails_with_the_reason(backend: ClusterBackend):
    await backend.create_model("first", "a", FULL)
    with pytest.raises(CapacityTimeout, match="got no 2 CPU bundles within 20 s"):
        await backend.create_model("second", "a", FULL)
    await train(backend, "first")


async def test_the_pool_of_a_base_without_models_is_closed_when_another_waits(
    backend: ClusterBackend,
):
    await backend.create_model("first", "a", SPEC)
    await backend.delete_model("first")
    assert groups_alive() == ["a"]
    await asyncio.wait_for(backend.create_model("second", "b", SPEC), LIMIT_S)
    assert groups_alive() == ["b"]


async def test_an_engine_that_cannot_start_fails_its_samples_and_not_the_training(
    backend: ClusterBackend,
):
    await backend.create_model("m", "a", SPEC)
    version = await backend.publish(FromBase("a"))
    first = await train(backend, "m")
    with pytest.raises(EngineDied, match="no engine here"):
        await backend.sample(version, SAMPLE)
    assert await train(backend, "m") < first
    assert backend.stats()["a: rank_restarts"] == 0
