"""Progress of long work on stderr: a bar on a terminal, a line a minute elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TimeRemainingColumn

SECONDS_BETWEEN_LINES = 60.0

Advance = Callable[..., Any]
"""Takes the units done since the last call, and a `note` that says more, such as the loss."""


ShowProgress = Callable[..., AbstractContextManager[Advance]]
"""Opens a stage of long work, as `show_progress` does."""


def opening(show: ShowProgress, what: str) -> AbstractContextManager[Advance]:
    """A stage of one step, such as loading."""
    return show(what, total=1, unit="step")


def silent(
    what: str, *, total: int, unit: str, completed: int = 0
) -> AbstractContextManager[Advance]:
    """A `ShowProgress` that shows nothing."""
    return nullcontext(lambda amount, note="": None)


@contextmanager
def show_progress(what: str, *, total: int, unit: str, completed: int = 0) -> Iterator[Advance]:
    """Gives a function to call with the units done since the last call; see `Advance`.

    Writes to stderr. On a terminal: a bar with the time left, which goes at the end. Elsewhere:
    a line a minute, the first of work counted in tokens after a second. `completed` units were
    done before.
    """
    # Not as rich decides it: FORCE_COLOR, which CI services set, makes no log a terminal.
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield _lines(what, total, unit, completed)
        return
    columns = [BarColumn(), TaskProgressColumn(), TimeRemainingColumn()]
    texts = "{task.description}", "{task.fields[note]}"
    console = Console(stderr=True)
    with Progress(
        texts[0], *columns, texts[1], console=console, transient=True, redirect_stdout=False
    ) as bar:
        steps = total if total > 1 else None  # work of one step shows that it goes on
        task = bar.add_task(what, total=steps, completed=completed, note="")
        yield lambda amount, note="": bar.update(task, advance=amount, note=note)


def _lines(what: str, total: int, unit: str, completed: int) -> Advance:
    """An `Advance` that prints what is done, the mean rate and the time left at that rate."""
    begin, done = time.monotonic(), completed
    first = 1.0 if unit == "tokens" else SECONDS_BETWEEN_LINES
    due = begin + min(SECONDS_BETWEEN_LINES, first)

    def advance(amount: int, note: str = "") -> None:
        nonlocal done, due
        done, now = done + amount, time.monotonic()
        if now < due and not (note and done >= total):
            return
        due = now + SECONDS_BETWEEN_LINES
        rate = (done - completed) / max(now - begin, 1e-9)
        parts = [f"{what}: {done:,} of {total:,} {unit}"]
        if rate:
            parts.append(f"{rate:,.0f} {unit}/s" if rate >= 10 else f"{rate:.2g} {unit}/s")
        if rate and done < total:
            parts.append(f"{timedelta(seconds=round((total - done) / rate))} left")
        print(", ".join(filter(None, [*parts, note])), file=sys.stderr, flush=True)

    return advance
