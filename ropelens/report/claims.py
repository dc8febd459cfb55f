"""A ledger of claims on pages: its sentences, a strip a claim, and models side by side."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pandas as pd

from ropelens.claims.claims import VERDICTS
from ropelens.errors import BadArgument, explained
from ropelens.figures.formats import plural
from ropelens.report.render import render, say
from ropelens.runtime.results import read_record

QUESTION = "Which published claims about RoPE hold here?"
GLYPHS = dict(zip(VERDICTS, ("✓", "✕", "○", "–"), strict=True))
ENDS = ("null_low", "null_median", "null_high", "low", "number", "high")
"""The columns that a strip shows."""
FIGURES = {
    "plot_norms": "norms-title",
    "plot_claim": "view=claim",
    "plot_head_map": "view=map",
    "plot_selectivity": "tab=selectivity",
    "plot_kernel": "tab=kernel",
}
"""Where the page of an analysis has the figure that a claim's `call` draws."""


def read_ledger(folder: str) -> tuple[pd.DataFrame, dict[str, Any]]:
    """The table of a folder of claims and its `runs`, of which a page can be drawn."""
    record = read_record(folder)
    with explained(f"The claims in {folder} cannot be read.", error=BadArgument):
        table = pd.read_csv(Path(folder) / "claims.csv")
        table["why"] = table["why"].str.removeprefix("'")  # from before a minus sign
        render_claims(table, record)
    return table, record["runs"]


def claims_sentences(table: pd.DataFrame) -> list[str]:
    """How many claims have each verdict, a sentence a model; then what is contradicted.

    Of several models the first sentence says how many hold in each.
    """
    sentences: list[str] = []
    holds: list[tuple[Hashable, int, int]] = []
    several = table["model"].nunique() > 1
    for model, rows in table.groupby("model", sort=False):
        counts = {word: int((rows["verdict"] == word).sum()) for word in VERDICTS}
        holds.append((model, counts["holds"], len(rows)))
        lost = rows.loc[rows["verdict"] == "contradicted", "statement"].tolist()
        record = {"counts": counts, "lost": lost, "where": model if several else ""}
        sentences += filter(None, (say("claims", of, **record) for of in ("counts", "lost")))
    if several:
        most = sorted(holds, key=lambda of: -of[1])
        sentences.insert(0, say("claims", "several", total=table["claim"].nunique(), most=most))
    return sentences


def render_claims(table: pd.DataFrame, record: Mapping[str, Any]) -> str:
    """The page as text; `table` has a column `model`, `record` is the run.json beside it."""
    models = table["model"].unique().tolist()
    cells = {(row["claim"], row["model"]): row for row in map(_row, table.to_dict("records"))}
    statements = dict(zip(table["claim"], table["statement"], strict=True))
    return render(
        "claims.html",
        question=QUESTION,
        findings=record["findings"],
        glyphs=GLYPHS,
        grid={
            words: [cells.get((claim, model)) for model in models]
            for claim, words in statements.items()
        },
        ledgers={model: ledger_rows(table[table["model"] == model]) for model in models},
        pages={n: quote(run["page"]) for n, run in record["runs"].items() if "page" in run},
        model=record["model"]["name"],
        facts=[plural(len(models), "model")],
        run=[(name, run["facts"]) for name, run in record["runs"].items()],
        versions=", ".join(f"{name} {version}" for name, version in record["versions"].items()),
        command=record["command"],
    )


def ledger_rows(table: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of one model as the template writes them: what holds comes first, then what is
    contradicted, unresolved and not testable."""
    order = np.argsort(table["verdict"].map(VERDICTS.index), kind="stable")
    return [_row(row) for row in table.iloc[order].to_dict("records")]


def _row(row: dict[Hashable, Any]) -> dict[str, Any]:
    """A claim, and where its strip has what, in percent of its width.

    A strip has a scale of its own, with the claimed side on the right.
    """
    known = {end: row["side"] * row[end] for end in ENDS if not pd.isna(row[end])}
    least, most = min(known.values(), default=0), max(known.values(), default=0)
    at = {end: 100 * (x - least) / ((most - least) or 1) for end, x in known.items()}
    pairs = {"null": ("null_low", "null_high"), "interval": ("low", "high")}
    bars = {bar: sorted(at[end] for end in of) for bar, of in pairs.items() if of[0] in at}
    figure = next((FIGURES[name] for name in FIGURES if name in row["call"]), "")
    return {**{str(n): x for n, x in row.items()}, "figure": figure, "bars": bars, "at": at}
