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
    place = tmp_path_factory.mktemp("analyses")
    few = rl.Options(context=16, surrogates=2, sequences=4)
    texts = {"deep": prose, "shallow": prose, "other": "Another text. " * 40}
    for name, text in texts.items():
        model = save_tiny(
            place / f"model-{name}", num_hidden_layers=2 + (name == "deep")
        )
        (place / name).mkdir()
        with without_page():
            rl.analyze(model, text, few).save(place / name / "out")
    return [place / name / "out" for name in texts]


@pytest.mark.thorough
def test_runs_become_four_files(ropelens, runs: list[Path], tmp_path: Path):
    out = tmp_path / "out"
    ended = ropelens("compare", *runs, "--sequences", 4, "--out", out)
    assert (ended.code, ended.out) == (0, f"{out / 'index.html'}\n")
    assert sorted(path.name for path in out.iterdir()) == sorted([*FILES, "measured"])
    table = pd.read_csv(out / "comparison.csv")
    assert table["group"].tolist() == ["rope", "nope"]
    assert table["over"].fillna("").tolist() == ["", "sequences"]
    record = json.loads((out / "run.json").read_text())
    assert ended.err.splitlines()[-1] in record["findings"]
    assert record["command"].startswith("ropelens compare ")
    assert (record["context"], record["sequences"]) == (32, 4)
    for entry, folder in zip(record["entries"], runs, strict=True):
        assert record["fingerprints"][entry] == identity_of(folder)
    page = (out / "index.html").read_bytes()
    assert ropelens("report", out) == Ended(0, f"{out / 'index.html'}\n", "")
    assert (out / "index.html").read_bytes() == page


def losses_of(analysis: Path, text: Path) -> list[float]:
    model, tokenizer = rl.load(analysis.parent.parent / f"model-{analysis.parent.name}")
    tokens = rl.tokenize([text.read_text()], tokenizer, context=16, sequences=4).ids
    with torch.no_grad():
        return [float(model(row[None], labels=row[None]).loss) for row in tokens]


@pytest.mark.thorough
def test_models_of_other_depths_are_compared(ropelens, analyses, prose, tmp_path):
    out = tmp_path / "out"
    assert ropelens("compare", *analyses, "--out", out).code == 0
    assert sorted(path.name for path in out.iterdir()) == FILES
    comparison = rl.open(out / "comparison.nc")
    assert comparison["entry"].values.tolist() == [
        "deep/out",
        "shallow/out",
        "other/out",
    ]
    profiles = [rl.open(folder / "profile.nc") for folder in analyses[:2]]
    for entry, profile in zip(comparison["entry"][:2], profiles, strict=True):
        layers = profile.sizes["layer"]
        part = comparison.sel(entry=entry)
        np.testing.assert_allclose(part["q_norm"][:layers], profile["q_norm"])
        assert part["q_norm"][layers:].isnull().all()
        assert (part["label"][layers:] == "").all()
        expected = pd.read_csv(Path(str(analyses[layers == 2])) / "heads.csv")["label"]
        assert part["label"][:layers].values.ravel().tolist() == expected.tolist()
    table = pd.read_csv(out / "comparison.csv").set_index("group")
    row = table.loc["shallow/out"]
    assert (row["over"], row["pairs"]) == ("groups", 1)
    change = profiles[1].attrs["loss"] - profiles[0].attrs["loss"]
    assert row["loss_change"] == pytest.approx(change)
    deep, shallow = [losses_of(folder, prose) for folder in analyses[:2]]
    interval = stats.ttest_rel(shallow, deep).confidence_interval()
    assert [row["low"], row["high"]] == pytest.approx(list(interval), abs=1e-6)
    assert np.isnan(table.loc["other/out", "loss_change"])  # another text
    assert "over the same text" in (out / "index.html").read_text()


def test_profiles_that_lack_numbers_are_refused(ropelens, tmp_path: Path):
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        few = xr.Dataset({"total_bits": 1.0}, attrs={"kind": "profile", "seed": 0})
        save(few, folder / "profile.nc")
    for words, arguments in {
        "A profile lacks numbers": ("compare", *folders, "--out", tmp_path / "out"),
        "lacks numbers that labels are computed from": ("report", folders[0]),
    }.items():
        ended = ropelens(*arguments)
        assert (ended.code, words in ended.err.splitlines()[-1]) == (1, True), ended.err


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
    before = {path: path.read_bytes() for path in analyses[0].iterdir()}
    cases = {
        "holds config.json, history": (*analyses, "--out", runs[0]),
        "holds the results of ropelens analyze": (*analyses, "--out", analyses[0]),
        "cannot be compared with the rest": (
            runs[0],
            analyses[0],
            "--out",
            tmp_path / "a",
        ),
    }
    for words, arguments in cases.items():
        ended = ropelens("compare", *arguments)
        assert (ended.code, words in ended.problem) == (1, True), ended.err
    ended = ropelens("compare", *runs, "--sequences", 1, "--out", tmp_path / "a")
    assert ended.code == 2
    assert not (tmp_path / "a").exists()
    assert {path: path.read_bytes() for path in analyses[0].iterdir()} == before


