"""Which heads are positional, which semantic, and how sure that is."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
import pandas as pd
import xarray as xr
from jaxtyping import Float, Int
from scipy import stats

from ropelens.errors import BadArgument
from ropelens.statistics.measures import columns
from ropelens.statistics.split import split_bits

LABELS = ("diffuse", "sink", "positional", "mixed", "semantic")

SEEN_BY = 0.05
"""Share of rows that must see an offset for it to be called a head's offset."""


@dataclass(frozen=True)
class Thresholds:
    """Where one label ends and the next begins.

    A head is "diffuse" below `diffuse` total bits; else "sink" where sink_bits exceed
    `sink` of the total; else "positional" from `positional` on, "semantic" up to
    `semantic`, both shares of position bits in position and content bits, "mixed" between.
    """

    diffuse: float = 0.1
    sink: float = 0.9
    positional: float = 2 / 3
    semantic: float = 1 / 3

    def __post_init__(self) -> None:
        ordered = 0 <= self.semantic <= self.positional <= 1
        if not (ordered and self.diffuse >= 0 and 0 <= self.sink <= 1):
            raise BadArgument(
                "Thresholds must be shares in order: 0 <= semantic <= positional <= 1.",
                seen=str(asdict(self)),
            )


def classify_heads(
    profile: xr.Dataset,
    *,
    thresholds: Thresholds | None = None,
    resamples: int = 1000,
    seed: int = 0,
) -> pd.DataFrame:
    """Label every head of a profile; the columns of heads.csv, a row a head.

    `confidence` is the share of `resamples` bootstrap resamples of sequences (in groups,
    where there are many) that give the same label; NaN with fewer than two. `offset` is
    the peak of the fitted kernel, for positional heads, and `offset_weight` the weight
    of that one offset in a row that sees them all. `mean_wavelength` (tokens) is the
    geometric mean of the wavelengths weighted by the positive part of selectivity, over
    planes that rotate.

    `attrs["thresholds"]` holds the thresholds; `attrs["claim"]` the rank correlation of
    positional_fraction with mean_wavelength, as `wavelength_claim` gives it.
    """
    thresholds = thresholds or Thresholds()
    budget = columns("budget")
    bits = {name.removesuffix("_bits"): profile[name].values for name in budget}
    labels = label_heads(thresholds, **bits)
    offset, offset_weight = _peaks(profile)
    layer, head = (np.asarray(index) for index in np.indices(labels.shape))
    given = [str(name) for name in profile.data_vars if "column" in profile[name].attrs]
    table: dict[str, np.ndarray] = {
        "layer": layer,
        "head": head,
        "label": labels,
        "confidence": _confidence(profile, labels, thresholds, resamples=resamples, seed=seed),
        "positional_fraction": positional_fraction(bits["position"], bits["content"]),
        **{name: profile[name].values for name in budget},
        "offset": offset,
        "offset_weight": offset_weight,
        "mean_wavelength": mean_wavelength(profile),
        **{name: profile[name].values for name in (*columns("score"), *given)},
    }
    heads = pd.DataFrame({name: values.ravel() for name, values in table.items()})
    heads = heads[heads["total_bits"].notna()].reset_index(drop=True)
    positional = heads["label"] == "positional"
    heads["offset"] = heads["offset"].where(positional).astype("Int64")
    heads["offset_weight"] = heads["offset_weight"].where(positional)
    heads.attrs["thresholds"] = asdict(thresholds)
    heads.attrs["claim"] = wavelength_claim(heads, seed=seed)
    return heads


def positional_fraction(
    position: Float[np.ndarray, "*shape"], content: Float[np.ndarray, "*shape"]
) -> Float[np.ndarray, "*shape"]:
    """Share of position bits in position and content bits; NaN where there are none."""
    both = position + content
    return np.divide(position, both, out=np.full_like(both, np.nan), where=both > 0)


def label_heads(
    thresholds: Thresholds,
    *,
    total: Float[np.ndarray, "*shape"],
    sink: Float[np.ndarray, "*shape"],
    position: Float[np.ndarray, "*shape"],
    content: Float[np.ndarray, "*shape"],
) -> np.ndarray:
    """The label of each head, from its budget in bits; the first rule that fits, "" of NaN."""
    fraction = positional_fraction(position, content)
    rules = {
        "": np.isnan(total),
        "diffuse": total < thresholds.diffuse,
        "sink": sink > thresholds.sink * total,
        "positional": fraction >= thresholds.positional,
        "semantic": fraction <= thresholds.semantic,
    }
    return np.select(list(rules.values()), list(rules), default="mixed").astype(object)


