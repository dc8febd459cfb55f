"""What all tests share: checked shapes, no network, the way to real checkpoints and texts."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Generator
from pathlib import Path

import hypothesis
import pytest

# Shapes stand in signatures, and tests hold every call to them. Before ropelens is imported.
ROOMS = [
    *("rope", "attention", "budget", "text", "checkpoints", "model", "rotation", "profiles"),
    *("interventions", "claims", "comparison", "analysis"),
]
# All but the last take tokens of any kind; that warns at its caller, whom a check hides.
NAMES = ("profile", "measurement", "model_text", "capture", "token_sets")
TAKES_ANY = {f"ropelens.profiles.{name}" for name in NAMES}
TAKES_ANY |= {"ropelens.text.text", "ropelens.text.tokenize", "ropelens.interventions.silence"}
TAKES_ANY |= {"ropelens.analysis.analyze", "ropelens.analysis.options"}
UNCHECKED = {*TAKES_ANY}
if "slow" in sys.argv:  # which workers are not told: they have arguments of their own
    os.environ["ALL_SHAPES"] = "1"
if "ALL_SHAPES" not in os.environ:
    BUDGET = "ropelens.budget"
    UNCHECKED |= {f"{BUDGET}.{name}" for name in ("logit", "offsets", "solver")}
PACKAGE = Path(__file__).parents[1] / "ropelens"
FILES = [file for room in ROOMS for file in (PACKAGE / room).rglob("*.py")]
CHECKED = {".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts) for file in FILES}

# The process that hands tests out to others runs none, and imports nothing slow.
if "PYTEST_XDIST_WORKER" in os.environ or "--numprocesses" not in sys.argv:
    gc.disable()  # until all is imported: there is no garbage yet
    import scipy.stats  # noqa: F401  # before the hook, under which no bytecode is kept
    import transformers.modeling_utils  # noqa: F401
    from shapes import check_shapes

    check_shapes(sorted(CHECKED - UNCHECKED))
    pytest_plugins = ["found_once", "oracles.tiny", "cli_runs", "trained"]
    pytest_plugins += ["synthetic_truncation"]

# The same examples everywhere, and no deadline: neither luck nor a loaded machine is a failure.
hypothesis.settings.register_profile("same", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("same")

# Read by huggingface_hub when it is imported, so before any test is.
os.environ["HF_HUB_OFFLINE"] = "1"

# Tables and help are as wide as the terminal says, and that of whoever runs the tests differs.
os.environ["COLUMNS"] = "80"


def pytest_collection_finish() -> None:
    """What is imported stays: nothing is won by looking for garbage in it again and again."""
    gc.freeze()
    gc.enable()
    gc.set_threshold(20_000, 20, 20)


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
    """Where CI runs nothing may be missing but a GPU, Firefox and what lies beside us."""
    report = yield
    missing = ("no real checkpoints", "no firefox")
    excused = "gpu" in item.keywords or any(name in str(report.longrepr) for name in missing)
    if report.skipped and os.environ.get("CI") and not excused:
        report.outcome = "failed"
        report.longrepr = (
            f"{item.nodeid} was skipped, which CI does not allow: {report.longrepr}"
        )
    return report
