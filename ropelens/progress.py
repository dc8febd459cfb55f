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
    TimeRemainingColumn,
)
from rich.text import Text

SECONDS_BETWEEN_LINES = 10.0


class _Rate(ProgressColumn):
    """Units a second."""

    def __init__(self, unit: str) -> None:
        super().__init__()
        self.unit = unit

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:,.0f} {self.unit}/s")


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
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        _Rate(unit),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, redirect_stdout=False) as bar:
        task = bar.add_task(what, total=total)
        yield lambda amount: bar.advance(task, amount)


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
        rate = done / max(now - begin, 1e-9)
        left = timedelta(seconds=round((total - done) / rate))
        print(
            f"{what}: {done:,} of {total:,} {unit}, {rate:,.0f} {unit}/s"
            + (f", {left} left" if done < total else ""),
            file=sys.stderr,
            flush=True,
        )

    return advance
