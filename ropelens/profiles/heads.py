"""Numbers of heads that follow from a profile: labels, fractions, wavelengths, resamples."""

from collections.abc import Mapping

import numpy as np
import xarray as xr
from jaxtyping import Float

from ropelens.attention.formulas import (
    FOLLOW,
    GAINS,
    describe_wavelengths,
)
from ropelens.budget.labels import HeadBudget, Thresholds
from ropelens.errors import BadArgument
from ropelens.profiles.measures import columns

FRACTIONS = ("positional_fraction", "content_fraction", "interaction_fraction")


def head_values(profile: xr.Dataset) -> dict[str, np.ndarray]:
    """Columns of heads.csv that follow from a profile by themselves, each [layer, head]."""
    require_budget(profile)
    columns_of_bits = {name: profile[name].values for name in columns("budget")}
    rows = profile["group_scored"].values
    budget = pooled_budget(profile, rows[None] / rows.sum())
    bits = {name: x[0] for name, x in budget.assigned_bits.items()}
    label = budget.labels(rows=float(rows.sum()))[0]
    by_head = "head_wavelength" if "head_wavelength" in profile else "wavelength"
    push, wavelength = xr.broadcast(profile["selectivity_keys"], profile[by_head])
    names = ("offset", "offset_low", "offset_high", "offset_weight")
    positional = label == "positional"
    offsets = {
        name: np.where(positional, profile[name].values, np.nan) for name in names
    }
    offsets["offset"][~(offsets["offset_weight"] >= Thresholds.offset)] = np.nan
    place: np.ndarray = np.indices(label.shape)
    return {
        "layer": place[0],
        "head": place[1],
        "label": label,
        **fractions(bits),
        **columns_of_bits,
        **offsets,
        **describe_wavelengths(push.values, wavelength.transpose(*push.dims).values),
    }


def require_budget(profile: xr.Dataset) -> None:
    """Raise `BadArgument` if the profile has no attention budget."""
    if "total_bits" not in profile:
        what = "This profile has no attention budget, and labels and claims follow from it."
        raise BadArgument(what, hint="rl.profile(model, text), without budget=False")


def fractions(bits: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The `FRACTIONS` of the bits that sinks do not explain; NaN if there are none."""
    parts = np.stack([bits[part] for part in ("position", "content", "interaction")])
    rest = np.broadcast_to(bits["total"] - bits["sink"], parts.shape)
    shares = np.divide(parts, rest, out=np.full_like(parts, np.nan), where=rest > 0)
    return dict(zip(FRACTIONS, shares, strict=True))


def resample_labels(
    profile: xr.Dataset, *, resamples: int, seed: int, spread: float = 1.0
) -> np.ndarray:
    """Labels [resample, layer, head] of the resamples of `resample_budget`."""
    budget = resample_budget(profile, resamples=resamples, seed=seed, spread=spread)
    return budget.labels(rows=float(profile["group_scored"].sum()))


def resample_budget(
    profile: xr.Dataset, *, resamples: int, seed: int, spread: float = 1.0
) -> HeadBudget:
    """Budgets of bootstrap resamples of groups, `spread` times as far from the whole text."""
    rows, random = profile["group_scored"].values, np.random.default_rng(seed % 2**64)
    evenly = np.full(len(rows), 1 / len(rows))
    draws = random.multinomial(len(rows), evenly, size=resamples)
    weight, share = draws * rows, rows / rows.sum()
    weight = share + spread * (weight / weight.sum(axis=1, keepdims=True) - share)
    return pooled_budget(profile, weight)


def pooled_budget(
    profile: xr.Dataset, weight: Float[np.ndarray, "resample group"]
) -> HeadBudget:
    """The budget [resample, layer, head] of each head with these weights of the groups."""

    def pooled(name: str) -> Float[np.ndarray, "resample layer head"]:
        return np.einsum("rg,glh->rlh", weight, profile[f"group_{name}"].values)

    return HeadBudget(
        gains={name: pooled(name) for name in GAINS},
        follow={name: pooled(f"follow_{name}") for name in FOLLOW},
    )
