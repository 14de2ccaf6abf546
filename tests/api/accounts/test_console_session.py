"""The console's page and its cookie: who is let in, and what the cookie is valid for."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from tests.api.harness import Api, serving
from tinkercloud.routers.console.cookie import COOKIE
from tinkercloud.storage import keys as key_store
from tinkercloud.storage.keys import KeyStore

SESSION = "/console/session"


def browser(api: Api, base_url: str = "http://server", **headers: str) -> httpx.AsyncClient:
    """It keeps cookies and has no key."""
    transport = httpx.ASGITransport(app=api.app)
    return httpx.AsyncClient(transport=transport, base_url=base_url, headers=headers)


@asynccontextmanager
async def signed_in(
    api: Api, user: str = "ann", **headers: str
) -> AsyncGenerator[httpx.AsyncClient]:
    async with browser(api, **headers) as client:
        answer = await client.post(SESSION, headers={"X-API-Key": api.keys[user]})
        assert answer.status_code == 200
        yield client


async def test_the_page_and_its_files_need_no_key_and_run_no_script_of_others(api: Api) -> None:
    async with browser(api) as client:
        page = await client.get("/console")
        script = await client.get("/console/static/main.js")
        licence = await client.get("/console/static/uplot/LICENSE")
        missing = await client.get("/console/static/../server.py")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert script.headers["content-type"] == "text/javascript; charset=utf-8"
    assert "MIT" in licence.text
    assert missing.status_code in (401, 404)
    for answer in (page, script):
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
    assert "<script>" not in page.text and " on" not in page.text.split("<body", 1)[0]


async def test_a_key_signs_in_and_the_cookie_cannot_be_read_by_scripts(api: Api) -> None:
    async with browser(api) as client:
        assert (await client.get(SESSION)).status_code == 401
        wrong = await client.post(SESSION, headers={"X-API-Key": "tml-wrong"})
        assert wrong.status_code == 401
        assert "set-cookie" not in wrong.headers
        answer = await client.post(SESSION, headers={"X-API-Key": api.keys["ann"]})
        assert answer.json() == {"user": "ann", "role": "user"}
        flags = answer.headers["set-cookie"].lower()
        assert "httponly" in flags and "samesite=strict" in flags
        assert api.keys["ann"] not in flags
        assert (await client.get(SESSION)).json()["user"] == "ann"


@pytest.mark.parametrize(
    ("public_url", "is_secure"), [("https://train.example/t", True), ("http://lan", False)]
)
async def test_behind_tls_the_cookie_is_for_tls_alone(
    tmp_path: Path, public_url: str, *, is_secure: bool
) -> None:
    async with serving(tmp_path, public_url=public_url) as api, browser(api) as client:
        answer = await client.post(SESSION, headers={"X-API-Key": api.keys["ann"]})
    assert ("secure" in answer.headers["set-cookie"].lower().split("; ")) == is_secure


async def test_the_cookie_reads_and_changes_nothing(api: Api) -> None:
    session_id = await api.session()
    model_id = await api.model(session_id)
    async with signed_in(api) as client:
        listed = await client.get("/api/v1/training_runs")
        assert [r["training_run_id"] for r in listed.json()["training_runs"]] == [model_id]
        for method, path in (
            ("POST", "/api/v1/create_session"),
            ("POST", "/api/v1/asample"),
            ("POST", "/oai/api/v1/chat/completions"),
            ("DELETE", f"/api/v1/training_runs/{model_id}/checkpoints/weights/x"),
            ("PUT", f"/api/v1/training_runs/{model_id}/checkpoints/weights/x/ttl"),
            ("POST", SESSION),
        ):
            assert (await client.request(method, path, json={})).status_code == 401, path


async def test_the_token_in_the_cookie_is_no_key(api: Api) -> None:
    async with signed_in(api) as client:
        token = client.cookies[COOKIE]
    for headers in ({"X-API-Key": token}, {"Authorization": f"Bearer {token}"}):
        async with browser(api, **headers) as client:
            assert (await client.get("/api/v1/sessions")).status_code == 401
    access = await api.ok("auth/token")
    async with browser(api, Cookie=f"{COOKIE}={access['jwt']}") as client:
        assert (await client.get("/api/v1/sessions")).status_code == 401


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
async def test_other_sites_and_ports_cannot_use_the_cookie(api: Api, site: str) -> None:
    async with signed_in(api, **{"Sec-Fetch-Site": site}) as client:
        assert (await client.get("/api/v1/sessions")).status_code == 401


async def test_signing_out_forgets_the_cookie(api: Api) -> None:
    async with signed_in(api) as client:
        assert (await client.delete(SESSION)).status_code == 204
        assert COOKIE not in client.cookies
        assert (await client.get(SESSION)).status_code == 401


async def test_a_revoked_key_ends_its_cookies(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_store, "CACHE_S", 0.0)
    async with signed_in(api) as client:
        store = KeyStore(tmp_path / "data")
        for record in store.list():
            if record.user == "ann":
                store.revoke(record.key_id)
        store.close()
        assert (await client.get(SESSION)).status_code == 401


async def test_a_read_only_key_looks_and_does_not_chat(api: Api) -> None:
    async with signed_in(api, "reader") as client:
        assert (await client.get("/console/samples")).status_code == 200
        messages = [{"role": "user", "content": "hello"}]
        body = {"model": "fake/tiny", "messages": messages}
        assert (await client.post("/console/chat", json=body)).status_code == 403


async def test_without_authentication_nobody_signs_in(tmp_path: Path) -> None:
    async with serving(tmp_path, auth=False) as api, browser(api) as client:
        who = (await client.get(SESSION)).json()
        assert who["auth"] is False
        assert "set-cookie" not in (await client.post(SESSION)).headers
