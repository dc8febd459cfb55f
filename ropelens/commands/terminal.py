"""Output, signals and exit status of the commands."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from ropelens.analysis.options import ModelArgument, Options, TextOption, with_options
from ropelens.errors import RopelensError

# The error of typer for a command that is called wrongly, which has no name before typer 0.28
WRONG_USAGE: Any = typer.BadParameter.__mro__[2]

if TYPE_CHECKING:
    from ropelens.analysis.analysis_result import Analysis
    from ropelens.analysis.answer import Answer


def print_message(message: str, *, by: str = "ropelens: ") -> None:
    """Print one line on stderr."""
    print_lines(by + " ".join(message.split()), err=True)


def print_lines(lines: object, *, err: bool = False) -> None:
    """Print lines of text, with escapes for control characters. Ignores a broken stderr."""
    text = ""
    for character in str(lines):
        shown = character.isprintable() or character == "\n"
        text += character if shown else ascii(character)[1:-1]
    if not err:
        print(text)
        return
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def print_path(path: Path) -> None:
    typer.echo(bytes(path))  # the encoding of stdout may lack characters of a path


def out_or_own(
    out: Path | None,
    name: str,
    *,
    joins: Callable[[Path], bool] | None = None,
) -> Path:
    """The folder `out`; if it is not named, `name` or the next folder that is not in use.

    The same command continues or replaces its own results. Results that a command `joins` stay.
    """
    from ropelens.runtime.own_folder import (
        is_begun_by_another,
        is_of_this_command,
        own_folder,
    )

    if out is not None:
        return out

    def owns(folder: Path) -> bool:
        if is_of_this_command(folder):
            return True
        return joins is not None and not is_begun_by_another(folder) and joins(folder)

    folder = own_folder(Path(name), owns)
    if folder != Path(name):
        print_message(f"{name} has results of another command; using {folder}")
    return folder


def finish(folder: Path) -> None:
    """Print the findings in `folder` on stderr, and the path of its page on stdout."""
    from ropelens.runtime.folder import PAGE, UNFINISHED
    from ropelens.runtime.run_record import read_record

    shutil.rmtree(folder / UNFINISHED, ignore_errors=True)
    for finding in read_record(folder).get("findings", [])[:5]:
        print_message(finding, by="")
    print_path(folder / PAGE)


def quiet_libraries() -> None:
    """Print warnings of ropelens in one line, and hide warnings and logs of libraries."""
    warnings.showwarning = lambda message, *_: print_message(f"warning: {message}")
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
        warnings.filterwarnings("default", module=r"ropelens\.")
    for library in ("TRANSFORMERS", "HF_HUB"):
        os.environ.setdefault(f"{library}_VERBOSITY", "error")
    for logger in ("torchao", "torch.utils._pytree"):  # imported by transformers
        logging.getLogger(logger).setLevel(logging.ERROR)
    for stream in (sys.stdout, sys.stderr):  # for characters that the encoding lacks
        if isinstance(stream, TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")
    if int(os.environ.get("RANK", "0")) > 0:
        sys.stdout = sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115


def catch_signals() -> list[int]:
    """Let SIGTERM and SIGHUP stop a run as Ctrl-C does. The list collects received signals."""
    received: list[int] = []  # some libraries convert Ctrl-C to their own errors

    def stop(number: int, frame: Any) -> None:
        received.append(number)
        signal.default_int_handler(number, frame)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        ignored = signal.getsignal(number) is signal.SIG_IGN  # by nohup and `&`
        if not ignored:
            signal.signal(number, stop)
    return received


def run_script(main: Callable[..., None]) -> None:
    """Run `main` of a script as `typer.run` does; --help prints the script's docstring.

    The first paragraph and indented paragraphs keep their lines.
    """
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    text = sys.modules[main.__module__].__doc__ or ""
    text = text.replace("\n\n    ", "\n\n\b\n    ")
    app.command(help=f"\b\n{text}")(main)
    run_app(app, name=Path(sys.argv[0]).name)


def run_analysis(
    answer: Callable[[Analysis], Answer],
    *,
    rows: int | Literal["all"] = "all",
    truncation: Mapping[str, Any] | None = None,
) -> None:
    """Run a script that answers one question about a model and a text.

    `answer` gets the `Analysis` of the options of the command line, with `rows` and
    `truncation` as for `analyze`. Its answer is written to reports/SCRIPT/MODEL next to the
    script's folder, with an index, and the path is printed.
    """
    script = Path(str(sys.modules[answer.__module__].__file__)).resolve()
    reports = script.parents[1] / "reports"

    @with_options(
        Options,
        only=("context", "sequences", "bos"),
        context=None if truncation else 512,
    )
    def main(
        model: ModelArgument = "bundled", text: TextOption = None, *, options: Options
    ) -> None:
        from ropelens.analysis.answer import write_answer
        from ropelens.analysis.run_plan import analyze  # slow: imports torch
        from ropelens.report import write_index

        analysis = analyze(
            model, text, replace(options, rows=rows), truncation=truncation
        )
        page = write_answer(reports / script.stem, analysis, answer(analysis))
        write_index(reports)
        print_path(page)

    main.__module__ = answer.__module__
    run_script(main)


def run_app(app: typer.Typer, *, name: str = "ropelens") -> None:
    """Run a command and exit.

    The status is 0 after success, 2 for wrong usage, 1 for other errors of a user, which print
    one line, and 128 + N after the signal N. Any other error is a bug and shows a traceback.
    """
    errors = sys.stderr  # quiet_libraries hides it, except in the first process
    quiet_libraries()
    signals = catch_signals()
    code = 1
    try:
        code = app(prog_name=name, standalone_mode=False) or 0
        print(end="", flush=True)
    except (Exception, KeyboardInterrupt) as error:
        if not signals:
            sys.stderr = errors
            code = _explain(error, name)
    if signals:  # also if a library ignored it
        with suppress(OSError):  # the terminal may be gone
            message = "stopped; no file is incomplete, and the same command continues"
            print_message(message)
        os._exit(128 + signals[0])  # a normal exit of torch takes seconds
    sys.exit(code)


def _explain(error: BaseException, name: str) -> int:
    """Print the error in one line and return the exit status; raise a bug."""
    if isinstance(error, WRONG_USAGE):
        message = error.format_message().replace("Value error, ", "")  # from typer
        context = getattr(error, "ctx", None)  # set if the command is known
        command = context.command_path if context else name
        print_message(f"{message.rstrip('.')}; see {command} --help")
        return error.exit_code
    if isinstance(error, RopelensError):
        print_message(error.line)
    elif isinstance(error, BrokenPipeError):  # for example `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    elif isinstance(error, OSError) and error.strerror:
        where = f": {error.filename}" if error.filename else ""
        print_message(f"{error.strerror}{where}")
    else:
        raise error
    return 1
