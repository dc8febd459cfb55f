"""The rule that decides whether a published claim holds in a model.

The number of a claim is compared with draws of its null: the same number if only chance and
geometry matter.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from jaxtyping import Float

from ropelens.claims.claim import Claim
from ropelens.claims.nulls import Arrays
from ropelens.intervals import NO_INTERVAL, Interval, jackknife_half

VERDICTS = ("holds", "contradicted", "unresolved", "not testable")
TAIL = 0.025  # share of the draws beyond either bound of the null
MIN_DRAWS = 39  # with fewer draws, not even a number beyond all of them is rare enough
SAME = 1e-9  # numbers that differ by less are equal, apart from rounding

NullDraws = Float[np.ndarray, " draw"]


@dataclass(frozen=True)
class Verdict:
    """One of the four `VERDICTS`, and its reason."""

    word: Literal["holds", "contradicted", "unresolved", "not testable"]
    why: str


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The number of a claim in a model, its 95 % interval, and the numbers of the null."""

    number: float = math.nan
    interval: Interval = NO_INTERVAL
    null: NullDraws = field(default_factory=lambda: np.empty(0))


@dataclass(frozen=True, kw_only=True)
class ClaimedSide:
    """A number and its null, multiplied by the sign of the claim and raised to its floor."""

    number: float
    null: NullDraws

    @property
    def p_value(self) -> float:
        """Share of the number and its draws that are as far on the claimed side."""
        as_far = int((self.null >= self.number - SAME).sum())
        return (1 + as_far) / (1 + len(self.null))

    def rarest(self, limit: float) -> float:
        """Share of all draws that are as extreme as possible: `limit`, or the largest draw."""
        extreme = max(self.null.max(), limit)
        as_extreme = (self.null >= extreme - SAME).sum()
        return float(max(1, as_extreme) / (1 + len(self.null)))


def judge(
    claim: Claim,
    arrays: Mapping[str, np.ndarray],
    random: np.random.Generator,
    draws: int,
    objection: str = "",
) -> dict[str, object]:
    """Test a claim: the row of the ledger. `objection` is a reason against a verdict, or ""."""
    values = tuple(arrays[name] for name in claim.arrays)
    evidence = Evidence()
    with np.errstate(invalid="ignore", divide="ignore"):
        why_not = _why_too_small(claim, values)
        if not why_not:
            why_not = objection or claim.objection(*values)
            evidence = _compare_with_null(claim, values, random, draws)
        elif len(values[0]):
            evidence = Evidence(number=claim.count(*values))
    side = _on_claimed_side(claim, evidence)
    verdict = _decide(claim, evidence, side, why_not)
    return _ledger_row(claim, evidence, side, verdict)


def _why_too_small(claim: Claim, values: Arrays) -> str:
    """Why the arrays have too few different draws for a verdict; "" if they have enough."""
    if not len(values[0]):
        return "no plane of this model rotates"
    possible = claim.null.possible(values[0])
    if possible > MIN_DRAWS:
        return ""
    needs = claim.null.min_size
    return f"{possible} draws are possible; a verdict needs {needs} or more"


def _compare_with_null(
    claim: Claim, values: Arrays, random: np.random.Generator, draws: int
) -> Evidence:
    drawn = claim.null.draw(values, random, draws)
    null = np.array([claim.count(*other) for other in drawn])
    return Evidence(
        number=claim.count(*values),
        interval=_interval(claim, values),
        null=null[np.isfinite(null)],
    )


def _interval(claim: Claim, values: Arrays) -> Interval:
    """The 95 % interval: by default a jackknife over the first axis, for 3 units or more."""
    if claim.interval is not None:
        return claim.interval(*values)
    units = len(values[0])
    if not claim.null.over or units < 3:
        return NO_INTERVAL
    without = []
    for unit in range(units):
        others = [np.delete(array, unit, axis=0) for array in values]
        without.append(claim.count(*others))
    number = claim.count(*values)
    half = float(jackknife_half(np.array(without)))
    return Interval(number - half, number + half)


def null_bounds(null: NullDraws) -> Interval:
    """The draws below and above which an exact test rejects at 2.5 %; NaN for fewer than 39."""
    beyond = int((1 + len(null)) * TAIL)
    if beyond == 0:
        return NO_INTERVAL
    in_order = np.sort(null)
    return Interval(float(in_order[beyond - 1]), float(in_order[-beyond]))


def _on_claimed_side(claim: Claim, evidence: Evidence) -> ClaimedSide:
    numbers = claim.sign * np.array([evidence.number, *evidence.null])
    floored = np.maximum(numbers, claim.floor.at_least)
    return ClaimedSide(number=floored[0], null=floored[1:])


def _decide(
    claim: Claim, evidence: Evidence, side: ClaimedSide, why_not: str
) -> Verdict:
    """The verdict of the evidence; "not testable" if there is a reason `why_not`."""
    if why_not:
        return Verdict("not testable", why_not)
    if not math.isfinite(evidence.number):
        return Verdict("not testable", claim.missing)
    draws = len(evidence.null)
    if draws and np.ptp([*evidence.null, evidence.number]) < SAME:
        return Verdict("not testable", claim.alike)
    below, above = null_bounds(side.null)
    if side.number > above + SAME:
        return Verdict("holds", claim.reasons.holds)
    if side.number < below - SAME:
        return Verdict("contradicted", claim.reasons.contradicted)
    floor = claim.floor.at_least
    if draws and claim.sign * evidence.number <= floor:
        return Verdict("unresolved", f"less than {floor:g} counts as none")
    why_not = _why_undecidable(claim, side)
    if why_not:
        return Verdict("not testable", why_not)
    return Verdict("unresolved", claim.reasons.unresolved)


def _why_undecidable(claim: Claim, side: ClaimedSide) -> str:
    """Why the claim can hold in no case, whatever the number is; "" if it can hold."""
    draws = len(side.null)
    if draws < MIN_DRAWS:
        return f"{draws} draws have a number; a verdict needs {claim.null.min_size}"
    rarest = side.rarest(claim.limit)
    if rarest <= TAIL:
        return ""
    needs = claim.min_size or f"{claim.null.min_size} or more"
    return (
        f"{rarest:.1%} of all draws are as extreme as possible; a verdict needs {needs}"
    )


def _ledger_row(
    claim: Claim, evidence: Evidence, side: ClaimedSide, verdict: Verdict
) -> dict[str, object]:
    null = evidence.null
    draws = len(null)
    null_low, null_high = null_bounds(null)
    beyond = max(null_bounds(side.null).high, claim.floor.beyond)
    why = verdict.why.format(
        number=evidence.number, low=null_low, high=null_high, draws=draws
    )
    return {
        "claim": claim.name,
        **claim.description(),
        "number": evidence.number,
        "low": evidence.interval.low,
        "high": evidence.interval.high,
        "over": claim.null.over if math.isfinite(evidence.interval.low) else "",
        "null": claim.null.how,
        "null_median": float(np.median(null)) if draws else math.nan,
        "null_low": null_low,
        "null_high": null_high,
        "null_draws": draws,
        "threshold": claim.sign * beyond,
        "side": claim.sign,
        "p_value": math.nan if verdict.word == "not testable" else side.p_value,
        "q_value": math.nan,
        "verdict": verdict.word,
        "why": why,
        "call": claim.call,
    }
