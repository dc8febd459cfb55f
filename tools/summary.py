"""Draw reports/summary.png: the verdicts on published claims, and one claim in numbers.

    python tools/summary.py

Reads only reports/claims/models/claims.csv. kaleido draws with the Chrome or Chromium that it
finds, or that BROWSER_PATH names.
"""

from pathlib import Path

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

REPORTS = Path(__file__).parents[1] / "reports"
MODELS = {  # in the order of ropelens.report.model_order
    "bundled-rope": "bundled<br>2.1M",
    "babyllama105": "babyllama<br>105",
    "stories260k": "stories<br>260k",
    "smollm2-135m": "SmolLM2<br>135M",
    "gemma3-270m": "Gemma 3<br>270M",
    "random": "random<br>weights",
}
VERDICTS = {  # colours of Okabe and Ito; the symbols also differ in shape
    "holds": ("#0072b2", "square"),
    "contradicted": ("#d55e00", "x"),
    "unresolved": ("#777777", "circle-open"),
    "not testable": ("#bbbbbb", "line-ew-open"),
}
WORST = ["contradicted", "unresolved", "holds", "not testable"]
TITLES = (
    "Verdicts on 24 published claims",
    "Positional heads use short<br>wavelengths: rank correlation ρ",
)


def summary(claims: pd.DataFrame) -> go.Figure:
    """Verdicts by claim and model; ρ of each model next to the 95 % range of its surrogates."""
    claims = claims[claims["model"].isin(MODELS)].replace({"model": MODELS})
    rank = claims["verdict"].map(
        WORST.index
    )  # a claim may have several kinds of layers
    claims = claims.loc[rank.sort_values(kind="stable").index]
    claims = claims.drop_duplicates(["model", "claim"])
    holding = (claims["verdict"] == "holds").groupby(claims["statement"]).sum()
    figure = make_subplots(
        cols=2, column_widths=[0.6, 0.4], horizontal_spacing=0.11, subplot_titles=TITLES
    )
    for verdict, (color, symbol) in VERDICTS.items():
        rows = claims[claims["verdict"] == verdict]
        marker = {
            "color": color,
            "symbol": symbol,
            "size": 12,
            "line": {"color": color, "width": 2},
        }
        figure.add_scatter(
            x=rows["model"],
            y=rows["statement"],
            name=verdict,
            mode="markers",
            marker=marker,
            row=1,
            col=1,
        )
    rows = claims[
        (claims["claim"] == "positional_fast") & (claims["verdict"] != "not testable")
    ]
    low = rows["null_low"]
    high = rows["null_high"]
    figure.add_bar(
        base=low,
        x=high - low,
        y=rows["model"],
        orientation="h",
        width=0.3,
        marker_color="#bbbbbb",
        name="ρ of 40 surrogates (95 %)",
        row=1,
        col=2,
    )
    figure.add_scatter(
        x=rows["number"],
        y=rows["model"],
        mode="markers",
        marker={"color": "#0072b2", "symbol": "diamond", "size": 15},
        name="ρ of the model",
        row=1,
        col=2,
    )
    figure.update_yaxes(
        categoryorder="array",
        categoryarray=holding.sort_values().index,
        dtick=1,
        col=1,
    )
    figure.update_yaxes(
        categoryorder="array", categoryarray=[*MODELS.values()][4::-1], col=2
    )
    figure.update_xaxes(
        categoryorder="array",
        categoryarray=[*MODELS.values()],
        side="top",
        tickangle=0,
        col=1,
    )
    figure.update_xaxes(range=[-1, 1], zeroline=True, zerolinecolor="#777777", col=2)
    figure.update_annotations(yshift=46)
    legend = {"orientation": "h", "y": -0.06, "x": -0.6}
    margin = {"l": 8, "r": 8, "t": 92, "b": 8}
    return figure.update_layout(
        template="simple_white", font_size=14, legend=legend, margin=margin
    )


def main() -> None:
    figure = summary(pd.read_csv(REPORTS / "claims/models/claims.csv"))
    figure.write_image(REPORTS / "summary.png", width=1400, height=720)


if __name__ == "__main__":
    main()
