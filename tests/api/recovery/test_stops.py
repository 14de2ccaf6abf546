"""A server that is stopped while an operation takes longer than it may."""

import asyncio
from pathlib import Path

import pytest

from tests.api.harness import Api, serving
from tests.api.recovery.test_recovery import ADAM, hold_passes, train
from tests.waiting import LIMIT_S
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
