"""An error prints one clear line and keeps earlier results; signals, pipes and terminals."""

import errno
import io
import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from cli_runs import MAIN, NAMES, PLAN, STOPPING, Ended, save_family, unharmed
from full_disk import full_disk

from ropelens.commands.terminal import print_lines
from ropelens.runtime.folder import PAGE
from ropelens.runtime.netcdf import open_results
from ropelens.runtime.progress import Stage
from ropelens.train import loop

MEASURE = "ropelens.analysis.run_plan.measure"


def test_a_model_that_cannot_be_measured(ropelens, tmp_path, text, out):
    model = save_family(tmp_path / "family", "falcon")
    on_text = (model, "--text", text, "--out")
    with unharmed(out):
        ended = [ropelens("analyze", *on_text, out)]
    ended += [
        ropelens("rope", model),
        ropelens("truncate", *on_text, tmp_path / "swept"),
    ]
    for end in ended:
        assert end.code == 1
        assert "FalconForCausalLM hides its attention" in end.problem


@pytest.mark.parametrize("command", ["analyze", "truncate", "analyze two", "claims"])
def test_results_of_another_model_are_refused_before_loading(
    ropelens, folder, model, text, tmp_path, monkeypatch, command
):
    monkeypatch.delattr("ropelens.checkpoints.load.Opened.read")
    name, *two = command.split()
    place = tmp_path / "out" / ("model" if two or name == "claims" else "")
    place.mkdir(parents=True)
    record = {
        "kind": "analysis",
        "model": {"name": "other llama", "fingerprint": "files:0"},
    }
    (place / "run.json").write_text(json.dumps(record))
    models = [folder, model] if two else [folder]
    ended = ropelens(name, *models, "--text", text, "--out", tmp_path / "out")
    assert ended.code == 1
    assert f"{place} has results of another model, other llama" in ended.problem
    assert list(place.iterdir()) == [place / "run.json"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["train"], "Missing option '--out'; see ropelens train --help"),
        (["analyze", "--rows", "few"], "Invalid value for '--rows': "),
        (
            ["analyze", "--seed", str(2**70)],
            "Invalid value for '--seed': ",
        ),
        (["analyze", "--nonsense"], "--nonsense"),
        (["analyze", "--out", ""], "'--out': it is empty"),
        (["truncate", "--keep", "half"], "Invalid value for '--keep': "),
        (["train", "--out", "run"], "one of --text, --tokens and --study is needed"),
        (
            ["train", "--study", "s", "--out", "o", "--steps", "9"],
            "--steps cannot be used",
        ),
    ],
)
def test_wrong_usage(ropelens, args: list[str], words: str):
    ended = ropelens(*args)
    assert ended.code == 2
    assert words in ended.problem


