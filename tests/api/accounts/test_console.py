"""The pages of console URLs: each user's own, for browsers, and nothing else by Basic."""

import base64
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from tinker.lib import console_urls

from tests.api.harness import Api, serving
from tinker_gmi.console import console_url


def browser(api: Api, user: str | None, **headers: str) -> httpx.AsyncClient:
    """As a browser sends a key that was typed in; user None: before it was."""
    if user is not None:
        typed = base64.b64encode(f"anything:{api.keys[user]}".encode()).decode()
        headers["Authorization"] = f"Basic {typed}"
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(app=api.app), base_url="http://server", headers=headers
    )


async def saved(api: Api) -> tuple[str, str, str]:
    """(session, training run, checkpoint path)"""
    session_id = await api.session()
    model_id = await api.model(session_id, user_metadata={"note": "<script>alert(1)</script>"})
    accepted = await api.ok("save_weights_for_sampler", model_id=model_id, path="ck", seq_id=1)
    return session_id, model_id, (await api.result(accepted))["path"]


async def links(api: Api) -> list[str]:
    """What the official SDK builds, on this server."""
    session_id, model_id, path = await saved(api)
    theirs = [
        console_urls.sessions_console_url(),
        console_urls.session_console_url(session_id),
        console_urls.training_run_console_url(model_id),
        console_urls.checkpoint_console_url(model_id, "sampler_weights/ck"),
        console_urls.checkpoint_playground_url(path),
        console_urls.new_api_key_console_url("laptop"),
    ]
    return [console_url(link, "http://server") for link in theirs]


async def test_every_console_link_of_the_sdk_has_a_page_here(api: Api) -> None:
    async with browser(api, "ann") as client:
        for link in await links(api):
            answered = await client.get(link)
            assert answered.status_code == 200, link
            assert answered.headers["content-type"].startswith("text/html")
            assert "default-src 'none'" in answered.headers["content-security-policy"]


async def test_pages_show_what_belongs_together(api: Api) -> None:
    session_id, model_id, path = await saved(api)
    async with browser(api, "ann") as client:
        assert quote(f"sessions/{session_id}") in (await client.get("/sessions")).text
        assert quote(model_id) in (await client.get(f"/sessions/{session_id}")).text
        run = (await client.get(f"/training_runs/{model_id}")).text
        assert "fake/tiny" in run
        assert "sampler_weights/ck" in run
        assert path in (await client.get(f"/checkpoints/{model_id}/sampler_weights/ck")).text


async def test_what_users_named_is_text(api: Api) -> None:
    _, model_id, _ = await saved(api)
    async with browser(api, "ann") as client:
        page = (await client.get(f"/training_runs/{model_id}")).text
    assert "<script" not in page
    assert "&lt;script&gt;" in page


async def test_another_user_sees_nothing_of_it(api: Api) -> None:
    session_id, model_id, path = await saved(api)
    async with browser(api, "bob") as client:
        assert session_id not in (await client.get("/sessions")).text
        for link in (
            f"/sessions/{session_id}",
            f"/training_runs/{model_id}",
            f"/checkpoints/{model_id}/sampler_weights/ck",
            f"/playground?mode=checkpoint&checkpoint={quote(path, safe='')}",
        ):
            assert (await client.get(link)).status_code == 404, link


async def test_a_browser_is_asked_for_the_key(api: Api) -> None:
    async with browser(api, None) as client:
        answered = await client.get("/sessions")
    assert answered.status_code == 401
    assert answered.headers["www-authenticate"].startswith("Basic realm=")


@pytest.mark.parametrize(
    "header", ["Basic", "Basic !!!", "Basic " + base64.b64encode(b"\xff:x").decode(), "basic "]
)
async def test_a_broken_header_is_no_key(api: Api, header: str) -> None:
    async with browser(api, None, Authorization=header) as client:
        assert (await client.get("/sessions")).status_code == 401


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/api/v1/sessions"),
        ("GET", "/api/v1/training_runs"),
        ("POST", "/api/v1/create_session"),
        ("POST", "/sessions"),
        ("DELETE", "/training_runs/x"),
        ("GET", "/health"),
        ("GET", "/metrics"),
        ("GET", "//sessions"),
        ("GET", "/sessionsx"),
    ],
)
async def test_a_password_opens_pages_only(api: Api, method: str, path: str) -> None:
    """A browser sends it with requests of other sites too: it must not open what changes things."""
    async with browser(api, "ann") as client:
        answered = await client.request(method, httpx.URL(f"http://server{path}"))
    assert answered.status_code == 401
    assert "www-authenticate" not in answered.headers


async def test_without_authentication_everything_is_shown(tmp_path: Path) -> None:
    async with serving(tmp_path, auth=False) as api:
        session_id = await api.session()
        async with browser(api, None) as client:
            assert session_id in (await client.get("/sessions")).text


async def test_a_new_session_says_where_its_page_is(tmp_path: Path) -> None:
    async with serving(tmp_path) as api:
        reply: dict[str, Any] = await api.ok("create_session")
        assert reply["info_message"].endswith(f"http://server/sessions/{reply['session_id']}")
    async with serving(tmp_path, public_url="https://train.example/tinker/") as api:
        reply = await api.ok("create_session")
        page = f"https://train.example/tinker/sessions/{reply['session_id']}"
        assert reply["info_message"].endswith(page)


def test_links_keep_path_and_query_and_take_our_origin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_BASE_URL", "https://train.example/tinker/")
    theirs = console_urls.checkpoint_console_url("a:train:0", "weights/ck")
    path = "/checkpoints/a%3Atrain%3A0/weights%2Fck"
    assert console_url(theirs) == f"https://train.example/tinker{path}"
    assert console_url("tinker://a:train:0/weights/ck", "http://x").startswith(
        "http://x/checkpoints/a%3Atrain%3A0/weights/ck"
    )
    assert console_url("https://vendor.example/playground?a=b", "http://x") == (
        "http://x/playground?a=b"
    )
    with pytest.raises(ValueError, match="neither a console link"):
        console_url("weights/ck")
