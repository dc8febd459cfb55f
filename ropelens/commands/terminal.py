"""How a command behaves toward the terminal or script that started it."""

from __future__ import annotations

import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from ropelens.analysis.options import Model, Options, TextOption, with_options
from ropelens.errors import RopelensError, explained

if TYPE_CHECKING:
    from ropelens.analysis.analysis import Analysis, Answer


def say(message: str, *, by: str = "ropelens: ") -> None:
    """Print one line on stderr, without characters that a terminal would obey."""
    line = " ".join("".join(c if c.isprintable() else " " for c in message).split())
    print(f"{by}{line}", file=sys.stderr, flush=True)


def print_path(path: Path) -> None:
    """Print a path on stdout, where a command prints nothing else."""
    typer.echo(bytes(path))  # a name need not be text in the terminal's encoding


def finish(folder: Path) -> None:
    """End a command: the findings in `folder` on stderr, the path of its page on stdout."""
    from ropelens.runtime.results import PAGE, read_record  # which import xarray

    for finding in read_record(folder).get("findings", [])[:5]:
        say(finding, by="")  # by the first process alone, which may be the one to have a folder
    print_path(folder / PAGE)


def quiet_libraries() -> None:
    """Show our own warnings, a line each, and not those of libraries, nor their logs.

    Python's -W and the libraries' own variables take precedence. Of the processes that
    torchrun started, only the first one prints.
    """
    warnings.showwarning = lambda message, *_: say(f"warning: {message}")
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
        warnings.filterwarnings("default", module=r"ropelens\.")
    for library in ("TRANSFORMERS", "HF_HUB"):
        os.environ.setdefault(f"{library}_VERBOSITY", "error")
    for logger in ("torchao", "torch.utils._pytree"):  # transformers imports it if it is there
        logging.getLogger(logger).setLevel(logging.ERROR)
    for stream in (sys.stdout, sys.stderr):  # a path may have what their encoding lacks
        if isinstance(stream, TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")
    if int(os.environ.get("RANK", "0")) > 0:
        sys.stdout = sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115


def let_one_speak() -> None:
    """Of the processes that torchrun started, only the first one to end prints its error."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return
    for number in (signal.SIGINT, signal.SIGTERM):  # torchrun sends them once one has ended
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


def catch_signals() -> list[int]:
    """Let SIGTERM and SIGHUP end a run as Ctrl-C does; the list gets the signals that come.

    The list is needed because libraries turn Ctrl-C into errors of their own, as
    transformers does while it imports.
    """
    received: list[int] = []

    def stop(number: int, _: object) -> None:
        received.append(number)
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # which nohup and `&` set
            signal.signal(number, stop)
    return received


def run_script(main: Callable[..., None]) -> None:
    """Run the function `main` of a script as the commands of `ropelens` run: see `run_app`.

    As in `typer.run`, its parameters become options; --help prints the docstring of the
    script.
    """
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(help=f"\b\n{sys.modules[main.__module__].__doc__ or ''}")(main)
    run_app(app, name=Path(sys.argv[0]).name)


def run_analysis(
    answer: Callable[[Analysis], Answer],
    *,
    rows: int | Literal["all"] = "all",
    truncation: Mapping[str, Any] | None = None,
) -> None:
    """Run a script that answers one question on the model and text of its command line.

    MODEL, --text, --context and --sequences become an `Analysis` (`rows` and `truncation` as
    for `analyze`), of which `answer` makes the answer. It is written to reports/SCRIPT/MODEL
    beside the script's folder, with an index of all reports; the path of the page is printed.
    --help prints the docstring of the script, and it ends as the commands of `ropelens` do.
    """
    script = Path(str(sys.modules[answer.__module__].__file__)).resolve()
    reports = script.parents[1] / "reports"

    @with_options(Options, only=("context", "sequences"), context=None if truncation else 512)
    def main(model: Model = "bundled", text: TextOption = None, *, options: Options) -> None:
        from ropelens.analysis.analysis import write_answer
        from ropelens.analysis.analyze import analyze  # which imports torch
        from ropelens.report.index import write_index

        options = replace(options, rows=rows)
        analysis = analyze(model, text, options, truncation=truncation)
        page = write_answer(reports / script.stem, analysis, answer(analysis))
        write_index(reports)
        print_path(page)

    main.__module__ = answer.__module__
    run_script(main)


def run_app(app: typer.Typer, *, name: str = "ropelens") -> None:
    """Run a command and exit.

    The status is 0 when it is done, 1 with one line on stderr for what a user can cause, 2
    for wrong usage, 130 on Ctrl-C, 143 on SIGTERM, 129 on SIGHUP. Any other error is a bug and
    shows a traceback.
    """
    quiet_libraries()
    signals = catch_signals()
    code = 1
    try:
        with explained("The working directory is gone.", "cd to another", error=RopelensError):
            Path.cwd()  # without one torch ends the process
        code = app(prog_name=name, standalone_mode=False) or 0
        print(end="", flush=True)
    except (Exception, KeyboardInterrupt) as error:
        if not signals:
            let_one_speak()
            code = _explain(error, name)
    if signals and code:
        let_one_speak()
        with suppress(OSError):  # the terminal may be gone
            say("stopped; nothing half-written is left, and the same command goes on")
        os._exit(128 + signals[0])  # leaving torch takes seconds
    sys.exit(code)


def _explain(error: BaseException, name: str) -> int:
    """Print in one line what went wrong and return the exit status; raise a bug."""
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
