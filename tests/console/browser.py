"""Headless Chromium on the console."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

from tests.serving import Server

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="needs Chromium: apt-get install chromium"
)
DESK, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
LIMIT_MS = 60_000  # on a busy machine; what is there at once takes no longer for it


@contextmanager
def chromium() -> Iterator[Browser]:
    expect.set_options(timeout=LIMIT_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM,
            args=["--no-sandbox", "--disable-gpu"],  # in containers, as root
        )
        yield browser
        browser.close()


class Console:
    """A page that is signed in. faults: errors of scripts, and what the page was refused."""

    def __init__(self, browser: Browser, server: Server, **options: Any):
        self.context = browser.new_context(**{"viewport": DESK, **options})
        self.context.set_default_timeout(LIMIT_MS)
        self.page: Page = self.context.new_page()
        self.server = server
        self.faults: list[str] = []
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("console", self._said)
        self.page.goto(f"{server.base_url}/console")

    def _said(self, message: ConsoleMessage) -> None:
        # Before signing in the page learns from a 401 that it has to.
        if message.type == "error" and "401" not in message.text:
            self.faults.append(message.text)

    def sign_in(self) -> None:
        self.page.get_by_label("API key").fill(self.server.api_key)
        self.page.get_by_role("button", name="Sign in").click()
        self.page.get_by_role("navigation").get_by_role("link").first.wait_for()

    def open(self, view: str) -> Page:
        """When it shows what was loaded."""
        self.page.evaluate("view => { location.hash = view }", view)
        self.page.locator(f"main .view.{view.split('/')[0].split('?')[0]} h1").wait_for()
        return self.page

    def settle(self) -> None:
        """Wait until what the view asked for is shown, and charts are drawn."""
        main = self.page.locator("main .view")
        main.locator(":is(table, .empty, .uplot, article, form):visible").first.wait_for()
        self.page.wait_for_timeout(200)
