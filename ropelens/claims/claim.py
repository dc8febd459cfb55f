"""The type of a published claim about RoPE, from which a row of the ledger is made."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from ropelens.claims.nulls import Null
from ropelens.claims.papers import Paper
from ropelens.intervals import NO_INTERVAL, Interval

NOT_STATED = "not stated"  # this project does not know this fact about a paper

Number = Callable[..., float]
"""A function of numbers.py, which computes a number from arrays of a model or of a null."""


@dataclass(frozen=True, kw_only=True)
class OtherStatistic:
    """Another reasonable statistic of a claim, for `--robust`; `what` describes it."""

    what: str
    number: Number


@dataclass(frozen=True, kw_only=True)
class Floor:
    """The sizes that count as none, in words, and the `day` of the commit that set them.

    A number below `at_least` does not count as evidence, and a number within ±`beyond` counts
    as 0. The function of the number applies other floors.
    """

    what: str
    day: str
    at_least: float = -math.inf
    beyond: float = -math.inf


NO_FLOOR = Floor(what="none", day="")


@dataclass(frozen=True, kw_only=True)
class Reasons:
    """The reasons of the verdicts on a testable claim.

    {number}, {low}, {high} and {draws} stand for the number of the model, the bounds of the
    null and the number of draws.
    """

    holds: str = "beyond what chance and geometry give"
    contradicted: str = "beyond what chance and geometry give, on the opposite side"
    unresolved: str = "chance and geometry can give this number"


REASONS = Reasons()


def no_objection(*arrays: np.ndarray) -> str:
    return ""


def no_interval(*arrays: np.ndarray) -> Interval:
    return NO_INTERVAL


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A published claim, its source and its test.

    The test computes `number` from the `arrays` of a model, and compares it with the numbers of
    arrays that `null` draws again.
    """

    name: str
    # The claim in one sentence
    statement: str
    # The call that shows the data
    call: str

    # The source, and how the paper measured its number `original`
    paper: Paper
    figure: str
    original: str
    original_model: str
    conditions: str
    # Parts of the names of such models, in lower case
    families: tuple[str, ...] = ()

    # How near the test is to the paper: "close" for the same statistic, and "conceptual" for
    # another statistic. The ledger has "direct" for the same statistic on a model of `families`
    nearness: Literal["close", "conceptual"]
    # How the test differs, in one sentence
    deviation: str

    # The statistic in words, its function, and the arguments by their names in `claim_arrays`
    what: str
    number: Number
    arrays: tuple[str, ...]
    null: Null
    # -1 if the claim is that the number is small
    sign: Literal[1, -1] = 1
    other: OtherStatistic | None = None
    floor: Floor = NO_FLOOR
    # Whether each kind of layers is tested by itself
    within_kind: bool = False
    # The largest possible number on the claimed side, if the draws may not reach it
    limit: float = -math.inf
    # The 95 % interval of the arrays; by default, a jackknife over their first axis
    interval: Callable[..., Interval] | None = None
    # The reason why the arrays do not allow a test, or ""
    objection: Callable[..., str] = no_objection

    # Reasons of "not testable": no number, equal draws, and a model that is too small for draws
    # that are as extreme as possible to be rare
    missing: str = "the model lacks what this claim is about"
    alike: str = "all draws give the same number"
    min_size: str = ""
    reasons: Reasons = REASONS

    def count(self, *arrays: np.ndarray) -> float:
        """The number of the arrays; 0 if it counts as none."""
        number = self.number(*arrays)
        return 0.0 if abs(number) < self.floor.beyond else number

    def description(self) -> dict[str, str]:
        """The columns of the ledger that describe the claim and its source."""
        source = self.paper.citation
        if self.figure != NOT_STATED:
            source = f"{source}, {self.figure}"
        return {
            "statement": self.statement,
            "what": self.what,
            "doi": self.paper.doi,
            "figure": self.figure,
            "original": self.original,
            "original_model": self.original_model,
            "conditions": self.conditions,
            "nearness": self.nearness,
            "deviation": self.deviation,
            "source": source,
            "floor": self.floor.what,
            "floor_day": self.floor.day,
            "other": "" if self.other is None else self.other.what,
        }


def with_other_statistic(claim: Claim, other: OtherStatistic) -> Claim:
    """The claim with its other statistic, whose interval is not known."""
    return replace(claim, number=other.number, interval=no_interval)
