"""How a command behaves toward the terminal or script that started it."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import shlex
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from io import FileIO, TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ropelens.errors import BadArgument, RopelensError

if TYPE_CHECKING:
    from rich.table import Table

    from ropelens.analysis.plan import Plan

NARROWEST = 72
"""Columns that a table takes, also in a terminal that has fewer and breaks its lines."""


class Stopped(Exception):
    """What a command says, once Ctrl-C has ended it, in place of `run_app`'s own words."""


@contextmanager
def stopped_in_its_words() -> Iterator[None]:
    """Pass on what a command says of itself when Ctrl-C ends it, which typer would drop.

    Around a block or, as a decorator, a function.
    """
    try:
        yield
    except KeyboardInterrupt as error:
        raise Stopped(str(error)) from error


def say(message: str, *, by: str = "ropelens: ") -> None:
    """One line on stderr, with nothing in it that a terminal would obey."""
    line = " ".join("".join(c if c.isprintable() else " " for c in message).split())
    print(f"{by}{line}", file=sys.stderr, flush=True)


def check_streams() -> None:
    """Make stdout and stderr safe to write to; raise BadArgument where stdout is closed.

    What their encoding lacks is escaped. The place of a closed stream is taken, for the next
    file that is opened would get it, and what libraries print with it. What goes to a closed
    stderr is lost.
    """
    while (spare := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(spare)
    if sys.stderr is None:
        sys.stderr = TextIOWrapper(FileIO(2, "w", closefd=False), line_buffering=True)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")
    if sys.stdout is None:
        raise BadArgument(
            "stdout is closed, so nothing can be printed.", attempt="> /dev/null, or a file"
        )


def this_command() -> str:
    """What a shell would be told to do this again."""
    return shlex.join(["ropelens", *sys.argv[1:]])


def print_path(path: Path) -> None:
    """A path on stdout, which is all that a command says there."""
    typer.echo(bytes(path))  # a name need not be text in the terminal's encoding


def print_tables(*tables: Table) -> None:
    """Tables on stdout."""
    from rich.console import Console

    console = Console(highlight=False)
    console.width = max(console.width, NARROWEST)
    for table in tables:
        console.print(table)


def finish(findings: Sequence[str], page: Path) -> None:
    """How a command ends: what was found, on stderr, and the path of the page on stdout."""
    for finding in findings:
        say(finding, by="")
    print_path(page)


def say_plan(plan: Plan) -> None:
    """The plan of a measurement, on the first line of stderr."""
    say(f"plan: {plan.line}")


def print_plan(plan: Plan) -> None:
    """The plan of a measurement on stdout; it is not carried out."""
    typer.echo(str(plan))
    raise typer.Exit


def speak_alone() -> None:
    """Of the processes that torchrun started the first has a voice, the others are silent."""
    if int(os.environ.get("RANK", "0")) > 0:
        sys.stdout = sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115


def give_voice_to_one() -> None:
    """Whichever of the processes that torchrun started ends first says why, and no other."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return
    for number in (signal.SIGINT, signal.SIGTERM):  # torchrun's, as one has ended
        signal.signal(number, signal.SIG_IGN)
    from torch.distributed import TCPStore

    try:
        place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(*place, is_master=False, timeout=timedelta(seconds=10))
        begun = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        first = store.add(f"ropelens ended {begun}", 1) == 1
    except (KeyError, ValueError, RuntimeError):  # nobody there to ask
        first = int(os.environ.get("RANK", "0")) == 0
    sys.stderr = sys.__stderr__ if first else Path(os.devnull).open("w")  # noqa: SIM115


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
    for logger in ("torchao", "torch.utils._pytree"):  # transformers imports it where it is
        logging.getLogger(logger).setLevel(logging.ERROR)


def catch_signals() -> list[int]:
    """Let SIGTERM and SIGHUP end a run as Ctrl-C does; the list gets the signals that come.

    It is needed where libraries turn Ctrl-C into errors of their own, as transformers does
    while it imports.
    """
    received: list[int] = []

    def stop(number: int, _: object) -> None:
        received.append(number)
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # which nohup and `&` set
            signal.signal(number, stop)
    return received


def hurry() -> None:
    """Spare the garbage collector what torch and transformers import: a million objects that
    stay, through which it would look again and again, and once more when Python ends."""
    gc.set_threshold(10_000)
    atexit.register(gc.freeze)


def run_script(main: Callable[..., None]) -> None:
    """Run the function `main` of a script as the commands of `ropelens` run: see `run_app`.

    As `typer.run`, which makes options of its parameters; --help prints the docstring of
    the script.
    """
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(help=f"\b\n{sys.modules[main.__module__].__doc__ or ''}")(
        stopped_in_its_words()(main)
    )
    run_app(app, name=Path(sys.argv[0]).name)


def run_app(app: typer.Typer, *, name: str = "ropelens") -> None:
    """Run a command and leave: exit 0 done, 1 with one line on stderr for what a user can
    cause, 2 for wrong usage, 130 on Ctrl-C, 143 on SIGTERM, 129 on SIGHUP. Any other error is
    a bug: a traceback."""
    hurry()
    quiet_libraries()
    signals = catch_signals()
    code, stopped = 1, ""
    speak_alone()
    try:
        check_streams()
        code = app(prog_name=name, standalone_mode=False) or 0
        sys.stdout.flush()
    except (Exception, KeyboardInterrupt) as error:
        give_voice_to_one()
        if not signals:
            code = _explain(error, name)
        elif isinstance(error, Stopped):
            stopped = str(error)
    if signals and code:
        with suppress(OSError):  # the terminal may be gone
            say(stopped or "stopped; nothing half-written is left")
        os._exit(128 + signals[0])  # all is cleaned up, and leaving torch takes seconds
    sys.exit(code)


def _explain(error: BaseException, name: str) -> int:
    """Say in one line what went wrong and return the exit code; raise what is a bug."""
    if isinstance(error, typer.TyperException):  # wrong usage
        message = error.format_message().replace("Value error, ", "")  # typer's, of choices
        context = getattr(error, "ctx", None)  # of the command, once it is known which
        command = context.command_path if context else name
        say(f"{message.rstrip('.')}; see {command} --help")
        return error.exit_code
    if isinstance(error, RopelensError):
        say(error.line)
    elif isinstance(error, BrokenPipeError):  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    elif isinstance(error, OSError) and error.strerror:
        where = f": {error.filename}" if error.filename else ""
        say(f"{error.strerror}{where}")
    else:
        raise error
    return 1
