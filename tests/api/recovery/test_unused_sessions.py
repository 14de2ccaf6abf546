"""What is kept for crashes of sessions that their clients have left."""

import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.api.harness import Api, serving
from tests.api.recovery.test_recovery import train
from tinkercloud.services.accounts import unused_sessions

TABLES = ("operations", "snapshots", "kept_versions")
Sign = Callable[[Api, str, str], Awaitable[object]]


async def age(api: Api, days: float) -> None:
    """All that was sent so far was sent so much earlier."""
    at = time.time() - 86400 * days
    for table, column in (
        ("sessions", "heartbeat_at"),
        ("models", "last_request_at"),
        ("futures", "finished_at"),
    ):
        await api.services.database.write(f"UPDATE {table} SET {column} = ?", at)


async def kept(api: Api, model_id: str) -> list[str]:
    """The tables that have something of the model for a crash."""
    return [
        table
        for table in TABLES
        if await api.services.database.all(f"SELECT 1 FROM {table} WHERE model_id = ?", model_id)
    ]


async def abandoned(api: Api) -> tuple[str, str, str]:
    """A session, its trained model and a sampler of what that published."""
    session = await api.session()
    model_id = await api.model(session)
    number = await train(api, model_id, 1, steps=1)
    published = await api.ok(
        "save_weights_for_sampler", model_id=model_id, seq_id=number, sampling_session_seq_id=5
    )
    sampler = (await api.result(published))["sampling_session_id"]
    await api.services.snapshots.take(("ann", model_id), number)
    await api.services.snapshots.settled()
    return session, model_id, sampler


async def sweep(api: Api, times: int = 2) -> None:
    for _ in range(times):
        await api.services.unused_sessions.finish()
    await api.services.models.freed()


@pytest.mark.parametrize(("days", "is_kept"), [(29.9, True), (30.1, False)])
async def test_a_session_that_nobody_finishes_ends_after_some_days(
    tmp_path: Path, days: float, is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unused_sessions, "CONFIRM_S", 0.0)
    async with serving(tmp_path, archive_bytes=0) as api:
        session, model_id, _ = await abandoned(api)
        await age(api, days)
        await sweep(api)
        assert await kept(api, model_id) == (list(TABLES) if is_kept else [])
        assert bool(list((tmp_path / "recovery").glob("*"))) is is_kept
        step = await api.post(
            "optim_step", model_id=model_id, seq_id=9, adam_params={"learning_rate": 0.1}
        )
        assert step.status_code == (200 if is_kept else 404)
        beat = await api.post("session_heartbeat", session_id=session)
        assert beat.status_code == (200 if is_kept else 410)


async def heartbeat(api: Api, session: str, model_id: str, sampler: str) -> object:
    return await api.ok("session_heartbeat", session_id=session)


async def operation(api: Api, session: str, model_id: str, sampler: str) -> object:
    return await api.result(await api.forward_backward(model_id, 5, forward_only=True))


async def sample(api: Api, session: str, model_id: str, sampler: str) -> object:
    return await api.result(await api.sample(sampler))


async def chat(api: Api, session: str, model_id: str, sampler: str) -> object:
    """Of a client that knows no sessions; its answers are not on record."""
    body = {"model": sampler, "prompt": [1, 2, 3], "max_tokens": 2}
    headers = {"authorization": f"Bearer {api.key}"}
    answer = await api.http.post("/oai/api/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer


async def acknowledged(api: Api, session: str, model_id: str, sampler: str) -> object:
    """Long ago, and it has not run yet."""
    accepted = await api.forward_backward(model_id, 5, forward_only=True)
    await api.result(accepted)
    await age(api, 31)
    return await api.services.database.write(
        "UPDATE futures SET status = 'pending' WHERE request_id = ?", accepted["request_id"]
    )


@pytest.mark.parametrize("sign", [heartbeat, operation, sample, chat, acknowledged])
async def test_what_shows_that_a_session_is_used_keeps_it(
    tmp_path: Path, sign: Sign, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unused_sessions, "CONFIRM_S", 0.0)
    async with serving(tmp_path, archive_bytes=0) as api:
        session, model_id, sampler = await abandoned(api)
        await age(api, 31)
        await sign(api, session, model_id, sampler)
        await sweep(api)
        assert await kept(api, model_id) == list(TABLES)


async def test_a_clock_that_is_set_ahead_ends_no_session_at_once(tmp_path: Path) -> None:
    """Clients that are there send their next heartbeat before the hour is over."""
    async with serving(tmp_path, archive_bytes=0) as api:
        session, model_id, _ = await abandoned(api)
        await age(api, 31)
        await sweep(api, times=3)
        assert await kept(api, model_id) == list(TABLES)
        await api.ok("session_heartbeat", session_id=session)


async def test_days_shorter_than_the_hour_are_waited_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(time=time.time, monotonic=lambda: 1000.0)
    monkeypatch.setattr(unused_sessions, "time", clock)
    async with serving(tmp_path, archive_bytes=0, session_days=0.5 / 86400) as api:
        _, model_id, _ = await abandoned(api)
        await age(api, 1)
        await sweep(api)
        assert await kept(api, model_id) == list(TABLES)
        clock.monotonic = lambda: 1000.6
        await sweep(api)
        assert await kept(api, model_id) == []
