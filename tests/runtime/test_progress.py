"""Progress: a bar on a terminal, and plain lines in a log."""

import contextlib
import os
import pty
import re
import sys
import time

import pytest

from ropelens.runtime import progress
from ropelens.runtime.progress import Stage, show_progress


def test_plain_lines_without_a_terminal(capsys, monkeypatch):
    """At most one line per minute, with the rate of this process and the last note."""
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
def test_a_bar_with_the_time_left_on_a_terminal(monkeypatch: pytest.MonkeyPatch, fails: bool):
    terminal, end = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    with os.fdopen(end, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        shown = show_progress(Stage("measuring", 1_000))
        with contextlib.suppress(KeyboardInterrupt), shown as advance:
            advance(800, note="loss 2")
            if fails:
                raise KeyboardInterrupt
    monkeypatch.undo()
    with os.fdopen(terminal) as screen, contextlib.suppress(OSError):  # at the end
        shown = ""
        while letter := screen.read(1):
            shown += letter
    words = re.sub(r"\x1b\[[\d;]*m", "", shown)  # without colours
    assert re.search(r"measuring [━╺╸]+ +80% [-\d:]+ loss 2", words)
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 1  # shown again
    assert shown.endswith("\x1b[2K")  # the bar is removed


def test_stages_share_one_estimate_of_the_time_left(capsys, monkeypatch):
    """Fits take twice the expected time, and text takes a quarter more."""
    probe, fits = Stage("probing", 1_000), Stage("fitting", 10, "layers", cost=250)
    text, clock = Stage("measuring", 8_000, cost=2), [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    steps = [(2.0, 1_000, 0), *[(1.0, 1, 1)] * 10, *[(5.0, 1_000, 2)] * 8]
    whole = sum(seconds for seconds, _, _ in steps)
    ends = []
    with show_progress(probe, fits, text) as advance:
        for seconds, amount, stage in steps:
            clock[0] += seconds
            advance(amount, stage)
            ends.append(clock[0] + progress.seconds_of((probe, fits, text))[1])
    assert all(whole / 1.5 < end < whole * 1.5 for end in ends)
    assert (ends[0], ends[1], ends[-1]) == (2 + 5 + 32, 2 + 10 + 32, whole)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "probing: 1,000 of 1,000 tokens, 500 tokens/s, 0:00:37 left"
    assert lines[5] == "fitting: 5 of 10 layers, 1 layers/s, 0:00:37 left"
    assert lines[-1] == "measuring: 8,000 of 8,000 tokens, 200 tokens/s"
