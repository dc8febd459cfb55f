"""Progress: a bar on a terminal, and plain lines in a log."""

import contextlib
import math
import os
import pty
import re
import select
import sys
import termios
import time
from dataclasses import dataclass

import numpy as np
import pytest

from ropelens.runtime import progress
from ropelens.runtime.progress import Stage, show_progress


def test_plain_lines_without_a_terminal(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as CI services do
    now = iter([100.0, 100.5, 101.0, 102.0, 160.0, 161.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(now))
    with show_progress(Stage("training", 15_000, done=5_000)) as advance:
        advance(500)  # too soon for a line
        advance(500, note="loss 4.0")  # the time left is known
        advance(1_000)
        advance(3_000)  # not yet a minute
        advance(5_000, note="loss 2.0")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "training: 6,000 of 15,000 tokens, 1,000 tokens/s, 0:00:09 left, loss 4.0",
        "training: 15,000 of 15,000 tokens, 164 tokens/s, loss 2.0",
    ]
    assert progress.SECONDS_BETWEEN_LINES == 60.0


@pytest.mark.parametrize("fails", [False, True])
def test_a_bar_with_the_time_left_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, fails: bool
):
    terminal, end = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    termios.tcsetwinsize(end, (24, 80))
    with os.fdopen(end, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        shown = show_progress(Stage("measuring", 1_000))
        with contextlib.suppress(KeyboardInterrupt), shown as advance:
            advance(400)
            advance(400, note="loss 2")
            if fails:
                raise KeyboardInterrupt
        screen = b""
        while select.select([terminal], [], [], 1.0)[0]:
            screen += os.read(terminal, 10_000)
    monkeypatch.undo()
    os.close(terminal)
    shown = r"measuring:  80% [█▏▎▍▌▋▊▉ ]+ [\d:]+, [-\d:]+ left loss 2\s*\r +\r$"
    assert re.search(shown, screen.decode())  # the bar is removed


def test_a_notebook_keeps_one_line(capsys, monkeypatch):
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    with progress.opening(show_progress, "loading") as advance:
        advance(1)
    with show_progress(
        Stage("measuring", 1_000), Stage("fitting", 2, "layers")
    ) as advance:
        for _ in range(4):
            advance(250, note="loss 2")
        advance(1, stage=1)
        advance(1, stage=1)
    out, err = capsys.readouterr()
    *_, last, end = re.split(
        "[\r\n]", out
    )  # the bar draws over itself until the line ends
    assert out.count("\n") == 1
    assert end == ""
    assert err == ""
    assert re.fullmatch("fitting: 100% [█#]+ [0-9:]+", last)
    assert "-:--:-- left loss 2" in out
    assert "loading" not in out


def test_no_estimate_before_each_stage_has_a_pace(capsys, monkeypatch):
    """Fits and text alternate. The first step of a stage includes its start."""
    probe = Stage("probing", 1_000)
    fits = Stage("fitting", 4, "layers")
    text = Stage("measuring", 8_000)
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    layers = [(9.0, 0, 2), *[(3.0, 1, 1), (2.0, 1_000, 2)] * 4]
    with show_progress(probe, fits, text) as advance:
        for seconds, amount, stage in [
            (20.0, 1_000, 0),
            *layers,
            *[(4.0, 2_000, 2)] * 2,
        ]:
            clock[0] += seconds
            advance(amount, stage)
    probing, start, first, _, *rest = capsys.readouterr().err.splitlines()
    assert probing == "probing: 1,000 of 1,000 tokens, 50 tokens/s"
    assert start == "measuring: 0 of 8,000 tokens"
    assert first == "fitting: 1 of 4 layers, 0.33 layers/s"
    *with_estimate, last = rest
    left = []
    for line in with_estimate:
        left += re.findall(r"[\d:]+(?= left)", line)
    assert left == [
        "0:00:20",
        "0:00:18",
        "0:00:15",
        "0:00:13",
        "0:00:10",
        "0:00:08",
        "0:00:04",
    ]
    assert " left" not in last


TEXT = 0
PROBING = 1
FITS = 2
TOKENS = 10_000  # of a batch


@dataclass(frozen=True)
class Step:
    """A step of a run: the units that it adds to its stage, and its mean time."""

    stage: int
    amount: int
    seconds: float


@dataclass(frozen=True)
class Run:
    """A run over batches of text, in which each kind of work has its own pace."""

    layers: int
    batches: int
    probing: float
    sums: float
    exchange: float
    fit: float

    @classmethod
    def draw(cls, random: np.random.Generator) -> "Run":
        """Each kind of work takes 0.2 to 5 times as long as in an average model."""
        probing, sums, exchange, fit = 5.0 ** random.uniform(-1, 1, 4)
        return cls(
            layers=random.choice([6, 30, 80]),
            batches=random.choice([1, 2, 8]),
            probing=probing,
            sums=sums,
            exchange=exchange,
            fit=fit,
        )

    def steps(self) -> list[Step]:
        steps = [Step(PROBING, 1, 5 * self.probing), Step(PROBING, 1, 2 * self.probing)]
        for batch in range(self.batches):
            steps += self.steps_of_batch(fits=batch == 0)
        return steps

    def steps_of_batch(self, *, fits: bool) -> list[Step]:
        of_layer = 0.5 + 0.3 * self.sums + 0.1 * self.exchange
        share = int(TOKENS / (1.05 * self.layers))
        steps = []
        for layer in range(self.layers):
            if layer == 0:
                steps.append(Step(TEXT, 0, 0.2 * of_layer))
            else:
                steps.append(Step(TEXT, share, of_layer))
            if fits:  # the first fit loads libraries
                steps.append(Step(FITS, 1, self.fit if layer else 3 * self.fit))
        rest = TOKENS - share * (self.layers - 1)
        steps.append(Step(TEXT, rest, of_layer + 0.05 * self.layers))
        return steps


@pytest.mark.parametrize("seed", range(60))
def test_an_estimate_is_within_a_factor_of_1_5_for_any_shares(seed: int):
    random = np.random.default_rng(seed)
    run = Run.draw(random)
    steps = run.steps()
    times = [step.seconds * random.uniform(0.8, 1.2) for step in steps]
    text = Stage("text", TOKENS * run.batches)
    fits = Stage("fits", run.layers, "layers")
    stages = (text, Stage("probing", 2), fits)
    left = sum(times)
    for step, seconds in zip(steps, times, strict=True):
        stages[step.stage].add(step.amount, seconds)
        left = left - seconds
        estimate = progress.seconds_left(stages)
        has_pace = fits.steps > 1
        assert math.isnan(estimate) != has_pace
        if has_pace and left > 0.05 * sum(times):
            assert left / 1.5 < estimate < left * 1.5
