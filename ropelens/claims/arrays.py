"""Arrays of a profile on which claims are tested."""

import math
import warnings
from dataclasses import dataclass

import numpy as np
import scipy
import xarray as xr
from jaxtyping import Bool, Float, Int

from ropelens.budget.labels import Thresholds
from ropelens.claims.numbers import ByHead, ByPlane, HeadDraws, PairsOfHeads
from ropelens.profiles.heads import head_values
from ropelens.profiles.kinds import layers_by_kind

ALL_LAYERS = "all"  # instead of a kind of layers
# Share of the bits that sinks explain, at least, in a model with sinks
MIN_SINK_SHARE = 0.05
# Times the mean length: a plane with one value 5 times the mean
MASSIVE = 5 / math.sqrt(2)
# Oka et al. 2026: the band is at plane (D/2) log_base(context / 3.657)
BAND_RATIO = 3.657

ByLayer = Float[np.ndarray, " layer"]
LayerHead = Float[np.ndarray, "layer head"]
Kernels = Float[np.ndarray, "layer head offset"]


def parts_by_kind(profile: xr.Dataset) -> dict[str, xr.Dataset]:
    """The layers of each kind that rotates, by its name; {"all": profile} for one kind.

    The context and the trained context of a kind are not longer than its reach.
    """
    rotating = profile.isel(layer=rotating_in(profile).layers)
    kinds = layers_by_kind(rotating)
    if len(kinds) < 2:
        return {ALL_LAYERS: profile}
    parts = {}
    for kind, layers_of_kind in kinds.items():
        part = rotating.isel(layer=layers_of_kind)
        reach = int(part["reach"][0])
        parts[kind] = part.assign_attrs(
            context=min(int(profile.attrs["context"]), reach),
            trained_context=min(int(profile.attrs["trained_context"]), reach),
        )
    return parts


@dataclass(frozen=True)
class Rotating:
    """Layers in which planes rotate, and planes that rotate in all these layers (indices)."""

    layers: Int[np.ndarray, " layer"]
    planes: Int[np.ndarray, " plane"]


def rotating_in(profile: xr.Dataset) -> Rotating:
    rotates = np.isfinite(profile["wavelength"].transpose("layer", "frequency").values)
    layers = np.flatnonzero(rotates.any(1))
    planes = np.flatnonzero(rotates[layers].all(0))
    return Rotating(layers=layers, planes=planes)


def claim_arrays(profile: xr.Dataset) -> dict[str, np.ndarray]:
    """Arrays of `profile` by the names in `Claim.arrays`.

    The first axis is the layers that rotate, and in most arrays the last axis is the planes
    that rotate in all layers. Numbers that the profile does not have are NaN.
    """
    indices = rotating_in(profile)
    rotating = profile.isel(layer=indices.layers)
    single = profile["offset_stop"] - profile["offset_start"] == 1
    return {
        **wavelength_arrays(profile),
        **_lengths(rotating, indices.planes),
        **_sinks(rotating, indices.planes),
        **_kernels(rotating),
        "kernel": rotating["kernel"].values[..., single.values],
        "positional": _positional_share(rotating),
    }


@dataclass(frozen=True)
class DrawnHeads:
    """Share that the offset explains and mean log wavelength of each head.

    Draw 0 is the model, and the others are surrogates.
    """

    offset_fraction: HeadDraws
    log_wavelength: HeadDraws

    @classmethod
    def of(cls, profile: xr.Dataset) -> "DrawnHeads":
        return cls(
            offset_fraction=profile["surrogate_offset_fraction"].values,
            log_wavelength=profile["surrogate_log_wavelength"].values,
        )


def wavelength_arrays(profile: xr.Dataset) -> dict[str, np.ndarray]:
    """The arrays of the claim on wavelengths: two numbers of heads, and the rows of labels."""
    drawn = DrawnHeads.of(profile)
    numbers = np.stack([drawn.offset_fraction, drawn.log_wavelength])
    return {
        "head_numbers": np.moveaxis(numbers, (2, 3), (0, 1)),  # layer and head first
        "scored_rows": np.array([float(profile["group_scored"].sum())]),
    }


def _lengths(rotating: xr.Dataset, planes: np.ndarray) -> dict[str, np.ndarray]:
    """Lengths of queries, keys and values in the `planes`."""
    by_plane = rotating[["q_norm", "k_norm", "v_norm", "q_coherence", "wavelength"]]
    by_plane = by_plane.isel(frequency=planes)
    queries = by_plane["q_norm"].values
    keys = by_plane["k_norm"].values
    values = by_plane["v_norm"].values
    massive = _massive(queries).sum(1) + _massive(keys).sum(1)
    trained = int(rotating.attrs["trained_context"])
    return {
        "length": np.nanmean(queries, 1) * np.nanmean(keys, 1),
        "massive": massive.astype(float),
        "q_norm": queries,
        "q_coherence": by_plane["q_coherence"].values,
        "q_uneven": _unevenness(queries),
        "k_uneven": _unevenness(keys),
        "v_uneven": _unevenness(values),
        "q_count": _massive_per_head(queries),
        "k_count": _massive_per_head(keys),
        "v_count": _massive_per_head(values),
        "band": _band(by_plane["wavelength"].values, trained),
    }


