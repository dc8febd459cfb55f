"""Numbers of heads that follow from a profile: labels, fractions, wavelengths, resamples."""

from collections.abc import Mapping

import numpy as np
import xarray as xr
from jaxtyping import Bool, Float, Int, Shaped

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
    rows = profile["group_scored"].values
    budget = pooled_budget(profile, rows[None] / rows.sum())
    label = budget.labels(rows=float(rows.sum()))[0]
    layer, head = np.indices(label.shape)
    values = {"layer": layer, "head": head, "label": label}
    values.update(fractions({name: x[0] for name, x in budget.assigned_bits.items()}))
    for name in columns("budget"):
        values[name] = profile[name].values
    values.update(positional_offsets(profile, label == "positional"))
    values.update(wavelengths(profile))
    return values


def positional_offsets(
    profile: xr.Dataset, positional: Bool[np.ndarray, "layer head"]
) -> dict[str, Float[np.ndarray, "layer head"]]:
    """Peak and middle half of the kernels of positional heads; NaN for other heads.

    There is no peak if it has less than 0.3 of the kernel.
    """
    offsets = {}
    for name in ("offset", "offset_low", "offset_high", "offset_weight"):
        offsets[name] = np.where(positional, profile[name].values, np.nan)
    has_peak = offsets["offset_weight"] >= Thresholds.offset
    offsets["offset"][~has_peak] = np.nan
    return offsets


def wavelengths(profile: xr.Dataset) -> dict[str, Shaped[np.ndarray, "layer head"]]:
    """The wavelengths through which each head picks keys; see `describe_wavelengths`."""
    name = "head_wavelength" if "head_wavelength" in profile else "wavelength"
    push, wavelength = xr.broadcast(profile["selectivity_keys"], profile[name])
    wavelength = wavelength.transpose(*push.dims)
    return describe_wavelengths(push.values, wavelength.values)


def require_budget(profile: xr.Dataset) -> None:
    """Raise `BadArgument` if the profile has no attention budget."""
    if "total_bits" not in profile:
        raise BadArgument(
            "This profile has no attention budget, and labels and claims follow from it.",
            hint="rl.profile(model, text), without budget=False",
        )


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
    rows = profile["group_scored"].values
    draws = draw_groups(len(rows), resamples=resamples, seed=seed)
    drawn_rows = draws * rows
    share = rows / rows.sum()
    drawn_share = drawn_rows / drawn_rows.sum(axis=1, keepdims=True)
    return pooled_budget(profile, share + spread * (drawn_share - share))


def draw_groups(
    groups: int, *, resamples: int, seed: int
) -> Int[np.ndarray, "resample group"]:
    """How often each group of sequences is in each bootstrap resample."""
    random = np.random.default_rng(seed % 2**64)
    return random.multinomial(groups, np.full(groups, 1 / groups), size=resamples)


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
