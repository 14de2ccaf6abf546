"""python -m tests.console.screenshots FOLDER [--trains]: how every view looks, light, dark, on a
phone. --trains: of SmolLM2 as recipes train it, which takes minutes; else of the tests' server."""

import sys
import tempfile
import time
from pathlib import Path

from playwright.sync_api import Page, expect

from tests.console.browser import DESK, PHONE, Console, chromium
from tests.console.scene import serving_scene
from tests.console.training_scene import serving_training

LOOKS = {"light": (DESK, "light"), "dark": (DESK, "dark"), "phone": (PHONE, "light")}
HIGHEST = 2600  # pixels of a picture: a view of samples is longer
ANSWERED_MS = 120_000
WATCHED_S = 90.0
"""How long pages are open before they are pictured while a model trains: a server's past begins
when its page is opened."""


def main(folder: Path, *, trains: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as data,
        (serving_training if trains else serving_scene)(Path(data)) as scene,
        chromium() as browser,
    ):
        consoles: dict[str, Console] = {}
        for look, (viewport, scheme) in LOOKS.items():
            console = Console(browser, scene.server, viewport=viewport, color_scheme=scheme)
            console.page.screenshot(path=folder / f"sign-in-{look}.png")
            console.sign_in()
            consoles[look] = console
        time.sleep(WATCHED_S if trains else 0.0)
        for view in scene.views:
            for look, console in consoles.items():
                _picture(console, view, folder, look)


def _picture(console: Console, view: str, folder: Path, look: str) -> None:
    page = console.open(view)
    console.settle()
    kind, _, item = view.partition("?")[0].partition("/")
    if kind == "chat":
        _ask(page)
    name = f"{kind}-one" if item else kind
    width, height = page.evaluate(
        "[document.documentElement.clientWidth, document.documentElement.scrollHeight]"
    )
    clip = {"x": 0, "y": 0, "width": width, "height": min(height, HIGHEST)}
    page.screenshot(path=folder / f"{name}-{look}.png", full_page=True, clip=clip)


def _ask(page: Page) -> None:
    page.get_by_label("Tokens at most").fill("32")
    page.get_by_label("Seed").fill("1")
    page.get_by_label("Message").fill("What does a kettle cost?")
    page.get_by_role("button", name="Ask").click()
    expect(page.get_by_role("button", name="Ask")).to_be_enabled(timeout=ANSWERED_MS)


if __name__ == "__main__":
    main(Path(sys.argv[1]), trains="--trains" in sys.argv[2:])
