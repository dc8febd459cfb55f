"""Signals, pipes and terminals, and errors before slow imports."""

import errno
import io
import os
import signal
import subprocess
import sys
import time

import pytest
from cli_runs import MAIN, NAMES, PLAN, STOPPING, Ended, unharmed

from ropelens.commands.terminal import print_lines
from ropelens.runtime.progress import Advance
from ropelens.runtime.results import open_results
from ropelens.train import loop

STOPPED = "ropelens: stopped; no file is incomplete, and the same command continues\n"


@pytest.mark.usefixtures("pageless")
def test_stdout_is_the_path_of_the_page_and_stderr_is_quiet(model, tmp_path, ropelens):
    strange = tmp_path / "\udcff\n"
    strange.mkdir()
    (strange / "a.txt").write_bytes(b"a\0b" * 50)
    out = strange / "out"
    ended = ropelens("analyze", model, "--text", strange, "--surrogates", 2, "--out", out)
    assert ended.code == 0
    assert ended.out == os.fsencode(out / "index.html").decode(errors="replace") + "\n"
    assert ended.err.startswith(PLAN)
    assert sorted(path.name for path in out.iterdir()) == list(NAMES)
    assert "\\udcff" in open_results(out / "profile.nc", "profile").attrs["command"]


def test_ctrl_c_while_measuring(ropelens, model, text, out, monkeypatch):
    def lines(*_: object) -> Advance:
        return lambda now, *_: now.what == "measuring" and os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr("ropelens.runtime.progress._log_lines", lines)
    with unharmed(out):
        ended = ropelens("analyze", model, "--text", text, "--batch-size", 1, "--out", out)
    plan, *rest = ended.err.splitlines(keepends=True)
    assert (ended.code, ended.out, rest) == (130, "", [STOPPED])
    assert plan.startswith(PLAN)


class Gone(io.StringIO):
    def write(self, _: str) -> int:
        raise OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize("number", STOPPING)
def test_a_signal_stops_a_run_although_a_library_converts_it(ropelens, monkeypatch, number):
    """transformers converts it during imports. The second run has no stderr."""

    def stop(*_: object) -> None:
        try:
            os.kill(os.getpid(), number)
        except KeyboardInterrupt as error:
            raise ImportError("no such module") from error

    monkeypatch.setattr("ropelens.checkpoints.load.open_checkpoint", stop)
    assert ropelens("rope") == Ended(128 + number, "", STOPPED)
    monkeypatch.setattr(sys, "stderr", Gone())
    assert ropelens("rope").code == 128 + number


def test_a_signal_in_a_function_that_ignores_errors(ropelens, monkeypatch):
    class Removed:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGINT)

    def stop(*_: object) -> None:
        Removed()
        time.sleep(60)

    monkeypatch.setattr("ropelens.checkpoints.load.open_checkpoint", stop)
    assert ropelens("rope") == Ended(130, "", STOPPED)


def test_a_signal_while_a_page_is_drawn(ropelens, model, text, out, monkeypatch):
    stop = lambda *_: os.kill(os.getpid(), signal.SIGTERM)  # noqa: E731
    monkeypatch.setattr("ropelens.analysis.analysis.render_page", stop)
    ended = ropelens("analyze", model, "--text", text, "--surrogates", 2, "--out", out)
    assert (ended.code, ended.out) == (143, "")
    assert ended.err.splitlines(keepends=True)[-1] == STOPPED
    assert {path.name for path in out.iterdir()} == {*NAMES} - {"index.html"}


def test_ctrl_c_while_training(text, tmp_path, ropelens, monkeypatch):
    sizes = ("--size", "1x16x1x1", "--context", 16, "--vocabulary", 258, "--steps", 4)
    args, batches = ("train", "--text", text, "--out", tmp_path / "run", *sizes), loop.batches

    def stop(*args: object, **options: object):
        for number, batch in enumerate(batches(*args, **options)):
            if number == 2:
                os.kill(os.getpid(), signal.SIGINT)
            yield batch

    with monkeypatch.context() as patch:
        patch.setattr(loop, "batches", stop)
        ended = ropelens(*args)
    assert (ended.code, ended.out) == (130, "")
    assert ended.err.splitlines(keepends=True)[-1] == STOPPED
    ended = ropelens(*args)
    assert (ended.code, ended.out) == (0, f"{tmp_path / 'run'}\n")


def apart(code: str, *args: object, stdout: int = subprocess.PIPE) -> Ended:
    command = [sys.executable, "-c", code, *map(str, args)]
    ended = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True)
    return Ended(ended.returncode, ended.stdout or "", ended.stderr)


def test_a_reader_that_stops_early_is_not_an_error():
    read, write = os.pipe()
    os.close(read)
    assert apart(MAIN, "list", stdout=write) == Ended(1, "", "")
    os.close(write)


def test_closed_streams_are_not_an_error(tmp_path, capsys: pytest.CaptureFixture[str]):
    names = ("stdin", "stdout", "stderr")
    run = f"import sys; sys.argv[1:] = ['list']; {MAIN}"
    for number, name in enumerate(names):
        closing = f"import os; os.close({number}); os.execv({sys.executable!r}, "
        ended = apart(f"{closing}[{sys.executable!r}, '-c', {run!r}])")
        assert (ended.code, ended.err) == (0, ""), name
        assert ("bundled:rope" in ended.out) == (name != "stdout")
    print_lines("a\x1b[31m\tb\n→")
    assert capsys.readouterr().out == "a\\x1b[31m\\tb\n→\n"


def test_characters_that_an_encoding_lacks_are_escaped(ropelens, monkeypatch):
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = open(number, "w", encoding="ascii", closefd=False)  # noqa: SIM115
        monkeypatch.setattr(sys, name, stream)
    assert "layers 0\\u20135" in ropelens("rope").out
    assert "\\u2192" in ropelens("rope", "./nö→").problem


# One process runs all commands, because starting a process is slow.
ALL_COMMANDS = """
import sys
from contextlib import suppress
from ropelens.commands.app import main
for args in {all_args}:
    sys.argv[1:] = args
    with suppress(SystemExit):
        main()
sys.exit(str({{"torch", "transformers", "plotly"}} & {{*sys.modules}}))
"""


def test_help_and_mistakes_do_not_wait_for_slow_imports(model, text, tmp_path):
    commands = ("", "analyze", "list", "truncate", "compare", "rope", "report", "train")
    helps = [[*command.split(), "--help"] for command in commands]
    to = ("--out", tmp_path / "out")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "config.json").write_text("{}")
    wrong: dict[tuple[object, ...], str] = {
        ("analyze", "--context", "x", *to): "'--context': Input should be a valid integer",
        ("analyze", model, "--text", tmp_path / "none", *to): "none does not exist",
        ("analyze", model, *to): "needs a text",
        ("analyze", model, "--text", text, "--out", tmp_path / "taken"): "holds config.json",
        ("analyze", "--dtype", "float7", *to): "'float7' is not one of 'float32'",
        ("truncate", "--measures", "loos", *to): "There is no measure 'loos'",
    }
    all_args = [*helps, *(list(map(str, args)) for args in wrong)]
    ended = apart(ALL_COMMANDS.format(all_args=all_args))
    assert ended.out.count("Usage: ropelens") == len(helps)
    *lines, imported = ended.err.splitlines()
    assert imported == "set()"
    for words, line in zip(wrong.values(), lines, strict=True):
        assert words in line
