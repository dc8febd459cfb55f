"""Terminals and pipes that are closed, narrow, gone or speak another encoding."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from pathlib import Path

import pytest
from cli_runs import STOPPING, Command, ropelens

import ropelens as rl
from ropelens.commands.app import main

__all__ = ["ropelens"]

VARIANT = ("rope", "--variant", "p-rope:0.5", "--head-dim", "8")


@pytest.fixture(autouse=True)
def _signals() -> object:
    handlers = {number: signal.getsignal(number) for number in STOPPING}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def run_with(
    monkeypatch: pytest.MonkeyPatch, *args: str, **streams: io.TextIOBase | None
) -> object:
    """The exit code of `ropelens *args` with other streams."""
    monkeypatch.setattr(sys, "argv", ["ropelens", *args])
    for name, stream in streams.items():
        monkeypatch.setattr(sys, name, stream)
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


@pytest.mark.parametrize("args", [("list",), ("--help",), VARIANT])
def test_a_closed_stdout_is_said_in_one_line(
    monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...]
) -> None:
    err = io.StringIO()
    assert run_with(monkeypatch, *args, stdout=None, stderr=err) == 1
    line = (
        "ropelens: stdout is closed, so nothing can be printed; try: > /dev/null, or a file\n"
    )
    assert err.getvalue() == line


def test_a_closed_stderr_keeps_its_lines_from_stdout(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    assert run_with(monkeypatch, "rope", "./nothing", stdout=out, stderr=None) == 1
    assert out.getvalue() == ""


def test_no_file_is_opened_in_the_place_of_a_closed_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stdin = os.dup(0)
    try:
        os.close(0)
        run_with(monkeypatch, "--version", stdout=io.StringIO(), stderr=io.StringIO())
        assert os.path.samestat(os.fstat(0), Path(os.devnull).stat())
    finally:
        os.dup2(stdin, 0)
        os.close(stdin)


@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
def test_what_an_encoding_lacks_is_escaped(
    monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding=encoding) for _ in range(2))
    assert run_with(monkeypatch, "rope", stdout=out, stderr=err) == 0
    assert b"stated \\u2212 1" in out.buffer.getvalue()
    assert run_with(monkeypatch, "rope", "./nö→", stdout=out, stderr=err) == 1
    err.flush()
    assert b"\\u2192" in err.buffer.getvalue()


@pytest.mark.parametrize("columns", ["0", "1", "4", "many"])
def test_a_narrow_terminal_breaks_the_lines_of_tables(
    ropelens: Command, monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    for args in (("list",), VARIANT):
        ended = ropelens(*args)
        assert (ended.code, ended.err) == (0, "")
        assert "…" not in ended.out
    assert ropelens("rope", "--help").code == 0


@pytest.mark.parametrize("number", STOPPING)
def test_every_signal_that_stops_does_so_cleanly(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], number: int
) -> None:
    """Also where stderr, a terminal that hung up, takes nothing any more."""

    class Gone(io.StringIO):
        def write(self, _: str) -> int:
            raise OSError(errno.EIO, "Input/output error")

    def leave(code: int) -> None:
        raise SystemExit(code)

    def stop(*_: object, **__: object) -> None:
        os.kill(os.getpid(), number)

    monkeypatch.setattr(rl, "parse_variant", stop, raising=False)
    monkeypatch.setattr(os, "_exit", leave)
    before = signal.signal(number, signal.SIG_DFL)  # which nohup has ignored
    try:
        assert run_with(monkeypatch, *VARIANT) == 128 + number
        told = capfd.readouterr().err
        assert told == "ropelens: stopped; nothing half-written is left\n"
        assert run_with(monkeypatch, *VARIANT, stderr=Gone()) == 128 + number
    finally:
        signal.signal(number, before)
