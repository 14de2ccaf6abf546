"""The console in a browser: its numbers are the API's, and what models wrote is text."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

import tinker_gmi as tinker
from tests.console.browser import DESK, PHONE, Console, chromium, needs_chromium
from tests.console.scene import HOSTILE, Scene, serving_scene, tensors
from tests.serving import Server, running
from tinker_gmi.run_metrics import RunMetrics

pytestmark = needs_chromium
RECOVERY = {
    "recoveries_total": "models brought back",
    "engine_restarts": "engine restarts",
    "replay_deviation_nats": "largest deviation of a replay, nats",
    "snapshots": "snapshots taken",
    "snapshot_bytes": "written by snapshots",
}


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
    newest = {"weights": "", "sampler_weights": ""}  # of the run that saved both
    for saved in api(scene, f"/api/v1/training_runs/{scene.sft}/checkpoints")["checkpoints"]:
        newest[saved["checkpoint_id"].split("/")[0]] = saved["time"]
    assert newest["weights"] < newest["sampler_weights"]
    (last,) = (row[5] for row in cells(page, "Training runs") if row[0] == scene.sft)
    assert last == "sampler_weights/taught"


def test_the_metrics_of_the_newest_step_are_the_results(console: Console, scene: Scene) -> None:
    page = console.open(f"runs/{scene.rl}")
    page.get_by_role("heading", name="Step 6").wait_for()
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
    legend = chart.locator(".u-legend .u-value").all_text_contents()
    assert legend[0] == "6"  # the newest step, as nobody points at another
    assert float(legend[1]) == pytest.approx(shown["ppo_kl:mean"], rel=1e-3)


def test_what_the_script_reported_is_shown_rewards_first(console: Console, scene: Scene) -> None:
    page = console.open(f"runs/{scene.rl}")
    section = page.get_by_role("region", name="Reported by the script", exact=True)
    section.get_by_role("heading", name="Step 5").wait_for()
    with RunMetrics(scene.server.base_url, scene.server.api_key) as metrics:
        newest = metrics.reported(scene.rl)[-1]
    shown = {name: float(value) for name, value in cells(page, "Reported of the newest step")}
    assert shown == newest["metrics"]
    assert next(iter(shown)) == "reward"
    assert section.get_by_role("img").count() == 1
    section.get_by_text("13 more metrics").click()
    others = section.get_by_role("img")
    expect(others).to_have_count(14)
    expect(others.locator("canvas")).to_have_count(14)
    assert "1 at step 5" in (others.first.get_attribute("aria-label") or "")


def test_rewards_come_as_they_are_reported(console: Console, scene: Scene) -> None:
    page = console.open(f"runs/{scene.sft}")
    section = page.get_by_role("region", name="Reported by the script", exact=True)
    page.get_by_role("heading", name="Computed by the server").wait_for()
    expect(section).to_be_hidden()
    with RunMetrics(scene.server.base_url, scene.server.api_key) as metrics:
        metrics.report(scene.sft, 7, reward=0.25)
        expect(section.get_by_role("heading", name="Step 7")).to_be_visible()
        metrics.report(scene.sft, 7, reward=0.5)
    value = section.locator("tbody data")
    expect(value).to_have_attribute("value", "0.5")


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
        train_once(training)
        expect(page.get_by_role("heading", name="Step 1")).to_be_visible()


def test_what_a_model_wrote_is_text(console: Console, scene: Scene) -> None:
    page = console.open("samples")
    sample = page.locator("article", has_text=scene.sft)
    sample.wait_for()
    assert sample.locator(".token", has_text=HOSTILE).count() >= 12
    assert page.locator("article script, article img, article b").count() == 0
    assert page.title() == "Samples - tinkercloud"  # HOSTILE would have changed it
    console.open(f"captures/{scene.capture}")
    page.get_by_text("Messages of trajectory 1").click()
    assert page.get_by_text("<b>three</b>").first.is_visible()


def test_no_script_is_run_that_is_no_file_of_the_console(console: Console) -> None:
    page = console.open("runs")
    page.evaluate(
        "document.body.append(Object.assign(document.createElement('script'),"
        " {textContent: 'window.ran = 1'}))"
    )
    page.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=ran=1>')")
    page.wait_for_timeout(200)
    assert page.evaluate("window.ran") is None
    assert all("Content Security Policy" in f or "404" in f for f in console.faults)
    assert console.faults
    console.faults.clear()


def test_samples_have_the_log_probabilities_of_the_api(console: Console, scene: Scene) -> None:
    page = console.open("samples")
    page.locator("article").first.wait_for()
    newest = api(scene, "/console/samples")["samples"][0]
    tokens = page.locator("article").first.locator(".tokens").first.locator(".token")
    sequence = newest["sequences"][0]
    assert tokens.all_text_contents() == [text for text, _ in sequence["tokens"]]
    mean = page.locator("article").first.locator("data").nth(1).get_attribute("value")
    logprobs = [logprob for _, logprob in sequence["tokens"]]
    assert float(mean or "") == pytest.approx(sum(logprobs) / len(logprobs))


def test_the_queue_is_that_of_the_metrics(console: Console, scene: Scene) -> None:
    page = console.open("queue")
    page.get_by_role("region", name="Queue").wait_for()
    ((user, owner, kind, waiting, running, oldest_s),) = cells(page, "Queue")
    assert (user, owner, kind) == ("default", scene.rl, "OptimStep")
    depth = 'tinkercloud_queue_operations{kind="OptimStep",phase="%s"} %s.0'
    with scene.server.http() as http:
        metrics = http.get("/metrics").text.splitlines()
    assert depth % ("waiting", waiting) in metrics
    assert depth % ("running", running) in metrics
    assert float(oldest_s) > 0


def test_the_servers_numbers_are_those_of_health(console: Console, scene: Scene) -> None:
    page = console.open("server")
    health = api(scene, "/health")["backend"]
    for name, text in {
        "engine_memory_bytes": "memory, engine",
        "sampling_memory_bytes": "engine, highest while sampling",
        "training_memory_bytes": "engine, highest while training",
    }.items():
        fact = page.locator("dl div", has_text=text).locator("data")
        assert fact.get_attribute("value") == str(health[name])
    page.get_by_role("img", name="Memory: API process").locator("canvas").wait_for()


def test_what_a_killed_engine_cost_is_seen_as_it_comes_back(
    browser: Browser, folder: Path, tmp_path: Path
) -> None:
    """On the real engine: nothing that was acknowledged is lost, and the page says what it took."""
    arguments = ("--backend", "embedded", "--model", f"tiny={folder}", "--engine-threads", "1")
    with running(Server(arguments, tmp_path / "data")) as server:
        console = Console(browser, server)
        console.sign_in()
        page = console.open("server")
        restarts, brought_back = (
            page.locator("dl div", has_text=text).locator("data")
            for text in ("engine restarts", "models brought back")
        )
        expect(brought_back).to_have_attribute("value", "0")
        with tinker.ServiceClient(base_url=server.base_url, api_key=server.api_key) as service:
            training = service.create_lora_training_client(base_model="tiny", rank=2).result()
            train_once(training)
            os.kill(server.engine_pid(), signal.SIGKILL)
            train_once(training)
            expect(restarts).to_have_attribute("value", "1")
            expect(brought_back).to_have_attribute("value", "1")
        until = time.monotonic() + 60.0
        while (seen := recovery_seen(page)) != (counted := recovery_counted(server)):
            assert time.monotonic() < until, (seen, counted)  # the page shows it a moment later
            page.wait_for_timeout(200)
        assert console.faults == []
        console.context.close()


def recovery_seen(page: Page) -> dict[str, float]:
    return {
        name: float(
            page.locator("dl div", has_text=text).locator("data").get_attribute("value") or "nan"
        )
        for name, text in RECOVERY.items()
    }


def recovery_counted(server: Server) -> dict[str, float]:
    with server.http() as http:
        lines = [line.split() for line in http.get("/metrics").text.splitlines()]
    values = {
        line[0].removeprefix("tinkercloud_"): float(line[1]) for line in lines if line[0][0] != "#"
    }
    return {name: values[name] for name in RECOVERY}


def train_once(training: tinker.TrainingClient) -> None:
    datum = tinker.Datum(
        model_input=tinker.ModelInput.from_ints([1, 2, 3]),
        loss_fn_inputs=tensors(target_tokens=[2, 3, 4], weights=[1.0] * 3),
    )
    training.forward_backward([datum], "cross_entropy").result()
    training.optim_step(tinker.AdamParams(learning_rate=0.1)).result()


def test_speculation_is_that_of_health(console: Console, scene: Scene) -> None:
    page = console.open("speculation")
    state = api(scene, "/health")["speculation"]["chatty"]
    page.get_by_role("region", name="Acceptance by depth of head").wait_for()
    rows = cells(page, "Acceptance by depth of head")
    depths = state["drafters"]["head"]["depths"]
    assert [row[1:3] for row in rows] == [
        [str(depth["verified"]), str(depth["accepted"])] for depth in depths
    ]
    (speedup,) = cells(page, "Speed-up on chatty")
    assert float(speedup[3]) == pytest.approx(state["goodput"]["1-1"]["speedup"])
    expect(page.get_by_text("2 steps behind the policy")).to_be_visible()


def test_rewards_of_a_capture_are_shown(console: Console, scene: Scene) -> None:
    page = console.open("captures")
    page.get_by_role("link", name=scene.capture).click()
    page.get_by_role("region", name="Trajectories").wait_for()
    answer = api(scene, f"/api/v1/captures/{scene.capture}/trajectories")
    rewards = [str(trajectory["reward"]) for trajectory in answer["trajectories"]]
    assert [f"{float(row[5]):.1f}" for row in cells(page, "Trajectories")] == rewards


def test_a_checkpoint_answers_beside_its_base(console: Console, scene: Scene) -> None:
    page = console.open("checkpoints")
    page.get_by_role("link", name=f"Chat with {scene.checkpoint}").click()
    expect(page.get_by_label("Checkpoint").locator("select")).to_have_value(scene.checkpoint)
    page.get_by_label("Tokens at most").fill("6")
    page.get_by_label("Seed").fill("3")
    page.get_by_label("Message").fill("one two")
    page.keyboard.press("Control+Enter")
    expect(page.get_by_role("button", name="Ask")).to_be_enabled()
    answers = [
        page.get_by_role("log", name=name).locator(".message.assistant .text").text_content()
        for name in ("Checkpoint", "Base")
    ]
    question = {"messages": [{"role": "user", "content": "one two"}], "max_tokens": 6, "seed": 3}
    with scene.server.http() as http:
        for name, shown in zip((scene.checkpoint, "chatty"), answers, strict=True):
            body = {"model": name, "temperature": 0.7, **question}
            answer = http.post("/oai/api/v1/chat/completions", json=body).raise_for_status()
            assert shown == answer.json()["choices"][0]["message"]["content"], name
    assert HOSTILE in (answers[0] or "")
    assert page.locator(".log script, .log img").count() == 0


def test_a_failed_answer_is_shown_in_its_place(console: Console) -> None:
    page = console.open("chat")
    base = page.get_by_label("Base", exact=True).locator("select")
    expect(base).to_have_value("chatty")
    base.select_option("fake/tiny")
    page.get_by_label("Tokens at most").fill("2")
    page.get_by_label("Message").fill("one")
    page.get_by_role("button", name="Ask").click()
    failure = page.get_by_role("log", name="Base").locator(".failure")
    expect(failure).to_contain_text("chat template")
    expect(page.get_by_role("log", name="Checkpoint").locator(".failure")).to_have_count(0)
    console.faults = [fault for fault in console.faults if "status of 4" not in fault]


@pytest.mark.parametrize(
    ("viewport", "scheme"),
    [
        pytest.param(DESK, "light", marks=pytest.mark.slow),
        (DESK, "dark"),
        (PHONE, "light"),
        pytest.param(PHONE, "dark", marks=pytest.mark.slow),
    ],
    ids=["desk-light", "desk-dark", "phone-light", "phone-dark"],
)
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
        tables = page.locator(".scroll").evaluate_all(
            "places => places.map(place => place.scrollWidth - place.clientWidth)"
        )
        assert max(tables, default=0) <= 0, view  # nothing lies beside what is seen
    assert console.faults == []
    console.context.close()


def test_the_keyboard_reaches_everything(console: Console) -> None:
    page = console.open("runs")
    page.get_by_role("link", name="Sessions").wait_for()
    page.evaluate("document.body.tabIndex = -1; document.body.focus()")
    names: list[str] = []
    for _ in range(14):
        page.keyboard.press("Tab")
        names.append(page.evaluate("document.activeElement.textContent"))
    assert names[0] == "Skip to the content"
    assert {"Runs", "Sessions", "Checkpoints", "Sign out"} <= set(names)
