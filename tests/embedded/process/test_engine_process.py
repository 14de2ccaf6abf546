"""The engine as a process: calls, concurrency, errors, death and restart."""

import asyncio
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from tests.embedded.tiny import ask, random_prompt, supervised
from tests.waiting import async_wait_for
from tinkercloud.config import Config, EngineConfig, ModelSource
from tinkercloud.core.types import AdamParams, FromBase, FromModel, LoraSpec, TrainBatch
from tinkercloud.embedded.backend import EmbeddedBackend
from tinkercloud.embedded.process import host
from tinkercloud.embedded.process.probe import EngineProbe
from tinkercloud.errors import ConfigError, EngineDied, ModelStateLost, UserError, VersionLost


def config(folder: Path, tmp_path: Path, **engine: int) -> Config:
    return Config(
        data_dir=tmp_path,
        models=(ModelSource("tiny", folder),),
        dtype="float32",
        engine=EngineConfig(**engine),
    )


@pytest.fixture
async def backend(folder: Path, tmp_path: Path) -> AsyncIterator[EmbeddedBackend]:
    backend = EmbeddedBackend(config(folder, tmp_path))
    (served,) = await backend.start()
    assert (served.name, served.architecture, served.vocab_size) == ("tiny", "llama", 260)
    await backend.loaded()
    yield backend
    await backend.stop()


BATCH = TrainBatch((supervised(40, 1),), "cross_entropy")


async def kill_engine(backend: EmbeddedBackend) -> None:
    os.kill(backend._host._process.pid, signal.SIGKILL)


async def end_engine(backend: EmbeddedBackend) -> None:
    """As `kill_engine`, and wait until the backend knows it."""
    await kill_engine(backend)
    await async_wait_for("the engine has ended", backend.stats, lambda s: not s["engine_alive"])


async def test_a_model_trains_and_is_sampled_across_the_process_boundary(
    backend: EmbeddedBackend, tmp_path: Path
) -> None:
    await backend.create_model("m", "tiny", LoraSpec(rank=4, seed=0))
    losses = []
    for _ in range(15):
        losses.append((await backend.forward_backward("m", BATCH)).metrics["loss:sum"])
        await backend.optim_step("m", AdamParams(learning_rate=0.01))
    assert losses[-1] < losses[0] / 2
    version = await backend.publish(FromModel("m"))
    output = await backend.sample(version, ask(random_prompt(5, 1), n=3))
    assert [len(s.tokens) <= 8 for s in output.sequences] == [True] * 3
    (tmp_path / "save").mkdir()
    await backend.save_model("m", tmp_path / "save", with_optimizer=True)
    spec = await backend.load_model("m2", "tiny", tmp_path / "save", with_optimizer=True)
    assert spec == LoraSpec(rank=4, seed=0)
    after = [await backend.forward_backward(m, BATCH) for m in ("m", "m2")]
    assert after[0].metrics == after[1].metrics


async def test_an_engine_that_does_not_answer_is_not_ready(backend: EmbeddedBackend) -> None:
    assert await backend.readiness() == {"engine": None}
    await backend._probe._question
    pid = backend._host._process.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        backend._probe = EngineProbe(backend._host, silence_s=0.2)
        reason = (await backend.readiness())["engine"]
        assert reason is not None
        assert "has not answered for" in reason
    finally:
        os.kill(pid, signal.SIGCONT)
    await backend._probe._question
    backend._probe = EngineProbe(backend._host)
    assert await backend.readiness() == {"engine": None}


async def test_errors_keep_their_class_and_text(backend: EmbeddedBackend, tmp_path: Path) -> None:
    with pytest.raises(ModelStateLost, match="'nobody'"):
        await backend.optim_step("nobody", AdamParams())
    with pytest.raises(VersionLost, match="'v-0'"):
        await backend.sample("v-0", ask([1]))
    with pytest.raises(UserError, match="not a checkpoint"):
        await backend.load_model("m", "tiny", tmp_path, with_optimizer=False)


async def test_samples_are_answered_while_a_long_training_call_runs(
    folder: Path, tmp_path: Path
) -> None:
    backend = EmbeddedBackend(config(folder, tmp_path, microbatch_tokens=64))
    await backend.start()
    try:
        await backend.create_model("m", "tiny", LoraSpec(rank=4, seed=0))
        version = await backend.publish(FromBase("tiny"))
        long = TrainBatch(tuple(supervised(60, i) for i in range(2000)), "cross_entropy")
        training = asyncio.create_task(backend.forward_backward("m", long))
        await asyncio.sleep(0.1)
        for seed in range(3):
            await backend.sample(version, ask(random_prompt(5, 1), seed=seed))
        assert not training.done()
        assert len((await training).outputs) == 2000
    finally:
        await backend.stop()


