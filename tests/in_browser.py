"""Pages in a real browser without a window: Chromium, and Firefox."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")


@pytest.fixture(scope="module")
def browser(driver: playwright.Playwright) -> Iterator[playwright.Browser]:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("no chromium on this machine (Debian: apt-get install chromium)")
    arguments = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    browser = driver.chromium.launch(executable_path=chromium, args=arguments)
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def firefox(driver: playwright.Playwright) -> Iterator[playwright.Browser]:
    """Firefox by WebDriver BiDi, as it is installed: playwright's own build is not needed."""
    path = shutil.which("firefox") or shutil.which("firefox-esr")
    if path is None:
        pytest.skip("no firefox on this machine (Debian: apt-get install firefox-esr)")
    try:
        browser = driver.firefox.launch(executable_path=path, channel="moz-firefox")
        browser.new_context().close()
    except playwright.Error as error:
        if "unknown command" not in str(error):
            raise
        pytest.skip("no firefox that playwright can drive: this one is too old")
    yield browser
    browser.close()


class Opened:
    """A page in a browser, with everything that it must not do kept."""

    def __init__(self, browser: playwright.Browser, path: Path, **options: object) -> None:
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.url = path.as_uri()
        self.console: list[str] = []
        self.requests: list[str] = []
        self.dialogs: list[str] = []
        self.page.on("console", lambda message: self.console.append(message.text))
        self.page.on("pageerror", lambda error: self.console.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("dialog", lambda dialog: (self.dialogs.append("!"), dialog.dismiss()))

    def load(self, fragment: str = "", *, ready: str = "html[data-shown]") -> playwright.Page:
        self.page.goto(self.url + fragment)
        self.page.wait_for_selector(ready)
        return self.page

    def harmless(self) -> bool:
        loaded = [url for url in self.requests if not url.startswith(("data:", "blob:"))]
        assert {url.split("#")[0] for url in loaded} <= {self.url}
        assert (self.console, self.dialogs) == ([], [])
        return True
