"""`ropelens compare` and `ropelens claims`: folders, settings, plans, and refused folders."""

import json
import shutil
from pathlib import Path
from unittest import mock

import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr
from cli_runs import Ended, without_page
from scipy import stats
from synthetic_profile import synthetic_profile
from tiny_checkpoints import identity_of, save_tiny
from trained import run_folder
from typer.testing import CliRunner

import ropelens as rl
from ropelens.commands.app import app
from ropelens.runtime.netcdf import save

FILES = ["comparison.csv", "comparison.nc", "index.html", "run.json"]


@pytest.fixture(scope="module")
def runs(trained_study: Path) -> list[Path]:
    return [run_folder(trained_study, variant, 0) for variant in ("rope", "nope")]


@pytest.fixture(scope="module")
def analyses(tmp_path_factory: pytest.TempPathFactory, prose: Path) -> list[Path]:
    """A model of three layers and one of two on one text; the second on another text."""
    root = tmp_path_factory.mktemp("analyses")
    texts = {"deep": prose, "shallow": prose, "other": "Another text. " * 40}
    options = rl.Options(context=16, surrogates=2, sequences=4)
    folders = []
    for name, text in texts.items():
        layers = 3 if name == "deep" else 2
        model = save_tiny(root / f"model-{name}", num_hidden_layers=layers)
        folder = root / name / "out"
        folder.parent.mkdir()
        with without_page():
            rl.analyze(model, text, options).save(folder)
        folders.append(folder)
    return folders


def test_runs_become_four_files(ropelens, runs: list[Path], tmp_path: Path):
    out = tmp_path / "out"
    ended = ropelens("compare", *runs, "--sequences", 4, "--out", out)
    assert ended.code == 0
    assert ended.out == f"{out / 'index.html'}\n"
    names = {path.name for path in out.iterdir()}
    assert names == {*FILES, "measured", "models"}
    pages = {path.name for path in (out / "models").iterdir()}
    assert pages == {"rope-seed-0.html", "nope-seed-0.html"}
    table = pd.read_csv(out / "comparison.csv")
    assert table["group"].tolist() == ["rope", "nope"]
    assert table["over"].fillna("").tolist() == ["", "sequences"]
    record = json.loads((out / "run.json").read_text())
    assert ended.err.splitlines()[-1] in record["findings"]
    assert record["command"].startswith("ropelens compare ")
    assert record["context"] == 32
    assert record["sequences"] == 4
    for entry, folder in zip(record["entries"], runs, strict=True):
        assert record["fingerprints"][entry] == identity_of(folder)
    page = (out / "index.html").read_bytes()
    assert ropelens("report", out) == Ended(0, f"{out / 'index.html'}\n", "")
    assert (out / "index.html").read_bytes() == page


@torch.no_grad()
def losses_of(analysis: Path, text: Path) -> list[float]:
    """Loss of each sequence, by transformers."""
    folder = analysis.parent
    model, tokenizer = rl.load(folder.parent / f"model-{folder.name}")
    tokens = rl.tokenize([text.read_text()], tokenizer, context=16, sequences=4)
    losses = []
    for ids in tokens.ids:
        sequence = ids[None]
        losses.append(float(model(sequence, labels=sequence).loss))
    return losses


def assert_heads_match(of_entry: xr.Dataset, analysis: Path) -> None:
    """The numbers and labels of an analysis, and nothing in the layers that it lacks."""
    profile = rl.open(analysis / "profile.nc")
    layers = profile.sizes["layer"]
    np.testing.assert_allclose(of_entry["q_norm"][:layers], profile["q_norm"])
    assert of_entry["q_norm"][layers:].isnull().all()
    assert (of_entry["label"][layers:] == "").all()
    expected = pd.read_csv(analysis / "heads.csv")["label"]
    labels = of_entry["label"][:layers].values.ravel()
    assert labels.tolist() == expected.tolist()


