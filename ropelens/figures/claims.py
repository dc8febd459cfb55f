"""The ledger of claims: each number beside its null, and verdicts of several models."""

from __future__ import annotations

from textwrap import wrap

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from ropelens.figures import style
from ropelens.figures.text import number, plotly_text
from ropelens.measure.claims import VERDICTS

COLORS = dict(zip(VERDICTS, ("#2a8fe0", "#d9700f", style.MUTED, "#b5b5b0"), strict=True))
GLYPHS = dict(zip(VERDICTS, ("✓", "✕", "○", "–"), strict=True))
SYMBOLS = dict(zip(VERDICTS, ("diamond", "x", "circle-open", "line-ew-open"), strict=True))
ROW, AROUND = 32, 130  # pixels of a claim, and of axis, legend and title
WIDE = 40  # letters of a line of a statement


def sorted_claims(table: pd.DataFrame) -> pd.DataFrame:
    """What holds first, then what is contradicted, unresolved and not testable."""
    order = table["verdict"].map(VERDICTS.index)
    return table.iloc[np.argsort(order, kind="stable")]


def plot_claims(table: pd.DataFrame) -> go.Figure:
    """A row a claim of one model: its null in grey, its number, its 95 % interval.

    Each row has a scale of its own, from the least to the largest of these, with the claimed
    side on the right. Claims without a number have an empty row.
    """
    table = sorted_claims(table)
    ends = ["number", "low", "high", "null_low", "null_median", "null_high"]
    values = table[ends].to_numpy(float) * table[["side"]].to_numpy(float)
    known = np.isfinite(values)
    least = np.where(known, values, np.inf).min(1, keepdims=True)
    width = np.where(known, values, -np.inf).max(1, keepdims=True) - least
    with np.errstate(invalid="ignore"):
        at = pd.DataFrame(np.where(width > 0, (values - least) / width, np.nan), columns=ends)
    rows = np.arange(len(table))
    figure = style.new_figure("Claims, each beside its null", height=ROW * len(table) + AROUND)
    for name, (low, high), look in (
        ("95% of the null", ("null_low", "null_high"), {"width": 14, "color": style.SHADE}),
        ("95% interval", ("low", "high"), {"width": 2, "color": style.MUTED}),
    ):
        x = np.column_stack([at[low], at[high], np.full(len(at), np.nan)]).ravel()
        figure.add_scatter(
            x=x, y=np.repeat(rows, 3), mode="lines", line=look, name=name, hoverinfo="skip"
        )
    verdicts = table["verdict"].to_numpy()
    for verdict in VERDICTS:
        of = verdicts == verdict
        if of.any():
            figure.add_scatter(
                x=at["number"][of].fillna(0),
                y=rows[of],
                mode="markers",
                marker={"color": COLORS[verdict], "symbol": SYMBOLS[verdict], "size": 12},
                name=f"{GLYPHS[verdict]} {verdict}",
                text=[_hover(row) for row in table[of].to_dict("records")],
                hovertemplate=style.TEXT_ONLY,
                cliponaxis=False,
            )
    _claim_axis(figure, table["statement"])
    ticks = {"tickvals": [0, 1], "ticktext": ["against", "as claimed"]}
    return figure.update_xaxes(range=[-0.05, 1.05], **ticks)


def plot_replication(table: pd.DataFrame) -> go.Figure:
    """Claims by models: the verdict's sign and colour, numbers on hover.

    `table` has the ledgers of all models, told apart by the column `model`.
    """
    grid = table.pivot(index="claim", columns="model", values="verdict")
    claims, models = table["claim"].unique(), table["model"].unique()
    grid = grid.loc[claims, models].fillna(VERDICTS[-1])
    rows = table.set_index(["claim", "model"]).to_dict("index")
    hovers = [[_hover(rows[claim, model]) for model in models] for claim in claims]
    steps = [end / len(VERDICTS) for n in range(len(VERDICTS)) for end in (n, n + 1)]
    colors = [style.faded(COLORS[verdict], 0.45) for verdict in VERDICTS for _ in "ab"]
    height = ROW * len(claims) + AROUND
    figure = style.new_figure("Which claims hold in which model", height=height)
    figure.add_heatmap(
        z=grid.map(VERDICTS.index).to_numpy(float),
        x=[plotly_text(model) for model in models],
        y=np.arange(len(claims)),
        zmin=-0.5,
        zmax=len(VERDICTS) - 0.5,
        colorscale=list(zip(steps, colors, strict=True)),
        showscale=False,
        text=[[GLYPHS[verdict] for verdict in row] for row in grid.to_numpy()],
        texttemplate="%{text}",
        customdata=hovers,
        hovertemplate="%{customdata}<extra></extra>",
        xgap=2,
        ygap=2,
    )
    style.add_squares(figure, {f"{GLYPHS[v]} {v}": COLORS[v] for v in VERDICTS})
    _claim_axis(figure, table.drop_duplicates("claim")["statement"])
    return figure


def _claim_axis(figure: go.Figure, statements: pd.Series) -> None:
    """Rows of claims, the first on top, each named by its statement."""
    words = ["<br>".join(map(plotly_text, wrap(statement, WIDE))) for statement in statements]
    ticks = {"tickvals": list(range(len(words))), "ticktext": words, "showgrid": False}
    figure.update_yaxes(range=[len(words) - 0.5, -0.5], **ticks)


def _hover(row: dict) -> str:
    null = f"{number(row['null_low'], '.3g')} to {number(row['null_high'], '.3g')}"
    return (
        f"<b>{plotly_text(row['statement'])}</b> {row['verdict']}<br>"
        f"{plotly_text(row['what'])}: {number(row['number'], '.3g')}<br>"
        f"null: {null}, median {number(row['null_median'], '.3g')} ({row['null_draws']} draws)"
    )
