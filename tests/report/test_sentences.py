"""Templates of sentences: layout, words for lists, and a sentence for every verdict."""

from __future__ import annotations

import jinja2
import pytest

from ropelens.report.words import in_words, plural, ranges, say

CLAIM = {
    **{"rank_correlation": -0.5, "low": -0.7, "high": -0.2, "heads": 12, "p_value": 0.3},
    **{"null_median": -0.4, "null_low": -0.6, "null_high": -0.1, "null_draws": 40},
}


@pytest.mark.parametrize("verdict", ["holds", "contradicted", "unresolved", "not testable"])
def test_a_claim_is_worded_by_its_verdict_not_by_a_sign(verdict: str) -> None:
    said = say("profile", "claim", verdict=verdict, why="no head", **CLAIM)
    assert f" {verdict} here: " in said
    numbers = (
        "mean wavelength is −0.50, ",
        "−0.60 to −0.10, median",
        "interval of −0.70 to −0.20.",
    )
    for number in numbers:
        assert (number in said) == (verdict != "not testable")
    assert ("no head" in said) == (verdict == "not testable")


def test_a_verdict_that_nobody_knows_and_a_number_that_lacks_are_errors() -> None:
    with pytest.raises(jinja2.UndefinedError):
        say("profile", "claim", verdict="true", why="", **CLAIM)
    with pytest.raises(jinja2.UndefinedError):
        say("truncation", "retrieval", share=0.5)


def test_names_are_text_and_layout_is_not() -> None:
    said = say("comparison", "without_rotation", groups=["<b>nope</b>", "{{ 7 * 7 }}"])
    assert said.startswith("Nothing rotates in <b>nope</b> and {{ 7 * 7 }}: no head there")
    assert "  " not in said
    assert "\n" not in said


def test_lists_counts_and_ranges_in_words() -> None:
    assert [in_words(["a", "b", "c"][:n]) for n in (1, 2, 3)] == ["a", "a and b", "a, b and c"]
    assert [plural(n, "head") for n in (1, 2, 1024)] == ["1 head", "2 heads", "1,024 heads"]
    assert [ranges(r) for r in ([3], [0, 1, 2, 5], [1, 3, 4])] == [
        "3",
        "0–2 and 5",
        "1 and 3–4",
    ]
