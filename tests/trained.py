"""A tiny model that tests can train, with a run, a study and a comparison."""

import csv
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from ropelens.comparison.entries import ComparisonEntry, find_entries
from ropelens.train import run as runs
from ropelens.train.run import run_study
from ropelens.train.settings import SIZES, Settings, Size

NANO = Size(
    layers=2,
    width=32,
    heads=2,
    kv_heads=1,
    head_dim=16,
    mlp=64,
    batch=4,
    micro_batch=2,
    learning_rate=1e-2,
)
SIZES["nano"] = NANO
OPTIONS = {
    "size": "nano",
    "context": 32,
    "vocabulary": 300,
    "steps": 60,
    "precision": "bf16",
}


def train(
    text: Sequence[Path | str] = (),
    *,
    out: Path,
    valid: Sequence[Path | str] = (),
    data: Path | None = None,
    watch: bool = False,
    **settings: Any,
) -> Path:
    return runs.train(
        Settings(**settings), text=text, out=out, valid=valid, data=data, watch=watch
    )


VARIANTS = ("rope", "p-rope:0.5", "nope")
STUDY = """\
variants = ["rope", "p-rope:0.5", "nope"]
seeds = [0, 1]
sizes = ["nano"]
context = 32
vocabulary = 300
steps = 2
precision = "bf16"
"""
SEQUENCES = 32


def story(lines: int) -> str:
    names = ["Anna", "Bertram", "Cecily", "Dorian"]
    sentences = []
    for i in range(lines):
        one = names[i % 4]
        other = names[i * 7 % 4]
        sentences.append(f"{one} met {other} and said good day, number {i % 10}.")
    return "\n".join(sentences)


def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all test processes share."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture(scope="session")
def prose(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.getbasetemp() / "story.txt"
    path.write_text(story(600), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory: pytest.TempPathFactory, prose: Path) -> Path:
    """A finished run. The first test process trains it."""
    folder = shared_folder(tmp_path_factory)
    with FileLock(folder / "run.lock"):
        return train([prose], out=folder / "trained-run", **OPTIONS)


def metrics(run: Path) -> list[dict[str, str]]:
    """Rows of metrics.csv without the tokens per second, which depend on the clock."""
    with (run / "metrics.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    for row in rows:
        del row["tokens_per_second"]
    return rows


@pytest.fixture(scope="session")
def trained_study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished study of six runs. The first test process trains them."""
    folder = shared_folder(tmp_path_factory) / "study"
    with FileLock(folder.with_suffix(".lock")):
        if not folder.exists():
            folder.mkdir()
            (folder / "story.txt").write_text(story(2000), encoding="utf-8")
            (folder / "study.toml").write_text(STUDY)
        text = [folder / "story.txt"]
        return run_study(folder / "study.toml", out=folder / "runs", text=text)


def run_folder(study: Path, variant: str, seed: int) -> Path:
    return study / "nano" / variant.replace(":", "-") / f"seed-{seed}"


def runs_in(study: Path) -> list[ComparisonEntry]:
    return find_entries([study]).entries


def copy_of(study: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(study, tmp_path / "copy"))
