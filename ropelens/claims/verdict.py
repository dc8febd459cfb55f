"""A published claim, and the rule that decides whether it holds in a model.

The number of a claim is compared with draws of its null: the same number if only chance and
geometry matter.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Float

from ropelens.claims.nulls import Null
from ropelens.intervals import jackknife_half

VERDICTS = ("holds", "contradicted", "unresolved", "not testable")
TAIL = 0.025  # share of the draws beyond either bound of the null
MIN_DRAWS = 39  # with fewer draws, not even a number beyond all of them is rare enough
NullDraws = Float[np.ndarray, " draw"]
SAME = 1e-9  # numbers that differ by less are equal, apart from rounding


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A published claim: a row of claims.toml. That file explains most of the fields.

    `facts` describe the claim and its source. `number` is computed from the `arrays` (names in
    `claim_arrays`) of the model, and from draws of the `null`. `limit` is the largest possible
    number on the claimed side; it is needed if the draws may not reach it. `interval` returns
    the ends of the 95 % interval (default: a jackknife over the first axis of the arrays), and
    `objection` a reason against a test, or "". `min_size` states the necessary size if most
    draws are alike. `words` are the reasons: it holds, is contradicted or is unresolved.
    """

    name: str
    facts: Mapping[str, str]
    call: str
    null: Null
    arrays: tuple[str, ...]
    number: Callable[..., float]
    other_number: Callable[..., float] | None = None
    families: tuple[str, ...] = ()
    sign: int = 1
    at_least: float = -math.inf
    beyond: float = -math.inf
    within_kind: bool = False
    limit: float = -math.inf
    interval: Callable[..., tuple[float, float]] | None = None
    objection: Callable[..., str] = lambda *_: ""
    missing: str = "the model lacks what this claim is about"
    alike: str = "all draws give the same number"
    min_size: str = ""
    words: tuple[str, ...] = (
        "beyond what chance and geometry give",
        "beyond what chance and geometry give, on the opposite side",
        "chance and geometry can give this number",
    )

    def count(self, *arrays: np.ndarray) -> float:
        """The number of the arrays; 0 if it counts as none."""
        number = self.number(*arrays)
        return 0.0 if abs(number) < self.beyond else number


def judge(
    claim: Claim, arrays: Mapping[str, Any], random: np.random.Generator, draws: int
) -> dict[str, object]:
    """Test a claim: the row of the ledger. `arrays` may state a reason against it."""
    x, why = (
        tuple(arrays[name] for name in claim.arrays),
        arrays.get(f"why {claim.name}", ""),
    )
    number, low, high, null = math.nan, math.nan, math.nan, np.empty(0)
    possible = claim.null.possible(x[0]) if len(x[0]) else 0
    with np.errstate(invalid="ignore", divide="ignore"):
        if not len(x[0]):
            why = "no plane of this model rotates"
        elif possible < MIN_DRAWS + 1:
            needs, number = claim.null.min_size, claim.count(*x)
            why = f"{possible} draws are possible; a verdict needs {needs} or more"
        else:
            number, why = claim.count(*x), why or claim.objection(*x)
            null = np.array(
                [claim.count(*y) for y in claim.null.draw(x, random, draws)]
            )
            low, high = (claim.interval or partial(_jackknife, claim))(*x)
    null = null[np.isfinite(null)]
    null_low, null_high = null_bounds(null)
    floored = np.maximum(claim.sign * np.array([number, *null]), claim.at_least)
    value, below, above = floored[0], *null_bounds(floored[1:])
    verdict = "not testable"
    if not why:
        verdict, why = _decide(claim, number, null, (value, below, above))
    p_value = (1 + int((floored[1:] >= value - SAME).sum())) / len(floored)
    bounds = {"number": number, "low": null_low, "high": null_high, "draws": len(null)}
    return {
        "claim": claim.name,
        **claim.facts,
        "number": number,
        "low": low,
        "high": high,
        "over": claim.null.over if math.isfinite(low) else "",
        "null": claim.null.how,
        "null_median": float(np.median(null)) if len(null) else math.nan,
        "null_low": null_low,
        "null_high": null_high,
        "null_draws": len(null),
        "threshold": claim.sign * max(above, claim.beyond),
        "side": claim.sign,
        "p_value": math.nan if verdict == "not testable" else p_value,
        "q_value": math.nan,
        "verdict": verdict,
        "why": why.format(**bounds),
        "call": claim.call,
    }


def null_bounds(null: NullDraws) -> tuple[float, float]:
    """The draws below and above which an exact test rejects at 2.5 %; NaN for fewer than 39."""
    beyond, in_order = int((1 + len(null)) * TAIL), np.sort(null)
    if beyond == 0:
        return math.nan, math.nan
    return float(in_order[beyond - 1]), float(in_order[-beyond])


def _decide(
    claim: Claim, number: float, null: NullDraws, bounded: tuple[float, float, float]
) -> tuple[str, str]:
    """The verdict and its reason; `bounded` are the number and bounds of the floored null."""
    if not math.isfinite(number):
        return "not testable", claim.missing
    if len(null) and np.ptp([*null, number]) < SAME:
        return "not testable", claim.alike
    value, below, above = bounded
    holds, contradicted, unresolved = claim.words
    if value > above + SAME:
        return "holds", holds
    if value < below - SAME:
        return "contradicted", contradicted
    floor = claim.at_least
    if len(null) and claim.sign * number <= floor:
        return "unresolved", f"less than {floor:g} counts as none"
    if len(null) < MIN_DRAWS:
        needs = claim.null.min_size
        return (
            "not testable",
            f"{len(null)} draws have a number; a verdict needs {needs}",
        )
    drawn = np.maximum(claim.sign * null, floor)
    extreme = max(drawn.max(), claim.limit)
    rarest = max(1, (drawn >= extreme - SAME).sum()) / (1 + len(null))
    if rarest > TAIL:
        needs = claim.min_size or f"{claim.null.min_size} or more"
        why = f"{rarest:.1%} of all draws are as extreme as possible; a verdict needs {needs}"
        return "not testable", why
    return "unresolved", unresolved


def _jackknife(claim: Claim, *x: np.ndarray) -> tuple[float, float]:
    """The 95 % interval over the first axis of the arrays; NaN for fewer than 3 units."""
    if not claim.null.over or len(x[0]) < 3:
        return math.nan, math.nan
    parts = ([np.delete(array, unit, 0) for array in x] for unit in range(len(x[0])))
    half = float(jackknife_half(np.array([claim.count(*part) for part in parts])))
    number = claim.count(*x)
    return number - half, number + half
