"""The documentation at /docs-site: for anybody, where it is built, and nothing beside it."""

import base64
import hashlib
from pathlib import Path

import httpx
import pytest

from tests.api.harness import Api
from tinkercloud.routers import docs_site

SCRIPT = "document.body.dataset.seen = 1"
PAGE = f"<html><script>{SCRIPT}</script><h1>Documents</h1></html>"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "site"
    (folder / "docs").mkdir(parents=True)
    (folder / "index.html").write_text(PAGE)
    (folder / "docs" / "quickstart.html").write_text("<h1>Quickstart</h1>")
    (folder / "docs" / "site.css").write_text("h1 { color: blue }")
    (tmp_path / "beside.txt").write_text("not of the site")
    monkeypatch.setattr(docs_site, "SITE", folder)
    (mount,) = docs_site.router.routes
    monkeypatch.setattr(mount.app, "all_directories", [folder])  # type: ignore[attr-defined]
    monkeypatch.setattr(mount.app, "config_checked", False)  # type: ignore[attr-defined]
    return folder


def browser(api: Api) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=api.app)
    return httpx.AsyncClient(transport=transport, base_url="http://server", follow_redirects=True)


async def test_anybody_reads_it(api: Api, site: Path) -> None:
    async with browser(api) as client:
        for path in ("/docs-site", "/docs-site/", "/docs-site/index.html"):
            answered = await client.get(path)
            assert (answered.status_code, answered.text) == (200, PAGE), path
        page = await client.get("/docs-site/docs/quickstart.html")
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        style = await client.get("/docs-site/docs/site.css")
        assert style.headers["content-type"].startswith("text/css")


async def test_a_page_runs_its_own_scripts_and_loads_nothing_from_elsewhere(
    api: Api, site: Path
) -> None:
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    async with browser(api) as client:
        policy = (await client.get("/docs-site/")).headers["content-security-policy"]
        other = (await client.get("/docs-site/docs/quickstart.html")).headers
    assert "default-src 'self'" in policy
    assert f"script-src 'self' 'sha256-{digest}';" in policy
    assert digest not in other["content-security-policy"]


@pytest.mark.parametrize(
    "path", ["../beside.txt", "%2e%2e/beside.txt", "docs/..%2f..%2fbeside.txt"]
)
async def test_what_lies_beside_it_is_not_shown(api: Api, site: Path, path: str) -> None:
    async with browser(api) as client:
        answered = await client.get(f"/docs-site/{path}")
    assert answered.status_code in (401, 404)
    assert "not of the site" not in answered.text


async def test_where_it_is_not_built_the_answer_says_what_builds_it(
    api: Api, site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(docs_site, "SITE", tmp_path / "nothing")
    async with browser(api) as client:
        for path in ("/docs-site/", "/docs-site/docs/quickstart.html"):
            answered = await client.get(path)
            assert answered.status_code == 404
            assert "make docs" in answered.json()["detail"]
        monkeypatch.setattr(docs_site, "SITE", site)
        assert (await client.get("/docs-site/")).status_code == 200


async def test_nothing_else_is_open_for_it(api: Api, site: Path) -> None:
    async with browser(api) as client:
        assert (await client.get("/docs-sites")).status_code == 401
        assert (await client.post("/docs-site/")).status_code == 401
