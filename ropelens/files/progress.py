"""How far long work has come: a bar on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskProgressColumn,
    TextColumn,
)
from rich.text import Text

SECONDS_BETWEEN_LINES = 10.0


class Advance(Protocol):
    """Takes the units done since the last call, and what else is to be shown of the work."""

    def __call__(self, amount: int, text: str = "") -> None: ...


@contextmanager
def show_progress(
    what: str,
    *,
    total: int,
    unit: str,
    completed: int = 0,
    seconds: float = SECONDS_BETWEEN_LINES,
) -> Iterator[Advance]:
    """Gives a function to call with the units done since the last call.

    Writes to stderr. On a terminal: a bar with rate and time left, gone when done.
    Elsewhere: plain lines, at least `seconds` apart, and one at the end. `completed`: units
    of the total that were done before.
    """
    # Not as rich judges it: FORCE_COLOR, which CI services set, makes no log a terminal.
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield _lines(what, total=total, unit=unit, completed=completed, seconds=seconds)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        _Pace(unit, completed),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, redirect_stdout=False) as bar:
        task = bar.add_task(what, total=total, completed=completed)

        def advance(amount: int, text: str = "") -> None:
            bar.update(task, advance=amount, description=", ".join(filter(None, (what, text))))

        yield advance


class _Pace(ProgressColumn):
    """Rate and time left; rich's own columns stay empty where a step takes long."""

    def __init__(self, unit: str, completed: int) -> None:
        super().__init__()
        self.unit, self.before = unit, completed

    def render(self, task: Task) -> Text:
        done = task.completed - self.before
        if not done or not task.total or not task.elapsed:
            return Text("")
        return Text(_pace(done, task.total - self.before, task.elapsed, self.unit))


def _lines(what: str, *, total: int, unit: str, completed: int, seconds: float) -> Advance:
    """Says on stderr how far it is, in plain lines."""
    begin = last = time.monotonic()
    done = completed

    def advance(amount: int, text: str = "") -> None:
        nonlocal last, done
        done += amount
        now = time.monotonic()
        if done < total and now - last < seconds:
            return
        last = now
        pace = _pace(done - completed, total - completed, now - begin, unit)
        line = ", ".join(filter(None, (f"{what}: {done:,} of {total:,} {unit}", pace, text)))
        print(line, file=sys.stderr, flush=True)

    return advance


def _pace(done: float, total: float, seconds: float, unit: str) -> str:
    """Mean rate so far, and the time that the rest takes at that rate."""
    rate = done / max(seconds, 1e-9)
    left = timedelta(seconds=round((total - done) / rate))
    shown = f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"
    return f"{shown} {unit}/s" + (f", {left} left" if done < total else "")
