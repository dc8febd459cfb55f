"""Which heads a list names, held to the list written out."""

from __future__ import annotations

import pytest

from ropelens.errors import BadArgument
from ropelens.rope.select import heads_by_layer


@pytest.mark.parametrize(
    ("heads", "named"),
    [
        ("1.2", {(1, 2)}),
        ("1.*", {(1, 0), (1, 1), (1, 2)}),
        ("1-2.0", {(1, 0), (2, 0)}),
        ("*.1-2, 0.0", {(0, 0), *((layer, head) for layer in range(4) for head in (1, 2))}),
        ("3-9.2", {(3, 2)}),
    ],
)
def test_a_list_names_heads(heads: str, named: set[tuple[int, int]]) -> None:
    chosen = heads_by_layer(heads, layers=4, heads_of_layer=3)
    assert {(layer, head) for layer, head in chosen.nonzero().tolist()} == named


@pytest.mark.parametrize(
    "heads", ["", "1", "4.0", "2-1.0", "-1.0", "1-.0", "1.x", "1.0,,", "²-3.0"]
)
def test_what_names_none_is_refused(heads: str) -> None:
    with pytest.raises(BadArgument, match="has no head"):
        heads_by_layer(heads, layers=4, heads_of_layer=3)
