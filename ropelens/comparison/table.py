"""A comparison as a table: a row a variant, with its difference to the baseline."""

from __future__ import annotations

import numpy as np
import pandas as pd
import xarray as xr
from jaxtyping import Float

from ropelens.comparison.pairs import changes, entries_of, group_names
from ropelens.heads import LABELS
from ropelens.statistics.intervals import paired_interval

NORMAL = 1.96
"""Standard errors on either side of a mean that hold 95% of a normal distribution."""

LOOKS_AT = 0.5
"""Mean attention from which a head is said to look at the previous token, or to induce."""


def summarize_comparison(comparison: xr.Dataset) -> pd.DataFrame:
    """The table of a comparison that `compare` made: a row for each of its groups, in order.

    `loss` is the mean over the group's entries (seeds), in nats per token, and
    `loss_change` its difference to the baseline's, pairs of one size and seed; `low` and
    `high` bound it with 95% confidence, by Student's t: over seeds, where there are two or
    more pairs, or else over sequences (`over` says which, `pairs` how many seeds), and
    "apart", from the standard errors of both, where the losses of single sequences are not
    known. `worse` counts the pairs in which the variant loses. NaN where nothing can be
    said: the baseline's own, or models that read different text.

    `loss_past_context` is the loss of the tokens between the trained context and the
    longest position seen, `repeat_loss` that of random tokens when repeated, `retrieval` the
    share of keys whose value was found. `previous_token_heads` counts heads that give half
    their attention to the previous token, `previous_token_layer_0` those of the first
    layer; `induction` is the best head's score. Heads by label, and the median wavelength
    (tokens, of planes that turn) that positional and semantic heads select through, follow.
    All are means over the group's entries.
    """
    return pd.DataFrame([_row(comparison, group) for group in group_names(comparison)])


def _row(comparison: xr.Dataset, group: str) -> dict[str, object]:
    entries = entries_of(comparison, group)
    first = entries.isel(entry=0)
    return {
        "group": group,
        "variant": str(first["variant"].item()),
        "size": str(first["size"].item()),
        "entries": entries.sizes["entry"],
        "loss": float(entries["loss"].mean()),
        **_loss_change(comparison, group),
        **_behaviour(entries, context=int(comparison.attrs.get("context", 0))),
        **_heads(entries),
    }


def _loss_change(comparison: xr.Dataset, group: str) -> dict[str, object]:
    """The difference of the group's loss to the baseline's, with its interval."""
    change = changes(comparison, group, "loss").values
    over, (mean, low, high) = _interval(comparison, group, change)
    return {
        "loss_change": mean,
        "low": low,
        "high": high,
        "over": over,
        "pairs": len(change),
        "worse": int((change > 0).sum()),
    }


def _interval(
    comparison: xr.Dataset, group: str, change: Float[np.ndarray, " pair"]
) -> tuple[str, tuple[float, float, float]]:
    """What the interval is over, the mean change and its bounds."""
    if not len(change):
        return "", (np.nan, np.nan, np.nan)
    if len(change) > 1:
        return "seeds", paired_interval(change)
    if "sequence_loss" in comparison:
        return "sequences", paired_interval(
            changes(comparison, group, "sequence_loss").values[0]
        )
    # Two models on one text, the losses of whose sequences are not known: as if apart.
    this = int(np.flatnonzero(comparison["group"].values == group)[0])
    both = [this, int(comparison["partner"].values[this])]
    error = float(np.hypot(*comparison["loss_se"].values[both]))
    mean = float(change[0])
    return "apart", (mean, mean - NORMAL * error, mean + NORMAL * error)


def _behaviour(entries: xr.Dataset, *, context: int) -> dict[str, float]:
    """Loss past the trained context, on repeated tokens, and retrieval; runs only."""
    if "position_loss" not in entries:
        return {}
    past = entries["position_loss"].where(entries["position_start"] >= context, drop=True)
    tokens = past["position_stop"] - past["position_start"]
    return {
        "loss_past_context": float(past.mean("entry").weighted(tokens).mean()),
        "repeat_loss": float(entries["repeat_loss"].mean()),
        "retrieval": float(entries["retrieval"].mean()),
    }


def _heads(entries: xr.Dataset) -> dict[str, float]:
    """What the heads do, per entry."""
    count = entries.sizes["entry"]
    previous = entries["previous_token"] >= LOOKS_AT
    wavelengths = {
        f"{label}_wavelength": float(
            entries["mean_wavelength"].where(entries["label"] == label).median()
        )
        for label in ("positional", "semantic")
    }
    return {
        "previous_token_heads": float(previous.sum() / count),
        "previous_token_layer_0": float(previous.isel(layer=0).sum() / count),
        "induction": float(entries["induction"].max(("layer", "head")).mean()),
        **{label: float((entries["label"] == label).sum() / count) for label in LABELS},
        **wavelengths,
    }
