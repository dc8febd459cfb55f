"""Profiles that were saved before a measure existed open, and have NaN for this measure.

`saved_profile.nc.gz` keeps the layout of November 2026. It was written with

    profile = rl.profile(tiny("llama_gqa"), random_tokens(sequences=2, length=12), surrogates=2)
    rl.save(profile, "tests/profiles/saved_profile.nc")

and `gzip -9 -n`. Do not write it again when the layout changes.
"""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from measured import old_rule

import ropelens as rl
from ropelens.analysis.analysis_result import Analysis
from ropelens.analysis.open_folder import rewrite_page
from ropelens.profiles import measures

SAVED = Path(__file__).with_name("saved_profile.nc.gz")
SINK_MASS = next(row for row in measures.MEASURES if row.name == "sink_mass")
NEW = replace(SINK_MASS, name="second_token")
WARNING = r"profile.nc was saved before ropelens measured second_token: NaN$"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the saved profile, in which measures that were added later are NaN."""
    (tmp_path / "profile.nc").write_bytes(gzip.decompress(SAVED.read_bytes()))
    (tmp_path / "run.json").write_text(json.dumps({"kind": "analysis"}))
    with pytest.warns(
        UserWarning, match="follows_position.*max_score.*count all shared bits"
    ):
        known = measures.open_profile(tmp_path / "profile.nc")
    rl.save(known, tmp_path / "profile.nc")
    rows = (row for row in measures.MEASURES if row.name in known or not row.saved)
    monkeypatch.setattr(measures, "MEASURES", (*rows,))
    return tmp_path


@pytest.fixture
def new_measure(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measures, "MEASURES", (*measures.MEASURES, NEW))


def test_without_exchanged_keys_labels_follow_the_old_rule(folder: Path):
    profile = rl.open(folder / "profile.nc")
    profile["group_scored"][:] = 200
    label, content = old_rule(profile)
    assert set(label.flat) == {"semantic", "mixed"}
    heads = rl.classify_heads(profile)
    assert heads["label"].tolist() == label.flatten().tolist()
    np.testing.assert_allclose(heads["content_fraction"], content.flatten())


@pytest.mark.filterwarnings("error")
def test_a_saved_profile_opens_without_a_warning(folder: Path):
    analysis = rl.open(folder)
    assert isinstance(analysis, Analysis)
    assert analysis.profile.identical(rl.open(folder / "profile.nc"))
    assert "</html>" in analysis.page()
    assert sum(row.saved for row in measures.MEASURES) == 55


@pytest.mark.parametrize("path", [".", "profile.nc"])
def test_a_measure_that_is_newer_than_the_profile_is_nan(folder, new_measure, path):
    with pytest.warns(UserWarning, match=WARNING) as warned:
        opened = rl.open(folder / path)
    assert len(warned) == 1
    profile = opened.profile if isinstance(opened, Analysis) else opened
    assert profile["second_token"].dims == ("layer", "head")
    assert profile["second_token"].isnull().all()
    assert rl.classify_heads(profile)["second_token"].isna().all()
    assert rl.test_claims(profile, draws=40)["verdict"].notna().all()
    rl.plot_head_map(profile)


@pytest.mark.thorough
def test_a_profile_opens_without_any_one_measure(folder: Path):
    saved = rl.open(folder / "profile.nc")
    assert isinstance(saved, xr.Dataset)
    for row in measures.MEASURES:
        if (
            row.saved and row.name != "total_bits"
        ):  # nothing has a label without a budget
            with pytest.warns(UserWarning, match=f"ropelens measured {row.name}: NaN"):
                older = measures.complete_profile(
                    saved.drop_vars(row.name), "profile.nc"
                )
            assert older[row.name].isnull().all()
            rl.plot_head_map(older)
            rl.plot_claim(older)


def test_the_page_of_an_older_profile_is_drawn_with_one_warning(folder, new_measure):
    with pytest.warns(UserWarning, match=WARNING) as warned:
        page = rewrite_page(folder)
    assert len(warned) == 1
    assert "</html>" in page.read_text()


@pytest.mark.filterwarnings("error")
def test_a_profile_without_a_budget_lacks_no_measure(folder: Path):
    profile = rl.open(folder / "profile.nc")
    fitted = [row.name for row in measures.MEASURES if isinstance(row, measures.Fitted)]
    rl.save(profile.drop_vars(fitted), folder / "profile.nc")
    assert "total_bits" not in rl.open(folder / "profile.nc")
