"""Labels before and after a change: the number that decides them, and what is certain."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_measurements import few

from ropelens.budget.label_changes import LabelComparison, LabelledHeads
from ropelens.budget.labels import label_heads


def heads(*budgets: tuple[float, float, float, float]) -> LabelledHeads:
    """Heads with these bits of sinks, position, content and interaction."""
    sink, position, content, interaction = np.array(budgets, dtype=float).T
    total = sink + position + content + interaction
    bits = {"total": total, "sink": sink, "position": position, "content": content}
    with np.errstate(invalid="ignore", divide="ignore"):
        positional_fraction = position / (total - sink)
    return LabelledHeads.of(
        label_heads(bits, rows=100.0),
        total_bits=total,
        sink_bits=sink,
        interaction_bits=interaction,
        positional_fraction=positional_fraction,
    )


def compared(
    before: LabelledHeads, after: LabelledHeads, confidence: float = 1.0
) -> LabelComparison:
    return LabelComparison(before, after, np.full(before.label.shape, confidence))


POSITIONAL = (0, 0.75, 0.25, 0)
MIXED = (0, 0.5, 0.25, 0.25)
SEMANTIC = (0, 0.25, 0.75, 0)
SINK = (0.95, 0.05, 0, 0)
DIFFUSE = (0, 0.05, 0, 0)
CASES = [
    # before, after -> decided by, before, after, margin
    (POSITIONAL, MIXED, ("positional_fraction", 3 / 4, 1 / 2, 1 / 12)),
    (SEMANTIC, POSITIONAL, ("positional_fraction", 1 / 4, 3 / 4, 1 / 12)),
    (SEMANTIC, MIXED, ("content_fraction", 3 / 4, 1 / 4, 1 / 12)),
    (SINK, SEMANTIC, ("sink_fraction", 0.95, 0, 0.05)),
    (SEMANTIC, DIFFUSE, ("total_bits", 1, 0.05, 0.05)),
    # no new label
    (DIFFUSE, DIFFUSE, ("total_bits", 0.05, 0.05, 0.05)),
    (SEMANTIC, SEMANTIC, ("content_fraction", 3 / 4, 3 / 4, 1 / 12)),
    (MIXED, MIXED, ("positional_fraction", 1 / 2, 1 / 2, 1 / 6)),
]


@pytest.mark.parametrize(("before", "after", "expected"), CASES)
def test_the_number_that_decides_between_two_labels(before, after, expected):
    deciding = compared(heads(before), heads(after)).deciding()
    name, number_before, number_after, margin = expected
    assert deciding.name[0] == name
    assert deciding.before[0] == pytest.approx(number_before)
    assert deciding.after[0] == pytest.approx(number_after)
    assert deciding.margin[0] == pytest.approx(margin)


BITS = st.tuples(*[st.integers(0, 8).map(lambda eighths: eighths / 8)] * 4)


@few
@given(BITS, BITS)
def test_the_threshold_is_between_the_numbers_of_different_labels(before, after):
    comparison = compared(heads(before), heads(after))
    deciding = comparison.deciding()
    if comparison.differs[0]:
        low, high = sorted([deciding.before[0], deciding.after[0]])
        assert low - 1e-12 <= deciding.threshold[0] <= high + 1e-12


def test_a_label_changes_if_it_differs_in_95_percent_of_the_resamples():
    before = heads(POSITIONAL)
    assert compared(before, heads(MIXED), 0.95).changed == [1]
    assert compared(before, heads(MIXED), 0.94).changed == [0]
    assert compared(before, before, 1.0).changed == [0]


def test_without_resamples_a_different_label_is_undecided():
    before = heads(POSITIONAL)
    assert np.isnan(compared(before, heads(MIXED), math.nan).changed)
    assert compared(before, before, math.nan).changed == [0]


@pytest.mark.parametrize("label", ["", "untested"])
def test_a_head_without_a_label_is_undecided(label: str):
    before = heads(POSITIONAL)
    without = LabelledHeads(np.array([label]), before.numbers)
    for comparison in (compared(before, without), compared(without, before)):
        assert np.isnan(comparison.changed).all()
        assert comparison.deciding().name.tolist() == [""]
        assert np.isnan(comparison.deciding().margin).all()