def test_a_place_that_cannot_be_written_to(ropelens, folder, text, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    content = text.read_bytes()
    ended = ropelens("analyze", folder, "--text", text, "--out", text)
    assert ended.code == 1
    assert "text.txt cannot be written to" in ended.problem
    assert sorted(tmp_path.rglob("*")) == before
    assert text.read_bytes() == content


def test_a_page_that_cannot_be_drawn_loses_no_number(
    ropelens, folder, text, out, monkeypatch
):
    def fails(*_: object) -> str:
        raise ValueError("no axis")

    (out / "index.html").write_text("<title>ropelens</title>, of an earlier run")
    commands = (
        ("analyze", folder, "--text", text, "--surrogates", 2, "--out"),
        ("report",),
    )
    with monkeypatch.context() as patch:
        patch.setattr("ropelens.analysis.analysis_result.render_page", fails)
        for command in commands:
            ended = ropelens(*command, out)
            assert ended.code == 1
            assert "all numbers are saved; seen: no axis" in ended.problem
            assert [path.name for path in sorted(out.iterdir())] == sorted(
                {*NAMES} - {PAGE}
            )
    assert ropelens("report", out) == Ended(0, f"{out / PAGE}\n", "")


def test_a_disk_that_runs_full(ropelens, folder, text, out, monkeypatch):
    analyze = ("analyze", folder, "--text", text, "--surrogates", 2, "--out")
    with unharmed(out), full_disk(200_000):
        ended = ropelens(*analyze, out)
    assert ended.code == 1
    assert "File too large" in ended.problem
    monkeypatch.setattr("ropelens.runtime.savepoint.SECONDS", 0)
    with full_disk(200_000):
        ended = ropelens(*analyze, out / "new")
    place = out / "new" / ".unfinished"
    assert ended.problem.endswith(f"the same command continues from {place}")
    with full_disk(10_000):
        ended = ropelens(*analyze, out / "none")
        size = (
            "--size",
            "1x16x1x1",
            "--context",
            16,
            "--vocabulary",
            258,
            "--steps",
            1,
        )
        learning = ropelens("train", "--text", text, *size, "--out", out / "run")
    assert ended.code == 1
    assert learning.code == 1
    assert not (out / "none").exists()
    assert learning.err.splitlines()[-1].startswith(
        "ropelens: The model cannot be written"
    )


def test_memory_that_runs_out_and_a_bug(ropelens, model, text, out, monkeypatch):
    args = ("analyze", model, "--text", text, "--out", out)
    monkeypatch.setattr(
        MEASURE, lambda *_, **__: torch.empty(2**50, dtype=torch.float64)
    )
    with unharmed(out):
        ended = ropelens(*args)
    assert ended.code == 1
    assert "The measurement does not fit into memory; seen: context 64" in ended.problem
    assert "a smaller --context" in ended.problem
    monkeypatch.setattr(MEASURE, lambda *_, **__: 1 / 0)
    with unharmed(out), pytest.raises(ZeroDivisionError):  # a bug shows its traceback
        ropelens(*args)


STOPPED = "ropelens: stopped; no file is incomplete, and the same command continues\n"


@pytest.mark.usefixtures("pageless")
def test_stdout_is_the_path_of_the_page_and_stderr_is_quiet(model, tmp_path, ropelens):
    strange = tmp_path / "\udcff\n"
    strange.mkdir()
    (strange / "a.txt").write_bytes(b"a\1b" * 50)
    out = strange / "out"
    ended = ropelens(
        "analyze", model, "--text", strange, "--surrogates", 2, "--out", out
    )
    assert ended.code == 0
    assert ended.out == os.fsencode(out / "index.html").decode(errors="replace") + "\n"
    assert ended.err.startswith(PLAN)
    assert sorted(path.name for path in out.iterdir()) == list(NAMES)
    assert "\\udcff" in open_results(out / "profile.nc", "profile").attrs["command"]


def test_ctrl_c_while_measuring(ropelens, model, text, out, monkeypatch):
    def stop(_: object, now: Stage, *more: object) -> None:
        if now.what == "measuring":
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr("ropelens.runtime.progress.LogLines.show", stop)
    with unharmed(out):
        ended = ropelens(
            "analyze", model, "--text", text, "--batch-size", 1, "--out", out
        )
    plan, *rest = ended.err.splitlines(keepends=True)
    assert ended.code == 130
    assert ended.out == ""
    assert rest == [STOPPED]
    assert plan.startswith(PLAN)


class Gone(io.StringIO):
    def write(self, _: str) -> int:
        raise OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize("number", STOPPING)
def test_a_signal_stops_a_run_although_a_library_converts_it(
    ropelens, monkeypatch, number
):
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


def test_a_signal_while_a_page_is_drawn(ropelens, model, text, out, monkeypatch):
    stop = lambda *_: os.kill(os.getpid(), signal.SIGTERM)  # noqa: E731
    monkeypatch.setattr("ropelens.analysis.analysis_result.render_page", stop)
    ended = ropelens("analyze", model, "--text", text, "--surrogates", 2, "--out", out)
    assert ended.code == 143
    assert ended.out == ""
    assert ended.err.splitlines(keepends=True)[-1] == STOPPED
    assert {path.name for path in out.iterdir()} == {*NAMES} - {"index.html"}


def test_ctrl_c_while_training(text, tmp_path, ropelens, monkeypatch):
    sizes = ("--size", "1x16x1x1", "--context", 16, "--vocabulary", 258, "--steps", 4)
    args = ("train", "--text", text, "--out", tmp_path / "run", *sizes)
    batches = loop.batches

    def stop(*args: object, **options: object):
        for number, batch in enumerate(batches(*args, **options)):
            if number == 2:
                os.kill(os.getpid(), signal.SIGINT)
            yield batch

    with monkeypatch.context() as patch:
        patch.setattr(loop, "batches", stop)
        ended = ropelens(*args)
    assert ended.code == 130
    assert ended.out == ""
    assert ended.err.splitlines(keepends=True)[-1] == STOPPED
    ended = ropelens(*args)
    assert ended.code == 0
    assert ended.out == f"{tmp_path / 'run'}\n"


def apart(code: str, *args: object, stdout: int = subprocess.PIPE) -> Ended:
    command = [sys.executable, "-c", code, *map(str, args)]
    ended = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True)
    return Ended(ended.returncode, ended.stdout or "", ended.stderr)


def test_a_reader_that_stops_early_is_not_an_error():
    read, write = os.pipe()
    os.close(read)
    assert apart(MAIN, "list", stdout=write) == Ended(1, "", "")
    os.close(write)


def test_control_characters_are_escaped(capsys: pytest.CaptureFixture[str]):
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


IMPORTED_BY_HELP = """
import sys
from contextlib import suppress
import ropelens
after_import = {*sys.modules}
from ropelens.commands.app import main
sys.argv[1:] = ["--help"]
with suppress(SystemExit):
    main()
slow = {"beartype", "typer"} & after_import
for name in ("numpy", "pandas", "plotly", "scipy", "torch", "transformers", "xarray"):
    if name in sys.modules:
        slow.add(name)
sys.exit(str(slow))
"""


def test_help_imports_only_the_command_line():
    """`ropelens --help` takes 0.2 s, and an import of xarray alone takes another 0.2 s."""
    ended = apart(IMPORTED_BY_HELP)
    assert ended.out.startswith("Usage: ropelens")
    assert ended.err == "set()\n"


def test_help_and_mistakes_do_not_wait_for_slow_imports(model, text, tmp_path):
    commands = ("", "analyze", "list", "truncate", "compare", "rope", "report", "train")
    helps = [[*command.split(), "--help"] for command in commands]
    to = ("--out", tmp_path / "out")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "config.json").write_text("{}")
    wrong: dict[tuple[object, ...], str] = {
        (
            "analyze",
            "--context",
            "x",
            *to,
        ): "Invalid value for '--context': ",
        ("analyze", model, "--text", tmp_path / "none", *to): "none does not exist",
        ("analyze", model, *to): "needs a text",
        ("truncate", "bundled:none", *to): "no checkpoint called 'none' is bundled",
        ("claims", "bundled:none", *to): "no checkpoint called 'none' is bundled",
        (
            "analyze",
            model,
            "--text",
            text,
            "--out",
            tmp_path / "taken",
        ): "holds config.json",
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
