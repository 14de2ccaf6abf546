"""An engine comes back however often it ends, and the server says so meanwhile."""

import sys
from pathlib import Path

import pytest

from tests.api.harness import Api, serving
from tests.embedded.process.test_engine_process import config, kill_engine
from tests.waiting import async_wait_for
from tinkercloud.config import Config
from tinkercloud.embedded.backend import EmbeddedBackend
from tinkercloud.embedded.process import host
from tinkercloud.services.observability import readiness

NUM_STARTS = 12


def counting_failure(folder: Path) -> Path:
    """A program that is started as the engine is, and ends at once."""
    program = folder / "engine"
    program.write_text(f'#!/bin/sh\necho start >> "{folder}/starts"\nexit 1\n')
    program.chmod(0o755)
    return program


async def test_one_that_ends_at_each_of_twelve_starts_comes_back(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    waits: list[int] = []
    monkeypatch.setattr(host, "restart_wait_s", lambda num_starts: waits.append(num_starts) or 0.01)
    monkeypatch.setattr(readiness, "REMEMBERED_S", 0.0)
    backend = EmbeddedBackend(config(folder, tmp_path / "data"))
    async with serving(tmp_path, backend=backend, hold_s=0.1) as api:
        model_id = await trained(api)
        with monkeypatch.context() as broken:
            broken.setattr(sys, "executable", str(tmp_path / "missing"))
            await kill_engine(backend)
            await async_wait_for(
                "the log says that no engine starts",
                lambda: caplog.text,
                lambda text: "no engine process can be started" in text,
            )
            broken.setattr(sys, "executable", str(counting_failure(tmp_path)))
            accepted = await api.optim_step(model_id, 2, learning_rate=0.1)
            await async_wait_for(
                f"it was started {NUM_STARTS} times",
                lambda: num_starts(tmp_path),
                lambda number: number >= NUM_STARTS,
            )
            assert (await api.http.get("/healthz")).status_code == 200
            ready = await api.http.get("/readyz")
            assert ready.status_code == 503
            assert "started again" in ready.json()["checks"]["engine"]
            assert (await api.http.get("/health")).json()["status"] == "degraded"
            poll = await api.retrieve(accepted["request_id"])
            assert (poll.status_code, poll.json()["type"]) == (408, "try_again")
            assert "started again" in poll.json()["queue_state_reason"]
        assert (await api.result(accepted))["metrics"]["unclipped_grad_l2:mean"] > 0
        assert (await api.http.get("/readyz")).status_code == 200
        assert waits == list(range(len(waits))), "each wait is by the number of starts of late"


async def trained(api: Api) -> str:
    """A model with a gradient."""
    model_id = await api.model(base_model="tiny")
    await api.result(await api.forward_backward(model_id, 1))
    return model_id


def num_starts(folder: Path) -> int:
    path = folder / "starts"
    return len(path.read_text().splitlines()) if path.exists() else 0


async def test_a_server_whose_first_engine_cannot_be_started_says_why(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = EmbeddedBackend(Config(data_dir=tmp_path, models=config(folder, tmp_path).models))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "missing"))
    with pytest.raises(host.ConfigError, match=r"no engine process can be started: .*missing"):
        await backend.start()
    await backend.stop()