@pytest.mark.thorough
def test_models_of_other_depths_are_compared(ropelens, analyses, prose, tmp_path):
    out = tmp_path / "out"
    assert ropelens("compare", *analyses, "--out", out).code == 0
    assert sorted(path.name for path in out.iterdir()) == FILES
    comparison = rl.open(out / "comparison.nc")
    entries = comparison["entry"].values.tolist()
    assert entries == ["deep/out", "shallow/out", "other/out"]
    deep, shallow, _ = analyses
    assert_heads_match(comparison.sel(entry="deep/out"), deep)
    assert_heads_match(comparison.sel(entry="shallow/out"), shallow)
    table = pd.read_csv(out / "comparison.csv").set_index("group")
    change = table.loc["shallow/out"]
    assert change["over"] == "groups"
    assert change["pairs"] == 1
    loss_of_deep = rl.open(deep / "profile.nc").attrs["loss"]
    loss_of_shallow = rl.open(shallow / "profile.nc").attrs["loss"]
    assert change["loss_change"] == pytest.approx(loss_of_shallow - loss_of_deep)
    paired = stats.ttest_rel(losses_of(shallow, prose), losses_of(deep, prose))
    expected = paired.confidence_interval()
    assert change["low"] == pytest.approx(expected.low, abs=1e-6)
    assert change["high"] == pytest.approx(expected.high, abs=1e-6)
    assert np.isnan(table.loc["other/out", "loss_change"])  # another text
    assert "over the same text" in (out / "index.html").read_text()


def test_profiles_that_lack_numbers_are_refused(ropelens, tmp_path: Path):
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        few = xr.Dataset({"total_bits": 1.0}, attrs={"kind": "profile", "seed": 0})
        save(few, folder / "profile.nc")
    compared = ropelens("compare", *folders, "--out", tmp_path / "out")
    assert compared.code == 1
    assert "A profile lacks numbers" in compared.err.splitlines()[-1]
    drawn = ropelens("report", folders[0])
    assert drawn.code == 1
    words = "lacks numbers that labels are computed from"
    assert words in drawn.err.splitlines()[-1]


def test_contexts_of_an_analyzed_folder_need_robust(
    ropelens, analyses, prose, tmp_path
):
    model = ("--model", "bundled", "--text", prose)
    out = tmp_path / "claims"
    ended = ropelens("claims", analyses[0], *model, "--contexts", 64, "--out", out)
    assert ended.code == 1
    assert "--contexts belongs to --robust" in ended.err
    assert not out.exists()


def test_bad_input_is_one_line_and_nothing_is_lost(ropelens, runs, analyses, tmp_path):
    run = runs[0]
    analysis = analyses[0]
    before = contents(analysis)
    out = tmp_path / "a"
    cases = {
        "holds config.json, history": (*analyses, "--out", run),
        "holds the results of ropelens analyze": (*analyses, "--out", analysis),
        "cannot be compared with the rest": (run, analysis, "--out", out),
    }
    for words, arguments in cases.items():
        refused = ropelens("compare", *arguments)
        assert refused.code == 1, refused.err
        assert words in refused.problem
    unknown = ropelens("compare", *runs, "--sequences", 1, "--out", out)
    assert unknown.code == 2
    assert not out.exists()
    assert contents(analysis) == before


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.iterdir()}


def saved(folder: Path, *, seed: int) -> Path:
    profile, _ = synthetic_profile(layers=4, seed=seed)
    profile = profile.assign_attrs(trained_context=512, tokens_sha256="0")
    folder.mkdir()
    rl.save(profile, folder / "profile.nc")
    (folder / "run.json").write_text(json.dumps({"kind": "analysis"}))
    return folder


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("ledger")
    one = saved(root / "one", seed=0)
    two = saved(root / "two", seed=1)
    return written(one, two, out=root / "both")


def written(*folders: Path, out: Path) -> Path:
    """The ledger of these folders."""
    arguments = ["claims", *map(str, folders), "--out", str(out)]
    ended = CliRunner().invoke(app, arguments)
    assert ended.exit_code == 0, ended.output
    assert ended.stdout == f"{out}/index.html\n"
    assert "null_high  q_value\n" in ended.stderr
    assert "q_value: among claims" in ended.stderr
    assert "  band: planes between a layer's longest plane and" in ended.stderr
    return out


