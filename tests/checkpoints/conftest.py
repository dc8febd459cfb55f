"""Fixtures of this room."""

from pathlib import Path

import pytest
from cli_runs import pageless
from tiny_checkpoints import save_tiny

__all__ = ["folder", "pageless"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A valid checkpoint that a test can damage."""
    return save_tiny(tmp_path / "model")
