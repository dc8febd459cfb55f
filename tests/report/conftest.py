"""One browser for all pages."""

import shutil

import pytest
from synthetic_recalibration import recalibrated, recalibrated_study
from synthetic_truncation import small

__all__ = ["browser", "driver", "recalibrated", "recalibrated_study", "small"]


@pytest.fixture(scope="package")
def driver():
    """Playwright has an event loop, so it is open while the tests of this folder run."""
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        yield driver


@pytest.fixture(scope="package")
def browser(driver):
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("no chromium on this machine (Debian: apt-get install chromium)")
    arguments = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    browser = driver.chromium.launch(executable_path=chromium, args=arguments)
    yield browser
    browser.close()
