"""How far long work has come: a bar on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

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


@contextmanager
def show_progress(what: str, *, total: int, unit: str) -> Iterator[Callable[[int], None]]:
    """Gives a function to call with the units done since the last call.

    Writes to stderr. On a terminal: a bar with rate and time left, gone when done.
    Elsewhere: plain lines, at least SECONDS_BETWEEN_LINES apart, and one at the end.
    """
    # Not as rich judges it: FORCE_COLOR, which CI services set, makes no log a terminal.
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield _lines(what, total=total, unit=unit)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), _Pace(unit))
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, redirect_stdout=False) as bar:
        task = bar.add_task(what, total=total)
        yield lambda amount: bar.advance(task, amount)


class _Pace(ProgressColumn):
    """Rate and time left; rich's own columns stay empty where a step takes long."""

    def __init__(self, unit: str) -> None:
        super().__init__()
        self.unit = unit

    def render(self, task: Task) -> Text:
        if not task.completed or not task.total or not task.elapsed:
            return Text("")
        return Text(_pace(task.completed, task.total, task.elapsed, self.unit))


def _lines(what: str, *, total: int, unit: str) -> Callable[[int], None]:
    """Says on stderr how far it is, in plain lines."""
    begin = last = time.monotonic()
    done = 0

    def advance(amount: int) -> None:
        nonlocal last, done
        done += amount
        now = time.monotonic()
        if done < total and now - last < SECONDS_BETWEEN_LINES:
            return
        last = now
        pace = _pace(done, total, now - begin, unit)
        print(f"{what}: {done:,} of {total:,} {unit}, {pace}", file=sys.stderr, flush=True)

    return advance


def _pace(done: float, total: float, seconds: float, unit: str) -> str:
    """Mean rate so far, and the time that the rest takes at that rate."""
    rate = done / max(seconds, 1e-9)
    left = timedelta(seconds=round((total - done) / rate))
    shown = f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"
    return f"{shown} {unit}/s" + (f", {left} left" if done < total else "")
