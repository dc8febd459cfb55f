"""Progress of long work: a bar on a terminal or in a notebook, a line per minute elsewhere."""

import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from rich.console import Console

SECONDS_BETWEEN_LINES = 60.0

# Takes the units done since the last call, the index of their `stage`, and a `note`
Advance = Callable[..., Any]
# Takes the `Stage`s of long work and shows their joint progress, as `show_progress` does
ShowProgress = Callable[..., AbstractContextManager[Advance]]

ProgressOption = ShowProgress | bool | None
"""True shows the progress on stderr, as commands do; a `ShowProgress` shows it elsewhere."""


@dataclass
class Stage:
    """A part of long work with `total` units, of which `done` are done."""

    what: str
    total: int
    unit: str = "tokens"
    done: int = 0
    steps: int = 0
    measured: int = 0  # units in this process, which took `seconds`
    seconds: float = 0.0
    # Each step has the weight of the number of steps before it: the first includes the start.
    weighted_units: float = 0.0
    weighted_seconds: float = 0.0

    def add(self, amount: int, seconds: float) -> None:
        """Count a step."""
        self.weighted_units += self.steps * amount
        self.weighted_seconds += self.steps * seconds
        self.steps += 1
        self.done += amount
        self.measured += amount
        self.seconds += seconds

    @property
    def pace(self) -> float:
        """Seconds per unit; NaN before the second step of a stage with several steps."""
        if self.weighted_units:
            return self.weighted_seconds / self.weighted_units
        if 0 < self.measured >= self.total:
            return self.seconds / self.measured
        return math.nan


# Takes the stage that advanced, a note, and the time in seconds
Show = Callable[[Stage, str, float], None]


def seconds_left(stages: Sequence[Stage]) -> float:
    """Seconds until all stages are done; NaN until each unfinished stage has a pace."""
    seconds = 0.0
    for stage in stages:
        if stage.done < stage.total:
            seconds += (stage.total - stage.done) * stage.pace
    return seconds


def opening(show: ShowProgress, what: str) -> AbstractContextManager[Advance]:
    """Show a stage of one step, such as loading."""
    return show(Stage(what, 1, "step"))


def silent(*stages: Stage) -> AbstractContextManager[Advance]:
    """A `ShowProgress` that shows nothing."""
    return nullcontext(lambda amount, stage=0, note="": None)


def display_of(progress: ProgressOption) -> ShowProgress:
    """The function that shows the progress for the option `progress` of a public function."""
    return show_progress if progress is True else progress or silent


@contextmanager
def show_progress(*stages: Stage) -> Iterator[Advance]:
    """Show the progress of `stages` on stderr. Gives an `Advance` to call after each part.

    A terminal shows one bar for all stages with the time left, and removes it at the end. A
    notebook shows the same bar for stages of several steps, and keeps it as one line. A log
    gets one line per minute. If a unit is "tokens", one more line comes as soon as the time
    left is known and a second has passed.
    """
    watched = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    in_notebook = Console(stderr=True).is_jupyter and not watched
    last = time.monotonic()
    display: AbstractContextManager[Show] = nullcontext(LogLines(stages, last).show)
    if watched or in_notebook:
        display = _bar(stages, in_notebook=in_notebook)
    with display as show:

        def advance(amount: int, stage: int = 0, note: str = "") -> None:
            nonlocal last
            before = last
            last = time.monotonic()
            stages[stage].add(amount, last - before)
            show(stages[stage], note, last)

        yield advance


@contextmanager
def _bar(stages: tuple[Stage, ...], *, in_notebook: bool) -> Iterator[Show]:
    """One bar for all stages, by the share of the expected time."""
    # tqdm draws text if there are no widgets.
    with warnings.catch_warnings(action="ignore"):
        from tqdm.auto import tqdm  # slow
    progress_bar = tqdm(
        total=1.0,
        desc=stages[0].what,
        bar_format="{desc}: {percentage:3.0f}% {bar} {elapsed}{postfix}",
        ncols=80,
        file=sys.stdout if in_notebook else sys.stderr,
        leave=in_notebook,
        disable=in_notebook and stages[0].unit == "step",
    )
    with progress_bar as bar:

        def show(current: Stage, note: str, _: float) -> None:
            left = seconds_left(stages)
            if not math.isnan(left):
                measured = [stage for stage in stages if stage.measured]
                spent = sum(stage.done * stage.pace for stage in measured)
                share = spent / max(spent + left, 1e-9)
                bar.n = max(bar.n, share)
            words = note
            if left:
                words = f"{_clock(left)} left {note}".strip()
            bar.set_description_str(current.what, refresh=False)
            bar.set_postfix_str(words)

        yield show


class LogLines:
    """Lines on stderr: one a minute, and one as soon as the time left is known."""

    def __init__(self, stages: tuple[Stage, ...], begin: float) -> None:
        self.stages = stages
        self.due = begin + SECONDS_BETWEEN_LINES
        self.due_if_known = math.inf
        if any(stage.unit == "tokens" for stage in stages):
            self.due_if_known = begin + 1.0

    def show(self, current: Stage, note: str, clock: float) -> None:
        """Print a line if it is due, or if all stages are done and there is a `note`."""
        finished = all(stage.done >= stage.total for stage in self.stages)
        left = seconds_left(self.stages)
        known = not math.isnan(left)
        due = min(self.due, self.due_if_known) if known else self.due
        if clock < due and not (note and finished):
            return
        self.due = clock + SECONDS_BETWEEN_LINES
        if known:
            self.due_if_known = math.inf
        parts = [
            f"{current.what}: {current.done:,} of {current.total:,} {current.unit}"
        ]
        rate = current.measured / max(current.seconds, 1e-9)
        if rate:
            number = f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"
            parts.append(f"{number} {current.unit}/s")
        if rate and known and not finished:
            parts.append(f"{_clock(left)} left")
        if note:
            parts.append(note)
        with suppress(OSError):  # nobody reads stderr
            print(", ".join(parts), file=sys.stderr, flush=True)


def _clock(seconds: float) -> str:
    if math.isnan(seconds):
        return "-:--:--"
    return str(timedelta(seconds=round(seconds)))
