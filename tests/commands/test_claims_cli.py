"""`ropelens claims`: plans, settings, claims that were left out, and claims.json."""

import json
from pathlib import Path
from unittest import mock

import pandas as pd
import pytest
from cli_runs import Command

QUICK = ("--context", 32, "--sequences", 8, "--surrogates", 2)
RUNS = ["slow_stop", "fast_stop", "long_planes", "slow_induction", "slow_reach", "apostrophes"]


@pytest.fixture
def texts(tmp_path: Path) -> list[object]:
    for name, letters in (("novel", "abcd efg"), ("code", "hi jklm")):
        (tmp_path / f"{name}.txt").write_text(letters * 300)
    return ["--text", tmp_path / "novel.txt", "--text", tmp_path / "code.txt"]


@pytest.mark.usefixtures("pageless")
def test_claims_that_were_left_out_run_only_with_the_model(ropelens, model, texts, tmp_path):
    ended = ropelens("claims", model, *texts, *QUICK, "--quick", "--out", tmp_path / "quick")
    folder = tmp_path / "quick" / "tiny-llama"
    assert f"ropelens claims '{model}' --text FILE" in ended.err
    ended = ropelens("claims", folder, "--out", tmp_path / "saved")
    assert (ended.code, ", ".join(RUNS[:5]) in ended.err) == (0, True)
    assert f"ropelens claims {folder} --model MODEL --text FILE" in ended.err
    record = json.loads((folder / "run.json").read_text())
    record["arguments"]["model"] = str(tmp_path / "trap")  # a folder names no model to load
    (folder / "run.json").write_text(json.dumps(record))
    given = ("claims", folder, "--model", model, *texts)
    planned = ropelens(*given, "--plan", "--out", tmp_path / "all")
    assert "tokens in further runs" in planned.out
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
    assert "was measured on another model" in ropelens(*given, "--out", tmp_path / "x").problem


@pytest.mark.usefixtures("pageless")
def test_settings_are_saved_as_they_end(ropelens: Command, model: Path, texts, tmp_path):
    out, what = tmp_path / "out", {"--contexts": "24,32", "--model": "bundled"}
    for option, value in what.items():  # they need --robust, or an analyzed folder
        assert f"{option} " in ropelens("claims", model, *texts, option, value).problem
    robust = ("claims", model, *texts, *QUICK[2:], "--contexts", "24,32", "--robust", "--quick")
    with mock.patch("ropelens.claims.tables.compare_settings", side_effect=KeyboardInterrupt):
        ropelens(*robust, "--out", out)
    with mock.patch("ropelens.claims.claim_runs.ledger", side_effect=AssertionError):
        ended = ropelens(*robust, "--out", out)
    assert ended.code == 0
    assert "for 4 settings" in ended.err
    assert ended.err.count("is measured already") == 4
    table = pd.read_csv(out / "claims.csv").set_index("claim")
    assert table.loc["band", "settings"] == 8
    assert table["robust"].between(0, 1).all()
    assert not (out / ".unfinished").exists()
    assert "verdicts are the same in all settings. Omitted: claims that need" in ended.err
    page = (out / "index.html").read_text()
    assert "Original: not stated as a number: the lowest frequencies dominate" in page
    assert "of 8 settings" in page
