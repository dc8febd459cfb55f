"""What all tests share: checked shapes, no network, the way to real checkpoints and texts."""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path

import pytest
from jaxtyping import install_import_hook

# Shapes stand in signatures, and tests hold every call to them. Before ropelens is imported.
CHECKED = ["rope", "statistics", "models", "collect", "summary", "heads", "edit", "means"]
CHECKED += ["reaching", "reach_summary"]
CHECKED += ["evaluation", "tasks", "truncation", "truncation_summary"]
CHECKED += ["comparison"]
install_import_hook([f"ropelens.{name}" for name in CHECKED], "beartype.beartype")

# Read by huggingface_hub when it is imported, so before any test is.
os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real checkpoints and texts that lies beside the repository."""
    beside = Path(__file__).parents[2] / "shared"
    folder = Path(os.environ.get("ROPELENS_SHARED", beside))
    if not (folder / "checkpoints").is_dir():
        pytest.skip(f"no real checkpoints in {folder} (set ROPELENS_SHARED to their folder)")
    return folder


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Where CI runs nothing may be missing but a GPU and what lies beside the project."""
    report = yield
    excused = "gpu" in item.keywords or "no real checkpoints" in str(report.longrepr)
    if report.skipped and os.environ.get("CI") and not excused:
        report.outcome = "failed"
        report.longrepr = (
            f"{item.nodeid} was skipped, which CI does not allow: {report.longrepr}"
        )
    return report
