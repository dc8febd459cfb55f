"""Figure of the cost of stopping planes, from either end, by bands, or by class of token."""

from collections.abc import Sequence
from typing import Literal

import pandas as pd
import plotly.graph_objects as go
import xarray as xr

from ropelens.arguments import public
from ropelens.errors import BadArgument
from ropelens.figures.sweep_traces import END_LOOKS
from ropelens.figures.truncation_bands import bands_figure
from ropelens.figures.truncation_classes import classes_figure
from ropelens.figures.truncation_ends import ends_figure
from ropelens.interventions.changes import class_changes
from ropelens.interventions.truncation_table import summarize_truncation, sweeps_by_kind

MeasureName = Literal[
    "loss", "far_loss", "copy_loss", "repeat_loss", "retrieval", "induction", "labels"
]


def summary_column(measure: MeasureName, table: pd.DataFrame) -> str:
    """The column of the table that shows the change of a measure.

    Results of earlier versions do not know how certain a new label is, so their figures show
    all labels that differ.
    """
    if measure != "labels":
        return f"{measure}_change"
    if table["labels_changed_share"].isna().all():
        return "labels_differ_share"
    return "labels_changed_share"


@public
def plot_truncation(
    truncation: xr.Dataset,
    *,
    by: Literal["share", "band", "class"] = "share",
    measures: Sequence[MeasureName] = ("loss",),
    layers: str | None = None,
    table: pd.DataFrame | None = None,
) -> go.Figure:
    """Effect of stopping planes, by the share that still rotates, by band, or by token class.

    - "share": change of each of `measures` from the unmodified model, with the 95 % interval of
      the paired difference. Grey crosses are draws of equally many random planes, and the
      dashed line is their mean. The dotted line is the plane whose wavelength is the trained
      context. Source: p-RoPE in both directions, Barbero et al. 2024 (arXiv 2410.06205).
    - "band": change of the first of `measures` if one band of wavelengths stops.
    - "class": change of loss, attention and labels of each class of tokens, with the share of
      planes stopped that is nearest to a quarter.

    `layers` names the kind of layers if the sweep has several; the default is the first kind.
    `table` is `summarize_truncation(truncation)`, if you already have it.
    """
    if "kept" not in truncation.coords:
        raise _cannot_draw("has no steps")
    if table is None:
        table = summarize_truncation(truncation)
    sweeps = sweeps_by_kind(truncation)
    if layers not in (None, *sweeps):
        raise _cannot_draw(f"has no layers {layers!r}, only {', '.join(sweeps)}")
    sweep = sweeps[layers or next(iter(sweeps))]
    table = table[table["edit"].isin(sweep["edit"].values)]
    kinds = set(table["kind"])
    ends = [end for end in END_LOOKS if end in kinds]
    if by == "class":
        classes = class_changes(sweep)
        if classes.empty:
            raise _cannot_draw("did not measure classes of tokens")
        _require_ends(ends)
        return classes_figure(classes, ends)
    columns = _measured_columns(table, measures)
    if by == "share":
        _require_ends(ends)
        return ends_figure(sweep, table, ends, columns)
    if "band" not in kinds:
        raise _cannot_draw("stopped no bands")
    return bands_figure(sweep, table, columns[0])


def _measured_columns(
    table: pd.DataFrame, measures: Sequence[MeasureName]
) -> list[str]:
    """Columns of the table that hold the changes of `measures`."""
    columns = []
    for measure in measures:
        column = summary_column(measure, table)
        if table[column].isna().all():
            raise _cannot_draw(f"did not measure {measure}")
        columns.append(column)
    if not columns:
        raise _cannot_draw("has no measures to draw")
    return columns


def _require_ends(ends: Sequence[str]) -> None:
    if not ends:
        raise _cannot_draw("stopped no planes from an end")


def _cannot_draw(why: str) -> BadArgument:
    hint = "truncate(model, text, ends=..., bands=..., measures=..., tokenizer=...)"
    return BadArgument(f"The sweep {why}.", hint=hint)
