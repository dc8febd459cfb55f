"""Which heads are positional, which semantic, how sure that is, and what follows from it."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pandas as pd
import xarray as xr
from jaxtyping import Float

from ropelens.attention.formulas import GAINS, attention_budget, describe_wavelengths
from ropelens.budget.labels import Thresholds, label_heads
from ropelens.claims.verdict import judge
from ropelens.errors import BadArgument, Count, Whole, public
from ropelens.profiles.measures import columns

FRACTIONS = ("positional_fraction", "content_fraction", "interaction_fraction")

APART = 2**0.5  # two samples of a text are so much farther apart than each is from the text

COLUMNS = (
    *("layer", "head", "label", "confidence"),
    *FRACTIONS,
    *columns("budget"),
    *("offset", "offset_low", "offset_high", "top_wavelength", "top_share"),
    *("offset_weight", "mean_wavelength"),
    *columns("score"),
    "planes_to_half",
)
"""The columns of heads.csv, before those of statistics that were asked for."""


@public
def classify_heads(
    profile: xr.Dataset, *, resamples: Count = 1000, seed: Whole = 0
) -> pd.DataFrame:
    """Label every head of a profile; the columns of heads.csv, a row per head.

    `confidence` estimates how often other sequences of the same text give the same label: the
    share of `resamples` bootstrap resamples of the groups of sequences (documents, where there
    are 8 or more) that do, their differences from the whole times the square root of 2. NaN
    with fewer than two groups, without resamples, or of heads that are "untested": see
    `Thresholds`.
    The three fractions are shares of the bits that sinks do not explain; NaN without any.
    `offset` is the peak of the fitted kernel, of positional heads where it has 0.3 of the
    kernel or more; `offset_low` to `offset_high` holds the middle half of it, of all positional
    heads. `top_wavelength` (tokens; infinite for a plane that stands still) is that of the
    plane with the most selectivity on keys that are no sinks, `top_share` its share, and
    `planes_to_half` the number of planes that hold half. `mean_wavelength` (tokens) is the
    geometric mean over planes that rotate, with the same weights.

    `attrs["thresholds"]` holds the thresholds; `attrs["claim"]` what `statistics.claim.judge`
    finds: do positional and semantic heads differ in wavelength more than in models whose
    frequencies are in a random order?
    """
    table = head_values(profile)
    table["confidence"] = np.full(table["label"].shape, np.nan)
    if profile.sizes["group"] > 1 and resamples:
        resampled = resample_labels(profile, resamples=resamples, seed=int(seed), spread=APART)
        known = table["label"] != "untested"
        table["confidence"] = np.where(known, (resampled == table["label"]).mean(0), np.nan)
    given = [str(name) for name in profile.data_vars if "column" in profile[name].attrs]
    table |= {name: profile[name].values for name in (*columns("score"), *given)}
    heads = pd.DataFrame({name: table[name].ravel() for name in (*COLUMNS, *given)})
    heads = heads[heads["total_bits"].notna()].reset_index(drop=True)
    whole = ("offset", "offset_low", "offset_high", "planes_to_half")
    heads = heads.astype(dict.fromkeys(whole, "Int64"))
    heads.attrs["thresholds"] = asdict(Thresholds())
    claim = judge(*claim_numbers(profile))
    if (heads["label"] == "untested").any():
        why = f"labels take {Thresholds.rows} scored rows, more than this text has"
        claim |= {"verdict": "not testable", "why": why}
    heads.attrs["claim"] = claim
    return heads


def claim_numbers(
    profile: xr.Dataset,
) -> tuple[Float[np.ndarray, "draw layer head"], Float[np.ndarray, "draw layer head"]]:
    """Offset fractions and mean log wavelengths of the heads, of the model and surrogates."""
    fraction, wavelength = "surrogate_offset_fraction", "surrogate_log_wavelength"
    return profile[fraction].values, profile[wavelength].values


def head_values(profile: xr.Dataset) -> dict[str, np.ndarray]:
    """The columns of heads.csv that follow from a profile, each [layer, head]."""
    require_budget(profile)
    columns_of_bits = {name: profile[name].values for name in columns("budget")}
    bits = {name.removesuffix("_bits"): x for name, x in columns_of_bits.items()}
    parts = np.stack([bits[name] for name in ("position", "content", "interaction")])
    rest = np.broadcast_to(bits["total"] - bits["sink"], parts.shape)
    shares = np.divide(parts, rest, out=np.full_like(parts, np.nan), where=rest > 0)
    label = label_heads(bits, rows=float(profile["group_scored"].sum()))
    by_head = "head_wavelength" if "head_wavelength" in profile else "wavelength"
    push, wavelength = xr.broadcast(profile["selectivity_keys"], profile[by_head])
    positional = label == "positional"
    named = positional & (profile["offset_weight"].values >= Thresholds.offset)
    layer, head = (np.asarray(index) for index in np.indices(label.shape))

    def only(where: np.ndarray, name: str) -> np.ndarray:
        return np.where(where, profile[name].values, np.nan)

    return {
        "layer": layer,
        "head": head,
        "label": label,
        **dict(zip(FRACTIONS, shares, strict=True)),
        **columns_of_bits,
        "offset": only(named, "offset"),
        "offset_low": only(positional, "offset_low"),
        "offset_high": only(positional, "offset_high"),
        "offset_weight": only(positional, "offset_weight"),
        **describe_wavelengths(push.values, wavelength.transpose(*push.dims).values),
    }


def require_budget(profile: xr.Dataset) -> None:
    """Raise `BadArgument` for a profile without attention budget."""
    if "total_bits" not in profile:
        raise BadArgument(
            "This profile has no attention budget, which labels and claims are made of.",
            hint="rl.profile(model, tokens), without budget=False",
        )


def resample_labels(
    profile: xr.Dataset, *, resamples: int, seed: int, spread: float = 1.0
) -> np.ndarray:
    """Labels [resample, layer, head] with the groups of sequences drawn again (bootstrap).

    The same seed draws the same groups of every profile that has as many. `spread` multiplies
    how far resamples are from the whole.
    """
    rows = profile["group_scored"].values
    draws = np.random.default_rng(seed % 2**64).multinomial(
        len(rows), np.full(len(rows), 1 / len(rows)), size=resamples
    )
    weight, whole = draws * rows, rows / rows.sum()
    weight = whole + spread * (weight / weight.sum(axis=1, keepdims=True) - whole)
    gains = (profile[f"group_{name}"].values for name in GAINS)
    bits = attention_budget(*(np.einsum("rg,glh->rlh", weight, gain) for gain in gains))
    return label_heads(bits, rows=float(rows.sum()))