def error_line(*words: str | Path) -> str:
    arguments = [str(word) for word in words]
    with pytest.raises(rl.RopelensError) as refused:
        CliRunner().invoke(app, arguments, catch_exceptions=False)
    return refused.value.line


def test_saved_analyses_become_a_ledger_and_ledgers_one(ledger: Path, tmp_path: Path):
    table = pd.read_csv(ledger / "claims.csv")
    assert table["model"].unique().tolist() == ["one", "two"]
    record = json.loads((ledger / "run.json").read_text())
    assert record["kind"] == "claims"
    assert record["findings"][0].startswith("Of ")
    last = saved(tmp_path / "last", seed=9)
    (last / "index.html").touch()
    ledger_of_last = written(last, out=tmp_path / "of last")
    joint = written(ledger, ledger_of_last, out=tmp_path / "all")
    joint_table = pd.read_csv(joint / "claims.csv")
    assert joint_table["model"].unique().tolist() == ["one", "two", "last"]
    pd.testing.assert_frame_equal(joint_table.iloc[: len(table)], table)
    runs = json.loads((joint / "run.json").read_text())["runs"]
    pages = {name: run.get("page") for name, run in runs.items()}
    expected = {"one": None, "two": None, "last": "../last/index.html"}
    assert pages == expected, "only pages that exist have links"


def test_an_analysis_stays_and_no_model_is_in_a_ledger_twice(
    ledger: Path, tmp_path: Path
):
    first = ledger.parent / "one"
    second = ledger.parent / "two"
    out = tmp_path / "out"
    assert "would replace" in error_line("claims", first, "--out", first)
    text = first / "run.json"
    line = error_line("claims", ledger, first, "--text", text, "--out", out)
    assert line == "Saved results are not measured again; try: without --text"
    for folders in ([ledger, first], [second, ledger]):
        line = error_line("claims", *folders, "--out", out)
        assert line.startswith("A ledger has each model once; seen: ")
    assert not out.exists()


BROKEN = [
    ("run.json", '{"kind": "claims"}'),
    ("claims.csv", "claim,model"),
    ("claims.csv", ""),
]


@pytest.mark.parametrize(("name", "content"), BROKEN)
def test_a_broken_ledger_is_refused_in_one_line(ledger, tmp_path, name, content):
    folder = Path(shutil.copytree(ledger, tmp_path / "ledger"))
    (folder / name).write_text(content)
    line = error_line("claims", folder, "--out", tmp_path / "out")
    assert line.startswith(f"The claims in {folder} cannot be read; seen: ")


def test_an_unsuitable_folder_is_described(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "run.json").write_text('{"kind": "claims"}')
    saved(tmp_path / "one", seed=0)
    descriptions = {
        "nothere": "does not exist",
        "empty": "holds no results",
        "one/profile.nc": "is a file",
        "other": "holds a ledger of claims",
    }
    for name, description in descriptions.items():
        folder = tmp_path / name
        line = error_line("report", folder)
        assert line.startswith(f"{folder} {description}; try: ")
    missing = tmp_path / "nothere"
    line = error_line("claims", missing, "--out", tmp_path / "out")
    assert line.startswith(f"{missing} needs a text")


FEW = ("--sequences", 8, "--surrogates", 2)
NEED_THE_MODEL = [
    "slow_stop",
    "fast_stop",
    "long_planes",
    "norms_not_worth",
    "retrieval_planes",
    "preferences_reverse",
    "slow_induction",
    "slow_reach",
    "apostrophes",
]


@pytest.fixture
def texts(tmp_path: Path) -> list[object]:
    novel = tmp_path / "novel.txt"
    novel.write_text("abcd efg" * 300)
    code = tmp_path / "code.txt"
    code.write_text("hi jklm" * 300)
    return ["--text", novel, "--text", code]


