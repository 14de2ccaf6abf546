"""The dashboard in a browser, of a proxy in this process: its numbers are those of /status."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import pytest
import uvicorn
from playwright.sync_api import Browser, Page, expect

from tests.console.browser import DESK, LIMIT_MS, PHONE, chromium, needs_chromium
from tests.proxy.bench import GREEDY, QUESTION, Bench, Made

KEY = "secret"
HOSTILE = "<img src=x onerror='document.title=1'><script>document.title=1</script>"
LIMIT_S = 30.0


@contextmanager
def served(bench: Bench, **changes: Any) -> Iterator[httpx.Client]:
    """A client of the proxy, with its key."""
    app = bench.app(KEY, **changes)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        deadline = time.monotonic() + LIMIT_S
        while not server.started:
            assert thread.is_alive() and time.monotonic() < deadline
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        headers = {"authorization": f"Bearer {KEY}"}
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers) as http:
            yield http
    finally:
        server.should_exit = True
        thread.join(LIMIT_S)


def ask(http: httpx.Client, **fields: Any) -> None:
    http.post("/v1/completions", json={"prompt": "One day", **GREEDY, **fields}).raise_for_status()


# ---- without a browser


async def test_the_page_is_for_everybody_and_its_numbers_for_who_has_the_key(bench: Made) -> None:
    async with bench().proxy(KEY) as http:
        page = await http.get("/dashboard")
        assert page.status_code == 200 and "<script type" in page.text
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
        for file in ("main.js", "view.js", "console/dom.js", "console/uplot/uPlot.esm.js"):
            answer = await http.get(f"/dashboard/static/{file}")
            assert answer.headers["content-type"].startswith("text/javascript"), file
        for path in ("/status", "/metrics", "/dashboard/", "/dashboardx"):
            assert (await http.get(path)).status_code == 401
        for file in ("../app.py", "%2e%2e/app.py", "console/main.js", "console/index.html"):
            assert (await http.get(f"/dashboard/static/{file}")).status_code in (401, 404)


async def test_what_is_passed_on_counts_its_tokens(bench: Made) -> None:
    made = bench("ollama")
    async with made.proxy() as http:
        body = {"prompt": "One day", **GREEDY}
        await http.post("/v1/completions", json=body)
        requests = (await http.get("/status")).json()["requests"]
        metrics = (await http.get("/metrics")).text
    assert requests["passed_tokens"] == 24
    assert 'tinkercloud_proxy_tokens_total{kind="passed_on"} 24.0' in metrics
    assert "tinkercloud_proxy_speculates 0.0" in metrics


async def test_what_fails_is_counted_and_the_target_s_state_is_that_of_its_last_answer(
    bench: Made,
) -> None:
    made = bench()
    async with made.proxy() as http:
        before = (await http.get("/status")).json()
        made.target.failing = True
        await http.post("/v1/completions", json={"prompt": "One day", **GREEDY})
        failed = (await http.get("/status")).json()
        made.target.failing = False
        await http.post("/v1/completions", json={"prompt": "One day", **GREEDY})
        after = (await http.get("/status")).json()
    assert [each["target"]["up"] for each in (before, failed, after)] == [True, False, True]
    assert "it fails" in failed["target"]["trouble"]
    assert [each["requests"]["failed"] for each in (before, failed, after)] == [0, 1, 1]
    assert 0 <= after["target"]["answered_s"] <= after["uptime_s"]


async def test_a_drafter_s_wins_are_among_the_rounds_that_asked_it(bench: Made) -> None:
    made = bench()
    async with made.proxy() as http:
        await http.post("/v1/completions", json={"prompt": "One day", **GREEDY})
        (drafter,) = (await http.get("/status")).json()["drafters"]
        made.draft.failing, made.draft.failure = True, HOSTILE
        await http.post("/v1/completions", json={"prompt": "Two days", **GREEDY})
        (failed,) = (await http.get("/status")).json()["drafters"]
    assert 0 < drafter["taken"] <= drafter["asked"] and drafter["up"]
    assert not failed["up"] and HOSTILE in failed["trouble"]
    assert failed["asked"] > drafter["asked"] and failed["taken"] == drafter["taken"]


# ---- in a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


class Dashboard:
    """waits: its time passes only where `page.clock` is told so. faults: errors of scripts, and
    what the page was refused."""

    def __init__(
        self, browser: Browser, http: httpx.Client, *, waits: bool = False, **options: Any
    ):
        self.context = browser.new_context(**{"viewport": DESK, **options})
        self.context.set_default_timeout(LIMIT_MS)
        self.page: Page = self.context.new_page()
        if waits:
            self.page.clock.install()
            self.page.clock.pause_at(time.time() + 60)
        self.faults: list[str] = []
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("console", lambda message: self._said(message.type, message.text))
        self.page.goto(f"{http.base_url}/dashboard")

    def _said(self, kind: str, text: str) -> None:
        # It learns from a 401 that it has to ask for the key.
        if kind == "error" and "401" not in text and "ERR_CONNECTION" not in text:
            self.faults.append(text)

    def sign_in(self, key: str = KEY) -> Page:
        self.page.get_by_label("Key", exact=True).fill(key)
        self.page.get_by_role("button", name="Sign in").click()
        return self.page


@contextmanager
def dashboard(browser: Browser, http: httpx.Client, **options: Any) -> Iterator[Dashboard]:
    board = Dashboard(browser, http, **options)
    yield board
    board.context.close()
    assert board.faults == []


def numbers(page: Page, table: str) -> list[list[str]]:
    """Exact ones, of cells that have them."""
    return (
        page.get_by_role("region", name=table, exact=True)
        .locator("tbody tr")
        .evaluate_all(
            "rows => rows.map(row => [...row.querySelectorAll('data')].map(data => data.value))"
        )
    )


def fact(page: Page, name: str) -> Any:
    return page.locator("dl div", has=page.get_by_text(name, exact=True)).locator("dd")


@needs_chromium
def test_numbers_are_those_of_the_status(browser: Browser, bench: Made) -> None:
    with served(bench()) as http, dashboard(browser, http) as board:
        ask(http)
        ask(http, n=2)
        page = board.sign_in("wrong")
        expect(page.get_by_role("alert")).to_contain_text("does not know this key")
        board.sign_in()
        expect(page.get_by_role("alert")).to_be_hidden()
        expect(page.get_by_role("heading", name="Proxy", exact=True)).to_be_visible()
        expect(fact(page, "speculation")).to_contain_text("on: drafts are verified by the target")
        status = http.get("/status").json()
        made, (drafter,) = status["speculation"], status["drafters"]
        (shown,) = numbers(page, "Drafters")
        share = drafter["taken"] / drafter["asked"]
        assert list(map(float, shown)) == [
            *(drafter["asked"], drafter["taken"], pytest.approx(share), drafter["failed"])
        ]
        assert numbers(page, "Requests") == [["1"], ["1"], ["0"]]
        for name, field in {
            "acceptance": "acceptance",
            "tokens a round": "tokens_a_round",
            "rounds": "rounds",
            "drafted": "drafted",
            "by the target without a draft": "plain",
        }.items():
            value = fact(page, name).locator("data").get_attribute("value")
            assert float(value or "nan") == pytest.approx(made[field]), name
        assert page.evaluate("[document.cookie, sessionStorage.length, localStorage.length]") == [
            *("", 0, 0)
        ]


@needs_chromium
def test_charts_go_on_as_answers_come(browser: Browser, bench: Made) -> None:
    """Those of the two seconds since the page last looked."""
    with served(bench()) as http, dashboard(browser, http, waits=True) as board:
        page = board.sign_in()
        chart = page.get_by_role("img", name="Acceptance of drafted tokens")
        expect(chart).to_have_attribute("aria-label", "Acceptance of drafted tokens: none")
        ask(http)
        page.clock.run_for(2000)
        made = http.get("/status").json()["speculation"]
        share = f"{100 * made['acceptance']:.1f} %"
        expect(chart).to_have_attribute("aria-label", f"Acceptance of drafted tokens: {share}")
        expect(chart.locator("canvas")).to_have_count(1)


@needs_chromium
def test_why_all_is_passed_on_is_said(browser: Browser, bench: Made) -> None:
    with served(bench("ollama")) as http, dashboard(browser, http) as board:
        http.post("/v1/chat/completions", json=GREEDY | {"messages": QUESTION}).raise_for_status()
        page = board.sign_in()
        expect(fact(page, "speculation")).to_have_text(
            "off, every request is passed on: its API gives no scores of drafted tokens"
        )
        assert numbers(page, "Requests") == [["0"], ["1"], ["0"]]
        expect(page.get_by_role("img", name="Tokens per second")).to_be_visible()
        expect(page.get_by_role("img", name="Tokens a round")).to_be_hidden()


@needs_chromium
def test_what_a_server_says_of_its_failure_is_text(browser: Browser, bench: Made) -> None:
    made = bench()
    with served(made) as http, dashboard(browser, http) as board:
        for server in (made.draft, made.target):
            server.failing, server.failure = True, HOSTILE
        with suppress(httpx.HTTPStatusError):
            ask(http)
        page = board.sign_in()
        expect(fact(page, "why it does not answer")).to_contain_text("<script>")
        expect(page.get_by_role("region", name="Drafters")).to_be_visible()
        assert page.locator("main img, main script").count() == 0
        assert page.title() == "tinkercloud proxy"


@needs_chromium
def test_a_proxy_that_is_gone_is_said_to_be(browser: Browser, bench: Made) -> None:
    with served(bench()) as http:
        board = Dashboard(browser, http)
        board.sign_in()
        expect(board.page.get_by_role("heading", name="Proxy", exact=True)).to_be_visible()
    expect(board.page.get_by_role("alert")).to_have_text("The proxy does not answer.")
    board.context.close()
    assert board.faults == []


@needs_chromium
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [DESK, PHONE], ids=["desk", "phone"])
def test_it_fits_its_window(
    browser: Browser, bench: Made, viewport: dict[str, int], scheme: str
) -> None:
    made = bench()
    made.draft.failing, made.draft.failure = True, "no room " * 20
    options = {"viewport": viewport, "color_scheme": scheme}
    with served(made) as http, dashboard(browser, http, **options) as board:
        ask(http)
        page = board.sign_in()
        expect(page.get_by_role("region", name="Drafters")).to_be_visible()
        page.locator(".uplot").first.wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
        beside = page.locator(".scroll").evaluate_all(
            "places => places.map(place => place.scrollWidth - place.clientWidth)"
        )
        assert max(beside) <= 0
