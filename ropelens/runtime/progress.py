"""Progress of long work on stderr: a bar on a terminal, one line per minute elsewhere."""

import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn

SECONDS_BETWEEN_LINES = 60.0
EXPECTED = 0.05  # share of a stage for which an estimate assumes the pace of the begun stages

Advance = Callable[..., Any]
"""Takes the units done since the last call, the index of their `stage`, and a `note`."""

ShowProgress = Callable[..., AbstractContextManager[Advance]]
"""Takes the `Stage`s of long work and shows their joint progress, as `show_progress` does."""


@dataclass
class Stage:
    """A part of long work with `total` units, of which `done` are done.

    One unit takes about as long as `cost` units of a stage with cost 1. In this process,
    `measured` units took `seconds`.
    """

    what: str
    total: int
    unit: str = "tokens"
    cost: float = 1.0
    done: int = 0
    measured: int = 0
    seconds: float = 0.0

    def rate(self, stages: tuple["Stage", ...]) -> float:
        """Seconds per unit, by the pace of all begun stages with this unit; NaN before."""
        begun = [stage for stage in stages if stage.measured]
        alike = [stage for stage in begun if stage.unit == self.unit] or begun
        units = sum(stage.cost * stage.measured for stage in alike) or math.nan
        pace, few = sum(stage.seconds for stage in alike) / units, EXPECTED * self.total
        return (self.seconds + few * pace * self.cost) / (self.measured + few or 1)


def seconds_of(stages: tuple[Stage, ...]) -> tuple[float, float]:
    """Seconds for the units that are done, and for the rest; NaN before the start."""
    done = sum(stage.rate(stages) * stage.done for stage in stages)
    total = sum(stage.rate(stages) * stage.total for stage in stages)
    return done, total - done


def opening(show: ShowProgress, what: str) -> AbstractContextManager[Advance]:
    """Show a stage of one step, such as loading."""
    return show(Stage(what, 1, "step"))


def silent(*stages: Stage) -> AbstractContextManager[Advance]:
    """A `ShowProgress` that shows nothing."""
    return nullcontext(lambda amount, stage=0, note="": None)


@contextmanager
def show_progress(*stages: Stage) -> Iterator[Advance]:
    """Show the progress of `stages` on stderr. Gives an `Advance` to call after each part.

    A terminal shows one bar for all stages with the time left, and removes it at the end. A
    log gets one line per minute; if a unit is "tokens", the first line comes after a second.
    """
    # rich would take a log for a terminal if a CI service sets FORCE_COLOR.
    watched = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    last = time.monotonic()
    with _bar(stages) if watched else nullcontext(_log_lines(stages, last)) as show:

        def advance(amount: int, stage: int = 0, note: str = "") -> None:
            nonlocal last
            current, before, last = stages[stage], last, time.monotonic()
            current.done += amount
            current.measured += amount
            current.seconds += last - before
            show(current, note, last)

        yield advance


@contextmanager
def _bar(stages: tuple[Stage, ...]) -> Iterator[Callable[[Stage, str, float], None]]:
    columns = "{task.description}", BarColumn(), TaskProgressColumn(), "{task.fields[words]}"
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, redirect_stdout=False) as bar:
        total = None if len(stages) == stages[0].total == 1 else 1.0  # None: the bar pulses
        task = bar.add_task(stages[0].what, total=total, words="-:--:--")

        def show(current: Stage, note: str, _: float) -> None:
            done, left = seconds_of(stages)
            share = max(bar.tasks[0].completed, done / max(done + left, 1e-9))  # never back
            words = f"{_clock(left)} {note}"
            bar.update(task, completed=share, description=current.what, words=words)

        yield show


def _log_lines(stages: tuple[Stage, ...], begin: float) -> Callable[[Stage, str, float], None]:
    in_tokens = any(stage.unit == "tokens" for stage in stages)
    due = begin + (1.0 if in_tokens else SECONDS_BETWEEN_LINES)

    def show(current: Stage, note: str, clock: float) -> None:
        nonlocal due
        done = all(stage.done >= stage.total for stage in stages)
        if clock < due and not (note and done):
            return
        due = clock + SECONDS_BETWEEN_LINES
        parts = [f"{current.what}: {current.done:,} of {current.total:,} {current.unit}"]
        if rate := current.measured / max(current.seconds, 1e-9):
            parts.append(f"{rate:{',.0f' if rate >= 10 else '.2g'}} {current.unit}/s")
            parts += [f"{_clock(seconds_of(stages)[1])} left"] * (not done)
        with suppress(OSError):  # nobody reads stderr
            print(", ".join(filter(None, [*parts, note])), file=sys.stderr, flush=True)

    return show


def _clock(seconds: float) -> str:
    return "-:--:--" if math.isnan(seconds) else str(timedelta(seconds=round(seconds)))
