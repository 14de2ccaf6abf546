"""Console URLs of the SDK: each leads to the view of the console that shows what it names."""

from pathlib import Path
from typing import Any

import httpx
import pytest
from tinker.lib import console_urls

from tests.api.harness import Api, serving
from tinker_gmi.console import console_url

RUN = "0f:train:0"
PATH = f"tinker://{RUN}/sampler_weights/a b&c"
LINKS = {
    console_urls.sessions_console_url(): "#sessions",
    console_urls.session_console_url("0f"): "#sessions/0f",
    console_urls.training_run_console_url(RUN): f"#runs/{RUN}",
    console_urls.checkpoint_console_url(RUN, "sampler_weights/ck"): f"#runs/{RUN}",
    console_urls.checkpoint_playground_url(PATH): "#chat?model=tinker://0f:train:0"
    "/sampler_weights/a%20b%26c",
    console_urls.new_api_key_console_url("laptop"): "#keys",
}


@pytest.mark.parametrize("origin", ["http://server", "http://server/below/a/prefix"])
@pytest.mark.parametrize("link", LINKS)
async def test_every_console_link_of_the_sdk_leads_to_a_view(
    api: Api, link: str, origin: str
) -> None:
    """A proxy that takes its prefix off asks for the same path; a browser follows from there."""
    transport = httpx.ASGITransport(app=api.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        answer = await client.get(console_url(link, "http://server"))
    assert answer.status_code == 303
    landed = httpx.URL(console_url(link, origin)).join(answer.headers["location"])
    assert str(landed.copy_with(fragment=None)) == f"{origin}/console"
    assert answer.headers["location"].endswith(LINKS[link])


async def test_nothing_is_said_of_whether_it_exists(api: Api) -> None:
    """Links need no key."""
    session_id = await api.session()
    api.http.headers.pop("X-API-Key")
    for name in (session_id, "0f"):
        assert (await api.http.get(f"/sessions/{name}")).status_code == 303


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
