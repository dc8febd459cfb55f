"""Table of recalibrations: a row per variant. docs/measures.md defines the columns."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from ropelens.budget.labels import LABELS
from ropelens.comparison.pairs import group_entries
from ropelens.comparison.recovery import Estimate, mean_change
from ropelens.comparison.summary import (
    loss_past_context,
    repeat_gain,
    rotating_planes,
)
from ropelens.interventions.changes import best_head

COMPARED = "recalibrations"
"""Attribute `compared` of a comparison of runs that start from one checkpoint."""

BEFORE = "before"
AFTER = "after"

NOT_REACHED = "not reached"
NOT_DEFINED = "not defined"
HEADS = ("layer", "head")
BY_RATE = ("variant", "rate")
ENDS = ("", "_low", "_high")


def is_recalibration(comparison: xr.Dataset) -> bool:
    """Whether a comparison is of runs that start from one checkpoint."""
    return comparison.attrs.get("compared") == COMPARED


def summarize_recalibration(comparison: xr.Dataset) -> pd.DataFrame:
    """Table of a comparison of recalibrations with a row per variant, the control first."""
    rows = []
    for variant in comparison["variant"].values.tolist():
        of_variant = comparison.sel(variant=variant)
        row: dict[str, object] = {"variant": variant, **_gaps(of_variant)}
        for phase in (BEFORE, AFTER):
            models = _models(comparison, variant, phase)
            row.update(_behaviour(models, phase))
            row.update(_labels(models, phase))
        row.update(rotating_planes(models))
        rows.append(row)
    return pd.DataFrame(rows)


def _models(comparison: xr.Dataset, variant: str, phase: str) -> xr.Dataset:
    models = group_entries(comparison, variant)
    return models.isel(entry=np.flatnonzero(models["phase"].values == phase))


def _gaps(of_variant: xr.Dataset) -> dict[str, object]:
    """Gaps and the recovered share, from the losses that the runs recorded."""
    by_seed = of_variant["gap_of_seed"].isel(step=-1).values
    by_seed = by_seed[np.isfinite(by_seed)]
    losses = of_variant["heldout_loss"].mean(("seed", "sequence"))
    columns: dict[str, object] = {"seeds": len(by_seed)}
    columns["loss_before"] = float(losses[0])
    columns["loss_after"] = float(losses[-1])
    columns.update(_estimate(of_variant, "loss_change"))
    for name, step in (("before", 0), ("after", -1)):
        gap = of_variant.isel(step=step)
        columns.update(_estimate(gap, "gap", f"gap_{name}"))
    last = of_variant.isel(step=-1)
    columns.update(_estimate(last, "recovered"))
    for name in ("tokens_to_half", "tokens_to_90"):
        for end in ENDS:
            columns[f"{name}{end}"] = tokens_in_words(float(of_variant[f"{name}{end}"]))
    spread = np.ptp(by_seed) if len(by_seed) > 1 else np.nan
    columns["gap_after_spread_of_seeds"] = float(spread)
    return columns


def _estimate(dataset: xr.Dataset, name: str, column: str = "") -> dict[str, float]:
    """A number and both ends of its interval."""
    return {f"{column or name}{end}": float(dataset[f"{name}{end}"]) for end in ENDS}


def tokens_in_words(tokens: float) -> object:
    """The rounded number of tokens, or why there is none."""
    if np.isnan(tokens):
        return NOT_DEFINED
    if np.isinf(tokens):
        return NOT_REACHED
    return round(tokens)


def _behaviour(models: xr.Dataset, phase: str) -> dict[str, float]:
    """Losses past both contexts, and results of tasks, as means over the seeds."""
    induction = best_head(models["trial_induction"])
    past_recalibrated = loss_past_context(models)
    past_trained = loss_past_context(models, context="trained_context")
    return {
        f"loss_past_recalibrated_context_{phase}": float(past_recalibrated.mean()),
        f"loss_past_trained_context_{phase}": float(past_trained.mean()),
        f"induction_{phase}": float(induction.mean()),
        f"repeat_gain_{phase}": float(repeat_gain(models).mean()),
        f"retrieval_{phase}": float(models["retrieval"].mean()),
        f"retrieval_past_recalibrated_context_{phase}": _retrieval_past(models),
    }


def gaps_past_context(comparison: xr.Dataset, variant: str) -> np.ndarray:
    """Loss past the recalibrated context after training, minus the control's, by seed."""
    models = _models(comparison, variant, AFTER)
    controls = comparison.isel(entry=models["partner"].values)
    return loss_past_context(models).values - loss_past_context(controls).values


