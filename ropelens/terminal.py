"""How a command behaves toward the terminal or script that started it."""

from __future__ import annotations

import os
import signal
import sys
import warnings


def say(message: str) -> None:
    """One line on stderr, with nothing in it that a terminal would obey."""
    line = " ".join("".join(c if c.isprintable() else " " for c in message).split())
    print(f"ropelens: {line}", file=sys.stderr, flush=True)


def quiet_libraries() -> None:
    """Show our own warnings, a line each; keep those and the logs of libraries to them.

    Python's -W and the libraries' own variables still rule where they are set.
    """
    warnings.showwarning = lambda message, *_: say(f"warning: {message}")
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
        warnings.filterwarnings("default", module=r"ropelens\.")
    for library in ("TRANSFORMERS", "HF_HUB"):
        os.environ.setdefault(f"{library}_VERBOSITY", "error")


def catch_signals() -> list[int]:
    """Let SIGTERM end a run as Ctrl-C does; the list returned gets the signals that come.

    It is needed where libraries turn Ctrl-C into errors of their own, as transformers does
    while it imports.
    """
    received: list[int] = []

    def stop(number: int, _: object) -> None:
        received.append(number)
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:  # which nohup and `&` set
            signal.signal(number, stop)
    return received
