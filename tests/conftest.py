"""Setup of all tests: checks of shapes, no network, few random draws."""

import gc
import os
import sys
from collections.abc import Generator, Iterator
from unittest import mock

import hypothesis
import pytest
from checked_modules import checked_modules

# Their failed assertions show the values, as assertions of tests do.
pytest.register_assert_rewrite("cli_runs", "in_browser", "small_measurements")

modules = checked_modules()

# The process that distributes tests to workers runs no test, and imports nothing slow.
if "PYTEST_XDIST_WORKER" in os.environ or "--numprocesses" not in sys.argv:
    gc.disable()  # imports make little garbage
    import scipy.stats  # noqa: F401  # before the hook, which disables cached bytecode
    import transformers.modeling_utils  # noqa: F401
    from shapes import check_shapes

    check_shapes(modules)
    import found_once  # noqa: F401

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


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """Draws without a generator do not depend on the tests that ran before."""
    import torch  # slow in the process that distributes tests

    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def few_draws() -> Iterator[None]:
    """Claims are compared with 60 random draws instead of 1,000."""
    from ropelens.claims.ledger import ledger

    def few(*args: object, draws: int = 1000, **options: object) -> object:
        return ledger(*args, draws=60 if draws == 1000 else draws, **options)

    with (
        mock.patch("ropelens.report.page.ledger", few),
        mock.patch("ropelens.claims.claim_runs.ledger", few),
    ):
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator:
    """Fail skipped tests in CI, except if something is missing that CI does not have.

    These are a GPU, Firefox, the shared folder, and what newer versions of libraries have.
    """
    report = yield
    missing = ("no real checkpoints", "no firefox", "older version")
    excused = "gpu" in item.keywords or any(
        name in str(report.longrepr) for name in missing
    )
    if report.skipped and os.environ.get("CI") and not excused:
        report.outcome = "failed"
        report.longrepr = (
            f"{item.nodeid} was skipped; CI allows no skips: {report.longrepr}"
        )
    return report
