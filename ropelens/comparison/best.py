"""The group with the lowest loss, and whether its difference from other groups is certain."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from ropelens.comparison.pairs import paired_changes
from ropelens.intervals import ROUNDING_ERROR, paired_interval

OVER_TEXT_OF_ONE_SEED = "sequences"


@dataclass(frozen=True)
class Difference:
    """The loss of `group` minus the loss of `other` on the same text (nats/token).

    The 95 % interval from `low` to `high` is `over` "seeds", or over parts of the text of one
    pair; NaN if it is not known.
    """

    group: str
    other: str
    value: float
    low: float
    high: float
    over: str
    pairs: int

    @property
    def certain(self) -> bool:
        """Whether the interval excludes 0. The text of one seed never makes it certain."""
        if self.over == OVER_TEXT_OF_ONE_SEED:
            return False
        return self.low > 0 or self.high < 0


@dataclass(frozen=True)
class Ranking:
    """The groups that are compared with one baseline, the lowest loss first.

    `differences` are from the `baseline`, which is not in them. `lead` is the difference of the
    best group from the second, if both have it.
    """

    baseline: str
    differences: list[Difference]
    lead: Difference | None

    @property
    def best(self) -> str:
        if self.differences and self.differences[0].value < 0:
            return self.differences[0].group
        return self.baseline


def rank_groups(comparison: xr.Dataset, table: pd.DataFrame) -> list[Ranking]:
    """A ranking for each baseline of a comparison and its summary `table`.

    Each size of trained runs has a baseline. Groups without pairs are left out.
    """
    rankings = []
    for _, of_size in table.groupby("size", sort=False):
        paired = of_size[of_size["loss_change"].notna()]
        if not len(paired):
            continue
        baseline = _baseline_group(of_size, str(comparison.attrs["baseline"]))
        rows = paired.sort_values("loss_change", kind="stable").to_dict("records")
        differences = [_from_baseline(row, baseline) for row in rows]
        lead = _lead(comparison, differences)
        rankings.append(Ranking(baseline, differences, lead))
    return rankings


def _baseline_group(of_size: pd.DataFrame, variant: str) -> str:
    """The group of the baseline's variant; analyzed models have no variant."""
    of_variant = of_size[of_size["variant"] == variant]
    if len(of_variant):
        return str(of_variant["group"].iloc[0])
    return str(of_size["group"].iloc[0])


def _from_baseline(row: Mapping[Any, Any], baseline: str) -> Difference:
    """The difference in a row of the table; 0 if it is only rounding."""
    value = row["loss_change"]
    if abs(value) < ROUNDING_ERROR:
        value = 0.0
    return Difference(
        group=row["group"],
        other=baseline,
        value=value,
        low=row["low"],
        high=row["high"],
        over=row["over"],
        pairs=row["pairs"],
    )


def _lead(comparison: xr.Dataset, differences: list[Difference]) -> Difference | None:
    """The best group minus the second over the seeds of both, if neither is the baseline."""
    if len(differences) < 2 or differences[1].value >= 0:
        return None
    first, second = differences[:2]
    by_seed = []
    for difference in (first, second):
        changes = paired_changes(comparison["loss"], difference.group)
        by_seed.append(pd.Series(changes.values, index=changes["seed"].values))
    pairs = (by_seed[0] - by_seed[1]).dropna().to_numpy()
    if len(pairs) < 2:
        return None
    mean, low, high = paired_interval(pairs)
    return Difference(
        group=first.group,
        other=second.group,
        value=mean,
        low=low,
        high=high,
        over="seeds",
        pairs=len(pairs),
    )


def tokens_trained(comparison: xr.Dataset, group: str) -> int | None:
    """Training tokens that each run of a group has seen; None for analyzed models."""
    if "tokens_seen" not in comparison.coords:
        return None
    entries = np.flatnonzero(comparison["group"].values == group)
    return int(comparison["tokens_seen"].isel(entry=entries[0]).max())
