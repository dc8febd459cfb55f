"""The page of a ledger of claims, of one model or of several."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from typing import Any

import pandas as pd
import xarray as xr

from ropelens.figures.claims import GLYPHS, plot_claims, plot_replication, sorted_claims
from ropelens.figures.text import NOTHING, in_words, number
from ropelens.measure.claims import VERDICTS
from ropelens.report.page import render_figures
from ropelens.report.tables import about, short_facts

QUESTION = "Which published claims about RoPE hold here?"
VERBS = dict(
    zip(
        VERDICTS,
        ("hold", "are contradicted", "are unresolved", "are not testable"),
        strict=True,
    )
)
EXPLAIN = (
    "Grey: what chance and geometry give. Diamond: this model; its line is the 95% interval. "
    "Each row has its own scale, with the claimed side on the right."
)
SIDE_BY_SIDE = "One column a model; numbers are on hover."


def claims_sentences(table: pd.DataFrame) -> list[str]:
    """How many claims have each verdict, a sentence a model; then what is contradicted."""
    sentences, several = [], table["model"].nunique() > 1
    for model, rows in table.groupby("model", sort=False):
        counts = Counter(rows["verdict"])
        parts = [
            _count(counts[verdict], VERBS[verdict]) for verdict in VERDICTS if counts[verdict]
        ]
        where = f" in {model}" if several else ""
        sentences.append(f"Of {len(rows)} claims{where}, {in_words(parts)}.")
        lost = rows.loc[rows["verdict"] == "contradicted", "statement"]
        sentences += [f"Contradicted{where}: {'; '.join(lost)}."] if len(lost) else []
    return sentences


def _count(count: int, verb: str) -> str:
    singular = verb.replace("hold", "holds").replace("are ", "is ") if count == 1 else verb
    return f"{count} {singular}"


def render_claims(
    table: pd.DataFrame, profiles: Mapping[str, xr.Dataset], *, command: str
) -> str:
    """The page as text; `table` has a column `model`, which names one of the `profiles`."""
    several, (first, *_) = len(profiles) > 1, profiles.values()
    facts = about(first.assign_attrs(command=command), pd.DataFrame())
    if several:
        runs = {name: ", ".join(short_facts(profile)) for name, profile in profiles.items()}
        facts |= {"model": f"{len(runs)} models", "facts": [*runs], "run": [*runs.items()]}
    figures = (
        {SIDE_BY_SIDE: plot_replication(table)} if several else {EXPLAIN: plot_claims(table)}
    )
    ledgers = {
        str(model): [_row(row) for row in sorted_claims(rows).to_dict("records")]
        for model, rows in table.groupby("model", sort=False)
    }
    said = {"question": QUESTION, "findings": claims_sentences(table), "glyphs": GLYPHS}
    return render_figures("claims.html", figures, ledgers=ledgers, **said, **facts)


def _row(row: dict[Hashable, Any]) -> dict[str, Any]:
    """The cells of a claim, as the template writes them."""

    def span(low: float, high: float) -> str:
        return NOTHING if pd.isna(low) else f"{number(low, '.3g')} to {number(high, '.3g')}"

    return {str(name): value for name, value in row.items()} | {
        "shown": number(row["number"], ".3g"),
        "interval": span(row["low"], row["high"]),
        "beside": span(row["null_low"], row["null_high"]),
        "p": number(row["p_value"], ".2g"),
        "q": number(row["q_value"], ".2g"),
    }
