"""Numbers and lists of numpy and torch mean what they print as."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from ropelens.rope.plain import plain_list, plain_number


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64, torch.tensor])
def test_a_share_in_few_bits_is_the_share_that_was_written(kind: type) -> None:
    for part in range(21):
        share = part / 20
        assert plain_number(kind(share)) == share


@pytest.mark.parametrize(
    ("given", "number"),
    [
        *((3, 3.0), (Fraction(1, 2), 0.5), (np.int64(7), 7.0), (torch.tensor(5), 5.0)),
        *((10**400, math.nan), ("1", math.nan), (None, math.nan), ([1.0], math.nan)),
        *((np.array([1.0]), math.nan), (torch.ones((), device="meta"), math.nan)),
        *((np.float64("inf"), math.inf), (1j, math.nan)),
    ],
)
def test_one_number_or_none(given: object, number: float) -> None:
    assert plain_number(given) == pytest.approx(number, rel=0, nan_ok=True)


def test_what_lists_others_can_be_read_twice() -> None:
    assert plain_list(torch.tensor([0, 1])) == plain_list((0, 1)) == [0, 1]
    assert plain_list(np.array(["a"])) == ["a"]
    assert sorted(plain_list({2, 1}) or []) == [1, 2]
    for one in ("ab", 5, None, np.array(3), torch.tensor(3), (n for n in (0, 1))):
        assert plain_list(one) is None
