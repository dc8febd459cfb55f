"""Pages of claims for one model and several models, and the tab of an analysis."""

import re

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from synthetic_profile import synthetic_profile

import ropelens as rl
from ropelens.claims.verdict import VERDICTS
from ropelens.report.claims import claims_sentences, ledger_rows, render_claims
from ropelens.report.page import render_page

HOSTILE = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def profile() -> xr.Dataset:
    return synthetic_profile(layers=6)[0]


@pytest.fixture(scope="module")
def table(profile: xr.Dataset) -> pd.DataFrame:
    return rl.test_claims(profile, draws=60).assign(model="toy")


def test_a_mark_beyond_its_null_on_the_claimed_side_is_a_claim_that_holds(table: pd.DataFrame):
    rows = ledger_rows(table)
    verdicts = [row["verdict"] for row in rows]
    assert verdicts == sorted(verdicts, key=VERDICTS.index)
    for row in rows:
        assert all(0 <= x <= 100 + 1e-9 for x in row["places"].values())
        assert ("number" in row["places"]) == np.isfinite(row["number"])
        if row["verdict"] == "holds":
            assert row["places"]["number"] > row["bars"]["null"][1]
            assert row["side"] * row["number"] > row["side"] * row["threshold"]


def test_the_first_sentence_counts_verdicts():
    words = ["holds", "holds", "contradicted", "not testable"]
    texts = {"statement": [*"abcd"], "claim": [*"abcd"]}
    table = pd.DataFrame({"model": "m", "verdict": words} | texts)
    counts = "Of 4 claims, 2 hold, 1 is contradicted and 1 is not testable."
    assert claims_sentences(table) == [counts, "Contradicted: c."]
    both = pd.concat([table.assign(model="none", verdict="unresolved"), table])
    assert claims_sentences(both)[0] == "Of 4 claims, 2 hold in m and none in none."
    quick = pd.concat([table, table[:3].assign(model="q")])
    first = "Of 4 claims, 2 hold in m and 2 in q (where only 3 were tested)."
    assert claims_sentences(quick)[0] == first


RECORD = {
    "findings": ["Of 14 claims, none."],
    "model": {"name": "toy"},
    "runs": {"toy": {"facts": "6 layers"}},
    "versions": {"torch": "1"},
    "command": "ropelens claims",
}


@pytest.mark.parametrize("names", [["toy"], ["toy", HOSTILE]])
def test_the_page_has_each_claim_and_escapes_names(table: pd.DataFrame, names: list[str]):
    several = pd.concat([table.assign(model=name) for name in names])
    several = several[(several["claim"] != "decay") | (several["model"] == "toy")]
    page = render_claims(several, RECORD)
    assert page.count('<details class="more claim"') == len(several)
    assert HOSTILE not in page
    assert all(statement in page for statement in table["statement"])
    cells = re.findall(r'<td class="([a-z-]+)"><a href="#(model-\d-\w+)"', page)
    assert len(cells) == (len(several) if len(names) > 1 else 0)
    assert all(f'id="{place}"' in page for _, place in cells)


def test_rows_link_to_their_figures_on_the_page_of_the_analysis(table, profile):
    run = RECORD["runs"]["toy"] | {"page": '../#1 "page"/index.html'}
    linked = render_claims(table, RECORD | {"runs": {"toy": run}})
    places = re.findall(r'href="\.\./%231%20%22page%22/index.html#([\w=-]+)"', linked)
    drawn = [row for row in table["call"] if "plot_" in row]
    assert len(places) == len(drawn) > 9
    assert "#" + places[0] not in render_claims(table, RECORD)
    page = render_page(profile, rl.classify_heads(profile))
    assert page.count("Show the figure") == len(drawn)
    for place in set(places):
        there = place.replace("view=", "all-tab-").replace("tab=", "one-tab-")
        assert f'id="{there}"' in page


def test_every_page_has_the_claims_that_its_profile_decides(profile, table):
    page = render_page(profile, rl.classify_heads(profile))
    assert page.count('<details class="more claim"') == len(table)
    assert f"Of {len(table)} claims, " in page
