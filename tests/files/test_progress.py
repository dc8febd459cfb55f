"""Progress: a bar where somebody watches, plain lines where a file does."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import sys
import time

import pytest

from ropelens.files import progress
from ropelens.files.progress import show_progress


def test_plain_lines_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # which CI services set
    now = iter([100.0, 100.5, 101.0, 102.0, 160.0, 161.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(now))
    with show_progress("measuring", total=10_000, unit="tokens") as advance:
        advance(500)  # too soon for a line
        advance(500)  # now the time left is known
        advance(1_000)
        advance(3_000)  # not yet a minute
        advance(5_000)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "measuring: 1,000 of 10,000 tokens, 1,000 tokens/s, 0:00:09 left",
        "measuring: 10,000 of 10,000 tokens, 164 tokens/s",
    ]
    assert progress.SECONDS_BETWEEN_LINES == 60.0


def test_work_that_goes_on_counts_its_own_rate_and_says_more(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter([100.0, 110.0, 160.0, 170.0, 171.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(now))
    with show_progress("training", total=100, unit="steps", completed=50) as advance:
        advance(5, note="loss 4.0")  # not yet a minute
        advance(25, note="loss 3.0")
        advance(10)
        advance(10, note="loss 2.0")  # news at the end
    assert capsys.readouterr().err.splitlines() == [
        "training: 80 of 100 steps, 0.5 steps/s, 0:00:40 left, loss 3.0",
        "training: 100 of 100 steps, 0.7 steps/s, loss 2.0",
    ]


def everything(terminal: int) -> str:
    """All that was written to a terminal; one read gives some of it."""
    os.set_blocking(terminal, False)
    parts = []
    with contextlib.suppress(BlockingIOError):
        while True:
            parts.append(os.read(terminal, 4096))
    return b"".join(parts).decode()


@pytest.mark.parametrize("fails", [False, True])
def test_a_bar_with_rate_and_time_left_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    terminal, end = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    with os.fdopen(end, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        try:
            with show_progress("measuring", total=1_000, unit="tokens") as advance:
                advance(800)  # one step is enough for a rate
                if fails:
                    raise KeyboardInterrupt
        except KeyboardInterrupt:
            assert fails
        monkeypatch.undo()
        seen = everything(terminal)
    os.close(terminal)
    words = re.sub(r"\x1b\[[\d;]*m", "", seen)  # without colours
    assert re.search(r"measuring [━╺╸]+ +80% [\d,]+ tokens/s, \d:\d\d:\d\d left", words)
    assert seen.count("\x1b[?25l") == seen.count("\x1b[?25h") == 1  # the cursor comes back
    assert seen.endswith("\x1b[2K")  # and the bar goes
