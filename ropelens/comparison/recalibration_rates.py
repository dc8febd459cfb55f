"""Gaps at other learning rates: does the rate of a study decide the order of its variants?"""

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import xarray as xr
from jaxtyping import Float

from ropelens.comparison.recalibration_runs import RecalibratedRun, RecordedLosses
from ropelens.comparison.recalibration_table import BY_RATE
from ropelens.comparison.recovery import Estimate, mean_change, measure_recovery
from ropelens.train.recalibration_settings import CONTROL

BY_PAIR = ("variant", "other_variant", "rate")
ENDS = {"": "value", "_low": "low", "_high": "high"}
LossesBySeed = Mapping[int, Float[np.ndarray, "step sequence"]]
LossesByRun = Mapping[tuple[str, float], LossesBySeed]


def rate_variables(
    runs: Sequence[RecalibratedRun],
    recorded: Sequence[RecordedLosses],
    variants: Sequence[str],
    *,
    study_rate: float,
) -> xr.Dataset:
    """Losses, gaps and recovered shares after training over (variant, rate).

    `rate` has the peak learning rates in ascending order. NaN marks variants without a run at
    a rate. `runs` and their `recorded` losses have controls with the same rate and seed. If
    several rates were tried, only seeds of the other rates count, so that all rates are
    compared with the same order of the text. Seeds are paired. `rate_difference` is the loss of
    a variant minus the loss of another one at the same rate, and `rate_loss_change` is the
    loss minus the loss of the same variant at the rate of the study; both in nats per token.
    """
    rates = sorted({run.learning_rate for run in runs})
    losses = _losses_by_run(runs, recorded, study_rate=study_rate)
    documents = recorded[0].documents
    dataset = _empty(variants, rates)
    for variant, rate in losses:
        place = {"variant": variant, "rate": rate}
        of_run = losses[variant, rate]
        last = [of_seed[-1] for of_seed in of_run.values()]
        dataset["rate_loss"].loc[place] = np.mean(last)
        change = _differences(of_run, losses[CONTROL, rate])
        steps = np.arange(change.shape[1])
        recovery = measure_recovery(change, documents, tokens=steps)
        _write(dataset, "rate_gap", place, _last(recovery.gap))
        _write(dataset, "rate_recovered", place, _last(recovery.recovered))
        of_rate = _differences(of_run, losses.get((variant, study_rate), {}))
        if len(of_rate):
            estimate = mean_change(of_rate[:, -1], documents)
            _write(dataset, "rate_loss_change", place, estimate)
    for variant, other, rate in itertools.product(variants, variants, rates):
        of_variant = losses.get((variant, rate), {})
        of_pair = _differences(of_variant, losses.get((other, rate), {}))
        if len(of_pair):
            place = {"variant": variant, "other_variant": other, "rate": rate}
            estimate = mean_change(of_pair[:, -1], documents)
            _write(dataset, "rate_difference", place, estimate)
    return dataset


def _differences(
    first: LossesBySeed, second: LossesBySeed
) -> Float[np.ndarray, "seed ..."]:
    """Differences [seed, step, sequence] of the seeds that both have; empty without any."""
    differences = []
    for seed, losses in first.items():
        if seed in second:
            differences.append(losses - second[seed])
    return np.array(differences)


def _losses_by_run(
    runs: Sequence[RecalibratedRun],
    recorded: Sequence[RecordedLosses],
    *,
    study_rate: float,
) -> LossesByRun:
    """The losses of each variant and rate, with the seeds that all other rates have."""
    seeds_at: dict[float, set[int]] = {}
    for run in runs:
        seeds_at.setdefault(run.learning_rate, set()).add(run.seed)
    seeds = {run.seed for run in runs}
    for rate, at_rate in seeds_at.items():
        if rate != study_rate:
            seeds &= at_rate
    by_run: dict[tuple[str, float], dict[int, np.ndarray]] = {}
    for run, of_run in zip(runs, recorded, strict=True):
        if run.seed in seeds:
            place = (run.variant, run.learning_rate)
            by_run.setdefault(place, {})[run.seed] = of_run.losses
    return by_run


def _empty(variants: Sequence[str], rates: Sequence[float]) -> xr.Dataset:
    names = np.array(variants, dtype=object)
    dataset = xr.Dataset(
        coords={"variant": names, "other_variant": names, "rate": list(rates)}
    )
    shape = (len(variants), len(rates))
    dataset["rate_loss"] = (BY_RATE, np.full(shape, np.nan))
    for end in ENDS:
        for name in ("rate_gap", "rate_recovered", "rate_loss_change"):
            dataset[f"{name}{end}"] = (BY_RATE, np.full(shape, np.nan))
        of_pairs = np.full((len(variants), *shape), np.nan)
        dataset[f"rate_difference{end}"] = (BY_PAIR, of_pairs)
    return dataset


def _last(estimate: Estimate) -> Estimate:
    """The estimate after the last step."""
    return Estimate(estimate.value[-1], estimate.low[-1], estimate.high[-1])


def _write(
    dataset: xr.Dataset, name: str, place: Mapping[str, object], estimate: Estimate
) -> None:
    for end, attribute in ENDS.items():
        dataset[f"{name}{end}"].loc[dict(place)] = getattr(estimate, attribute)
