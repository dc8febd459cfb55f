"""No public function changes the random numbers that the caller draws next."""

import random
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

import pytest
from forked import together

import ropelens as rl
from ropelens.arguments import check_value
from ropelens.errors import BadArgument

CALLS = Path(__file__).with_name("random_state_calls.py")
CALLED_ELSEWHERE = {"RopeCallback"}
RESULTS = {"Analysis", "Planes", "Statistic"}
ERRORS = {
    "RopelensError",
    "UnsupportedModel",
    "BadCheckpoint",
    "BadText",
    "BadArgument",
}


@pytest.mark.parametrize(
    ("value", "hint", "other"),
    [
        (["a", "b"], Sequence[str], ["a", "b", 3]),
        (["a", "b"], str | Iterable[str], ["a", None]),
        ([1, 2], list[Integral] | None, [1, 2.5]),
        ({"a": ["b", "c"]}, Mapping[str, str | Sequence[str]], {"a": ["b", 1]}),
        ({"a": "b"}, Mapping[str, Any], {1: "b"}),
    ],
)
def test_each_item_of_a_list_is_checked_without_random_numbers(value, hint, other):
    state = random.getstate()
    for _ in range(20):
        check_value("argument", value, hint)
        with pytest.raises(BadArgument, match="argument must be"):
            check_value("argument", other, hint)
    assert random.getstate() == state


def test_an_iterator_is_not_used_up_by_the_check():
    lines = iter(["a", "b"])
    check_value("documents", lines, str | Iterable[str])
    assert list(lines) == ["a", "b"]


@pytest.mark.thorough
def test_no_public_function_changes_the_state_of_python_numpy_or_torch(tmp_path):
    """In another process, because the checks of shapes draw from `random` as well."""
    ended = together(CALLS, tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == ""


def test_each_public_function_is_called_there():
    """Except `RopeCallback`, whose training draws random numbers; see train/test_watch.py."""
    source = CALLS.read_text()
    for name in set(rl.__all__) - CALLED_ELSEWHERE - RESULTS - ERRORS:
        assert f"rl.{name}(" in source, name