def saved(folder: Path, *, seed: int) -> Path:
    profile, _ = synthetic_profile(layers=4, seed=seed)
    folder.mkdir()
    more = {"trained_context": 512, "tokens_sha256": "0"}
    rl.save(profile.assign_attrs(more), folder / "profile.nc")
    (folder / "run.json").write_text(json.dumps({"kind": "analysis"}))
    return folder


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("ledger")
    folders = [saved(place / name, seed=n) for n, name in enumerate(("one", "two"))]
    return written(*folders, place / "both")


def written(*folders: Path) -> Path:
    *inputs, out = map(str, folders)
    ended = CliRunner().invoke(app, ["claims", *inputs, "--out", out])
    assert (ended.exit_code, ended.stdout) == (0, f"{out}/index.html\n"), ended.output
    assert "null_high  q_value\n" in ended.stderr
    assert "q_value: among claims" in ended.stderr
    assert "  band: planes between a layer's longest plane and" in ended.stderr
    return folders[-1]


def error_line(*words: str | Path) -> str:
    with pytest.raises(rl.RopelensError) as refused:
        CliRunner().invoke(app, [*map(str, words)], catch_exceptions=False)
    return refused.value.line


def test_saved_analyses_become_a_ledger_and_ledgers_one(ledger: Path, tmp_path: Path):
    table = pd.read_csv(ledger / "claims.csv")
    assert table["model"].unique().tolist() == ["one", "two"]
    record = json.loads((ledger / "run.json").read_text())
    assert record["kind"] == "claims"
    assert record["findings"][0].startswith("Of ")
    (saved(tmp_path / "last", seed=9) / "index.html").touch()
    last = written(tmp_path / "last", tmp_path / "of last")
    joint = pd.read_csv(written(ledger, last, tmp_path / "all") / "claims.csv")
    assert joint["model"].unique().tolist() == ["one", "two", "last"]
    pd.testing.assert_frame_equal(joint.iloc[: len(table)], table)
    runs = json.loads((tmp_path / "all" / "run.json").read_text())["runs"]
    pages = {name: run.get("page") for name, run in runs.items()}
    assert pages == {"one": None, "two": None, "last": "../last/index.html"}, (
        "dead links"
    )


def test_an_analysis_stays_and_no_model_is_in_a_ledger_twice(
    ledger: Path, tmp_path: Path
):
    first, second = [ledger.parent / name for name in ("one", "two")]
    assert "would replace" in error_line("claims", first, "--out", first)
    text = ("--text", first / "run.json")
    words = error_line("claims", ledger, first, *text, "--out", tmp_path / "out")
    assert words == "Saved results are not measured again; try: without --text"
    for more in ([ledger, first], [second, ledger]):
        words = error_line("claims", *more, "--out", tmp_path / "out")
        assert words.startswith("A ledger has each model once; seen: ")
    assert not (tmp_path / "out").exists()


BROKEN = [
    ("run.json", '{"kind": "claims"}'),
    ("claims.csv", "claim,model"),
    ("claims.csv", ""),
]


@pytest.mark.parametrize(("name", "content"), BROKEN)
def test_a_broken_ledger_is_refused_in_one_line(ledger, tmp_path, name, content):
    folder = Path(shutil.copytree(ledger, tmp_path / "ledger"))
    (folder / name).write_text(content)
    words = error_line("claims", folder, "--out", tmp_path / "out")
    assert words.startswith(f"The claims in {folder} cannot be read; seen: ")


def test_an_unsuitable_folder_is_described(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "run.json").write_text('{"kind": "claims"}')
    words = {"nothere": "does not exist", "empty": "holds no results"}
    words["one/profile.nc"] = "is a file"
    words["other"] = "holds a ledger of claims"
    saved(tmp_path / "one", seed=0)
    for place, what in words.items():
        line = error_line("report", tmp_path / place)
        assert line.startswith(f"{tmp_path / place} {what}; try: ")
    line = error_line("claims", tmp_path / "nothere", "--out", tmp_path / "out")
    assert line.startswith(f"{tmp_path / 'nothere'} needs a text")