async def test_when_the_engine_dies_its_calls_fail_and_a_new_one_serves(
    backend: EmbeddedBackend,
) -> None:
    await backend.create_model("m", "tiny", LoraSpec(rank=4, seed=0))
    version = await backend.publish(FromBase("tiny"))
    long = TrainBatch(tuple(supervised(60, i) for i in range(2000)), "cross_entropy")
    training = asyncio.create_task(backend.forward_backward("m", long))
    await asyncio.sleep(0.2)
    await kill_engine(backend)
    with pytest.raises(EngineDied, match="the models are restored"):
        await training
    # These wait for the new engine, which knows neither the model nor the version.
    with pytest.raises(ModelStateLost):
        await backend.optim_step("m", AdamParams())
    with pytest.raises(VersionLost):
        await backend.sample(version, ask([1]))
    again = await backend.publish(FromBase("tiny"))
    output = await backend.sample(again, ask(random_prompt(5, 1)))
    assert np.isfinite(output.sequences[0].logprobs).all()
    assert backend.stats()["engine_restarts"] == 1


async def test_an_engine_that_keeps_dying_is_started_again_and_again(
    backend: EmbeddedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "restart_wait_s", lambda num_starts: 0.01 * num_starts)
    for number in range(1, 8):
        await end_engine(backend)
        assert "started again" in str(backend.queue_state("m"))
        assert backend.trouble() == backend.queue_state("m")
        await backend.publish(FromBase("tiny"))
        assert backend.stats()["engine_restarts"] == number
    assert backend.queue_state("m") is None


def test_starts_are_further_and_further_apart() -> None:
    waits = [host.restart_wait_s(num_starts) for num_starts in range(12)]
    assert waits[:5] == [0, 0.5, 1, 2, 4]
    assert waits[-1] == waits[-2] == host.LONGEST_WAIT_S


async def test_a_model_that_cannot_be_served_fails_the_start(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    backend = EmbeddedBackend(config(tmp_path, tmp_path))
    with pytest.raises(ConfigError, match="GPT2LMHeadModel"):
        await backend.start()
    await backend.stop()


async def test_calls_wait_for_the_weights_and_are_told_so(folder: Path, tmp_path: Path) -> None:
    backend = EmbeddedBackend(config(folder, tmp_path))
    (served,) = await backend.start()
    try:
        assert served.name == "tiny"
        os.kill(backend._host._process.pid, signal.SIGSTOP)
        assert "loading" in str(backend.trouble())
        assert backend.queue_state("m") == backend.trouble()
        waiting = asyncio.create_task(backend.publish(FromBase("tiny")))
        assert not (await asyncio.wait([waiting], timeout=0.2))[0]
        os.kill(backend._host._process.pid, signal.SIGCONT)
        await asyncio.wait_for(backend.loaded(), 60)
        assert backend.trouble() is None
        assert (await waiting).startswith("v-")
    finally:
        await backend.stop()


async def test_an_engine_killed_while_it_loads_is_started_again(
    folder: Path, tmp_path: Path
) -> None:
    backend = EmbeddedBackend(config(folder, tmp_path))
    await backend.start()
    try:
        await kill_engine(backend)
        await asyncio.wait_for(backend.loaded(), 60)
        assert backend.stats()["engine_restarts"] == 1
        await backend.publish(FromBase("tiny"))
    finally:
        await backend.stop()


async def test_one_that_is_killed_at_each_first_load_is_given_up(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "restart_wait_s", lambda num_starts: 0.0)
    backend = EmbeddedBackend(config(folder, tmp_path))
    await backend.start()
    try:
        loaded = asyncio.create_task(backend.loaded())
        killed = set()
        while not loaded.done():
            if (process := backend._host._process).pid not in killed and (
                backend.stats()["engine_restarts"] == len(killed)
            ):
                killed.add(process.pid)
                process.kill()
            await asyncio.sleep(0)
        with pytest.raises(ConfigError, match="SIGKILL 3 times while it loaded"):
            await loaded
        assert len(killed) == host.MAX_FIRST_STARTS
    finally:
        await backend.stop()


async def test_an_engine_that_fails_while_it_loads_is_not_started_again(
    folder: Path, tmp_path: Path
) -> None:
    copied = tmp_path / "model"
    shutil.copytree(folder, copied)
    (copied / "tokenizer.json").write_text("{}")
    backend = EmbeddedBackend(config(copied, tmp_path / "data"))
    await backend.start()
    try:
        with pytest.raises(ConfigError, match="ended with code 1 while loading"):
            await asyncio.wait_for(backend.loaded(), 60)
        assert backend.stats()["engine_restarts"] == 0
    finally:
        await backend.stop()


async def test_tensors_that_do_not_fit_are_refused_before_the_weights_are_read(
    folder: Path, tmp_path: Path
) -> None:
    copied = tmp_path / "model"
    shutil.copytree(folder, copied)
    settings = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**settings, "intermediate_size": 80}))
    backend = EmbeddedBackend(config(copied, tmp_path / "data"))
    with pytest.raises(ConfigError, match="of the wrong shape"):
        await backend.start()
    await backend.stop()


async def test_stop_ends_the_process_and_the_calls_underway(folder: Path, tmp_path: Path) -> None:
    backend = EmbeddedBackend(config(folder, tmp_path))
    await backend.start()
    pid = backend._host._process.pid
    await backend.create_model("m", "tiny", LoraSpec(rank=4, seed=0))
    long = TrainBatch(tuple(supervised(60, i) for i in range(2000)), "cross_entropy")
    training = asyncio.create_task(backend.forward_backward("m", long))
    await asyncio.sleep(0.2)
    await backend.stop()
    with pytest.raises(EngineDied, match="shutting down"):
        await training
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
