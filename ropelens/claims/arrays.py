"""Arrays of a profile on which claims are tested."""

import math
import warnings

import numpy as np
import scipy
import xarray as xr
from jaxtyping import Float

from ropelens.budget.labels import Thresholds
from ropelens.claims.numbers import HeadDraws
from ropelens.profiles.heads import head_values
from ropelens.profiles.kinds import layers_by_kind

MIN_SINK_SHARE = (
    0.05  # smallest share of the bits at which a model counts as having sinks
)
MASSIVE = 5 / math.sqrt(
    2
)  # times the mean length: a plane with one value 5 times the mean
BAND_RATIO = (
    3.657  # Oka et al. 2026: the band is at plane (D/2) log_base(context / 3.657)
)


def parts_by_kind(profile: xr.Dataset) -> dict[str, xr.Dataset]:
    """The layers of each kind that rotates, by its name; {"all": profile} for one kind."""
    rotating = profile.isel(layer=rotating_in(profile)[0])
    kinds = layers_by_kind(rotating)
    if len(kinds) < 2:
        return {"all": profile}
    parts = {kind: rotating.isel(layer=layers) for kind, layers in kinds.items()}
    contexts = {
        name: int(profile.attrs[name]) for name in ("context", "trained_context")
    }
    for kind, part in parts.items():
        reach = int(part["reach"][0])
        parts[kind] = part.assign_attrs(
            {name: min(x, reach) for name, x in contexts.items()}
        )
    return parts


def claim_arrays(profile: xr.Dataset) -> dict[str, Float[np.ndarray, "..."]]:
    """Arrays of `profile` by the names in `Claim.arrays`.

    The first axis is the layers that rotate, and in most arrays the last axis is the planes
    that rotate in all layers. Numbers that the profile does not have are NaN.
    """
    layers, planes = rotating_in(profile)
    part = profile.isel(layer=layers)

    def by_plane(name: str) -> np.ndarray:
        return part[name].isel(frequency=planes).values

    wavelength = by_plane("wavelength")
    context, trained = (int(profile.attrs[n]) for n in ("context", "trained_context"))
    band = np.log(2 * np.pi * trained / BAND_RATIO)
    q, k, values, coherence = map(
        by_plane, ("q_norm", "k_norm", "v_norm", "q_coherence")
    )
    kernel, predicted = part["kernel"].values, part["predicted_kernel"].values
    single = (profile["offset_stop"] - profile["offset_start"] == 1).values
    chooses = part["total_bits"] >= Thresholds.diffuse
    sinks = float(part["sink_bits"].sum()) >= MIN_SINK_SHARE * float(
        part["total_bits"].sum()
    )
    fitted = np.log(np.where(kernel > 0, kernel, np.nan))
    agreement = _correlate(predicted[:, :, None], fitted[:, None])
    agreement = np.where(chooses.values[:, None], agreement, np.nan)
    near = np.broadcast_to(
        -np.arange(predicted.shape[-1], dtype=float), predicted.shape
    )
    nearness = _correlate(scipy.stats.rankdata(predicted, axis=-1), near)
    positional = part["total_bits"].copy(data=head_values(part)["positional_fraction"])
    push = (
        np.nanmean(by_plane("selectivity_sink").clip(min=0), 1) if sinks else math.nan
    )
    evenness, massive = {}, {}
    for name, x in (("q", q), ("k", k), ("v", values)):
        mean = x.mean(-1, keepdims=True)
        mean = np.where(
            mean > 0, mean, np.nan
        )  # a head may have no values, or be pruned
        massive[name] = x > MASSIVE * mean
        evenness[f"{name}_uneven"] = _mean(x.std(-1) / mean[..., 0])
        evenness[f"{name}_count"] = _mean(massive[name].sum(-1) + 0 * mean[..., 0])
    arrays = {
        "massive": (massive["q"].sum(1) + massive["k"].sum(1)).astype(float),
        "length": np.nanmean(q, 1) * np.nanmean(k, 1),
        "band": np.array(
            [np.interp(band, np.log(w), range(len(w))) for w in wavelength]
        ),
        "slow": (wavelength > context).astype(float),
        "sink_push": np.broadcast_to(push, wavelength.shape),
        "positional": positional.where(chooses).median("head").values,
        "q_coherence": coherence,
        "q_norm": q,
        "agreement": agreement * np.abs(agreement),
        "nearness": np.nanmean(nearness, 1),
        "kernel": kernel[..., single],
        "range": _median_offset(part),
        "sink_mass": part["sink_mass"].where(sinks).values,
    }
    return wavelength_arrays(profile) | evenness | arrays


def rotating_in(profile: xr.Dataset) -> tuple[np.ndarray, np.ndarray]:
    """The layers in which planes rotate, and the planes that rotate in all these layers."""
    rotates = np.isfinite(profile["wavelength"].transpose("layer", "frequency").values)
    layers = np.flatnonzero(rotates.any(1))
    return layers, np.flatnonzero(rotates[layers].all(0))


def claim_numbers(profile: xr.Dataset) -> tuple[HeadDraws, HeadDraws]:
    """Share that the offset explains and mean log wavelength of each head."""
    names = ("surrogate_offset_fraction", "surrogate_log_wavelength")
    return profile[names[0]].values, profile[names[1]].values


def wavelength_arrays(profile: xr.Dataset) -> dict[str, np.ndarray]:
    """The arrays of the claim on wavelengths: two numbers of heads, and the rows of labels."""
    numbers = np.moveaxis(np.stack(claim_numbers(profile)), (2, 3), (0, 1))
    return {
        "head_numbers": numbers,
        "scored_rows": np.array([float(profile["group_scored"].sum())]),
    }


def _median_offset(profile: xr.Dataset) -> Float[np.ndarray, "layer head"]:
    """Median offset of the attention of each head on keys other than position 0, in tokens."""
    mass = profile["offset_mass"].transpose("layer", "head", "offset_bin").values
    edges = np.append(profile["offset_start"].values, profile["offset_stop"].values[-1])
    medians = np.full(mass.shape[:2], math.nan)
    for head in zip(*np.nonzero(np.nansum(mass, -1) > 0), strict=True):
        below = np.append(0, np.nancumsum(mass[head]))
        medians[head] = np.interp(below[-1] / 2, below, edges)
    return medians


def _mean(by_head: Float[np.ndarray, "layer head"]) -> Float[np.ndarray, " layer"]:
    """Mean over the heads that a layer has; NaN if it has none."""
    known = np.isfinite(by_head).sum(1)
    return np.nansum(by_head, 1) / np.where(known, known, np.nan)


def _correlate(
    x: Float[np.ndarray, "*batch point"], y: Float[np.ndarray, "*other point"]
) -> Float[np.ndarray, "*both"]:
    """Pearson's correlation along the last axis, over the points that both arrays have."""
    x, y = (np.where(np.isfinite(x + y), values, np.nan) for values in (x, y))
    with np.errstate(invalid="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # NaN without any point
        x, y = (
            values - np.nanmean(values, axis=-1, keepdims=True) for values in (x, y)
        )
        return np.nansum(x * y, -1) / np.sqrt(
            np.nansum(x * x, -1) * np.nansum(y * y, -1)
        )
