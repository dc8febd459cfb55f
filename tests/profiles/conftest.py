"""Fixtures of this room, and the folder of real checkpoints."""

import os
from pathlib import Path

import pytest
from oracles.tiny import llama

__all__ = ["llama", "shared"]


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real checkpoints and texts."""
    beside = Path(__file__).parents[3] / "shared"
    folder = Path(os.environ.get("ROPELENS_SHARED", beside))
    if not (folder / "checkpoints").is_dir():
        pytest.skip(
            f"no real checkpoints in {folder} (set ROPELENS_SHARED to their folder)"
        )
    return folder
