"""Pages of claims: one row with a strip per claim, and models side by side."""

from collections.abc import Mapping
from os.path import relpath
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pandas as pd

from ropelens.claims.claims import CLAIMS
from ropelens.claims.verdict import VERDICTS
from ropelens.errors import BadArgument, explained
from ropelens.figures.formats import plural
from ropelens.report.render import render
from ropelens.report.sentences.claims import shown_statement
from ropelens.runtime.run_record import read_record

CLAIMS_QUESTION = "Which published claims about RoPE hold here?"
GLYPHS = dict(zip(VERDICTS, ("✓", "✕", "○", "–"), strict=True))
STRIP_COLUMNS = ("null_low", "null_median", "null_high", "low", "number", "high")
CLAIM_FIGURES = {
    "plot_norms": "norms-title",
    "plot_claim": "view=claim",
    "plot_head_map": "view=map",
    "plot_selectivity": "tab=selectivity",
    "plot_kernel": "tab=kernel",
}
"""Address on the page of an analysis of the figure that the `call` of a claim draws."""


def read_ledger(folder: str, out: Path) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Table and `runs` of a folder of claims, with the addresses of pages from `out`."""
    record = read_record(folder)
    with explained(f"The claims in {folder} cannot be read.", error=BadArgument):
        table = pd.read_csv(Path(folder) / "claims.csv")
        table["why"] = table["why"].str.removeprefix("'")  # which protects a minus sign
        described = pd.DataFrame({claim.name: claim.description() for claim in CLAIMS})
        described.loc["layers"] = "all"
        for column, words in described.iterrows():  # a ledger of an earlier version
            if column not in table:
                table[column] = table["claim"].map(words).fillna("")
        table = table.fillna(
            dict.fromkeys(("over", "other", "floor_day", "differ"), "")
        )
        render_claims(table, record)
    for run in record["runs"].values():
        page = Path(folder) / run.pop(
            "page", ""
        )  # page of the analysis, if it was kept
        run |= {"page": relpath(page, out)} if page.is_file() else {}
    return table, record["runs"]


def render_claims(table: pd.DataFrame, record: Mapping[str, Any]) -> str:
    """Text of the page. `table` has a column `model`; `record` is the content of run.json."""
    models = table["model"].unique().tolist()
    rows = [_ledger_row(row) for row in table.to_dict("records")]
    cells = {(row["place"], row["model"]): row for row in rows}
    statements = {row["place"]: row["shown"] for row in rows}
    return render(
        "claims.html",
        question=CLAIMS_QUESTION,
        findings=record["findings"],
        glyphs=GLYPHS,
        grid={
            words: [cells.get((place, model)) for model in models]
            for place, words in statements.items()
        },
        ledgers={
            model: ledger_rows(table[table["model"] == model]) for model in models
        },
        pages={
            n: quote(run["page"]) for n, run in record["runs"].items() if "page" in run
        },
        model=record["model"]["name"],
        facts=[plural(len(models), "model")],
        run=[(name, run["facts"]) for name, run in record["runs"].items()],
        versions=", ".join(
            f"{name} {version}" for name, version in record["versions"].items()
        ),
        command=record["command"],
    )


def ledger_rows(table: pd.DataFrame) -> list[dict[str, Any]]:
    order = np.argsort(table["verdict"].map(VERDICTS.index), kind="stable")
    return [_ledger_row(row) for row in table.iloc[order].to_dict("records")]


def _ledger_row(row: dict[Any, Any]) -> dict[str, Any]:
    """A claim with its figure, and the places of its strip in percent, claimed side last."""
    known = {
        name: row["side"] * row[name]
        for name in STRIP_COLUMNS
        if not pd.isna(row[name])
    }
    least, most = min(known.values(), default=0), max(known.values(), default=0)
    places = {
        name: 100 * (x - least) / ((most - least) or 1) for name, x in known.items()
    }
    ends = {"null": ("null_low", "null_high"), "interval": ("low", "high")}
    bars = {
        bar: sorted(places[x] for x in xs)
        for bar, xs in ends.items()
        if xs[0] in places
    }
    figure = next(
        (CLAIM_FIGURES[name] for name in CLAIM_FIGURES if name in row["call"]), ""
    )
    place = row["claim"] + f"-{row['layers']}" * (row["layers"] != "all")
    names = {"place": place, "shown": shown_statement(row)}
    return row | names | {"figure": figure, "bars": bars, "places": places}