def _retrieval_past(models: xr.Dataset) -> float:
    """Share of needles found in prompts that are longer than the recalibrated context."""
    longer = models["prompt_length"] > int(models.attrs["context"])
    return float(models["far_retrieval"].where(longer, drop=True).mean())


def _labels(models: xr.Dataset, phase: str) -> dict[str, float]:
    """Mean numbers of heads by label, and heads that differ from the control."""
    count = models.sizes["entry"]
    columns = {}
    for label in LABELS:
        with_label = (models["label"] == label).sum()
        columns[f"{label}_heads_{phase}"] = float(with_label / count)
    # NaN if the label of no head could be decided
    changed = models["label_changed"].sum(min_count=1) / count
    columns[f"labels_changed_{phase}"] = float(changed)
    change = models["attention_change"].mean()
    columns[f"attention_change_{phase}"] = float(change)
    return columns


def gap_between(comparison: xr.Dataset, first: str, second: str) -> Estimate:
    """Loss of the first variant minus loss of the second after training, nats/token.

    The interval is over documents, as for gaps.
    """
    last = comparison["heldout_loss"].isel(step=-1)
    difference = last.sel(variant=first) - last.sel(variant=second)
    change = difference.transpose("seed", "sequence").values
    paired = np.isfinite(change).all(1)
    return mean_change(change[paired], comparison["document"].values)


@dataclass(frozen=True)
class RateSwap:
    """Two variants whose order at a learning rate differs from their order at the study's.

    The `better` one has the lower loss at `rate`. A swap is `certain` if the intervals of both
    differences exclude 0.
    """

    rate: float
    better: str
    worse: str
    certain: bool


def repeated_variants(comparison: xr.Dataset) -> list[str]:
    """The variants, and the control, that have the study's learning rate and another one."""
    study_rate = float(comparison.attrs["learning_rate"])
    losses = comparison["rate_loss"].transpose("variant", "rate")
    several = np.isfinite(losses.values).sum(1) > 1
    of_study = np.isfinite(losses.sel(rate=study_rate).values)
    return comparison["variant"].values[several & of_study].tolist()


def swaps_at_rates(comparison: xr.Dataset) -> list[RateSwap]:
    """The pairs of repeated variants whose order depends on the learning rate."""
    study_rate = float(comparison.attrs["learning_rate"])
    name = "rate_difference"
    swaps = []
    for first, second in combinations(repeated_variants(comparison), 2):
        pair = comparison.sel(variant=first, other_variant=second)
        of_study = pair.sel(rate=study_rate)
        for rate in comparison["rate"].values.tolist():
            at_rate = pair.sel(rate=rate)
            before = float(of_study[name])
            after = float(at_rate[name])
            if before * after < 0:
                better, worse = (first, second) if after < 0 else (second, first)
                certain = excludes_zero(of_study, name) and excludes_zero(at_rate, name)
                swaps.append(RateSwap(rate, better, worse, certain))
    return swaps


def orders_are_certain(comparison: xr.Dataset) -> bool:
    """Whether the intervals of all differences of repeated variants exclude 0, at each rate."""
    for first, second in combinations(repeated_variants(comparison), 2):
        pair = comparison.sel(variant=first, other_variant=second)
        for rate in comparison["rate"].values.tolist():
            at_rate = pair.sel(rate=rate)
            is_known = np.isfinite(at_rate["rate_difference"])
            if is_known and not excludes_zero(at_rate, "rate_difference"):
                return False
    return True


def excludes_zero(numbers: Mapping[Any, Any], name: str) -> bool:
    """Whether the interval of a number in a row or a dataset does not contain 0."""
    return bool(numbers[f"{name}_low"] > 0 or numbers[f"{name}_high"] < 0)
