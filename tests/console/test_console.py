"""The console in a browser: its numbers are the API's, and what models wrote is text."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

import tinker_gmi as tinker
from tests.console.browser import DESK, PHONE, Console, chromium, needs_chromium
from tests.console.scene import Scene, serving_scene, tensors

pytestmark = needs_chromium


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with serving_scene(tmp_path_factory.mktemp("console")) as scene:
        yield scene


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def console(browser: Browser, scene: Scene) -> Iterator[Console]:
    console = Console(browser, scene.server)
    console.sign_in()
    yield console
    console.context.close()
    assert console.faults == []


def api(scene: Scene, path: str) -> Any:
    with scene.server.http() as http:
        return http.get(path).raise_for_status().json()


def cells(page: Page, table: str) -> list[list[str]]:
    """Exact numbers where cells have them."""
    return (
        page.get_by_role("region", name=table, exact=True)
        .locator("tbody tr")
        .evaluate_all(
            "rows => rows.map(row => [...row.cells].map(cell =>"
            " cell.querySelector('data')?.value ?? cell.textContent))"
        )
    )


def test_a_wrong_key_is_refused_and_the_right_one_signs_in(browser: Browser, scene: Scene) -> None:
    console = Console(browser, scene.server)
    console.page.get_by_label("API key").fill("tml-wrong")
    console.page.keyboard.press("Enter")
    expect(console.page.get_by_role("alert")).to_contain_text("does not know this key")
    console.sign_in()
    expect(console.page.get_by_role("alert")).to_be_hidden()
    console.page.reload()
    expect(console.page.get_by_role("heading", name="Runs")).to_be_visible()
    assert console.page.evaluate("document.cookie") == ""
    console.page.get_by_role("button", name="Sign out").click()
    expect(console.page.get_by_label("API key")).to_be_focused()
    assert console.faults == []
    console.context.close()


def test_runs_are_those_of_the_api(console: Console, scene: Scene) -> None:
    page = console.open("runs")
    page.get_by_role("link", name=scene.rl).wait_for()
    runs = api(scene, "/api/v1/training_runs")["training_runs"]
    assert [row[0] for row in cells(page, "Training runs")] == [
        run["training_run_id"] for run in runs
    ]
    assert [row[3] for row in cells(page, "Training runs")] == [
        str(run["lora_rank"]) for run in runs
    ]


def test_the_metrics_of_the_newest_step_are_the_results(console: Console, scene: Scene) -> None:
    page = console.open(f"runs/{scene.rl}")
    page.get_by_role("heading", name="Step").wait_for()
    shown = {name: float(value) for name, value in cells(page, "Metrics of the newest step")}
    with (
        scene.server.http() as http,
        http.stream("GET", f"/console/runs/{scene.rl}/events") as stream,
    ):
        points = next(httpx_events(stream))
    assert points[-1]["step"] == 6
    assert shown == points[-1]["metrics"]
    assert {"loss:sum", "ppo_kl:mean", "pg_clipfrac:mean", "entropy_estimate:mean"} <= set(shown)
    chart = page.get_by_role("img", name="KL of sampler and policy")
    assert "at step 6" in (chart.get_attribute("aria-label") or "")
    assert chart.locator("canvas").count() == 1


def httpx_events(stream: httpx.Response) -> Iterator[Any]:
    for line in stream.iter_lines():
        if line.startswith("data: "):
            yield httpx.Response(200, text=line.removeprefix("data: ")).json()


def test_checkpoints_are_those_of_the_api(console: Console, scene: Scene) -> None:
    page = console.open("checkpoints")
    page.get_by_role("link", name="Download").first.wait_for()
    checkpoints = api(scene, "/api/v1/checkpoints")["checkpoints"]
    rows = cells(page, "Checkpoints")
    assert [row[3] for row in rows] == [str(saved["size_bytes"]) for saved in checkpoints]
    assert [row[0] for row in rows] == [saved["tinker_path"] + "Copy" for saved in checkpoints]


def test_a_checkpoint_is_downloaded_by_the_cookie(console: Console, scene: Scene) -> None:
    page = console.open("checkpoints")
    with page.expect_download() as download:
        page.get_by_role("link", name=f"Download {scene.checkpoint}").click()
    size = download.value.path().stat().st_size
    saved = api(scene, "/api/v1/checkpoints")["checkpoints"]
    assert size >= min(checkpoint["size_bytes"] for checkpoint in saved)


def test_a_path_is_copied(console: Console, scene: Scene) -> None:
    console.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page = console.open("checkpoints")
    page.get_by_role("button", name=f"Copy {scene.checkpoint}").click()
    assert page.evaluate("navigator.clipboard.readText()") == scene.checkpoint


def test_a_session_leads_to_its_runs(console: Console, scene: Scene) -> None:
    page = console.open(f"sessions/{scene.session}")
    page.get_by_role("link", name=scene.sft).click()
    expect(page.get_by_role("heading", name="Run", exact=True)).to_be_visible()
    assert page.url.endswith(f"#runs/{scene.sft}")


def test_curves_go_on_while_a_run_trains(console: Console, scene: Scene) -> None:
    server = scene.server
    with tinker.ServiceClient(base_url=server.base_url, api_key=server.api_key) as service:
        training = service.create_lora_training_client(base_model="chatty", rank=2).result()
        page = console.open(f"runs/{training.model_id}")
        expect(page.get_by_text("No step of the optimizer yet.")).to_be_visible()
        datum = tinker.Datum(
            model_input=tinker.ModelInput.from_ints([1, 2, 3]),
            loss_fn_inputs=tensors(target_tokens=[2, 3, 4], weights=[1.0] * 3),
        )
        training.forward_backward([datum], "cross_entropy").result()
        training.optim_step(tinker.AdamParams(learning_rate=0.1)).result()
        expect(page.get_by_role("heading", name="Step 1")).to_be_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [DESK, PHONE], ids=["desk", "phone"])
def test_every_view_fits_its_window(
    browser: Browser, scene: Scene, viewport: dict[str, int], scheme: str
) -> None:
    console = Console(browser, scene.server, viewport=viewport, color_scheme=scheme)
    console.sign_in()
    for view in scene.views:
        page = console.open(view)
        console.settle()
        width = page.evaluate("document.documentElement.scrollWidth")
        assert width <= viewport["width"], view
    assert console.faults == []
    console.context.close()


def test_the_keyboard_reaches_everything(console: Console) -> None:
    page = console.open("runs")
    page.get_by_role("link", name="Sessions").wait_for()
    page.evaluate("document.body.tabIndex = -1; document.body.focus()")
    names: list[str] = []
    for _ in range(8):
        page.keyboard.press("Tab")
        names.append(page.evaluate("document.activeElement.textContent"))
    assert names[0] == "Skip to the content"
    assert {"Runs", "Sessions", "Checkpoints", "Sign out"} <= set(names)
