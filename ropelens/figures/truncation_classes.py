"""Figure of the effect of stopping planes, by class of token."""

import pandas as pd
import plotly.graph_objects as go

from ropelens.figures import style
from ropelens.figures.sweep_traces import END_LOOKS, changes_of
from ropelens.interventions.truncation_table import QUARTER

AXIS_TITLES = {  # by column of the table of classes
    "loss_change": "change of loss<br>(nats/token)",
    "bits": "change of<br>attention (bits)",
    "labels_changed": "heads with a new<br>label (count)",
    "labels_differ": "heads with another<br>label (count)",
}


def classes_figure(table: pd.DataFrame, ends: list[str]) -> go.Figure:
    """Panels per measure, with a mark per class and end; a quarter of the planes stops."""
    measures = _measures(table)
    figure = style.stacked(
        "Effect of stopping planes, by class of token",
        len(measures),
        height=120 + 110 * len(measures),
        spacing=0.08,
    )
    for row, measure in enumerate(measures, start=1):
        for end in ends:
            _add_end(figure, table[table["kind"] == end], end, measure, row=row)
        figure.update_yaxes(
            title_text=AXIS_TITLES[measure], zeroline=True, nticks=5, row=row
        )
    style.set_x_title(figure, "class of token (name)")
    return figure.update_layout(scattermode="group", margin_t=80)


def _measures(table: pd.DataFrame) -> list[str]:
    """The columns to draw. Certain changes of labels are drawn if they are known."""
    measures = [measure for measure in AXIS_TITLES if measure in table]
    if "labels_changed" in table:
        is_known = bool(table["labels_changed"].notna().any())
        measures.remove("labels_differ" if is_known else "labels_changed")
    return measures


def _add_end(
    figure: go.Figure, table: pd.DataFrame, end: str, measure: str, *, row: int
) -> None:
    """Draw a mark for each class at the step of an end that is nearest to a quarter."""
    look = END_LOOKS[end]
    kept = min(table["kept"], key=lambda share: abs(share - QUARTER))
    classes = table[table["kept"] == kept]
    changes = changes_of(classes, measure)
    which = look.name.split()[0]  # "slowest" or "fastest"
    figure.add_scatter(
        x=classes["token_class"],
        y=changes.values,
        error_y=changes.bars,
        text=changes.hovers,
        hovertemplate=style.TEXT_ONLY,
        mode="markers",
        marker={"color": look.color, "symbol": look.symbol, "size": 9},
        name=f"{which} {100 * (1 - kept):.3g}% of planes stopped",
        legendgroup=end,
        showlegend=row == 1,
        cliponaxis=False,
        row=row,
        col=1,
    )
