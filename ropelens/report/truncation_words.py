"""What a truncation sweep says, in sentences with numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from ropelens.figures.head_wavelengths import selectivity_shares
from ropelens.figures.text import short_count
from ropelens.figures.wavelengths import marks, plane_index, turning_wavelengths
from ropelens.measure.truncation_table import summarize_truncation
from ropelens.report.sentences import say
from ropelens.report.table import CHANCE

Record = dict[str, Any]
"""The numbers that a sentence tells."""

FREE = 0.01
"""Nats/token: a cut whose interval ends below this is called free."""

QUARTER = 0.75
OF_END = {"slow": "slowest", "fast": "fastest"}
CONTROL = {"slow": "random", "fast": "random", "band": "band control"}
"""The kind of the random sets that stand beside an entry."""

FEW = 5
"""Bands of which a rank correlation says nothing."""


def describe_truncation(
    truncation: xr.Dataset, *, table: pd.DataFrame | None = None
) -> list[str]:
    """What `ropelens.truncate` found, in sentences, the most important first.

    In one without intervals, which planes may stop for nothing and what the fastest cost;
    then, with them, the cost of a quarter of the planes from either end, beside as many
    random ones; the slowest planes that may stop for less than 0.01 nats/token; where among
    the planes the trained context and the predicted band lie; the dearest band, and whether
    heads select through the dear ones; heads with a new label; retrieval. What was not
    measured is left out. `table` is its `summarize_truncation`, if made already. Raises
    `BadArgument` for a dataset that is no sweep.
    """
    table = summarize_truncation(truncation) if table is None else table
    ends, free = _ends(table), _free(table)
    fast = [row for row in ends["rows"] if row["kind"] == "fast"] if ends else []
    records = {
        "short": {"free": free, "fast": fast[0]} if free and fast else None,
        "ends": ends,
        "free": free,
        "places": _places(truncation),
        "bands": _bands(table, truncation),
        "labels": _labels(table),
        "retrieval": _retrieval(table),
    }
    return [say("truncation", name, **record) for name, record in records.items() if record]


def control_change(table: pd.DataFrame, row: pd.Series) -> float:
    """The mean loss change of the random sets that stand beside an entry; NaN without."""
    control = table[table["kind"] == CONTROL[row["kind"]]]
    same = "band" if row["kind"] == "band" else "kept"
    return float(control.loc[control[same] == row[same], "loss_change"].mean())


def span(row: pd.Series) -> str:
    """The wavelengths that stop: "63 to 199", or one."""
    low, high = short_count(row["wavelength_low"]), short_count(row["wavelength_high"])
    return low if low == high else f"{low} to {high}"


def _record(row: pd.Series) -> Record:
    """A row of the summary with its end, its share and its wavelengths in words."""
    end = OF_END.get(row["kind"], "")
    return dict(row) | {"end": end, "stopped": 1 - row["kept"], "span": span(row)}


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _quarters(table: pd.DataFrame, measured: str) -> list[pd.Series]:
    """Of each end the entry that stops a quarter of the planes, or the nearest share to it."""
    ends = (table[(table["kind"] == end) & table[measured].notna()] for end in OF_END)
    return [
        rows.iloc[int((rows["kept"] - QUARTER).abs().argmin())] for rows in ends if len(rows)
    ]


def _ends(table: pd.DataFrame) -> Record | None:
    """What a quarter of the planes costs, from both ends."""
    rows = _quarters(table, "loss_change")
    if not rows:
        return None
    controls = [_known(control_change(table, row)) for row in rows]
    random = [control for control in controls if control is not None]
    return {"rows": [_record(row) for row in rows], "random": random[-1] if random else None}


def _free(table: pd.DataFrame) -> Record | None:
    """How many of the slowest planes may stop for nothing."""
    rows = table[(table["kind"] == "slow") & table["loss_change_high"].notna()]
    rows = rows.sort_values("kept", ascending=False)
    if not len(rows):
        return None
    free = rows[(rows["loss_change_high"] < FREE).cummin()]
    last = _record(free.iloc[-1]) if len(free) else None
    return {"last": last, "least": _record(rows.iloc[0]), "limit": FREE}


def _places(truncation: xr.Dataset) -> Record | None:
    """Where the trained context and the predicted band lie among the planes."""
    _, wavelength = turning_wavelengths(truncation)
    found = [
        (mark.name, mark.wavelength, plane_index(wavelength, mark.wavelength))
        for mark in marks(truncation)
    ]
    inside = [place for place in found if place[2] is not None]
    return {"slowest": len(wavelength) - 1, "marks": inside} if inside else None


def _bands(table: pd.DataFrame, truncation: xr.Dataset) -> Record | None:
    """The dearest band, beside random planes, and whether selectivity tells the dear ones."""
    bands = table[(table["kind"] == "band") & table["loss_change"].notna()]
    if not len(bands):
        return None
    row = bands.iloc[int(bands["loss_change"].argmax())]
    return {
        "count": len(bands),
        "dearest": _record(row),
        "random": _known(control_change(table, row)),
        "correlation": _known(_correlation(bands, truncation)),
    }


def _correlation(bands: pd.DataFrame, truncation: xr.Dataset) -> float:
    """The rank correlation of what bands cost with what heads select through them."""
    if "selectivity_keys" not in truncation or len(bands) <= FEW:
        return math.nan
    share = selectivity_shares(truncation)
    wavelength = truncation["wavelength"].transpose("layer", "frequency").values[:, None]
    within = [
        np.nanmean(np.nansum(share * ((wavelength >= low) & (wavelength <= high)), axis=-1))
        for low, high in zip(bands["wavelength_low"], bands["wavelength_high"], strict=True)
    ]
    return bands["loss_change"].corr(pd.Series(within, bands.index), method="spearman")


def _labels(table: pd.DataFrame) -> Record | None:
    """Heads that are called something else, with a quarter of the planes stopped."""
    rows = _quarters(table, "labels_changed")
    return {"rows": [_record(row) for row in rows]} if rows else None


def _retrieval(table: pd.DataFrame) -> Record | None:
    """How well the model retrieves as it is, without which changes mean little."""
    share = _known(table["retrieval"].iloc[0])
    return None if share is None else {"share": share, "chance": CHANCE}