def _mean_length(length: ByHead) -> Float[np.ndarray, "layer head 1"]:
    """Mean over planes; NaN for heads without any length (pruned heads, absent values)."""
    mean = length.mean(-1, keepdims=True)
    return np.where(mean > 0, mean, np.nan)


def _massive(length: ByHead) -> Bool[np.ndarray, "layer head frequency"]:
    return length > MASSIVE * _mean_length(length)


def _massive_per_head(length: ByHead) -> ByLayer:
    """Mean number of massive planes of the heads of a layer."""
    missing = 0 * _mean_length(length)[..., 0]  # 0, or NaN
    return _mean_over_heads(_massive(length).sum(-1) + missing)


def _unevenness(length: ByHead) -> ByLayer:
    """Standard deviation over mean of the planes, mean over heads."""
    return _mean_over_heads(length.std(-1) / _mean_length(length)[..., 0])


def _mean_over_heads(by_head: LayerHead) -> ByLayer:
    """Mean over the heads that a layer has; NaN if it has none."""
    heads = np.isfinite(by_head).sum(1)
    return np.nansum(by_head, 1) / np.where(heads, heads, np.nan)


def _band(wavelength: ByPlane, trained_context: int) -> ByLayer:
    """Plane of the band of each layer, interpolated between the wavelengths of planes."""
    log_band = np.log(2 * np.pi * trained_context / BAND_RATIO)
    planes = range(wavelength.shape[-1])
    bands = [np.interp(log_band, np.log(of_layer), planes) for of_layer in wavelength]
    return np.array(bands)


def _sinks(rotating: xr.Dataset, planes: np.ndarray) -> dict[str, np.ndarray]:
    """Numbers of sinks, which are NaN in a model without sinks."""
    sink_bits = float(rotating["sink_bits"].sum())
    has_sinks = sink_bits >= MIN_SINK_SHARE * float(rotating["total_bits"].sum())
    wavelength = rotating["wavelength"].isel(frequency=planes).values
    push = np.full(wavelength.shape, math.nan)
    if has_sinks:
        selectivity = rotating["selectivity_sink"].isel(frequency=planes).values
        push = np.nanmean(selectivity.clip(min=0), 1)
    return {
        "slow": (wavelength > int(rotating.attrs["context"])).astype(float),
        "sink_push": push,
        "range": _median_offset(rotating),
        "sink_mass": rotating["sink_mass"].where(has_sinks).values,
    }


def _positional_share(rotating: xr.Dataset) -> ByLayer:
    """Median positional share of the heads of a layer that choose keys."""
    bits = rotating["total_bits"]
    share = bits.copy(data=head_values(rotating)["positional_fraction"])
    return share.where(bits >= Thresholds.diffuse).median("head").values


def _kernels(rotating: xr.Dataset) -> dict[str, np.ndarray]:
    """How kernels that follow from mean vectors agree with fitted kernels and with decay."""
    predicted = rotating["predicted_kernel"].values
    chooses = (rotating["total_bits"] >= Thresholds.diffuse).values
    agreement = _agreement(rotating["kernel"].values, predicted)
    agreement = np.where(chooses[:, None], agreement, np.nan)
    near = -np.arange(predicted.shape[-1], dtype=float)
    ranks = scipy.stats.rankdata(predicted, axis=-1)
    nearness = _correlate(ranks, np.broadcast_to(near, predicted.shape))
    return {
        "agreement": agreement * np.abs(agreement),
        "nearness": np.nanmean(nearness, 1),
    }


def _agreement(kernel: Kernels, predicted: Kernels) -> PairsOfHeads:
    """Correlation of each fitted log kernel (last axis) with the prediction of each head."""
    fitted = np.log(np.where(kernel > 0, kernel, np.nan))
    return _correlate(predicted[:, :, None], fitted[:, None])


def _median_offset(profile: xr.Dataset) -> LayerHead:
    """Median offset of the attention of each head on keys other than position 0, in tokens."""
    mass = profile["offset_mass"].transpose("layer", "head", "offset_bin").values
    edges = np.append(profile["offset_start"].values, profile["offset_stop"].values[-1])
    medians = np.full(mass.shape[:2], math.nan)
    for head in zip(*np.nonzero(np.nansum(mass, -1) > 0), strict=True):
        below = np.append(0, np.nancumsum(mass[head]))
        medians[head] = np.interp(below[-1] / 2, below, edges)
    return medians


def _correlate(
    x: Float[np.ndarray, "*batch point"], y: Float[np.ndarray, "*other point"]
) -> Float[np.ndarray, "*both"]:
    """Pearson's correlation along the last axis, over the points that both arrays have."""
    have_both = np.isfinite(x + y)
    with np.errstate(invalid="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # NaN without any point
        x = _centred(np.where(have_both, x, np.nan))
        y = _centred(np.where(have_both, y, np.nan))
        squares = np.nansum(x * x, -1) * np.nansum(y * y, -1)
        return np.nansum(x * y, -1) / np.sqrt(squares)


def _centred(
    values: Float[np.ndarray, "*batch point"],
) -> Float[np.ndarray, "*batch point"]:
    return values - np.nanmean(values, axis=-1, keepdims=True)
