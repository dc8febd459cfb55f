"""How far long work has come: a bar on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Protocol, runtime_checkable

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

SECONDS_BETWEEN_LINES = 60.0
SECONDS_TO_FIRST_LINE = 1.0
"""By then a rate is known, and with it the time that the rest takes."""


@runtime_checkable
class ShowProgress(Protocol):
    """Opens a stage of long work; the function it gives is told the units done since."""

    def __call__(
        self, what: str, *, total: int, unit: str
    ) -> AbstractContextManager[Callable[[int], None]]: ...


def opening(show: ShowProgress, what: str) -> AbstractContextManager[Callable[[int], None]]:
    """A stage of one step, such as loading."""
    return show(what, total=1, unit="step")


def silent(
    what: str, *, total: int, unit: str
) -> AbstractContextManager[Callable[[int], None]]:
    """A `ShowProgress` that shows nothing."""
    return nullcontext(lambda _: None)


class Advance:
    """Tells how far the work is, in plain lines on stderr; `show_progress` gives it."""

    def __init__(
        self, what: str, total: int, unit: str, completed: int, seconds: float
    ) -> None:
        self.what, self.total, self.unit, self.seconds = what, total, unit, seconds
        self.begun = self.completed = completed
        self.begin = time.monotonic()
        first = SECONDS_TO_FIRST_LINE if unit == "tokens" else seconds
        self.next = self.begin + min(seconds, first)

    def __call__(
        self, amount: int = 0, *, completed: int | None = None, note: str = ""
    ) -> None:
        """`amount` more units are done, or `completed` in all; `note` says more, as a loss."""
        self.completed = self.completed + amount if completed is None else completed
        self.show(time.monotonic(), note)

    def show(self, now: float, note: str) -> None:
        """A line, where the last is long enough ago, or there is news when all is done."""
        if now >= self.next or (note and self.completed >= self.total):
            self.next = now + self.seconds
            done = f"{self.what}: {self.completed:,} of {self.total:,} {self.unit}"
            said = ", ".join(part for part in (done, self.pace(now), note) if part)
            print(said, file=sys.stderr, flush=True)

    def pace(self, now: float) -> str:
        """Mean rate so far, and the time that the rest takes at that rate."""
        rate = (self.completed - self.begun) / max(now - self.begin, 1e-9)
        if rate <= 0:
            return ""
        left = timedelta(seconds=round((self.total - self.completed) / rate))
        shown = f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"
        more = f", {left} left" if self.completed < self.total else ""
        return f"{shown} {self.unit}/s{more}"


class _Bar(Advance):
    """The same as a bar with rate and time left, which is gone when the work is done."""

    bar: Progress

    def show(self, now: float, note: str) -> None:
        said = ", ".join(part for part in (self.pace(now), note) if part)
        self.bar.update(self.bar.task_ids[0], completed=self.completed, said=said)


@contextmanager
def show_progress(
    what: str,
    *,
    total: int,
    unit: str,
    completed: int = 0,
    seconds: float | None = None,
) -> Iterator[Advance]:
    """Gives a function to call with the units done since the last call; see `Advance`.

    Writes to stderr. On a terminal: a bar with rate and time left, gone when done; work of one
    step, as loading, has a bar that moves with the time it has taken.
    Elsewhere: plain lines, `seconds` apart (a minute without); of work counted in tokens the
    first after a second, when the time left can be told. `completed` units were done
    before, such as the steps of a run that goes on.
    """
    apart = SECONDS_BETWEEN_LINES if seconds is None else seconds
    # Not as rich judges it: FORCE_COLOR, which CI services set, makes no log a terminal.
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield Advance(what, total, unit, completed, apart)
        return
    advance = _Bar(what, total, unit, completed, apart)
    words = [TextColumn(text) for text in ("{task.description}", "{task.fields[said]}")]
    columns: list[ProgressColumn] = [words[0], BarColumn(), TaskProgressColumn(), words[1]]
    if total <= 1:  # one step, of which only its time can be told
        columns = [words[0], BarColumn(), TimeElapsedColumn()]
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, redirect_stdout=False) as bar:
        bar.add_task(what, total=total if total > 1 else None, completed=completed, said="")
        advance.bar = bar
        yield advance
