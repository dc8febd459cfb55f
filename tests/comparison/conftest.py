"""Fixtures of this room: a trained study, and the comparison of its runs."""

from pathlib import Path

import pytest
import xarray as xr
from synthetic_recalibration import recalibrated, recalibrated_study
from trained import SEQUENCES, trained_study

import ropelens as rl

__all__ = [
    "comparison",
    "comparison_cache",
    "recalibrated",
    "recalibrated_study",
    "trained_study",
]


@pytest.fixture(scope="session")
def comparison_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the comparison saves the profiles of the runs."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def comparison(trained_study: Path, comparison_cache: Path) -> xr.Dataset:
    return rl.compare([trained_study], cache=comparison_cache, sequences=SEQUENCES)
