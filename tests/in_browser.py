"""Pages in a real browser without a window, and what tests ask of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

# The page follows its address before we go on; to the one that it has, by way of none.
GO_TO = """async (hash) => {
  const go = (to) => new Promise((done) => {
    addEventListener("hashchange", done, { once: true });
    location.hash = to;
  });
  if (location.hash === hash) await go("");
  await go(hash);
}"""


class Opened:
    """A page in a browser, with a record of everything that it must not do."""

    def __init__(self, browser: playwright.Browser, path: Path, **options: object) -> None:
        window = {"viewport": {"width": 1280, "height": 800}}
        self.context = browser.new_context(**window | options)
        self.page = self.context.new_page()
        self.path, self.url = path, path.as_uri()
        self.console: list[str] = []
        self.requests: list[str] = []
        self.dialogs: list[str] = []
        self.page.on("console", lambda message: self.console.append(message.text))
        self.page.on("pageerror", lambda error: self.console.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("dialog", lambda dialog: (self.dialogs.append("!"), dialog.dismiss()))

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self.context.close()
        assert error or self.harmless()

    def load(self, fragment: str = "", *, ready: str = "html[data-shown]") -> playwright.Page:
        """The page at an address, opened anew."""
        if self.page.url != "about:blank":
            self.page.goto("about:blank")
        self.page.goto(self.url + fragment)
        self.page.wait_for_selector(ready)
        if ready == "html[data-shown]":
            idle(self.page)
        return self.page

    def at(self, fragment: str) -> playwright.Page:
        """The page at an address "#...", without opening it again."""
        if self.page.url == "about:blank":
            return self.load(fragment)
        self.page.evaluate(GO_TO, fragment)
        idle(self.page)
        return self.page

    def harmless(self) -> bool:
        """Whether the page asked for itself alone, and said nothing; held when it is closed."""
        loaded = [
            url for url in self.requests if not url.startswith(("data:", "blob:", "about:"))
        ]
        assert {url.split("#")[0] for url in loaded} <= {self.url}
        assert (self.console, self.dialogs) == ([], [])
        return True


def idle(page: playwright.Page) -> None:
    """Wait until the figures show what was chosen."""
    page.wait_for_selector("#explore[aria-busy=false]")


def shown(page: playwright.Page, layer: int, head: int) -> None:
    """Wait until this head is shown."""
    page.wait_for_selector(f"html[data-shown=L{layer}H{head}]")
    idle(page)


def view(page: playwright.Page, name: str) -> None:
    """Show this view of all heads, or this tab of the chosen one."""
    page.click(f"[role=tab][data-tab={name}]")
    idle(page)


def fits(page: playwright.Page) -> None:
    """Nothing stands out to the side: wide and light, narrow and dark."""
    over = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert page.evaluate(over) <= 0
    page.emulate_media(color_scheme="dark")
    page.set_viewport_size({"width": 400, "height": 900})
    drawn = (
        "() => [...document.querySelectorAll('.plot')].every((p) => p._fullLayout.width < 400)"
    )
    page.wait_for_function(drawn)
    assert page.evaluate(over) <= 0


def values(page: playwright.Page, name: str, axis: str, trace: int = 0) -> np.ndarray:
    """The numbers of a trace of the figure in the element `name`."""
    numbers = page.evaluate(
        """([name, axis, trace]) => Array.from(document.getElementById(name).data[trace][axis],
             (row) => row?.length === undefined ? row : Array.from(row))""",
        [name, axis, trace],
    )
    return np.array(numbers, dtype=float)


def broken(page: playwright.Page, context: str | None = None) -> set[tuple[str, str]]:
    """The rules of axe-core that a part of the page breaks, and where."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    violations = axe.run(page, context=context).response["violations"]
    return {(one["id"], node["html"][:120]) for one in violations for node in one["nodes"]}
