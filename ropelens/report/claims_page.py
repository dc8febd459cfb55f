"""Pages of claims: one row with a strip per claim, and models side by side."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from ropelens.report.run_facts import PageFacts, version_words
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


@dataclass(frozen=True)
class Bar:
    """A bar on a strip, from `start` to `stop` (percent)."""

    start: float
    stop: float


@dataclass(frozen=True)
class GridCell:
    """The verdict on a claim in the layers of one kind of a model.

    `letter` is the letter of the kind, or "" if all layers are tested together.
    """

    row: "LedgerRow"
    letter: str


@dataclass(frozen=True)
class LedgerRow:
    """A claim of a ledger on a page.

    `claim` has the columns of the table, and `place` names the row in addresses. `figure` is
    the address of a figure, or "". On the strip of the row, `places` has the columns that are
    known, in percent, with the claimed side last.
    """

    claim: Mapping[Any, Any]
    place: str
    shown: str
    figure: str
    places: Mapping[str, float]

    @property
    def original(self) -> str:
        """What the source measured, and where; "" if the source is not known."""
        claim = self.claim
        if not claim.get("doi"):
            return ""
        source = claim["source"]
        if claim["doi"] != "not stated":
            source = f"{source}, DOI {claim['doi']}"
        return (
            f"Original: {claim['original']}. Model: {claim['original_model']}. "
            f"Conditions: {claim['conditions']}. Source: {source}."
        )

    @property
    def method(self) -> str:
        """How the test deviates from its source, and what counts as none."""
        claim = self.claim
        floor = claim["floor"]
        if _is_text(claim["floor_day"]):
            floor = f"{floor} (committed on {claim['floor_day']})"
        method = f"{claim['deviation']} Counts as none: {floor}."
        if _is_text(claim["other"]):
            method = f"{method} Other statistic: {claim['other']}."
        return method

    @property
    def null(self) -> Bar | None:
        return self._bar("null_low", "null_high")

    @property
    def interval(self) -> Bar | None:
        return self._bar("low", "high")

    def _bar(self, low: str, high: str) -> Bar | None:
        if low not in self.places:
            return None
        start, stop = sorted([self.places[low], self.places[high]])
        return Bar(start, stop)


def _is_text(value: object) -> bool:
    """Whether a cell of a table has a text; empty cells are "", None or NaN."""
    return isinstance(value, str) and value != ""


def read_ledger(folder: str, out: Path) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Table and `runs` of a folder of claims, with the addresses of pages from `out`."""
    record = read_record(folder)
    with explained(f"The claims in {folder} cannot be read.", error=BadArgument):
        table = pd.read_csv(Path(folder) / "claims.csv")
        table["why"] = table["why"].str.removeprefix("'")  # which protects a minus sign
        table = _with_descriptions(table)
        texts = ("over", "other", "floor_day", "differ")
        table = table.fillna(dict.fromkeys(texts, ""))
        render_claims(table, record)
    runs = record["runs"]
    for run in runs.values():
        page = Path(folder) / run.pop("page", "")
        if page.is_file():  # the page of the analysis was kept
            run["page"] = relpath(page, out)
    return table, runs


def _with_descriptions(table: pd.DataFrame) -> pd.DataFrame:
    """A ledger of an earlier version with the descriptions of claims that it lacks."""
    described = pd.DataFrame({claim.name: claim.description() for claim in CLAIMS})
    described.loc["layers"] = "all"
    for column, words in described.iterrows():
        if column not in table:
            table[column] = table["claim"].map(words).fillna("")
    return table


def render_claims(table: pd.DataFrame, record: Mapping[str, Any]) -> str:
    """Text of the page. `table` has a column `model`; `record` is the content of run.json."""
    models = table["model"].unique().tolist()
    runs = record["runs"]
    return render(
        "claims.html",
        about=PageFacts(
            facts=[plural(len(models), "model")],
            model=record["model"]["name"],
            run=[(name, run["facts"]) for name, run in runs.items()],
            versions=version_words(record["versions"]),
            command=record["command"],
        ),
        question=CLAIMS_QUESTION,
        findings=record["findings"],
        glyphs=GLYPHS,
        grid=_grid(table, models),
        letters=kind_letters(table),
        originals=_originals(table) if len(models) > 1 else {},
        ledgers={
            model: ledger_rows(table[table["model"] == model]) for model in models
        },
        pages={name: quote(run["page"]) for name, run in runs.items() if "page" in run},
    )


def _grid(
    table: pd.DataFrame, models: Sequence[str]
) -> dict[str, list[list[GridCell]]]:
    """The cells of each model by the statement of a claim.

    A model with several kinds of layers has a cell for each kind in which the claim is tested.
    """
    letters = kind_letters(table)
    grid: dict[str, dict[str, list[GridCell]]] = {}
    for claim in table.to_dict("records"):
        of_models = grid.setdefault(claim["statement"], {name: [] for name in models})
        letter = letters.get(claim["layers"], "")
        of_models[claim["model"]].append(GridCell(_ledger_row(claim), letter))
    return {statement: list(cells.values()) for statement, cells in grid.items()}


def _originals(table: pd.DataFrame) -> dict[str, LedgerRow]:
    """The first row of each claim with a known source, by the name of the claim."""
    originals: dict[str, LedgerRow] = {}
    for claim in table.to_dict("records"):
        row = _ledger_row(claim)
        if row.original:
            originals.setdefault(claim["claim"], row)
    return originals


def kind_letters(table: pd.DataFrame) -> dict[str, str]:
    """A letter for each kind of layers in a table of claims: its first letter, or more."""
    kinds = [kind for kind in table["layers"].unique() if kind != "all"]
    letters: dict[str, str] = {}
    for kind in kinds:
        length = 1
        while any(kind[:length] == other[:length] for other in kinds if other != kind):
            length += 1
        letters[kind] = kind[:length].capitalize()
    return letters


def ledger_rows(table: pd.DataFrame) -> list[LedgerRow]:
    """The rows of a ledger in the order of `VERDICTS`."""
    order = np.argsort(table["verdict"].map(VERDICTS.index), kind="stable")
    return [_ledger_row(claim) for claim in table.iloc[order].to_dict("records")]


def _ledger_row(claim: dict[Any, Any]) -> LedgerRow:
    place = claim["claim"]
    if claim["layers"] != "all":
        place = f"{place}-{claim['layers']}"
    figures = [CLAIM_FIGURES[name] for name in CLAIM_FIGURES if name in claim["call"]]
    return LedgerRow(
        claim=claim,
        place=place,
        shown=shown_statement(claim),
        figure=figures[0] if figures else "",
        places=_strip_places(claim),
    )


def _strip_places(claim: dict[Any, Any]) -> dict[str, float]:
    """Places of the numbers on the strip of a claim, from 0 to 100."""
    numbers = {}
    for name in STRIP_COLUMNS:
        if not pd.isna(claim[name]):
            numbers[name] = claim["side"] * claim[name]
    least = min(numbers.values(), default=0)
    width = max(numbers.values(), default=0) - least
    if width == 0:
        width = 1
    return {name: 100 * (number - least) / width for name, number in numbers.items()}
