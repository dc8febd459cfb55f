"""Files that are in the repository, and not in a source distribution."""

from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]


def repository_path(path: str) -> Path:
    """The file or folder; skips the test if it is missing."""
    whole = REPOSITORY / path
    if not whole.exists():
        pytest.skip(f"{path} is only in the repository")
    return whole
