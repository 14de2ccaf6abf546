"""Sessions whose clients fall silent: what they have in memory goes to the disk."""

import asyncio
import re
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.api.harness import Api, serving
from tests.api.recovery.test_idle_models import FullDisk, drawn, memory, published
from tests.api.recovery.test_recovery import goes_on, hold_passes, train
from tests.waiting import async_wait_for
from tinkercloud.backends.fake import FakeBackend
from tinkercloud.config import Config
from tinkercloud.services.recovery import snapshots


async def listed(api: Api, session: str) -> dict[str, Any]:
    """A session's status, which the search has too; it may change between two requests."""

    async def status() -> dict[str, Any]:
        return (await api.get(f"sessions/{session}")).json()["status"]

    before = await status()
    found = await api.ok("sessions/search", session_id=session)
    after = await status()
    assert found["sessions"][0]["status"] in (before, after)
    return after


def allow_silence(api: Api, seconds: float) -> None:
    """How long sessions may be silent from now on, on a server that has run for longer; it looks
    for them as often as before. So none of them expires while this machine is busy."""
    sessions = api.services.sessions
    sessions._ttl_s, sessions._started_at = seconds, 0.0


async def test_a_session_without_heartbeats_expires_and_goes_on_by_the_next_one(
    tmp_path: Path,
) -> None:
    """Nothing of it is deleted, and another one that samples the same base is not disturbed."""
    async with serving(tmp_path, session_ttl_s=1.0) as api:
        allow_silence(api, 3600.0)
        numbers = count(1)  # a request that is sent again is no sign of life
        lively = await api.sampler(await api.session())
        session = await api.session()
        ids = [await api.model(session, number, lora_config={"seed": 1}) for number in range(2)]
        for model_id in ids:
            number = await train(api, model_id, 1)
        sampler = await published(api, ids[0], number)
        of_base = await api.sampler(session, 77)
        before = [await drawn(api, each, 0) for each in (sampler, of_base, lively)]
        assert memory(api) == (2, 2)
        allow_silence(api, 1.0)

        async def while_lively() -> tuple[dict[str, Any], tuple[int, int]]:
            await drawn(api, lively, next(numbers))
            return await listed(api, session), memory(api)

        status, _ = await async_wait_for(
            "the session has expired, and nothing of it is in memory",
            while_lively,
            lambda seen: seen[0]["type"] == "cancelled" and seen[1] == (0, 1),
            poll_s=0.05,
        )
        allow_silence(api, 3600.0)
        assert status["detail"].startswith("expired at ")
        assert (await listed(api, lively.partition(":")[0]))["type"] == "active"
        assert (await api.get("sessions")).json()["states"][session] == "expired"
        assert (await api.get(f"sessions/{session}")).json()["state"] == "expired"
        for query in ("expired", "cancelled"):
            found = await api.ok("sessions/search", statuses=[{"type": query}])
            assert (session, "expired") in [
                (s["session_id"], s["state"]) for s in found["sessions"]
            ]
        metrics = (await api.as_user("eve").http.get("/metrics")).text
        # Twice where this machine was too busy for a second to draw the lively one's sample.
        assert re.search(r"^tinkercloud_sessions_expired_total [12]\.0$", metrics, re.M)

        await api.ok("session_heartbeat", session_id=session)
        assert (await listed(api, session))["type"] == "active"
        assert [await drawn(api, each, 10**6) for each in (sampler, of_base, lively)] == before
        first = await goes_on(api, ids[0], number + 1)
        assert first == await goes_on(api, ids[1], number)


async def expired(api: Api, session: str) -> None:
    await async_wait_for(
        "the session has expired",
        lambda: listed(api, session),
        lambda status: status["type"] == "cancelled",
    )


@pytest.mark.parametrize("comes_back", [False, True])
async def test_what_could_not_be_put_away_goes_once_there_is_room(
    tmp_path: Path, comes_back: bool
) -> None:
    """Nothing but the end of its session puts it away; not where its client was heard of again."""
    backend = FullDisk(Config(backend="fake"))
    async with serving(tmp_path, backend=backend, session_ttl_s=0.3) as api:
        session = await api.session()
        model_id = await api.model(session)
        number = await train(api, model_id, 1)
        await published(api, model_id, number)
        await expired(api, session)
        await asyncio.sleep(0.5)
        assert memory(api) == (1, 1)
        if comes_back:
            allow_silence(api, 3600.0)
            await api.ok("session_heartbeat", session_id=session)
        backend.is_full = False
        if comes_back:
            await api.services.sessions.expire()
            assert memory(api) == (1, 1)
        else:
            await async_wait_for(
                "nothing is in memory", lambda: memory(api), lambda counts: counts == (0, 0)
            )


class Forgetful(FakeBackend):
    """Nothing of it comes back, as on a cluster."""

    def incarnation(self) -> int | None:
        return None

    async def copy_state(self, model_id: str) -> int:
        raise NotImplementedError

    async def write_version(self, version: str, directory: Path) -> None:
        raise NotImplementedError


async def test_an_expired_session_stays_in_the_memory_of_a_backend_that_brings_nothing_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(snapshots, "SHARE", 1e9)
    backend = Forgetful(Config(backend="fake"))
    async with serving(tmp_path, backend=backend, session_ttl_s=0.3) as api:
        first, second = [await api.session() for _ in range(2)]
        for session in (first, second):
            model_id = await api.model(session)
            number = await train(api, model_id, 1)
            await published(api, model_id, number)
        await expired(api, first)
        await expired(api, second)
        assert memory(api) == (2, 2)
    assert "no snapshot" not in caplog.text


async def test_a_session_whose_operation_waits_does_not_expire(tmp_path: Path) -> None:
    async with serving(tmp_path, session_ttl_s=0.2) as api:
        session = await api.session()
        model_id = await api.model(session)
        gate = asyncio.Event()
        hold_passes(api, gate)
        waiting = await api.forward_backward(model_id, 1)
        await asyncio.sleep(0.6)
        assert (await listed(api, session))["type"] == "active"
        gate.set()
        await api.result(waiting)


async def test_silence_while_no_server_ran_is_no_silence(tmp_path: Path) -> None:
    async with serving(tmp_path) as api:
        session = await api.session()
        await api.services.database.write("UPDATE sessions SET heartbeat_at = heartbeat_at - 7200")
    async with serving(tmp_path, session_ttl_s=3600.0) as api:
        await api.services.sessions.expire()
        state = (await api.get(f"sessions/{session}")).json()["state"]
        assert state == "silent", "and not expired"
