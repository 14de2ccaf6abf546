"""python -m tests.console.screenshots FOLDER: how every view looks, light, dark, on a phone."""

import sys
import tempfile
from pathlib import Path

from tests.console.browser import DESK, PHONE, Console, chromium
from tests.console.scene import serving_scene

LOOKS = {"light": (DESK, "light"), "dark": (DESK, "dark"), "phone": (PHONE, "light")}


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as data,
        serving_scene(Path(data)) as scene,
        chromium() as browser,
    ):
        for look, (viewport, scheme) in LOOKS.items():
            console = Console(browser, scene.server, viewport=viewport, color_scheme=scheme)
            console.page.screenshot(path=folder / f"sign-in-{look}.png")
            console.sign_in()
            for view in scene.views:
                page = console.open(view)
                console.settle()
                kind, _, item = view.partition("?")[0].partition("/")
                name = f"{kind}-one" if item else kind
                page.screenshot(path=folder / f"{name}-{look}.png", full_page=True)
            console.context.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
