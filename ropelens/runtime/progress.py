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
        return (
            self.seconds / self.measured
            if 0 < self.measured >= self.total
            else math.nan
        )


def seconds_left(stages: Sequence[Stage]) -> float:
    """Seconds until all stages are done; NaN until each unfinished stage has a pace."""
    return sum((x.total - x.done) * x.pace for x in stages if x.done < x.total)


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
    last, in_notebook = (
        time.monotonic(),
        Console(stderr=True).is_jupyter and not watched,
    )
    bar = _bar(stages, in_notebook=in_notebook) if watched or in_notebook else None
    with bar or nullcontext(_log_lines(stages, last)) as show:

        def advance(amount: int, stage: int = 0, note: str = "") -> None:
            nonlocal last
            current, before, last = stages[stage], last, time.monotonic()
            current.add(amount, last - before)
            show(current, note, last)

        yield advance


@contextmanager
def _bar(
    stages: tuple[Stage, ...], *, in_notebook: bool
) -> Iterator[Callable[[Stage, str, float], None]]:
    with warnings.catch_warnings(
        action="ignore"
    ):  # tqdm draws text if there are no widgets
        from tqdm.auto import tqdm  # slow
    look: Any = {"bar_format": "{desc}: {percentage:3.0f}% {bar} {elapsed}{postfix}"}
    look |= {"ncols": 80, "file": sys.stdout if in_notebook else sys.stderr}
    look |= {"leave": in_notebook, "disable": in_notebook and stages[0].unit == "step"}
    with tqdm(total=1.0, desc=stages[0].what, **look) as bar:

        def show(current: Stage, note: str, _: float) -> None:
            if not math.isnan(left := seconds_left(stages)):
                spent = sum(x.done * x.pace for x in stages if x.measured)
                bar.n = max(bar.n, spent / max(spent + left, 1e-9))
            bar.set_description_str(current.what, refresh=False)
            bar.set_postfix_str(f"{_clock(left)} left {note}".strip() if left else note)

        yield show


def _log_lines(
    stages: tuple[Stage, ...], begin: float
) -> Callable[[Stage, str, float], None]:
    in_tokens = any(stage.unit == "tokens" for stage in stages)
    due, early = begin + SECONDS_BETWEEN_LINES, begin + 1.0 if in_tokens else math.inf

    def show(current: Stage, note: str, clock: float) -> None:
        nonlocal due, early
        done, left = (
            all(stage.done >= stage.total for stage in stages),
            seconds_left(stages),
        )
        known = not math.isnan(left)
        if clock < min(due, early if known else due) and not (note and done):
            return
        due, early = clock + SECONDS_BETWEEN_LINES, math.inf if known else early
        parts = [
            f"{current.what}: {current.done:,} of {current.total:,} {current.unit}"
        ]
        if rate := current.measured / max(current.seconds, 1e-9):
            parts.append(f"{rate:{',.0f' if rate >= 10 else '.2g'}} {current.unit}/s")
            parts += [f"{_clock(left)} left"] * (known and not done)
        with suppress(OSError):  # nobody reads stderr
            print(", ".join(filter(None, [*parts, note])), file=sys.stderr, flush=True)

    return show


def _clock(seconds: float) -> str:
    return "-:--:--" if math.isnan(seconds) else str(timedelta(seconds=round(seconds)))
