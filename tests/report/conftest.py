"""One browser for all pages."""

import shutil
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="package")
def driver() -> Iterator[Any]:
    """Playwright has an event loop, so it is open while the tests of this folder run."""
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