@pytest.mark.usefixtures("pageless")
def test_claims_that_were_left_out_run_only_with_the_model(
    ropelens, model, texts, tmp_path
):
    few = ("--context", 32, *FEW)
    quick = ropelens(
        "claims", model, *texts, *few, "--quick", "--out", tmp_path / "quick"
    )
    assert f"ropelens claims '{model}' --text FILE" in quick.err
    folder = tmp_path / "another-name"
    folder.symlink_to(tmp_path / "quick" / "tiny-llama")
    saved = ropelens("claims", folder, "--out", tmp_path / "saved")
    assert saved.code == 0
    assert ", ".join(NEED_THE_MODEL[:8]) in saved.err
    assert f"ropelens claims {folder} --model MODEL --text FILE" in saved.err
    record = json.loads((tmp_path / "saved" / "run.json").read_text())
    title = record["model"]["name"]
    assert title == "tiny llama", "the title of the page names the model"

    # A folder names no model to load.
    change_record(folder, argument=str(tmp_path / "trap"))
    given = ("claims", folder, "--model", model, *texts)
    out = tmp_path / "all"
    plan = ropelens(*given, "--plan", "--out", out)
    assert "tokens in further runs" in plan.out
    assert not out.exists()
    assert ropelens(*given, "--out", out).code == 0
    table = pd.read_csv(out / "claims.csv")
    assert {*NEED_THE_MODEL} < {*table["claim"]}
    as_json = (out / "claims.json").read_text()
    assert "NaN" not in as_json
    rows = json.loads(as_json)
    assert list(rows[0]) == list(table.columns)
    assert [row["claim"] for row in rows] == table["claim"].tolist()

    (tmp_path / "other.txt").write_text("abcdefgh" * 200)
    text = ("--text", tmp_path / "other.txt")
    other_text = ropelens(
        "claims", folder, "--model", model, *text, "--out", tmp_path / "x"
    )
    assert "was measured on other tokens" in other_text.problem

    change_record(folder, fingerprint="files:0")
    other = ropelens(*given, "--out", tmp_path / "x")
    assert "was measured on another model" in other.problem


def change_record(
    folder: Path, *, argument: str | None = None, fingerprint: str | None = None
) -> None:
    """Change the argument "model" or the fingerprint of the model in run.json."""
    path = folder / "run.json"
    record = json.loads(path.read_text())
    if argument is not None:
        record["arguments"]["model"] = argument
    if fingerprint is not None:
        record["model"]["fingerprint"] = fingerprint
    path.write_text(json.dumps(record))


@pytest.mark.parametrize(
    "option", [("--contexts", "24,32"), ("--model", "bundled")], ids=lambda x: x[0]
)
def test_options_need_robust_or_an_analyzed_folder(ropelens, model, texts, option):
    refused = ropelens("claims", model, *texts, *option)
    assert f"{option[0]} " in refused.problem


STOPPED = KeyboardInterrupt


@pytest.mark.usefixtures("pageless")
def test_settings_are_saved_as_they_end(ropelens, model: Path, texts, tmp_path):
    out = tmp_path / "out"
    robust = ("claims", model, *texts, *FEW, "--contexts", "24,32", "--robust")
    with mock.patch("ropelens.claims.ledger.compare_settings", side_effect=STOPPED):
        ropelens(*robust, "--quick", "--out", out)
    with mock.patch("ropelens.claims.claim_runs.run_for_claims", side_effect=STOPPED):
        not_quick = ropelens(*robust, "--out", out)
    assert "is measured already" in not_quick.err
    unused = f"the progress in {out / '.unfinished' / 'tiny-llama'} is not used"
    assert unused in not_quick.err
    with mock.patch("ropelens.claims.claim_runs.ledger", side_effect=AssertionError):
        ended = ropelens(*robust, "--quick", "--out", out)
    assert ended.code == 0
    assert "is not used" not in ended.err
    assert "for 4 settings" in ended.err
    assert ended.err.count("is measured already") == 4
    assert "verdicts are the same in all settings." in ended.err
    assert "Omitted" not in ended.err  # no claim that runs the model was tested
    assert not (out / ".unfinished").exists()
    table = pd.read_csv(out / "claims.csv").set_index("claim")
    assert table.loc["band", "settings"] == 8
    assert table["robust"].between(0, 1).all()
    page = (out / "index.html").read_text()
    assert "Original: not stated as a number: the lowest frequencies dominate" in page
    assert "of 8 settings" in page
