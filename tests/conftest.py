"""Setup of all tests: checks of shapes, no network, real checkpoints and texts."""

import gc
import os
import sys
from collections.abc import Generator
from pathlib import Path

import hypothesis
import pytest

# Tests check the shapes in the signatures of these rooms, for every call.
ROOMS = [
    *(
        "rope",
        "attention",
        "budget",
        "text",
        "checkpoints",
        "model",
        "measured_rotation",
        "profiles",
    ),
    *("interventions", "claims", "comparison", "analysis"),
]
# These modules are not checked, because a check would hide the caller from their warnings.
NAMES = ("profile", "measurement", "capture", "token_sets")
UNCHECKED = {f"ropelens.profiles.{name}" for name in NAMES}
UNCHECKED |= {
    "ropelens.text.text",
    "ropelens.text.tokenize",
    "ropelens.interventions.silence",
}
UNCHECKED |= {"ropelens.analysis.run_plan", "ropelens.analysis.options"}
if "slow" in sys.argv:  # workers get other arguments, but inherit the environment
    os.environ["ALL_SHAPES"] = "1"
if "ALL_SHAPES" not in os.environ:
    BUDGET = "ropelens.budget"
    UNCHECKED |= {f"{BUDGET}.{name}" for name in ("logit", "offsets", "solver")}
PACKAGE = Path(__file__).parents[1] / "ropelens"
FILES = [file for room in ROOMS for file in (PACKAGE / room).rglob("*.py")]
CHECKED = {
    ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts) for file in FILES
}

# The process that distributes tests to workers runs no test, and imports nothing slow.
if "PYTEST_XDIST_WORKER" in os.environ or "--numprocesses" not in sys.argv:
    gc.disable()  # imports make little garbage
    import scipy.stats  # noqa: F401  # before the hook, which disables cached bytecode
    import transformers.modeling_utils  # noqa: F401
    from shapes import check_shapes

    check_shapes(sorted(CHECKED - UNCHECKED))
    pytest_plugins = ["found_once", "oracles.tiny", "cli_runs", "trained"]
    pytest_plugins += ["synthetic_truncation"]

# All runs use the same examples, and a slow machine does not fail a test.
hypothesis.settings.register_profile(
    "same", deadline=None, derandomize=True, database=None
)
hypothesis.settings.load_profile("same")

# huggingface_hub reads this variable when it is imported.
os.environ["HF_HUB_OFFLINE"] = "1"

# Tables and help depend on the width of the terminal.
os.environ["COLUMNS"] = "80"


def pytest_collection_finish() -> None:
    """Exclude imported objects from garbage collection, because they stay until the end."""
    gc.freeze()
    gc.enable()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(scope="session")
def shared() -> Path:
    folder = Path(
        os.environ.get("ROPELENS_SHARED", Path(__file__).parents[2] / "shared")
    )
    if not (folder / "checkpoints").is_dir():
        pytest.skip(
            f"no real checkpoints in {folder} (set ROPELENS_SHARED to their folder)"
        )
    return folder


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator:
    """Fail skipped tests in CI, except if a GPU, Firefox or the shared folder is missing."""
    report = yield
    missing = ("no real checkpoints", "no firefox")
    excused = "gpu" in item.keywords or any(
        name in str(report.longrepr) for name in missing
    )
    if report.skipped and os.environ.get("CI") and not excused:
        report.outcome = "failed"
        report.longrepr = (
            f"{item.nodeid} was skipped; CI allows no skips: {report.longrepr}"
        )
    return report
