"""Fixtures of this room: commands, and the files that they read and write."""

from pathlib import Path

import pytest
from cli_runs import pageless, ropelens
from tiny_checkpoints import folder, save_tiny
from trained import prose, trained_run, trained_study

__all__ = [
    "folder",
    "model",
    "out",
    "pageless",
    "prose",
    "ropelens",
    "text",
    "trained_run",
    "trained_study",
]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny checkpoint. Do not change it."""
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny llama")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog " * 20)
    return path


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """An empty folder for results."""
    folder = tmp_path / "results" / "out"
    folder.mkdir(parents=True)
    return folder
