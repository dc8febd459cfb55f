"""The sentence that begins a comparison: which group is best, by how much, how certainly."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xarray as xr

from ropelens.comparison.best import Difference, Ranking, tokens_trained
from ropelens.comparison.pairs import group_entries
from ropelens.figures.formats import NO_NUMBER, change_and_interval, in_words, signed
from ropelens.report.sentences.wording import Change

SOURCES_OF_SPREAD = {
    "sequences": "the text of one seed",
    "groups": "the same text",
    "trials": "trials of one seed",
}


@dataclass(frozen=True)
class GroupChange:
    """The change of a group from the baseline.

    The interval is `over` this many `pairs` of seeds, or over parts of the text of one pair.
    """

    group: str
    change: Change
    over: str
    pairs: int

    @property
    def excludes_zero(self) -> bool:
        return self.change.low > 0 or self.change.high < 0

    def in_words(self) -> str:
        value, interval = change_and_interval(
            self.change.value, self.change.low, self.change.high
        )
        if interval == NO_NUMBER:
            return f"{self.group} {value} (no interval)"
        source = SOURCES_OF_SPREAD.get(self.over, f"{self.pairs} pairs of seeds")
        return f"{self.group} {value} ({interval}, over {source})"


def best_sentences(comparison: xr.Dataset, rankings: Sequence[Ranking]) -> list[str]:
    """For each size of model, which group has the lowest loss, and how certain this is."""
    sentences = []
    for ranking in rankings:
        begin = beginning(comparison, ranking, name_size=len(rankings) > 1)
        sentences.append(begin + best_words(ranking))
        if ranking.lead is not None:
            sentences.append(_lead_sentence(ranking.lead))
    return sentences


def beginning(comparison: xr.Dataset, ranking: Ranking, *, name_size: bool) -> str:
    """The words before the best group: the training tokens, or that models read one text."""
    tokens = tokens_trained(comparison, ranking.baseline)
    if tokens is None:
        return "On the same text, "
    begin = f"After {count_in_words(tokens)} training tokens"
    if name_size:
        of_baseline = group_entries(comparison["size"], ranking.baseline)
        begin += f", of the runs of size {of_baseline.values[0]}"
    return f"{begin}, "


def count_in_words(count: int) -> str:
    """A count as "12,800", "0.41 million" or "1.3 billion"."""
    if count < 10**5:
        return f"{count:,}"
    if count < 10**9:
        return f"{count / 10**6:.3g} million"
    return f"{count / 10**9:.3g} billion"


def best_words(ranking: Ranking) -> str:
    """The best group, its difference from the baseline, and the difference of the worst."""
    baseline = ranking.baseline
    nearest = ranking.differences[0]
    worst = ranking.differences[-1]
    if nearest.value == 0:
        equal = [other.group for other in ranking.differences if other.value == 0]
        words = (
            f"{baseline}, the baseline, has the lowest loss, together with "
            f"{in_words(equal)}"
        )
    elif ranking.best == baseline:
        words = (
            f"{baseline}, the baseline, has the lowest loss: the next, {nearest.group}, is "
            f"{amount(nearest)} nats/token above it {certainty(nearest)}"
        )
    else:
        words = (
            f"{nearest.group} has the lowest loss: {amount(nearest)} nats/token below "
            f"{baseline} {certainty(nearest)}"
        )
    if worst is nearest or nearest.value == worst.value == 0:
        return f"{words}."
    if worst.value == 0:
        return f"{words}; {baseline} and {worst.group} are worst."
    if worst.value < 0:
        return f"{words}; {baseline} is worst."
    words += f"; {worst.group} is worst, {amount(worst)} above {baseline}"
    return f"{words}{_in_brief(worst)}."


def amount(difference: Difference) -> str:
    """The size of a difference without its sign, with three decimals."""
    return signed(abs(difference.value), ".3f")


def certainty(difference: Difference) -> str:
    """The interval of a difference in brackets, and whether the difference is certain."""
    _, interval = change_and_interval(difference.value, difference.low, difference.high)
    if interval == NO_NUMBER:
        return "(no interval), which is not certain"
    source = SOURCES_OF_SPREAD.get(difference.over, f"{difference.pairs} seeds")
    words = f"(95% interval {interval}, over {source})"
    if difference.certain:
        return f"{words}, which is certain"
    if difference.over == "sequences":
        return f"{words}, which is not certain, because other seeds may differ"
    return f"{words}, which is not certain"


def _in_brief(difference: Difference) -> str:
    if not np.isfinite(difference.low):
        return ""
    return " (certain)" if difference.certain else " (not certain)"


def _lead_sentence(lead: Difference) -> str:
    """How far the best group is below the second, if both are below the baseline."""
    return (
        f"{lead.other} is second: {lead.group} is {amount(lead)} nats/token below it "
        f"{certainty(lead)}."
    )
