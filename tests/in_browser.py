"""Opens pages in a real browser without a window, for tests."""

from pathlib import Path

import numpy as np
import pytest

playwright = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed"
)

# Waits for the page to follow its address. An unchanged address is cleared first.
GO_TO = """async (hash) => {
  const go = (to) => new Promise((done) => {
    addEventListener("hashchange", done, { once: true });
    location.hash = to;
  });
  if (location.hash === hash) await go("");
  await go(hash);
}"""


class Opened:
    """A page in a browser, with a record of its messages, requests and dialogs."""

    def __init__(
        self, browser: playwright.Browser, path: Path, **options: object
    ) -> None:
        options.setdefault("viewport", {"width": 1280, "height": 800})
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.path = path
        self.url = path.as_uri()
        self.console: list[str] = []
        self.requests: list[str] = []
        self.dialogs: list[str] = []
        self.page.on("console", lambda message: self.console.append(message.text))
        self.page.on("pageerror", lambda error: self.console.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("dialog", self.dismiss)

    def dismiss(self, dialog: playwright.Dialog) -> None:
        self.dialogs.append("!")
        dialog.dismiss()

    def __enter__(self) -> "Opened":
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self.context.close()
        assert error or self.harmless()

    def load(
        self, fragment: str = "", *, ready: str = "html[data-shown]"
    ) -> playwright.Page:
        if self.page.url != "about:blank":
            self.page.goto("about:blank")
        self.page.goto(self.url + fragment)
        self.page.wait_for_selector(ready)
        if ready == "html[data-shown]":
            idle(self.page)
        return self.page

    def at(self, fragment: str) -> playwright.Page:
        if self.page.url == "about:blank":
            return self.load(fragment)
        self.page.evaluate(GO_TO, fragment)
        idle(self.page)
        return self.page

    def harmless(self) -> bool:
        local = ("data:", "blob:", "about:")
        loaded = [url for url in self.requests if not url.startswith(local)]
        assert {url.split("#")[0] for url in loaded} <= {self.url}
        assert self.console == []
        assert self.dialogs == []
        return True


def idle(page: playwright.Page) -> None:
    page.wait_for_selector("#explore[aria-busy=false]")


def shown(page: playwright.Page, layer: int, head: int) -> None:
    page.wait_for_selector(f"html[data-shown=L{layer}H{head}]")
    idle(page)


def view(page: playwright.Page, name: str) -> None:
    page.click(f"[role=tab][data-tab={name}]")
    idle(page)


def fits(page: playwright.Page) -> None:
    over = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert page.evaluate(over) <= 0
    page.emulate_media(color_scheme="dark")
    page.set_viewport_size({"width": 400, "height": 900})
    drawn = "[...document.querySelectorAll('.plot')].every((p) => p._fullLayout.width < 400)"
    page.wait_for_function(f"() => {drawn}")
    assert page.evaluate(over) <= 0


def values(page: playwright.Page, name: str, axis: str, trace: int = 0) -> np.ndarray:
    numbers = page.evaluate(
        """([name, axis, trace]) => Array.from(document.getElementById(name).data[trace][axis],
             (row) => row?.length === undefined ? row : Array.from(row))""",
        [name, axis, trace],
    )
    return np.array(numbers, dtype=float)


def broken(page: playwright.Page, context: str | None = None) -> set[tuple[str, str]]:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    violations = axe.run(page, context=context).response["violations"]
    return {
        (rule["id"], node["html"][:120])
        for rule in violations
        for node in rule["nodes"]
    }
