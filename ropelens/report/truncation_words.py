"""What a truncation sweep says, in sentences with numbers."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import xarray as xr

from ropelens.figures.label_selectivity import selectivity_shares
from ropelens.figures.numbers import change_and_interval, short_count, signed
from ropelens.figures.plane_marks import marks, plane_index, turning_wavelengths
from ropelens.measure.truncation_table import summarize_truncation
from ropelens.report.table import CHANCE

FREE = 0.01
"""Nats/token: a cut whose interval ends below this is called free."""

QUARTER = 0.75
OF_END = {"slow": "slowest", "fast": "fastest"}
CONTROL = {"slow": "random", "fast": "random", "band": "band control"}
"""The kind of the random sets that stand beside an entry."""

FEW = 5
"""Bands of which a rank correlation says nothing."""


def describe_truncation(truncation: xr.Dataset) -> list[str]:
    """What `ropelens.truncate` found, in sentences, the most important first.

    The cost of a quarter of the planes from either end, beside as many random ones; the
    slowest planes that may stop for less than 0.01 nats/token; where among the planes the
    trained context and the predicted band lie; the dearest band, and whether heads select
    through the dear ones; heads with a new label; retrieval. What was not measured is left
    out. Raises `BadArgument` for a dataset that is no sweep.
    """
    return tell_table(summarize_truncation(truncation), truncation)


def tell_table(table: pd.DataFrame, truncation: xr.Dataset) -> list[str]:
    """`describe_truncation`, from the table that `summarize_truncation` made."""
    said = (
        _quarters(table),
        _free(table),
        _places(truncation),
        _bands(table, truncation),
        _labels(table),
        _retrieval(table),
    )
    return [sentence for sentence in said if sentence]


def control_change(table: pd.DataFrame, row: pd.Series) -> float:
    """The mean loss change of the random sets that stand beside an entry; NaN without."""
    control = table[table["kind"] == CONTROL[row["kind"]]]
    same = "band" if row["kind"] == "band" else "kept"
    return float(control.loc[control[same] == row[same], "loss_change"].mean())


def span(row: pd.Series) -> str:
    """The wavelengths that stop: "63 to 199", or one."""
    low, high = short_count(row["wavelength_low"]), short_count(row["wavelength_high"])
    return low if low == high else f"{low} to {high}"


def _of_quarter(table: pd.DataFrame, end: str, measured: str) -> pd.Series | None:
    """The entry that stops the quarter of planes at an end, or the nearest share to it."""
    rows = table[(table["kind"] == end) & table[measured].notna()]
    return rows.iloc[int((rows["kept"] - QUARTER).abs().argmin())] if len(rows) else None


def _stopped(row: pd.Series) -> str:
    """The share of the planes that stop: "25%"."""
    return f"{100 * (1 - row['kept']):.3g}%"


def _quarters(table: pd.DataFrame) -> str:
    """What a quarter of the planes costs, from both ends."""
    parts, random = [], ""
    for end, name in OF_END.items():
        row = _of_quarter(table, end, "loss_change")
        if row is None:
            continue
        parts.append(
            f"the {name} {_stopped(row)} of the planes (wavelengths {span(row)} tokens) "
            f"changes the loss by {_change(row)}"
        )
        control = control_change(table, row)
        if math.isfinite(control):
            random = f"; as many random planes by {signed(control)}, mean of the draws"
    return f"Stopping {'; stopping '.join(parts)}{random}." if parts else ""


def _change(row: pd.Series) -> str:
    low, high = row["loss_change_low"], row["loss_change_high"]
    change, ends = change_and_interval(row["loss_change"], low, high)
    known = f" (95% interval {ends})" if math.isfinite(low) else ""
    return f"{change} nats/token{known}"


def _free(table: pd.DataFrame) -> str:
    """How many of the slowest planes may stop for nothing."""
    rows = table[(table["kind"] == "slow") & table["loss_change_high"].notna()]
    rows = rows.sort_values("kept", ascending=False)
    if not len(rows):
        return ""
    free = rows[(rows["loss_change_high"] < FREE).cummin()]
    if not len(free):
        least = rows.iloc[0]
        return (
            f"Not even the slowest {_stopped(least)} of the planes may stop for "
            f"nothing: the interval ends at {signed(least['loss_change_high'])} nats/token."
        )
    last = free.iloc[-1]
    return (
        f"The slowest planes may stop for nothing (the interval ends below {FREE} nats/token) "
        f"until {100 * last['kept']:.3g}% still rotate: wavelengths of "
        f"{short_count(last['wavelength_low'])} tokens and more."
    )


def _places(truncation: xr.Dataset) -> str:
    """Where the trained context and the predicted band lie among the planes."""
    _, wavelength = turning_wavelengths(truncation)
    words = {
        "context": "a wavelength of the trained context ({length:,.0f} tokens) falls at "
        "{at:.1f}",
        "band": "the predicted high-norm band ({length:,.0f} tokens, Oka et al. 2026) "
        "at {at:.1f}",
    }
    found = [(mark, plane_index(wavelength, mark.wavelength)) for mark in marks(truncation)]
    parts = [
        words[mark.name].format(length=mark.wavelength, at=at)
        for mark, at in found
        if at is not None
    ]
    if not parts:
        return ""
    return (
        f"Where planes are numbered from 0, the fastest, to {len(wavelength) - 1}, "
        f"{' and '.join(parts)}."
    )


def _bands(table: pd.DataFrame, truncation: xr.Dataset) -> str:
    """The dearest band, beside random planes, and whether selectivity tells the dear ones."""
    bands = table[(table["kind"] == "band") & table["loss_change"].notna()]
    if not len(bands):
        return ""
    row = bands.iloc[int(bands["loss_change"].argmax())]
    control = control_change(table, row)
    beside = f"; as many random planes: {signed(control)}" if math.isfinite(control) else ""
    return (
        f"Of {len(bands)} bands, the dearest is that of wavelengths {span(row)} tokens: "
        f"{signed(row['loss_change'])} nats/token{beside}.{_together(bands, truncation)}"
    )


def _together(bands: pd.DataFrame, truncation: xr.Dataset) -> str:
    """The rank correlation of what bands cost with what heads select through them."""
    if "selectivity" not in truncation or len(bands) <= FEW:
        return ""
    share = selectivity_shares(truncation)
    wavelength = truncation["wavelength"].transpose("layer", "frequency").values[:, None]
    within = [
        np.nanmean(np.nansum(share * ((wavelength >= low) & (wavelength <= high)), axis=-1))
        for low, high in zip(bands["wavelength_low"], bands["wavelength_high"], strict=True)
    ]
    found = bands["loss_change"].corr(pd.Series(within, bands.index), method="spearman")
    if not math.isfinite(found):
        return ""
    told = f"{found:+.2f}".replace("-", "−")
    return (
        f" Rank correlation over the {len(bands)} bands of the cost with the share of the "
        f"selectivity: {told}."
    )


def _labels(table: pd.DataFrame) -> str:
    """Heads that are called something else, with a quarter of the planes stopped."""
    parts = []
    for end, name in OF_END.items():
        row = _of_quarter(table, end, "labels_changed")
        if row is None:
            continue
        low, high = row["labels_changed_low"], row["labels_changed_high"]
        spread = f"; 95% interval {low:.0f} to {high:.0f}" if math.isfinite(low) else ""
        most, bits = row["changed_most"], row["largest_attention_change"]
        parts.append(
            f"{row['labels_changed']:.0f} ({row['labels_changed_share']:.0%}{spread}) with the "
            f"{name} {_stopped(row)} of the planes stopped"
            + (
                f" (attention moves most in {most}: {bits:.2g} bits)"
                if isinstance(most, str) and most
                else ""
            )
        )
    return f"Heads with a new label: {'; '.join(parts)}." if parts else ""


def _retrieval(table: pd.DataFrame) -> str:
    """How well the model retrieves as it is, without which changes mean little."""
    share = table["retrieval"].iloc[0]
    if not math.isfinite(share):
        return ""
    return f"As it is, the model retrieves {share:.1%} of the needles (chance: {CHANCE:.1%})."
