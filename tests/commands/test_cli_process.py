"""What only a process of its own can show: signals, pipes, noise, a fast start."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from cli_runs import NAMES, PLAN, Command, apart, ropelens, start, unharmed
from tiny_checkpoints import save_tiny

from ropelens.files.results import open_results

__all__ = ["ropelens"]

STOPPED = "ropelens: stopped; nothing half-written is left"

# Every batch gets a line, so that one tells that measuring has begun.
LINE_A_BATCH = "from ropelens.files import progress; progress.SECONDS_BETWEEN_LINES = 0"

# Ctrl-C while transformers imports, of which some library makes an ImportError.
STOP_IMPORTING = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "transformers.modeling_utils":
            sys.meta_path.remove(self)
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt as error:
                raise ImportError("no such module") from error
sys.meta_path.insert(0, Finder())
"""

# SIGTERM while the results are written: the profile and the table are there, the page not.
STOP_WRITING = """
import os, signal, ropelens.analysis.analysis as analysis
def stop(*_, **__):
    os.kill(os.getpid(), signal.SIGTERM)
analysis.render_page = stop
"""

# Ctrl-C after the second step of a training.
STOP_TRAINING = """
import os, signal
from ropelens.train import loop
batches = loop.batches
def stop(*args, **options):
    for number, batch in enumerate(batches(*args, **options)):
        if number == 2:
            os.kill(os.getpid(), signal.SIGINT)
        yield batch
loop.batches = stop
"""

# A line on stderr at the end, should anything have waited to try again.
NO_WAITING = """
import sys, time
time.sleep = lambda seconds: print(f"waits {seconds} s", file=sys.stderr)
"""

# A line on stderr at the end, should torch have been imported.
NO_TORCH = """
import atexit, sys
atexit.register(lambda: "torch" in sys.modules and print("torch is here", file=sys.stderr))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "model")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog " * 20)
    return path


@pytest.fixture
def out(tmp_path: Path) -> Path:
    folder = tmp_path / "results" / "out"
    folder.mkdir(parents=True)
    return folder


def test_stdout_is_the_path_of_the_page_and_stderr_is_quiet(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where names are not text, as Python sees the byte 0xff."""
    monkeypatch.setenv("PYTHONIOENCODING", "utf-8:strict")
    strange = tmp_path / "\udcff\n"
    strange.mkdir()
    (strange / "a.txt").write_bytes(b"a\0b" * 50)
    out = strange / "out"
    ended = apart("analyze", model, "--text", strange, "--out", out)
    assert ended.code == 0
    assert ended.out == f"{out / 'index.html'}\n"
    assert ended.err.startswith(PLAN)
    assert sorted(path.name for path in out.iterdir()) == list(NAMES)
    assert "\\udcff" in open_results(out / "profile.nc", "profile").attrs["command"]


def cpu_seconds(process: int) -> float:
    """CPU time, user and system, that a process has used (Linux)."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def children_seconds() -> float:
    """CPU time that the processes which this one waited for have used."""
    times = os.times()
    return times.children_user + times.children_system


def test_ctrl_c_while_measuring(model: Path, text: Path, out: Path) -> None:
    text.write_text("the quick brown fox jumps over the lazy dog " * 12_000)
    args = ("analyze", model, "--text", text, "--sequences", 7_000, "--out", out)
    with unharmed(out), start(*args, before=LINE_A_BATCH) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith(PLAN)
        assert any(line.startswith("measuring: ") for line in process.stderr)
        spent = cpu_seconds(process.pid)
        process.send_signal(signal.SIGINT)
        others = children_seconds()
        output, lines = process.communicate(timeout=100)
    assert process.returncode == 130
    assert output == ""
    *progress, last = lines.splitlines()
    assert last == STOPPED
    assert all(line.startswith("measuring: ") for line in progress)
    # The other batches would take several times as long.
    assert children_seconds() - others - spent < 5


@pytest.mark.parametrize(
    ("when", "code"), [(STOP_IMPORTING, 130), (STOP_WRITING, 143)], ids=["import", "write"]
)
def test_a_signal_at_the_worst_moment(
    model: Path, text: Path, out: Path, when: str, code: int
) -> None:
    with unharmed(out):
        ended = apart("analyze", model, "--text", text, "--out", out, before=when)
    assert ended.code == code
    assert ended.err.splitlines()[-1] == STOPPED
    assert "Traceback" not in ended.err
    assert ended.out == ""


def test_ctrl_c_while_training(text: Path, tmp_path: Path, ropelens: Command) -> None:
    sizes = ("--size", "1x16x1x1", "--context", 16, "--vocabulary", 258, "--steps", 4)
    args = ("train", "--text", text, "--out", tmp_path / "run", *sizes)
    ended = apart(*args, before=STOP_TRAINING)
    assert (ended.code, ended.out) == (130, "")
    assert ended.err.splitlines()[-1] == STOPPED
    ended = ropelens(*args)
    assert (ended.code, ended.out) == (0, f"{tmp_path / 'run'}\n")


def test_a_reader_that_leaves_early_is_no_error(model: Path) -> None:
    """As `ropelens rope MODEL | head -1`."""
    read, write = os.pipe()
    os.close(read)
    with start("rope", model, stdout=write) as process:
        os.close(write)
        _, err = process.communicate(timeout=60)
    assert err == ""
    assert process.returncode == 1


def test_an_unknown_hub_id_without_a_network_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # where nothing listens
    monkeypatch.setenv("NO_PROXY", "*")
    ended = apart("rope", "nobody/nothing", before=NO_WAITING)
    assert ended.code == 1
    assert ended.problem.startswith("There is no checkpoint called nobody/nothing")


# One process for all commands.
EACH = """
from contextlib import suppress
from ropelens.commands.app import main
for command in ("", "analyze", "list", "truncate", "compare", "rope", "report", "train"):
    sys.argv[1:] = [*command.split(), "--help"]
    with suppress(SystemExit):
        main()
sys.argv[1:] = ["analyze", "--out", "out", "--rows", "0"]
"""


def test_neither_help_nor_wrong_usage_waits_for_torch() -> None:
    ended = apart(before=NO_TORCH + EACH)
    assert (ended.code, ended.out.count("Usage: ropelens")) == (2, 8)
    (line,) = ended.err.splitlines()
    assert "--rows" in line
