"""The page of a ledger, of one model and of several, and its figures."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from synthetic_profile import synthetic_profile

import ropelens as rl
from ropelens.figures.claims import GLYPHS, plot_claims, plot_replication
from ropelens.measure.claims import VERDICTS
from ropelens.report.claims import claims_sentences, render_claims

HOSTILE = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def profile() -> xr.Dataset:
    made, _ = synthetic_profile(layers=6)
    return made.assign_attrs(trained_context=512)


@pytest.fixture(scope="module")
def table(profile: xr.Dataset) -> pd.DataFrame:
    return rl.test_claims(profile, draws=60).assign(model="toy")


def test_every_claim_is_a_mark_of_its_verdict_on_the_claimed_side_of_its_null(
    table: pd.DataFrame,
) -> None:
    figure = plot_claims(table)
    marks = {trace.name: trace for trace in figure.data}
    for verdict in VERDICTS:
        count = int((table["verdict"] == verdict).sum())
        mark = marks.get(f"{GLYPHS[verdict]} {verdict}")
        assert (0 if mark is None else len(mark.x)) == count
    null = np.reshape(marks["95% of the null"].x, (-1, 3))
    holds = marks[f"{GLYPHS['holds']} holds"]
    for x, row in zip(holds.x, holds.y, strict=True):
        assert x > np.nanmax(null[int(row), :2])


def test_models_stand_side_by_side_with_their_verdicts(table: pd.DataFrame) -> None:
    other = table.assign(model=HOSTILE, verdict="unresolved")
    figure = plot_replication(pd.concat([table, other]))
    heat = figure.data[0]
    assert heat.z.shape == (len(table), 2)
    assert [VERDICTS[int(z)] for z in heat.z[:, 0]] == table["verdict"].tolist()
    assert (heat.z[:, 1] == VERDICTS.index("unresolved")).all()


def test_the_first_sentence_counts_verdicts() -> None:
    words = ["holds", "holds", "contradicted", "not testable"]
    table = pd.DataFrame({"model": "m", "verdict": words, "statement": [*"abcd"]})
    assert claims_sentences(table) == [
        "Of 4 claims, 2 hold, 1 is contradicted and 1 is not testable.",
        "Contradicted: c.",
    ]


@pytest.mark.parametrize("names", [["toy"], ["toy", HOSTILE]])
def test_the_page_has_each_claim_and_escapes_names(
    profile: xr.Dataset, table: pd.DataFrame, names: list[str]
) -> None:
    several = pd.concat([table.assign(model=name) for name in names])
    page = render_claims(several, dict.fromkeys(names, profile), command="ropelens claims")
    assert page.count("<summary>") >= len(several)
    assert HOSTILE not in page
    assert all(statement in page for statement in table["statement"])
