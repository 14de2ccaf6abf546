"""What supervisors and load balancers ask without a key."""

import asyncio
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.harness import Api, serving
from tinkercloud.backends.fake import FakeBackend
from tinkercloud.config import Config
from tinkercloud.services.observability import readiness
from tinkercloud.storage import keys as key_store
from tinkercloud.storage.keys import KeyStore


def anybody(api: Api) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=api.app), base_url="http://server")


class Troubled(FakeBackend):
    """reasons: what the next checks say."""

    reasons: Mapping[str, str | None] = {"engine": None}
    delay_s = 0.0
    num_asked = 0

    async def readiness(self) -> Mapping[str, str | None]:
        self.num_asked += 1
        await asyncio.sleep(self.delay_s)
        return self.reasons


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "REMEMBERED_S", 0.0)


async def test_a_server_that_works_is_alive_and_ready(api: Api) -> None:
    async with anybody(api) as client:
        assert (await client.get("/healthz")).json() == {"status": "ok"}
        answer = await client.get("/readyz")
    assert answer.status_code == 200
    assert answer.json() == {"status": "ready", "checks": {"storage": "ok", "engine": "ok"}}


async def test_what_is_not_ready_is_named(tmp_path: Path) -> None:
    backend = Troubled(Config(backend="fake"))
    backend.reasons = {"engine": "the engine is loading its model", "placement": None}
    async with serving(tmp_path, backend=backend) as api, anybody(api) as client:
        answer = await client.get("/readyz")
        assert (await client.get("/healthz")).status_code == 200
    assert answer.status_code == 503
    checks = {"storage": "ok", "engine": "the engine is loading its model", "placement": "ok"}
    assert answer.json() == {"status": "not ready", "checks": checks}


async def test_a_backend_that_does_not_answer_is_not_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readiness, "DEADLINE_S", 0.1)
    backend = Troubled(Config(backend="fake"))
    backend.delay_s = 60
    async with serving(tmp_path, backend=backend) as api, anybody(api) as client:
        answer = await client.get("/readyz")
    assert answer.status_code == 503
    assert answer.json()["checks"]["engine"] == "no answer within 0.1 s"


async def test_a_check_that_fails_unexpectedly_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(FakeBackend):
        async def readiness(self) -> Mapping[str, str | None]:
            raise RuntimeError("secret")

    backend = Broken(Config(backend="fake"))
    async with serving(tmp_path, backend=backend) as api, anybody(api) as client:
        answer = await client.get("/readyz")
    assert answer.status_code == 503
    engine = "the check failed (RuntimeError); see the server's log"
    assert answer.json()["checks"] == {"storage": "ok", "engine": engine}
    assert "secret" in caplog.text


async def test_a_data_folder_that_takes_no_files_is_not_ready(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    async with serving(data_dir) as api, anybody(api) as client:
        data_dir.rename(tmp_path / "unmounted")
        answer = await client.get("/readyz")
        (tmp_path / "unmounted").rename(data_dir)
        assert (await client.get("/readyz")).status_code == 200
    assert answer.status_code == 503
    assert answer.json()["checks"]["storage"].startswith("the data folder cannot be written: ")


async def test_who_asks_at_once_shares_one_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readiness, "REMEMBERED_S", 60.0)
    backend = Troubled(Config(backend="fake"))
    async with serving(tmp_path, backend=backend) as api, anybody(api) as client:
        answers = await asyncio.gather(*(client.get("/readyz") for _ in range(50)))
        await client.get("/readyz")
    assert {answer.status_code for answer in answers} == {200}
    assert backend.num_asked == 1


async def test_health_shows_numbers_of_the_server_to_who_may_see_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def for_ever(self: FakeBackend, *args: object, **options: object) -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr(FakeBackend, "sample", for_ever)
    async with serving(tmp_path, metrics_users="scraper") as api:
        bob = api.as_user("bob")
        sampler = await bob.sampler(await bob.session())
        for _ in range(3):
            await bob.sample(sampler)
        seen = {user: await health(api.as_user(user)) for user in ("ann", "bob", "reader")}
        assert seen["ann"] == seen["reader"] == {"status": "ok", "num_pending": 0}
        assert seen["bob"] == {"status": "ok", "num_pending": 3}
        for observer in (api.as_user("eve"), with_new_key(api, "scraper")):
            shown = await health(observer)
            assert (shown["num_pending"], shown["backend"]["backend"]) == (3, "fake")


async def test_the_only_user_sees_the_server_until_there_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_store, "CACHE_S", 0.0)
    async with serving(tmp_path) as api:
        with closing(KeyStore(tmp_path)) as keys:
            for key in keys.list():
                if key.user != "ann":
                    keys.revoke(key.key_id)
        assert "backend" in await health(api)
        assert "process_open_fds" in (await api.http.get("/metrics")).text
        with_new_key(api, "bob")
        assert "backend" not in await health(api)
        assert "process_open_fds" not in (await api.http.get("/metrics")).text


async def health(api: Api) -> dict[str, Any]:
    return (await api.http.get("/health")).json()


def with_new_key(api: Api, user: str) -> Api:
    with closing(KeyStore(api.services.config.data_dir)) as keys:
        return Api(api.app, api.keys, keys.add(user))
