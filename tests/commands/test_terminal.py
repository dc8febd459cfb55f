"""Terminals that are gone or have another encoding."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys

import pytest
from cli_runs import STOPPING, ropelens

from ropelens.commands.app import main

__all__ = ["ropelens"]


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


def test_what_an_encoding_lacks_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="ascii") for _ in range(2))
    assert run_with(monkeypatch, "rope", stdout=out, stderr=err) == 0
    assert b"stated \\u2212 1" in out.buffer.getvalue()
    assert run_with(monkeypatch, "rope", "./nö→", stdout=out, stderr=err) == 1
    err.flush()
    assert b"\\u2192" in err.buffer.getvalue()


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

    monkeypatch.setattr("ropelens.models.load.open_checkpoint", stop)
    monkeypatch.setattr(os, "_exit", leave)
    before = signal.signal(number, signal.SIG_DFL)  # which nohup has ignored
    try:
        assert run_with(monkeypatch, "rope") == 128 + number
        told = capfd.readouterr().err
        assert told == "ropelens: stopped; nothing half-written is left\n"
        assert run_with(monkeypatch, "rope", stderr=Gone()) == 128 + number
    finally:
        signal.signal(number, before)
