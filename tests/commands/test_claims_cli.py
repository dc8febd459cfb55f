"""`ropelens claims` on folders of results, one or several, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from synthetic_profile import synthetic_profile
from typer.testing import CliRunner

import ropelens as rl
from ropelens.commands.app import app


def saved(folder: Path, *, seed: int) -> Path:
    profile, _ = synthetic_profile(layers=4, seed=seed)
    folder.mkdir()
    more = {"trained_context": 512, "tokens_sha256": "0"}
    rl.save(profile.assign_attrs(more), folder / "profile.nc")
    (folder / "run.json").write_text(json.dumps({"kind": "analysis"}))
    return folder


@pytest.mark.parametrize("names", [["one"], ["one", "two"]])
def test_saved_analyses_become_a_ledger(tmp_path: Path, names: list[str]) -> None:
    folders = [str(saved(tmp_path / name, seed=n)) for n, name in enumerate(names)]
    ended = CliRunner().invoke(app, ["claims", *folders, "--out", str(tmp_path / "out")])
    assert ended.exit_code == 0, ended.output
    assert ended.stdout.strip() == str(tmp_path / "out" / "index.html")
    table = pd.read_csv(tmp_path / "out" / "claims.csv")
    assert table["model"].unique().tolist() == names
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    assert record["kind"] == "claims"
    assert record["findings"][0].startswith("Of ")
    again = ["claims", str(tmp_path / "out"), str(saved(tmp_path / "last", seed=9))]
    ended = CliRunner().invoke(app, [*again, "--out", str(tmp_path / "all")])
    assert ended.exit_code == 0, ended.output
    every = pd.read_csv(tmp_path / "all" / "claims.csv")
    assert every["model"].unique().tolist() == [*names, "last"]
    pd.testing.assert_frame_equal(every.iloc[: len(table)], table)


def test_a_ledger_is_not_written_over_an_analysis(tmp_path: Path) -> None:
    folder = saved(tmp_path / "one", seed=0)
    with pytest.raises(rl.BadArgument, match="would replace"):
        CliRunner().invoke(
            app, ["claims", str(folder), "--out", str(folder)], catch_exceptions=False
        )
