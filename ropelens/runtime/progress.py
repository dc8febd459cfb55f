"""Progress of long work on stderr: one bar on a terminal, a line per minute elsewhere."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn

SECONDS_BETWEEN_LINES = 60.0

EXPECTED = 0.05
"""Share of a stage that counts at the pace of the others beside its own measured pace."""

Advance = Callable[..., Any]
"""Takes the units done since the last call, the number of their `stage` (by default the first),
and a `note` that says more, such as the loss."""

ShowProgress = Callable[..., AbstractContextManager[Advance]]
"""Takes the `Stage`s of long work and shows them as one, as `show_progress` does."""


@dataclass
class Stage:
    """A part of long work: `total` units, `done` of them before.

    One takes about as long as `cost` units of a stage of cost 1. `measured` units took so many
    `seconds`.
    """

    what: str
    total: int
    unit: str = "tokens"
    cost: float = 1.0
    done: int = 0
    measured: int = 0
    seconds: float = 0.0

    def rate(self, stages: tuple[Stage, ...]) -> float:
        """Seconds a unit, by the pace of those of the `stages` that have the same unit, or of
        all, until its own is known; NaN before anything is done."""
        begun = [one for one in stages if one.measured]
        alike = [one for one in begun if one.unit == self.unit] or begun
        units = sum(one.cost * one.measured for one in alike) or math.nan
        pace, few = sum(one.seconds for one in alike) / units, EXPECTED * self.total
        return (self.seconds + few * pace * self.cost) / (self.measured + few or 1)


def seconds_of(stages: tuple[Stage, ...]) -> tuple[float, float]:
    """Seconds that what is done of the stages takes, and what is left; NaN before the start."""
    rates = [stage.rate(stages) for stage in stages]
    done = sum(rate * one.done for one, rate in zip(stages, rates, strict=True))
    return done, sum(rate * one.total for one, rate in zip(stages, rates, strict=True)) - done


def opening(show: ShowProgress, what: str) -> AbstractContextManager[Advance]:
    """A stage of one step, such as loading."""
    return show(Stage(what, 1, "step"))


def silent(*stages: Stage) -> AbstractContextManager[Advance]:
    """A `ShowProgress` that shows nothing."""
    return nullcontext(lambda amount, stage=0, note="": None)


@contextmanager
def show_progress(*stages: Stage) -> Iterator[Advance]:
    """Gives a function to call with the units done since the last call; see `Advance`.

    Writes to stderr. On a terminal: one bar for all stages, with the time left, which goes at
    the end. Elsewhere: a line per minute, the first of work counted in tokens after a second.
    """
    # Not as rich decides it: FORCE_COLOR, which CI services set, makes no log a terminal.
    watched = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    last = time.monotonic()
    with _bar(stages) if watched else nullcontext(_lines(stages, last)) as show:

        def advance(amount: int, stage: int = 0, note: str = "") -> None:
            nonlocal last
            now, before, last = stages[stage], last, time.monotonic()
            now.done, now.measured = now.done + amount, now.measured + amount
            now.seconds += last - before
            show(now, note, last)

        yield advance


@contextmanager
def _bar(stages: tuple[Stage, ...]) -> Iterator[Callable[[Stage, str, float], None]]:
    """A function that moves the bar of all stages; its share is that of the time."""
    columns = "{task.description}", BarColumn(), TaskProgressColumn(), "{task.fields[words]}"
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, redirect_stdout=False) as bar:
        total = None if len(stages) == stages[0].total == 1 else 1.0  # it goes on
        task = bar.add_task(stages[0].what, total=total, words="-:--:--")

        def show(now: Stage, note: str, _: float) -> None:
            done, left = seconds_of(stages)
            share = max(bar.tasks[0].completed, done / max(done + left, 1e-9))  # no way back
            words = f"{_clock(left)} {note}"
            bar.update(task, completed=share, description=now.what, words=words)

        yield show


def _lines(stages: tuple[Stage, ...], begin: float) -> Callable[[Stage, str, float], None]:
    """A function that prints what is done of a stage, its mean rate, and all the time left."""
    in_tokens = any(stage.unit == "tokens" for stage in stages)
    due = begin + (1.0 if in_tokens else SECONDS_BETWEEN_LINES)

    def show(now: Stage, note: str, at: float) -> None:
        nonlocal due
        done = all(stage.done >= stage.total for stage in stages)
        if at < due and not (note and done):
            return
        due = at + SECONDS_BETWEEN_LINES
        parts = [f"{now.what}: {now.done:,} of {now.total:,} {now.unit}"]
        if rate := now.measured / max(now.seconds, 1e-9):
            parts.append(f"{rate:{',.0f' if rate >= 10 else '.2g'}} {now.unit}/s")
            parts += [f"{_clock(seconds_of(stages)[1])} left"] * (not done)
        print(", ".join(filter(None, [*parts, note])), file=sys.stderr, flush=True)

    return show


def _clock(seconds: float) -> str:
    return "-:--:--" if math.isnan(seconds) else str(timedelta(seconds=round(seconds)))
