"""Profiles that were saved before a measure existed open, and have NaN for this measure.

`saved_profile.nc.gz` keeps the layout of November 2026. It was written with

    profile = rl.profile(tiny("llama_gqa"), random_tokens(sequences=2, length=12), surrogates=2)
    rl.save(profile, "tests/profiles/saved_profile.nc")

and `gzip -9 -n`. Do not write it again when the layout changes.
"""

import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest
import xarray as xr
from small_measurements import old_rule

import ropelens as rl
from ropelens.analysis.analysis_result import Analysis
from ropelens.analysis.open_folder import rewrite_page
from ropelens.analysis.ranks import write_ranks
from ropelens.figures.head_wavelengths import plot_head_wavelengths
from ropelens.profiles import measures
from ropelens.report import describe

SAVED = Path(__file__).with_name("saved_profile.nc.gz")
SINK_MASS = next(row for row in measures.MEASURES if row.name == "sink_mass")
NEW = replace(SINK_MASS, name="second_token")
WARNING = r"profile.nc was saved before ropelens measured second_token: NaN$"


def write_saved(folder: Path) -> None:
    """Write the saved profile and a record to `folder`."""
    profile = gzip.decompress(SAVED.read_bytes())
    (folder / "profile.nc").write_bytes(profile)
    record = json.dumps({"kind": "analysis"})
    (folder / "run.json").write_text(record)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the saved profile, in which measures that were added later are NaN."""
    write_saved(tmp_path)
    path = tmp_path / "profile.nc"
    words = "follows_position.*max_score.*count all shared bits"
    with pytest.warns(UserWarning, match=words):
        completed = measures.open_profile(path)
    rl.save(completed, path)
    measures_of_profile = []
    for measure in measures.MEASURES:
        if measure.name in completed or not measure.saved:
            measures_of_profile.append(measure)
    monkeypatch.setattr(measures, "MEASURES", tuple(measures_of_profile))
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
    saved = {row.name for row in measures.MEASURES if row.saved}
    assert saved <= set(analysis.profile.data_vars), "older measures are not lost"


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
    for measure in measures.MEASURES:
        name = measure.name
        if not measure.saved or name == "total_bits":  # no label without a budget
            continue
        without = saved.drop_vars(name)
        with pytest.warns(UserWarning, match=f"ropelens measured {name}: NaN"):
            older = measures.complete_profile(without, "profile.nc")
        assert older[name].isnull().all()
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


@dataclass(frozen=True, eq=False)
class Old:
    """The saved profile as it was written, and as it is opened in two ways."""

    path: Path
    profile: xr.Dataset
    analysis: Analysis


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Old:
    folder = tmp_path_factory.mktemp("old")
    write_saved(folder)
    path = folder / "profile.nc"
    words = "was saved before ropelens measured q_mean"
    with pytest.warns(UserWarning, match=words):
        profile = rl.open(path)
    with pytest.warns(UserWarning, match=words):
        analysis = rl.open(folder)
    return Old(path, profile, analysis)


def read_page(profile: xr.Dataset, path: Path) -> str:
    return rl.write_report(profile, path / "page.html").read_text()


HEAD = {"layer": 0, "head": 1}
PUBLIC: dict[str, Callable[[xr.Dataset, Path], object]] = {
    "classify_heads": lambda profile, _: rl.classify_heads(profile).to_csv(),
    "test_claims": lambda profile, _: rl.test_claims(profile, draws=20).to_csv(),
    "plot_attention": lambda profile, _: rl.plot_attention(profile, **HEAD),
    "plot_claim": lambda profile, _: rl.plot_claim(profile),
    "plot_follow": lambda profile, _: rl.plot_follow(profile),
    "plot_head_map": lambda profile, _: rl.plot_head_map(profile),
    "plot_head_wavelengths": lambda profile, _: plot_head_wavelengths(profile),
    "plot_kernel": lambda profile, _: rl.plot_kernel(profile, **HEAD),
    "plot_norms": lambda profile, _: rl.plot_norms(profile),
    "plot_selectivity": lambda profile, _: rl.plot_selectivity(profile, **HEAD),
    "write_report": read_page,
    "show": lambda profile, _: rl.show(profile).html,
    "describe": lambda profile, _: describe(profile),
    "scale": lambda profile, _: rl.scale(
        rl.Slowest(0.5), by=0, keep_length=profile
    ).keep_length["q_mean"],
    "write_ranks": lambda profile, path: write_ranks(profile, "mha2mla", path),
    "Analysis": lambda profile, _: Analysis(profile, pd.DataFrame(), {}).profile,
}
"""Public functions that take a profile, with a result that can be compared."""


def test_every_public_function_that_takes_a_profile_is_called_here():
    public = {name for name in rl.__all__ if callable(getattr(rl, name))}
    takes = {n for n in public if "profile" in signature(getattr(rl, n)).parameters}
    assert takes <= PUBLIC.keys()
    assert len(takes) == 11


def assert_results_equal(result: object, expected: object) -> None:
    if isinstance(expected, xr.Dataset | xr.DataArray):
        xr.testing.assert_equal(result, expected)
    elif isinstance(expected, go.Figure):
        assert result.to_json() == expected.to_json()
    else:
        assert result == expected


@pytest.mark.filterwarnings("always:.* was saved before ropelens measured")
@pytest.mark.parametrize("name", PUBLIC)
def test_public_functions_complete_an_old_profile_once(
    name: str, old: Old, tmp_path: Path, recwarn: pytest.WarningsRecorder
):
    expected = PUBLIC[name](old.profile.copy(deep=True), tmp_path)
    of_analysis = PUBLIC[name](old.analysis.profile.copy(deep=True), tmp_path)
    assert len(recwarn) == 0
    assert_results_equal(of_analysis, expected)
    with xr.open_dataset(old.path) as not_completed:
        completed_here = PUBLIC[name](not_completed, tmp_path)
    (warning,) = recwarn
    words = "this profile was saved before ropelens measured q_mean"
    assert words in str(warning.message)
    assert_results_equal(completed_here, expected)


def test_results_of_another_kind_lack_no_measure():
    capture = xr.Dataset(attrs={"kind": "capture"})
    assert measures.complete_profile(capture) is capture
