"""Gaps at other learning rates: does the rate of a study decide the order of its variants?"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import xarray as xr
from jaxtyping import Float, Int

from ropelens.comparison.recalibration_runs import RecalibratedRun, RecordedLosses
from ropelens.comparison.recovery import measure_recovery
from ropelens.train.recalibration_settings import CONTROL

OF_VARIANT_AND_RATE = ("variant", "rate")
NUMBERS = ("gap", "recovered")
ENDS = {"": "value", "_low": "low", "_high": "high"}


@dataclass(frozen=True)
class PairedRun:
    """Losses of a run, and losses of the control with the same learning rate and seed."""

    variant: str
    rate: float
    losses: Float[np.ndarray, "step sequence"]
    of_control: Float[np.ndarray, "step sequence"]


def rate_variables(
    runs: Sequence[RecalibratedRun],
    recorded: Sequence[RecordedLosses],
    variants: Sequence[str],
) -> xr.Dataset:
    """The loss, the gap and the recovered share after training over (variant, rate).

    `rate` has the peak learning rates in ascending order. NaN marks variants without a run at
    a rate. `runs` and their `recorded` losses have controls with the same rate and seed.
    """
    rates = sorted({run.learning_rate for run in runs})
    pairs = list(_pairs(runs, recorded))
    coordinates = {"variant": np.array(variants, dtype=object), "rate": rates}
    dataset = xr.Dataset(coords=coordinates)
    shape = (len(variants), len(rates))
    names = ["rate_loss"]
    for name in NUMBERS:
        names += [f"rate_{name}{end}" for end in ENDS]
    for name in names:
        dataset[name] = (OF_VARIANT_AND_RATE, np.full(shape, np.nan))
    for variant in variants:
        for rate in rates:
            place = {"variant": variant, "rate": rate}
            of_place = [
                pair for pair in pairs if (pair.variant, pair.rate) == (variant, rate)
            ]
            if of_place:
                _fill(dataset, place, of_place, recorded[0].documents)
    return dataset


def _pairs(
    runs: Sequence[RecalibratedRun], recorded: Sequence[RecordedLosses]
) -> Iterator[PairedRun]:
    controls = {}
    for run, of_run in zip(runs, recorded, strict=True):
        if run.variant == CONTROL:
            controls[run.learning_rate, run.seed] = of_run.losses
    for run, of_run in zip(runs, recorded, strict=True):
        rate = run.learning_rate
        yield PairedRun(run.variant, rate, of_run.losses, controls[rate, run.seed])


def _fill(
    dataset: xr.Dataset,
    place: dict[str, object],
    pairs: Sequence[PairedRun],
    documents: Int[np.ndarray, " sequence"],
) -> None:
    """Write the numbers of the runs of a variant at a rate."""
    losses = np.stack([pair.losses for pair in pairs])
    change = losses - np.stack([pair.of_control for pair in pairs])
    dataset["rate_loss"].loc[place] = losses[:, -1].mean()
    steps = np.arange(change.shape[1])
    recovery = measure_recovery(change, documents, tokens=steps)
    for name in NUMBERS:
        estimate = getattr(recovery, name)
        for end, attribute in ENDS.items():
            last = getattr(estimate, attribute)[-1]
            dataset[f"rate_{name}{end}"].loc[place] = last