def mean_wavelength(profile: xr.Dataset) -> Float[np.ndarray, "layer head"]:
    """Geometric mean wavelength (tokens) that a head selects through; NaN if none rotates.

    Planes weigh with the positive part of their selectivity: a plane that pushes away
    from the keys attended to is not one that the head selects through.
    """
    wavelength = profile["wavelength"].where(np.isfinite(profile["wavelength"]))
    weight = profile["selectivity"].clip(min=0).where(wavelength.notnull(), 0.0)
    total = weight.sum("frequency")
    mean_log = (weight * np.log(wavelength)).sum("frequency") / total.where(total > 0)
    return np.exp(mean_log.transpose("layer", "head").values)


def wavelength_claim(
    heads: pd.DataFrame, *, resamples: int = 2000, seed: int = 0
) -> dict[str, float | int]:
    """Do positional heads select through short wavelengths, semantic ones through long?

    Spearman's rank correlation of positional_fraction with mean_wavelength over the heads
    that are neither diffuse nor sinks, and its 95 % interval by the percentile bootstrap
    over heads (scipy.stats.bootstrap). A negative one is no evidence by itself: a plane much
    slower than the context counts as content in any model. NaN where fewer than 4 heads
    remain or all are alike.
    """
    chosen = heads[~heads["label"].isin(["diffuse", "sink"])]
    chosen = chosen[["positional_fraction", "mean_wavelength"]].dropna()
    unknown = {"rank_correlation": np.nan, "low": np.nan, "high": np.nan, "heads": len(chosen)}
    if len(chosen) < 4 or (chosen.nunique() < 2).any():
        return unknown

    def correlation(x: np.ndarray, y: np.ndarray, axis: int = -1) -> np.ndarray:
        ranks = [stats.rankdata(values, axis=axis) for values in (x, y)]
        centred = [r - r.mean(axis=axis, keepdims=True) for r in ranks]
        spread = np.sqrt(np.prod([(c**2).sum(axis=axis) for c in centred], axis=0))
        product = (centred[0] * centred[1]).sum(axis=axis)
        return np.divide(product, spread, out=np.zeros_like(product), where=spread > 0)

    pairs = (chosen["positional_fraction"].to_numpy(), chosen["mean_wavelength"].to_numpy())
    interval = stats.bootstrap(
        pairs,
        correlation,
        paired=True,
        n_resamples=resamples,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return {
        "rank_correlation": float(correlation(*pairs)),
        "low": float(interval.low),
        "high": float(interval.high),
        "heads": len(chosen),
    }


def _peaks(
    profile: xr.Dataset,
) -> tuple[Int[np.ndarray, "layer head"], Float[np.ndarray, "layer head"]]:
    """Offset (tokens) at which each head's kernel peaks, and the kernel's weight there."""
    kernel = profile["kernel"].where(profile["offset_share"] >= SEEN_BY, 0.0)
    kernel = kernel.fillna(0.0).transpose("layer", "head", "offset_bin")
    peak = kernel.argmax("offset_bin").values
    return profile["offset_start"].values[peak], kernel.max("offset_bin").values


def _confidence(
    profile: xr.Dataset,
    labels: np.ndarray,
    thresholds: Thresholds,
    *,
    resamples: int,
    seed: int,
) -> Float[np.ndarray, "layer head"]:
    """Share of bootstrap resamples of the groups of sequences that repeat each label."""
    if profile.sizes["group"] < 2:
        return np.full(labels.shape, np.nan)
    resampled = resample_labels(profile, thresholds, resamples=resamples, seed=seed)
    return (resampled == labels).mean(axis=0)


def resample_labels(
    profile: xr.Dataset, thresholds: Thresholds, *, resamples: int, seed: int
) -> np.ndarray:
    """Labels [resample, layer, head] with the groups of sequences drawn again (bootstrap).

    The same seed draws the same groups of every profile that has as many.
    """
    rows = profile["group_rows"].values
    draws = np.random.default_rng(seed).multinomial(
        len(rows), np.full(len(rows), 1 / len(rows)), size=resamples
    )
    weight = draws * rows
    weight = weight / weight.sum(axis=1, keepdims=True)
    names = ("total_bits", "sink_bits", "position_gain", "content_gain")
    means = [
        np.einsum("rg,glh->rlh", weight, profile[f"group_{name}"].values) for name in names
    ]
    sink, position, content = split_bits(*means)
    return label_heads(
        thresholds, total=means[0], sink=sink, position=position, content=content
    )
