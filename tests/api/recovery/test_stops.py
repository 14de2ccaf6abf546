"""A server that is stopped while an operation takes longer than it may."""

import asyncio
from pathlib import Path

import pytest

from tests.api.harness import Api, serving
from tests.api.recovery.test_recovery import ADAM, goes_on, hold_passes, train
from tests.waiting import LIMIT_S
from tinkercloud.backends.fake import FakeBackend
from tinkercloud.config import Config
from tinkercloud.core.types import TrainBatch, TrainOutput
from tinkercloud.services.recovery import snapshots


async def test_a_stop_waits_no_longer_than_configured_and_what_ran_begins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "SHARE", 0.0)  # none is due
    async with serving(tmp_path, drain_s=0.2) as api:
        held = await api.model()
        number = await train(api, held, 1)
        is_held = hold_passes(api, asyncio.Event())
        running = await api.forward_backward(held, number)
        queued = await api.optim_step(held, number + 1, **ADAM)
        await is_held.wait()
        async with asyncio.timeout(LIMIT_S):
            await api.services.stop_work()
        database, keys = api.services.database, api.keys
        kept = await database.all("SELECT model_id FROM snapshots")
        assert not kept, "half of an operation is no state"
        rows = await database.all("SELECT request_id FROM futures WHERE status = 'pending'")
        assert {row["request_id"] for row in rows} == {r["request_id"] for r in (running, queued)}
    async with serving(tmp_path) as server:
        api = Api(server.app, keys, keys["ann"])
        assert (await api.result(running)).metrics
        assert (await api.result(queued))["metrics"]["unclipped_grad_l2:mean"] > 0


class WithEngineProcess(FakeBackend):
    """As with an engine in a process of its own: who gives a pass up does not end it there. The
    third one takes until the gate is open."""

    def __init__(self) -> None:
        super().__init__(Config(backend="fake"))
        self.gate, self.is_held = asyncio.Event(), asyncio.Event()
        self.passes: list[asyncio.Task[TrainOutput]] = []

    async def forward_backward(self, model_id: str, batch: TrainBatch) -> TrainOutput:
        computing = asyncio.create_task(self._compute(model_id, batch, len(self.passes)))
        self.passes.append(computing)
        return await asyncio.shield(computing)

    async def _compute(self, model_id: str, batch: TrainBatch, number: int) -> TrainOutput:
        if number == 2:
            self.is_held.set()
            await self.gate.wait()
        return await super().forward_backward(model_id, batch)


async def test_a_pass_that_the_engine_ends_after_a_stop_has_given_it_up_is_not_done_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "SHARE", 0.0)  # none is due
    results = []
    for folder in (tmp_path / "undisturbed", tmp_path / "stopped"):
        backend = WithEngineProcess()
        async with serving(folder, backend=backend, drain_s=0.2) as api:
            keys, model_id = api.keys, await api.model()
            number = await train(api, model_id, 1, steps=1)
            if folder.name == "undisturbed":
                backend.gate.set()
            last = await api.forward_backward(model_id, number)
            await backend.is_held.wait()
            if folder.name == "stopped":
                await api.services.stop_work()
                backend.gate.set()
                await asyncio.wait(backend.passes)
            else:
                await api.result(last)
        # `serving` closes as every server's process does at its end: it stops the work once more
        async with serving(folder) as server:
            api = Api(server.app, keys, keys["ann"])
            results.append([(await api.result(last)).metrics])
            results[-1] += await goes_on(api, model_id, number + 1)
    assert results[0] == results[1]


async def test_a_server_that_was_stopped_has_no_second_time_when_it_closes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, drain_s=LIMIT_S) as api:
        given: list[float] = []

        async def close(keys: object, within_s: float) -> None:
            given.append(within_s)

        monkeypatch.setattr(api.services.snapshots, "close", close)
        await api.services.stop_work()
    assert given[0] > 0
    assert given[1:] == [0.0]
