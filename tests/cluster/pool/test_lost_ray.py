"""Ray's daemon on the server's machine is killed: the server says that it is not ready, takes a new
Ray and new GPUs, and goes on where checkpoints and versions are."""

import asyncio
import time
from operator import not_
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.waiting import async_wait_for
from tinkercloud.cluster.backend import ClusterBackend
from tinkercloud.core.types import AdamParams, Datum, LoraSpec, TrainBatch
from tinkercloud.errors import EngineDied, TrainingRewound

SPEC = LoraSpec(rank=4, seed=1)


def batch(tokens: int, *, forward_only: bool = False) -> TrainBatch:
    datum = Datum(
        np.ones(tokens, np.int32),
        {
            "target_tokens": np.full(tokens, 5, np.int64),
            "weights": np.full(tokens, 1 / tokens, np.float32),
        },
    )
    return TrainBatch((datum,), "cross_entropy", forward_only=forward_only)


def kill_raylet() -> None:
    below = psutil.Process().children(recursive=True)
    raylets = [process for process in below if process.name() == "raylet"]
    assert len(raylets) == 1
    raylets[0].kill()


async def until(backend: ClusterBackend, *, ready: bool) -> float:
    """Seconds that it took."""
    begun = time.monotonic()
    await async_wait_for(
        "it is ready" if ready else "it is not ready",
        backend.readiness,
        lambda reasons: all(reason is None for reason in reasons.values()) == ready,
    )
    return time.monotonic() - begun


async def loss(backend: ClusterBackend, tokens: int = 1) -> float:
    output = await backend.forward_backward("m", batch(tokens, forward_only=True))
    return output.metrics["loss:sum"]


async def step(backend: ClusterBackend) -> None:
    await backend.forward_backward("m", batch(1))
    await backend.optim_step("m", AdamParams(learning_rate=0.1))


async def test_a_killed_raylet_is_seen_at_once_and_models_come_back_from_their_checkpoints(
    backend: ClusterBackend, tmp_path: Path
):
    await backend.create_model("m", "a", SPEC)
    await step(backend)
    (tmp_path / "saved").mkdir()
    await backend.save_model("m", tmp_path / "saved", with_optimizer=True)
    saved = await loss(backend)
    await step(backend)
    kill_raylet()
    assert await until(backend, ready=False) < 10.0  # Ray itself may take half a minute
    reasons = await backend.readiness()
    assert "raylet" in str(reasons["engine"])
    assert reasons["placement"] == reasons["engine"] == backend.trouble()
    # It waits for the new Ray, which takes less than the placement's time.
    with pytest.raises(TrainingRewound, match="restored to"):
        await loss(backend)
    assert backend.trouble() is None
    assert await loss(backend) == pytest.approx(saved)
    assert await loss(backend, tokens=400_000) == pytest.approx(saved, rel=1e-4)
    await step(backend)
    assert await loss(backend) < saved


async def test_what_runs_when_the_raylet_is_killed_fails_and_the_next_operation_does_not(
    backend: ClusterBackend, faults: Path
):
    await backend.create_model("m", "a", SPEC)
    (faults / "forward_only-0-hang").touch()
    running = asyncio.create_task(loss(backend))
    await async_wait_for("the rank hangs", lambda: list(faults.iterdir()), not_)
    kill_raylet()
    async with asyncio.timeout(60):  # half of what a rank may take that hangs
        with pytest.raises(EngineDied, match="raylet"):
            await running
    assert await loss(backend) == pytest.approx(np.log(32))


async def test_a_large_batch_does_not_end_the_server_when_the_raylet_has_just_died(
    backend: ClusterBackend,
):
    """Ray's store ends the process that puts into it then."""
    await backend.create_model("m", "a", SPEC)
    expected = await loss(backend, tokens=400_000)
    kill_raylet()
    await until(backend, ready=False)
    large = await asyncio.gather(
        *(loss(backend, tokens=400_000) for _ in range(3)), return_exceptions=True
    )
    assert all(isinstance(r, EngineDied) or r == pytest.approx(expected) for r in large)
    assert await loss(backend, tokens=400_000) == pytest.approx(expected)
