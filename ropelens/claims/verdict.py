"""A published claim, and the rule that decides whether it holds in a model.

The number of a claim is compared with draws of its null: the same number if only chance and
geometry matter.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from ropelens.claims.nulls import Arrays, Null
from ropelens.intervals import jackknife_half

VERDICTS = ("holds", "contradicted", "unresolved", "not testable")
TAIL = 0.025  # share of the draws beyond either bound of the null
MIN_DRAWS = 39  # with fewer draws, not even a number beyond all of them is rare enough
SAME = 1e-9  # numbers that differ by less are equal, apart from rounding


@dataclass(frozen=True)
class Claim:
    """A published claim: a row of the ledger.

    `number` makes a number from the `arrays` (names in `claim_arrays`) of the model, and from
    draws of the `null`. According to the claim the number is large, or small if `sign` is -1. A
    number below `floor` counts as none. `limit` is the largest possible number on the claimed
    side; it is needed if the draws of the null may not reach it.

    `interval` returns the ends of the 95 % interval; the default is a jackknife over the first
    axis of the arrays. `objection` returns a reason against a test, or "". `why_untestable` is
    the reason if the number is missing. `min_size` states the necessary size if most draws are
    alike. `words` are the reasons if the claim holds, is contradicted or is unresolved.
    """

    name: str
    statement: str
    source: str
    what: str
    call: str
    null: Null
    arrays: tuple[str, ...]
    number: Callable[..., float]
    sign: int = 1
    floor: float = -math.inf
    limit: float = -math.inf
    interval: Callable[..., tuple[float, float]] | None = None
    objection: Callable[..., str] = lambda *_: ""
    why_untestable: str = "the model lacks what this claim is about"
    min_size: str = ""
    words: tuple[str, str, str] = (
        "beyond what chance and geometry give",
        "beyond what chance and geometry give, on the opposite side",
        "chance and geometry can give this number",
    )


def judge(
    claim: Claim, arrays: Mapping[str, np.ndarray], random: np.random.Generator, draws: int
) -> dict[str, object]:
    """Test a claim: the row of the ledger with the number, the null and the verdict."""
    x = tuple(arrays[name] for name in claim.arrays)
    number, low, high, null, why = math.nan, math.nan, math.nan, np.empty(0), ""
    with np.errstate(invalid="ignore", divide="ignore"):
        if not len(x[0]):
            why = "no plane of this model rotates"
        else:
            number, possible = claim.number(*x), claim.null.possible(x[0])
            if possible < MIN_DRAWS + 1:
                needs = claim.null.min_size
                why = f"{possible} draws are possible; a verdict needs {needs} or more"
            else:
                why = claim.objection(*x)
                drawn = claim.null.draw(x, random, draws)
                null = np.array([claim.number(*sample) for sample in drawn])
                low, high = claim.interval(*x) if claim.interval else _jackknife(claim, x)
    null = null[np.isfinite(null)]
    null_low, null_high = null_bounds(null)
    p_value, opposite = p_values(claim, number, null)
    verdict = "not testable"
    if not why:
        verdict, why = _decide(claim, number, null, p_value, opposite)
    bounds = {"number": number, "low": null_low, "high": null_high, "draws": len(null)}
    far = null_high if claim.sign == 1 else null_low
    return {
        "claim": claim.name,
        **{name: getattr(claim, name) for name in ("statement", "source", "what")},
        "number": number,
        "low": low,
        "high": high,
        "over": claim.null.over if math.isfinite(low) else "",
        "null": claim.null.how,
        "null_median": float(np.median(null)) if len(null) else math.nan,
        "null_low": null_low,
        "null_high": null_high,
        "null_draws": len(null),
        "threshold": claim.sign * max(claim.sign * far, claim.floor),
        "side": claim.sign,
        "p_value": math.nan if verdict == "not testable" else p_value,
        "q_value": math.nan,
        "verdict": verdict,
        "why": why.format(**bounds),
        "call": claim.call,
    }


def null_bounds(null: Float[np.ndarray, " draw"]) -> tuple[float, float]:
    """The draws below and above which an exact test rejects at 2.5 %; NaN for fewer than 39."""
    beyond, in_order = int((1 + len(null)) * TAIL), np.sort(null)
    if beyond == 0:
        return math.nan, math.nan
    return float(in_order[beyond - 1]), float(in_order[-beyond])


def p_values(
    claim: Claim, number: float, null: Float[np.ndarray, " draw"]
) -> tuple[float, float]:
    """Share of the number and its draws as far as the number: claimed side, opposite side."""
    value, drawn = (np.maximum(claim.sign * x, claim.floor) for x in (number, null))
    as_far, opposite = (drawn >= value - SAME).sum(), (drawn <= value + SAME).sum()
    return (1 + int(as_far)) / (1 + len(null)), (1 + int(opposite)) / (1 + len(null))


def _decide(
    claim: Claim,
    number: float,
    null: Float[np.ndarray, " draw"],
    p_value: float,
    opposite: float,
) -> tuple[str, str]:
    if not math.isfinite(number) or (len(null) and np.ptp([*null, number]) < SAME):
        return "not testable", claim.why_untestable
    holds, contradicted, unresolved = claim.words
    if p_value <= TAIL:
        return "holds", holds
    if opposite <= TAIL:
        return "contradicted", contradicted
    drawn = np.maximum(claim.sign * null, claim.floor)
    if len(null) and claim.sign * number <= claim.floor:
        return "unresolved", f"less than {claim.floor:g} counts as none"
    if len(null) < MIN_DRAWS:
        needs = claim.null.min_size
        return "not testable", f"{len(null)} draws have a number; a verdict needs {needs}"
    extreme = max(drawn.max(), claim.limit)
    rarest = max(1, (drawn >= extreme - SAME).sum()) / (1 + len(null))
    if rarest > TAIL:
        needs = claim.min_size or f"{claim.null.min_size} or more"
        why = f"{rarest:.1%} of all draws are as extreme as possible; a verdict needs {needs}"
        return "not testable", why
    return "unresolved", unresolved


def _jackknife(claim: Claim, x: Arrays) -> tuple[float, float]:
    """The 95 % interval over the first axis of the arrays; NaN for fewer than 3 units."""
    if not claim.null.over or len(x[0]) < 3:
        return math.nan, math.nan
    parts = ([np.delete(array, unit, 0) for array in x] for unit in range(len(x[0])))
    half = float(jackknife_half(np.array([claim.number(*part) for part in parts])))
    number = claim.number(*x)
    return number - half, number + half
