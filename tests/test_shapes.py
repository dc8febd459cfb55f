"""A call that violates its signature is refused, also after correct calls."""

from dataclasses import dataclass

import pytest
import torch
from beartype import beartype
from jaxtyping import Float, TypeCheckError
from shapes import checked
from torch import Tensor

check = checked(typechecker=beartype)


@check
def joined(
    x: Float[Tensor, "row n"], y: Float[Tensor, "row m"], *, turn: bool
) -> Float[Tensor, "row _"]:
    both = torch.cat([x, y], dim=1)
    return both.T if turn else both


@check
def within(sizes: list[int]) -> list[Tensor]:
    @check
    def ones(size: int) -> Float[Tensor, " size"]:
        return torch.ones(3, size) if size > 3 else torch.ones(size)

    return [ones(size) for size in sizes]


@check
@dataclass(frozen=True)
class Pair:
    x: Float[Tensor, " n"]
    y: Float[Tensor, " n"]


ROWS = torch.ones(2, 3)
WRONG = {
    "another shape": lambda: joined(ROWS, torch.ones(3, 3), turn=False),
    "another dtype": lambda: joined(ROWS.int(), ROWS, turn=False),
    "another type": lambda: joined(ROWS, ROWS, turn="no"),
    "another result": lambda: joined(ROWS, ROWS, turn=True),
    "a function within": lambda: within([2, 3, 4]),
    "an element": lambda: within([2, "3"]),
    "a field": lambda: Pair(torch.ones(2), torch.ones(3)),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_is_refused_each_time(name: str):
    for _ in range(2):
        assert joined(ROWS, ROWS, turn=False).shape == (2, 6)
        assert [ones.tolist() for ones in within([1, 2])] == [[1], [1, 1]]
        assert Pair(torch.ones(2), torch.ones(2)).y.sum() == 2
        with pytest.raises(TypeCheckError):
            WRONG[name]()