QUICK = ("--context", 32, "--sequences", 8, "--surrogates", 2)
RUNS = ["slow_stop", "fast_stop", "long_planes", "norms_not_worth", "retrieval_planes"]
RUNS += ["preferences_reverse", "slow_induction", "slow_reach", "apostrophes"]


@pytest.fixture
def texts(tmp_path: Path) -> list[object]:
    for name, letters in (("novel", "abcd efg"), ("code", "hi jklm")):
        (tmp_path / f"{name}.txt").write_text(letters * 300)
    return ["--text", tmp_path / "novel.txt", "--text", tmp_path / "code.txt"]


@pytest.mark.usefixtures("pageless")
def test_claims_that_were_left_out_run_only_with_the_model(
    ropelens, model, texts, tmp_path
):
    ended = ropelens(
        "claims", model, *texts, *QUICK, "--quick", "--out", tmp_path / "quick"
    )
    folder = tmp_path / "another-name"
    folder.symlink_to(tmp_path / "quick" / "tiny-llama")
    assert f"ropelens claims '{model}' --text FILE" in ended.err
    ended = ropelens("claims", folder, "--out", tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "run.json").read_text())
    assert saved["model"]["name"] == "tiny llama", (
        "the title of the page names the model"
    )
    assert (ended.code, ", ".join(RUNS[:8]) in ended.err) == (0, True)
    assert f"ropelens claims {folder} --model MODEL --text FILE" in ended.err
    record = json.loads((folder / "run.json").read_text())
    record["arguments"]["model"] = str(
        tmp_path / "trap"
    )  # a folder names no model to load
    (folder / "run.json").write_text(json.dumps(record))
    given = ("claims", folder, "--model", model, *texts)
    assert (
        "tokens in further runs"
        in ropelens(*given, "--plan", "--out", tmp_path / "all").out
    )
    assert not (tmp_path / "all").exists()
    assert ropelens(*given, "--out", tmp_path / "all").code == 0
    table = pd.read_csv(tmp_path / "all" / "claims.csv")
    rows = json.loads((tmp_path / "all" / "claims.json").read_text())
    assert {*RUNS} < {*table["claim"]}
    assert [*rows[0]] == [*table.columns]
    assert [row["claim"] for row in rows] == table["claim"].tolist()
    assert "NaN" not in (tmp_path / "all" / "claims.json").read_text()
    record["model"]["fingerprint"] = "files:0"
    (folder / "run.json").write_text(json.dumps(record))
    assert (
        "was measured on another model"
        in ropelens(*given, "--out", tmp_path / "x").problem
    )


@pytest.mark.usefixtures("pageless")
def test_settings_are_saved_as_they_end(ropelens, model: Path, texts, tmp_path):
    out = tmp_path / "out"
    what = {"--contexts": "24,32", "--model": "bundled"}
    for option, value in what.items():  # they need --robust, or an analyzed folder
        assert f"{option} " in ropelens("claims", model, *texts, option, value).problem
    robust = (
        "claims",
        model,
        *texts,
        *QUICK[2:],
        "--contexts",
        "24,32",
        "--robust",
        "--quick",
    )
    with mock.patch(
        "ropelens.claims.ledger.compare_settings", side_effect=KeyboardInterrupt
    ):
        ropelens(*robust, "--out", out)
    with mock.patch(
        "ropelens.claims.claim_runs.run_for_claims", side_effect=KeyboardInterrupt
    ):
        not_quick = ropelens(*robust[:-1], "--out", out)
    assert "is measured already" in not_quick.err
    unused = f"the progress in {out / '.unfinished' / 'tiny-llama'} is not used"
    assert unused in not_quick.err
    with mock.patch("ropelens.claims.claim_runs.ledger", side_effect=AssertionError):
        ended = ropelens(*robust, "--out", out)
    assert "is not used" not in ended.err
    assert ended.code == 0
    assert "for 4 settings" in ended.err
    assert ended.err.count("is measured already") == 4
    table = pd.read_csv(out / "claims.csv").set_index("claim")
    assert table.loc["band", "settings"] == 8
    assert table["robust"].between(0, 1).all()
    assert not (out / ".unfinished").exists()
    assert "verdicts are the same in all settings." in ended.err
    assert "Omitted" not in ended.err  # no claim that runs the model was tested
    page = (out / "index.html").read_text()
    assert "Original: not stated as a number: the lowest frequencies dominate" in page
    assert "of 8 settings" in page
