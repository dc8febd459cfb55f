"""What a profile says, in sentences with numbers."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import xarray as xr

from ropelens.figures.numbers import number
from ropelens.figures.style import LABELS

DOUBT = 0.8
"""A label less sure than this may well change with other text."""


def label_counts(heads: pd.DataFrame) -> dict[str, int]:
    """How many heads carry each label, in the order of `LABELS`, absent ones included."""
    return {label: int((heads["label"] == label).sum()) for label in LABELS}


def headline(heads: pd.DataFrame) -> str:
    """How many heads do what: "Of 40 heads, 12 are positional, 9 semantic and 3 sink."."""
    counts = [(count, label) for label, count in label_counts(heads).items() if count]
    counts.sort(key=lambda pair: -pair[0])
    (first, label), rest = counts[0], [f"{count} {label}" for count, label in counts[1:]]
    verb = "is" if first == 1 else "are"
    whole = _join([f"{first} {verb} {label}", *rest])
    return f"Of {plural(len(heads), 'head')}, {whole}."


def where_positional(heads: pd.DataFrame) -> str:
    """Where the positional heads sit and how far back they look; "" where there are none."""
    kept = heads[heads["label"] == "positional"]
    if not len(kept):
        return ""
    layers = sorted({int(layer) for layer in kept["layer"]})
    where = f"layer {layers[0]}" if len(layers) == 1 else f"layers {_ranges(layers)}"
    offsets = kept["offset"].dropna().astype(int).value_counts().sort_index()
    if not len(offsets):
        return f"Positional heads sit in {where}."
    common = offsets.sort_values(ascending=False, kind="stable").head(4).sort_index()
    looks = _join([f"{offset} ({plural(count, 'head')})" for offset, count in common.items()])
    most = " most often" if len(common) < len(offsets) else ""
    return f"Positional heads sit in {where}; the offsets they look back to are{most} {looks}."


def claim_sentence(claim: dict | None) -> str:
    """Whether positional heads use short wavelengths here, and how sure that is.

    "" where nobody asked: a table of heads read from a file carries no claim.
    """
    if not claim:
        return ""
    if not math.isfinite(claim["rank_correlation"]):
        return (
            "Whether positional heads use short wavelengths cannot be said here: too few heads "
            "are neither sink nor diffuse."
        )
    numbers = (
        f"rank correlation of positional fraction with mean wavelength "
        f"{number(claim['rank_correlation'])}, 95% interval {number(claim['low'])} to "
        f"{number(claim['high'])}, {plural(claim['heads'], 'head')}"
    )
    if claim["high"] < 0:
        verdict = "Positional heads use short wavelengths, semantic ones long"
    elif claim["low"] > 0:
        verdict = "Against the paper's claim, positional heads use the longer wavelengths here"
    else:
        verdict = "Whether positional heads use short wavelengths is open here"
    return f"{verdict}: {numbers}."


def label_rules(thresholds: dict | None) -> str:
    """When a head carries which label, with the thresholds that were used, where known."""
    if not thresholds:
        return (
            "A head is positional where mostly the offset explains its choice of keys, "
            "semantic where mostly the tokens do, mixed between; sink where nearly all goes to "
            "the first token, diffuse where it hardly chooses."
        )
    return (
        "A head is positional where the offset explains at least "
        f"{thresholds['positional']:.0%} of its position and content bits, semantic where at "
        f"most {thresholds['semantic']:.0%}, mixed between. Before that: sink where the first "
        f"token explains more than {thresholds['sink']:.0%} of all its bits, diffuse where it "
        f"has fewer than {thresholds['diffuse']:g} bits."
    )


def interval_method() -> str:
    """How the claim's interval was made."""
    return "Spearman's rank correlation; 95% interval by percentile bootstrap over heads."


def cautions(profile: xr.Dataset, heads: pd.DataFrame) -> list[str]:
    """What a reader should mind: the run's warnings, and what the numbers cannot bear.

    The profile's attribute "warnings", where it has one, holds a warning a line.
    """
    stated = str(profile.attrs.get("warnings", "")).splitlines()
    found = [line.strip() for line in stated if line.strip()]
    if heads["confidence"].isna().all():
        found.append(
            "No confidence: labels were not resampled, so nothing says how firm they are."
        )
    doubtful = int((heads["confidence"] < DOUBT).sum())
    if doubtful:
        have = "has" if doubtful == 1 else "have"
        found.append(
            f"{plural(doubtful, 'head')} of {len(heads)} {have} a label with confidence below "
            f"{DOUBT:g}: it may change with other text."
        )
    return found


def slow_planes(profile: xr.Dataset) -> str:
    """How many planes never turn within the context, as a sentence; "" where none."""
    context = int(profile.attrs.get("context", 0))
    wavelength = profile["wavelength"].values[0]
    slow = int((wavelength > context).sum())
    if not context or not slow:
        return ""
    whole = int((~pd.isna(wavelength)).sum())
    alike = np.allclose(profile["wavelength"], wavelength, rtol=1e-3, equal_nan=True)
    where = "In every layer" if alike else "In layer 0"
    return (
        f"{where}, {slow} of {plural(whole, 'plane')} {'is' if slow == 1 else 'are'} longer "
        f"than the context of {context:,} tokens and never turn once within it."
    )


def map_summary(profile: xr.Dataset, heads: pd.DataFrame) -> str:
    """The head map in words, for those who cannot see it."""
    layers = []
    for layer in range(profile.sizes["layer"]):
        counts = label_counts(heads[heads["layer"] == layer])
        named = [f"{count} {label}" for label, count in counts.items() if count]
        layers.append(f"layer {layer}: {', '.join(named)}")
    return (
        f"Map of {profile.sizes['layer']} layers by {profile.sizes['head']} heads; "
        + "; ".join(layers)
    )


def first_head(heads: pd.DataFrame) -> tuple[int, int]:
    """The head to open the page with: the one with most position bits."""
    row = heads.iloc[int(heads["position_bits"].fillna(-1).to_numpy().argmax())]
    return int(row["layer"]), int(row["head"])


def plural(count: int, noun: str) -> str:
    """ "1 head", "2 heads", "1,024 heads"."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def _join(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] as "0–2 and 5"."""
    runs: list[list[int]] = []
    for one in numbers:
        if runs and one == runs[-1][-1] + 1:
            runs[-1].append(one)
        else:
            runs.append([one])
    return _join([f"{run[0]}" if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs])
