"""Running the command line in tests."""

import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
from oracles.tiny import tiny
from tiny_checkpoints import save_tiny

from ropelens.commands.app import main
from ropelens.errors import RopelensError

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PLAN = "ropelens: plan: "
RECORD = '{"kind": "analysis", "findings": ["an earlier one"]}'
NAMES = ("heads.csv", "index.html", "profile.nc", "run.json")
COLUMNS = (
    "layer,head,label,confidence,positional_fraction,content_fraction,interaction_fraction,"
    "total_bits,sink_bits,position_bits,content_bits,interaction_bits,offset,offset_low,"
    "offset_high,top_wavelength,top_share,offset_weight,mean_wavelength,previous_token,"
    "self_mass,sink_mass,entropy_bits,induction,duplicate_token"
)
"""The first columns of heads.csv. Further columns may follow."""
MAIN = "from ropelens.commands.app import main; main()"
PAGELESS_MAIN = f"from cli_runs import without_page\nwith without_page():\n    {MAIN}"


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str

    @property
    def problem(self) -> str:
        """The line on stderr that states the error, without the plan and lines of progress."""
        other = re.compile(f"{PLAN}|[a-z ]+: [\\d,]+ of ")
        lines = [line for line in self.err.splitlines() if not other.match(line)]
        assert len(lines) == 1, self.err
        assert lines[0].startswith("ropelens: ")
        assert len(lines[0]) < 700
        assert self.out == ""
        return lines[0].removeprefix("ropelens: ")


Command = Callable[..., Ended]


def here(capfd, program: str | Path, run: Callable[[], object], *args: object) -> Ended:
    """Run a program in this process, with `args` on its command line."""
    columns = os.environ.get("COLUMNS", "80")
    handlers = {number: signal.signal(number, signal.SIG_DFL) for number in STOPPING}
    capfd.readouterr()
    try:
        with (
            mock.patch.object(sys, "argv", [str(program), *map(str, args)]),
            mock.patch.object(os, "_exit", sys.exit),
            mock.patch.dict(os.environ, {"COLUMNS": columns}),
            warnings.catch_warnings(),
            pytest.raises(SystemExit) as ended,
        ):
            run()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    out, err = capfd.readouterr()
    assert isinstance(ended.value.code, int)
    return Ended(ended.value.code, out, err)


@pytest.fixture
def ropelens(capfd: pytest.CaptureFixture[str]) -> Command:
    return lambda *args: here(capfd, "ropelens", main, *args)


def without_page() -> AbstractContextManager[object]:
    """Replace the page by its title, because drawing takes longer than a tiny measurement."""
    page = "<!doctype html>\n<title>tiny · ropelens</title>"
    return mock.patch(
        "ropelens.analysis.analysis_result.render_page", return_value=page
    )


@pytest.fixture
def pageless() -> Iterator[None]:
    with without_page():
        yield


def save_family(folder: Path, name: str, **config: object) -> Path:
    save_tiny(folder)
    (folder / "model.safetensors").unlink()
    tiny(name, max_position_embeddings=64, **config).save_pretrained(folder)
    return folder


@contextmanager
def works_or_is_refused() -> Iterator[None]:
    line = ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        except RopelensError as error:
            line = error.line
    assert "\n" not in line
    assert len(line) < 1000


@contextmanager
def unharmed(folder: Path) -> Iterator[None]:
    """Write files of an earlier run to `folder`, and check that the block changes nothing."""
    earlier = {name: f"an earlier {name}" for name in NAMES}
    earlier["run.json"] = RECORD
    for name in NAMES:
        (folder / name).write_text(earlier[name])
    before = sorted(folder.iterdir())
    before_around = sorted(folder.parent.iterdir())
    yield
    assert sorted(folder.iterdir()) == before
    assert sorted(folder.parent.iterdir()) == before_around
    for name in NAMES:
        assert (folder / name).read_text() == earlier[name]
