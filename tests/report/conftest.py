"""One browser for all pages."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="package")
def driver() -> Iterator[Any]:
    """Playwright, which holds an event loop: open while the tests of this folder run."""
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        yield driver


@pytest.fixture(scope="package")
def browser(driver: Any) -> Iterator[Any]:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("no chromium on this machine (Debian: apt-get install chromium)")
    arguments = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    browser = driver.chromium.launch(executable_path=chromium, args=arguments)
    yield browser
    browser.close()


@pytest.fixture(scope="package")
def firefox(driver: Any) -> Iterator[Any]:
    """Firefox by WebDriver BiDi, as it is installed: playwright's build is not needed."""
    path = shutil.which("firefox") or shutil.which("firefox-esr")
    if path is None:
        pytest.skip("no firefox on this machine (Debian: apt-get install firefox-esr)")
    try:
        browser = driver.firefox.launch(executable_path=path, channel="moz-firefox")
        browser.new_context().close()
    except Exception as error:
        if "unknown command" not in str(error):
            raise
        pytest.skip("no firefox that playwright can drive: this one is too old")
    yield browser
    browser.close()
