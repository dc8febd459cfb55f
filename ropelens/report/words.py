"""What a profile says, in sentences with numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from ropelens.figures.style import LABELS
from ropelens.report.sentences import say
from ropelens.statistics.intervals import ENOUGH_DOCUMENTS

DOUBT = 0.8
"""A label less sure than this may well change with other text."""

MOST_OFFSETS = 4
"""Of the offsets that positional heads look back to, so many are told."""


def label_counts(heads: pd.DataFrame) -> dict[str, int]:
    """How many heads carry each label, in the order of `LABELS`, absent ones included."""
    return {label: int((heads["label"] == label).sum()) for label in LABELS}


def describe_heads(heads: pd.DataFrame) -> list[str]:
    """What a table of heads says, in sentences; the first has the labels and the verdict."""
    claim = heads.attrs.get("claim")
    first = f"{headline(heads)} {claim_sentence(claim)}".strip()
    return [first, *filter(None, (where_positional(heads), through_wavelengths(heads)))]


def headline(heads: pd.DataFrame) -> str:
    """How many heads do what: "Of 40 heads, 12 are positional, 9 semantic and 3 sink."."""
    counts = sorted(_present(heads), key=lambda pair: -pair[1])
    return say("profile", "headline", heads=len(heads), counts=counts)


def where_positional(heads: pd.DataFrame) -> str:
    """Where the positional heads sit and how far back they look; "" where there are none."""
    kept = heads[heads["label"] == "positional"]
    if not len(kept):
        return ""
    offsets = kept["offset"].dropna().astype(int).value_counts().sort_index()
    common = offsets.sort_values(ascending=False, kind="stable").head(MOST_OFFSETS)
    return say(
        "profile",
        "where_positional",
        layers=sorted({int(layer) for layer in kept["layer"]}),
        offsets=list(common.sort_index().items()),
        all=len(common) == len(offsets),
        bands=int(kept["offset"].isna().sum()),
    )


def through_wavelengths(heads: pd.DataFrame) -> str:
    """The strongest planes of positional and of semantic heads; "" without either."""
    found = []
    for label in ("positional", "semantic"):
        rows = heads[(heads["label"] == label) & heads["top_share"].notna()]
        if len(rows):
            top = rows["top_wavelength"].astype(float)
            found.append(
                {
                    "label": label,
                    "heads": len(rows),
                    "low": _tokens(top.min()),
                    "median": _tokens(top.quantile(0.5, interpolation="lower")),
                    "high": _tokens(top.max()),
                    "share": float(rows["top_share"].median()),
                    "planes": int(rows["planes_to_half"].median()),
                }
            )
    return say("profile", "through_wavelengths", found=found) if found else ""


def _tokens(wavelength: np.floating | float) -> str:
    """A wavelength in words: three digits below 100, whole tokens from there on."""
    if not np.isfinite(wavelength):
        return "∞"
    return f"{wavelength:.3g}" if wavelength < 100 else f"{wavelength:,.0f}"


def describe_attention_on(profile: xr.Dataset) -> list[str]:
    """The head that attends most to each set of tokens that heads were searched by."""
    found = []
    for name in map(str, profile.data_vars):
        of, _, tokens = name.partition("_on_")
        if of != "attention" or f"even_on_{tokens}" not in profile:
            continue
        attention, even = (profile[key].values for key in (name, f"even_on_{tokens}"))
        layer, head = np.unravel_index(np.nanargmax(attention - even), attention.shape)
        found.append(
            say(
                "profile",
                "attention_on",
                tokens=profile[name].attrs["long_name"].removeprefix("mean attention on "),
                head=f"{layer}.{head}",
                attention=float(attention[layer, head]),
                even=float(even[layer, head]),
            )
        )
    return found


def claim_sentence(claim: dict | None) -> str:
    """Whether positional heads use short wavelengths here, and how sure that is.

    "" where nobody asked: a table of heads read from a file carries no claim.
    """
    return say("profile", "claim", **claim) if claim else ""


def scope(attrs: Mapping[Any, Any]) -> str:
    """That results on few documents speak of this text alone; "" where there are enough.

    `attrs` are those of the results; "" also where these do not tell, as of earlier versions.
    """
    documents = int(attrs.get("documents", ENOUGH_DOCUMENTS))
    return "" if documents >= ENOUGH_DOCUMENTS else say("profile", "scope", documents=documents)


def label_rules(thresholds: dict | None) -> str:
    """When a head carries which label, with the thresholds that were used, where known."""
    return say("profile", "label_rules", thresholds=thresholds)


def cautions(profile: xr.Dataset, heads: pd.DataFrame) -> list[str]:
    """What a reader should mind: the run's warnings, and what the numbers cannot bear.

    The profile's attribute "warnings", where it has one, holds a warning a line.
    """
    stated = str(profile.attrs.get("warnings", "")).splitlines()
    found = [line.strip() for line in stated if line.strip()]
    if heads["confidence"].isna().all():
        found.append(say("profile", "no_confidence"))
    named = heads["label"].isin(["positional", "semantic", "mixed"])
    limit = heads.attrs.get("thresholds", {}).get("faint", np.nan)
    if faint := int((named & (heads["total_bits"] < limit)).sum()):
        found.append(say("profile", "faint", count=faint, heads=int(named.sum()), limit=limit))
    if doubtful := int((heads["confidence"] < DOUBT).sum()):
        found.append(say("profile", "doubtful", count=doubtful, heads=len(heads), doubt=DOUBT))
    return found


def slow_planes(profile: xr.Dataset) -> str:
    """How many planes never turn within the context, as a sentence; "" where none."""
    context = int(profile.attrs.get("context", 0))
    wavelength = profile["wavelength"].values[0]
    slow = int((wavelength > context).sum())
    if not context or not slow:
        return ""
    planes = int((~pd.isna(wavelength)).sum())
    alike = np.allclose(profile["wavelength"], wavelength, rtol=1e-3, equal_nan=True)
    return say("profile", "slow_planes", slow=slow, planes=planes, context=context, alike=alike)


def map_summary(profile: xr.Dataset, heads: pd.DataFrame) -> str:
    """The head map in words, for those who cannot see it."""
    layers = range(profile.sizes["layer"])
    counts = [_present(heads[heads["layer"] == layer]) for layer in layers]
    return say("profile", "map_summary", layers=counts, heads=profile.sizes["head"])


def first_head(heads: pd.DataFrame) -> tuple[int, int]:
    """The head to open the page with: the one with most position bits."""
    row = heads.iloc[int(heads["position_bits"].fillna(-1).to_numpy().argmax())]
    return int(row["layer"]), int(row["head"])


def _present(heads: pd.DataFrame) -> list[tuple[str, int]]:
    """Labels that heads carry, with how many do."""
    return [(label, count) for label, count in label_counts(heads).items() if count]
