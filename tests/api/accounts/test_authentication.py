"""Every route asks for a key, by construction."""

import logging
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from fastapi.routing import APIRoute

from tests.api.harness import Api, serving
from tinkercloud.storage.tokens import TOKEN_PREFIX

SIGNED = [
    ("GET", "/api/v1/signed/traces/{session_id}"),
    ("GET", "/api/v1/signed/{run_id}/{segment}/{name}/{generation}/{file}"),
]
"""The routes that ask for a signature in place of a key (test_downloads.py, test_traces.py)."""
CONSOLE_LINKS = [
    ("GET", "/checkpoints/{run_id}/{segment}/{name}"),
    ("GET", "/keys"),
    ("GET", "/keys/{key_id}"),
    ("GET", "/playground"),
    ("GET", "/sessions"),
    ("GET", "/sessions/{session_id}"),
    ("GET", "/training_runs/{run_id}"),
]
CONSOLE_FILES = ("GET", "/console/static/{path:path}")
OPEN = [("GET", "/console"), ("GET", "/healthz"), ("GET", "/readyz")]
UNKNOWN_PATHS = ["/", "/docs", "/redoc", "/api/v1/nothing", "/health/x"]


def routes(api: Api) -> list[tuple[str, str]]:
    """(method, path) of everything the application can answer."""
    pairs = [
        (method, route.path) for route in _flat(api.app.routes) for method in route.methods or ()
    ]
    assert len(pairs) > 30
    return pairs


def _flat(items) -> list[APIRoute]:
    flat: list[APIRoute] = []
    for item in items:
        inner = getattr(item, "routes", None) or getattr(
            getattr(item, "original_router", None), "routes", None
        )
        flat += _flat(inner) if inner else [item] if isinstance(item, APIRoute) else []
    return flat


@pytest.mark.parametrize("headers", [{}, {"X-API-Key": "tml-wrong"}, {"Authorization": "Bearer "}])
async def test_every_route_refuses_a_request_without_a_valid_key(
    api: Api, headers: dict[str, str]
) -> None:
    stranger = httpx.AsyncClient(
        transport=httpx.ASGITransport(app=api.app), base_url="http://server", headers=headers
    )
    for method, path in [*routes(api), *(("GET", path) for path in UNKNOWN_PATHS)]:
        response = await stranger.request(method, path)
        if (method, path) in OPEN:
            assert response.status_code == 200, (method, path)
            continue
        if (method, path) in CONSOLE_LINKS:
            assert response.status_code == 303, (method, path)
            continue
        if (method, path) in (*SIGNED, CONSOLE_FILES):
            assert response.status_code == 404, (method, path)
            continue
        assert response.status_code == 401, (method, path)
        assert method == "HEAD" or "API key" in response.text, (method, path)


async def test_only_signed_links_probes_and_the_consoles_files_pass_without_a_key(api: Api) -> None:
    stranger = httpx.AsyncClient(
        transport=httpx.ASGITransport(app=api.app), base_url="http://server"
    )
    pairs = [*routes(api), *(("GET", path) for path in UNKNOWN_PATHS)]
    answers = [(await stranger.request(*pair), pair) for pair in pairs]
    passed = sorted(pair for response, pair in answers if response.status_code != 401)
    assert passed == sorted([*SIGNED, *OPEN, *CONSOLE_LINKS, CONSOLE_FILES])


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/api/v1/signed/a/weights/b/c/d"),
        ("DELETE", "/api/v1/signed/a/weights/b/c/d"),
        ("GET", "/api/v1/signed"),
        ("GET", "/api/v1/Signed/a/weights/b/c/d"),
        ("GET", "/api/v1/training_runs?/api/v1/signed/"),
        ("GET", "//api/v1/signed/a/weights/b/c/d"),
    ],
)
async def test_only_the_signed_path_itself_passes_without_a_key(
    api: Api, method: str, path: str
) -> None:
    stranger = httpx.AsyncClient(
        transport=httpx.ASGITransport(app=api.app), base_url="http://server"
    )
    assert (await stranger.request(method, httpx.URL(f"http://server{path}"))).status_code == 401


async def test_no_other_route_is_reached_below_the_signed_path(api: Api) -> None:
    stranger = httpx.AsyncClient(
        transport=httpx.ASGITransport(app=api.app), base_url="http://server"
    )
    for way in ("../training_runs", "%2e%2e/training_runs", "..%2ftraining_runs", "a", "a/b/c/d/e"):
        url = httpx.URL("http://server", raw_path=f"/api/v1/signed/{way}".encode())
        assert (await stranger.get(url)).status_code in (401, 404), way


async def test_the_body_of_a_stranger_is_not_read(api: Api) -> None:
    async def body() -> AsyncIterator[bytes]:
        raise AssertionError("the body was read")
        yield b""

    stranger = httpx.AsyncClient(
        transport=httpx.ASGITransport(app=api.app), base_url="http://server"
    )
    assert (await stranger.post("/api/v1/asample", content=body())).status_code == 401


async def test_a_key_works_as_a_bearer_token(api: Api) -> None:
    client = httpx.AsyncClient(
        transport=httpx.ASGITransport(app=api.app),
        base_url="http://server",
        headers={"Authorization": f"Bearer {api.key}"},
    )
    assert (await client.get("/api/v1/healthz")).json() == {"status": "ok"}


async def test_with_a_key_there_are_no_documentation_pages(api: Api) -> None:
    for path in UNKNOWN_PATHS:
        assert (await api.http.get(path)).status_code == 404, path


async def test_keys_do_not_appear_in_the_log(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    await api.post("create_model", session_id="none", model_seq_id=0, base_model="x")
    await api.result(await api.forward_backward("none", 1))
    assert api.key not in caplog.text


async def test_without_authentication_everybody_is_the_default_user(tmp_path: Path) -> None:
    async with serving(tmp_path, auth=False) as api:
        model_id = await api.model()
        runs = (await api.get("training_runs")).json()["training_runs"]
    assert [(run["training_run_id"], run["model_owner"]) for run in runs] == [(model_id, "default")]


@pytest.mark.parametrize(
    ("headers", "said"),
    [
        ({}, "needs an API key"),
        ({"X-API-Key": "tml-wrong"}, "`tinkercloud keys add`"),
        ({"Authorization": f"Bearer {TOKEN_PREFIX}old"}, "has expired"),
    ],
)
async def test_a_refusal_says_what_is_wrong_with_the_key(
    api: Api, headers: dict[str, str], said: str
) -> None:
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app=api.app), base_url="http://server"
    ) as stranger:
        answer = await stranger.get("/api/v1/get_server_capabilities", headers=headers)
    assert answer.status_code == 401
    assert said in answer.text
