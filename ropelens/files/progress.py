"""Progress of long work: a bar on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Protocol, runtime_checkable

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

SECONDS_BETWEEN_LINES = 60.0
SECONDS_TO_FIRST_LINE = 1.0
"""By then the rate is known, and with it the time left."""


@runtime_checkable
class ShowProgress(Protocol):
    """Opens a stage of long work; the function it gives takes the units done since."""

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
    """Shows how much of the work is done, in `bar` or as lines on stderr."""

    def __init__(
        self, what: str, total: int, unit: str, completed: int, bar: Progress | None
    ) -> None:
        self.what, self.total, self.unit, self.bar = what, total, unit, bar
        self.before = self.completed = completed
        self.begin = time.monotonic()
        first = SECONDS_TO_FIRST_LINE if unit == "tokens" else SECONDS_BETWEEN_LINES
        self.next = self.begin + min(SECONDS_BETWEEN_LINES, first)

    def __call__(self, amount: int, *, note: str = "") -> None:
        """`amount` more units are done; `note` says more, such as the loss."""
        self.completed += amount
        now = time.monotonic()
        parts = [self._pace(now), note]
        if self.bar is not None:
            text = ", ".join(filter(None, parts))
            self.bar.update(self.bar.task_ids[0], completed=self.completed, text=text)
        elif now >= self.next or (note and self.completed >= self.total):
            self.next = now + SECONDS_BETWEEN_LINES
            done = f"{self.what}: {self.completed:,} of {self.total:,} {self.unit}"
            print(", ".join(filter(None, [done, *parts])), file=sys.stderr, flush=True)

    def _pace(self, now: float) -> str:
        """The mean rate, and the time that the rest takes at that rate."""
        rate = (self.completed - self.before) / max(now - self.begin, 1e-9)
        if rate <= 0:
            return ""
        left = timedelta(seconds=round((self.total - self.completed) / rate))
        shown = f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"
        more = f", {left} left" if self.completed < self.total else ""
        return f"{shown} {self.unit}/s{more}"


@contextmanager
def show_progress(what: str, *, total: int, unit: str, completed: int = 0) -> Iterator[Advance]:
    """Gives a function to call with the units done since the last call; see `Advance`.

    Writes to stderr. On a terminal: a bar with rate and time left, which goes at the end; work
    of one step, such as loading, shows the time it has taken. Elsewhere: a line a minute; of
    work counted in tokens the first comes after a second. `completed` units were done before.
    """
    # Not as rich decides it: FORCE_COLOR, which CI services set, makes no log a terminal.
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield Advance(what, total, unit, completed, None)
        return
    name, text = TextColumn("{task.description}"), TextColumn("{task.fields[text]}")
    steps = total > 1
    end = [TaskProgressColumn(), text] if steps else [TimeElapsedColumn()]
    console = Console(stderr=True)
    columns = [name, BarColumn(), *end]
    with Progress(*columns, console=console, transient=True, redirect_stdout=False) as bar:
        bar.add_task(what, total=total if steps else None, completed=completed, text="")
        yield Advance(what, total, unit, completed, bar)
