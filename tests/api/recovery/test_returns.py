"""A model on its way back: what its clients are told, and what happens where that way ends the
engine each time."""

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.api.harness import Api, serving
from tests.api.recovery.test_engine_ends import Mortal
from tests.api.recovery.test_idle_models import published
from tests.api.recovery.test_recovery import ADAM, train
from tests.waiting import async_wait_for
from tinkercloud.core.types import TrainBatch, TrainOutput
from tinkercloud.services.recovery import returns, snapshots

BROUGHT_BACK = "the model is being brought back: its operation 1 (ForwardBackward) is done again"


class SlowAfterAnEnd(Mortal):
    """Passes that come after an end wait until they are let go."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on = asyncio.Event()

    async def forward_backward(self, model_id: str, batch: TrainBatch) -> TrainOutput:
        if self.num_ends:
            await self.goes_on.wait()
        return await super().forward_backward(model_id, batch)


async def test_operations_and_samples_say_that_their_model_is_being_brought_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "SHARE", 0.0)
    backend = SlowAfterAnEnd()
    async with serving(tmp_path, backend=backend, hold_s=0.05) as api:
        model_id = await api.model()
        number = await train(api, model_id, 1)
        sampler = await published(api, model_id, number)
        backend.end()
        step = await api.optim_step(model_id, number + 1, **ADAM)
        sample = await api.sample(sampler, seed=1)
        for accepted in (step, sample):
            await async_wait_for(
                "the reason is told",
                lambda accepted=accepted: reason(api, accepted["request_id"]),
                lambda told: told == BROUGHT_BACK,
            )
        backend.goes_on.set()
        assert "metrics" in await api.result(step)
        await api.result(sample)


async def reason(api: Api, request_id: str) -> str | None:
    return (await api.retrieve(request_id)).json().get("queue_state_reason")


class EndsAtReplays(Mortal):
    """The second pass of `killer` ends it whenever it is done again."""

    def __init__(self) -> None:
        super().__init__()
        self.killer = ""
        self._num_passes = 0

    async def create_model(self, model_id: str, *args: object) -> None:
        if model_id == self.killer:
            self._num_passes = 0
        await super().create_model(model_id, *args)  # type: ignore[arg-type]

    async def forward_backward(self, model_id: str, batch: TrainBatch) -> TrainOutput:
        if model_id == self.killer:
            self._num_passes += 1
            self.ends[model_id] = int(self._num_passes == 2)
        return await super().forward_backward(model_id, batch)


async def test_a_replay_that_ends_the_engine_each_time_fails_by_name_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "SHARE", 0.0)
    now = SimpleNamespace(monotonic=time.monotonic)
    monkeypatch.setattr(returns, "time", now)
    backend = EndsAtReplays()
    async with serving(tmp_path, backend=backend) as api:
        session = await api.session()
        killer, other = await api.model(session), await api.model(session, 1)
        number = await train(api, killer, 1)
        await train(api, other, 1)
        sampler = await published(api, killer, number)
        backend.killer = killer
        backend.end()
        first = await api.optim_step(killer, number + 1, **ADAM)
        await train(api, other, number)
        text = await api.failure(first, "server")
        assert "3 times while its operation 2 (ForwardBackward) is done again" in text
        assert "10 minutes" in text
        assert backend.num_ends == 1 + returns.MAX_ENDS
        again = await api.optim_step(killer, number + 2, **ADAM)
        assert await api.failure(again, "server") == text
        assert text in await api.failure(await api.sample(sampler, seed=1), "server")
        await train(api, other, number + 3)
        assert backend.num_ends == 1 + returns.MAX_ENDS, "it is not tried again at once"
        backend.killer = ""  # there is more memory now
        now.monotonic = lambda: time.monotonic() + returns.GIVEN_UP_S
        step = await api.result(await api.optim_step(killer, number + 3, **ADAM))
        assert "metrics" in step
