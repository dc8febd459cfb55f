"""Which planes may stop rotating at no cost, and which planes may not?

Source: Barbero et al. 2024, "Round and Round We Go!" (arXiv 2410.06205): a model
that is trained with the slowest planes stopped (p-RoPE) loses nothing. A model that is trained
with the fastest planes stopped loses much.

Method: planes of a trained model stop, from either end or a band of wavelengths at a time.
Random sets of the same size stop for comparison, on the same text. The text is as long as the
trained context, as far as memory and time allow: in a model that was made for 8,192 tokens,
planes that cost nothing in 256 tokens cost 0.3 nats/token at 4,000.

Expectation: planes slower than the high-norm band (Oka et al. 2026: at wavelength 2 pi
context / 3.657) cost nothing, the fastest cost nats/token. The more the heads select through
a band, the more it costs.

    python analyses/truncation.py [MODEL] [--text FILE]... [--context N]

Writes reports/truncation/<model>/. Takes about 10 minutes of CPU for the bundled checkpoint: 65
evaluations of the model, with attention in 64 rows of a sequence and a budget fitted to each.
"""

import pandas as pd
import plotly.graph_objects as go
import xarray as xr

import ropelens as rl
from ropelens.analysis.answer import Answer
from ropelens.commands.terminal import run_analysis
from ropelens.report import describe

ROWS = 64
SWEEP = {"bands": 8, "measures": ("loss", "induction", "change", "labels", "copying")}
OTHERS = {
    "far_loss": "loss near the end of the context",
    "copy_loss": "loss of the farthest possible copies",
    "repeat_loss": "loss of repeated random tokens",
    "labels": "number of heads with a new label",
}
"""Measures of a second figure. `labels` has the name `labels_changed` in tables."""


def answer(analysis: rl.Analysis) -> Answer:
    sweep = analysis.truncation
    figures = figures_of(sweep, analysis.truncation_table)
    question = "Which planes may stop rotating at no cost?"
    return Answer(question, describe(sweep), figures)


def figures_of(sweep: xr.Dataset, table: pd.DataFrame) -> dict[str, go.Figure]:
    """Figures of what was measured, by their captions."""
    caption = (
        "Planes stop step by step, the slowest first (left) or the fastest first (right), with "
        "95% intervals of the paired change. Grey: random planes."
    )
    figures = {caption: rl.plot_truncation(sweep, table=table)}
    if {"sliding", "full"} <= {*table["layers"]}:
        full = rl.plot_truncation(sweep, layers="full", table=table)
        figures["The same for planes of full layers."] = full
    if "band" in sweep["kind"]:
        caption = "One band of wavelengths stops at a time. Grey: random planes."
        figures[caption] = rl.plot_truncation(sweep, by="band", table=table)
    others = [name for name in OTHERS if is_measured(table, name)]
    if others:
        words = ", ".join(OTHERS[name] for name in others)
        caption = f"The same steps: {words}."
        figures[caption] = rl.plot_truncation(sweep, measures=others, table=table)
    if sweep["class_tokens"].any():
        caption = "A quarter of the planes stopped: loss, attention, labels by class of token."
        figures[caption] = rl.plot_truncation(sweep, by="class", table=table)
    return figures


def is_measured(table: pd.DataFrame, measure: str) -> bool:
    column = "labels_changed" if measure == "labels" else f"{measure}_change"
    return bool(table[column].notna().any())


if __name__ == "__main__":
    run_analysis(answer, rows=ROWS, truncation=SWEEP)
