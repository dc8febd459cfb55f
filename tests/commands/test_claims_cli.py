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


def said(*words: str | Path) -> str:
    """What the command says that it refuses."""
    with pytest.raises(rl.RopelensError) as refused:
        CliRunner().invoke(app, [*map(str, words)], catch_exceptions=False)
    return refused.value.line


def test_a_model_that_would_be_in_a_ledger_twice_is_refused(tmp_path: Path) -> None:
    one, two = (saved(tmp_path / name, seed=n) for n, name in enumerate(("one", "two")))
    both = tmp_path / "both"
    ended = CliRunner().invoke(app, ["claims", str(one), str(two), "--out", str(both)])
    assert ended.exit_code == 0, ended.output
    for more in ([both, one], [two, both]):
        words = said("claims", *more, "--out", tmp_path / "out")
        assert words.startswith("A ledger has each model once; seen: ")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("damage", ["other columns", "empty", "no keys", "no table"])
def test_a_ledger_that_cannot_be_read_is_refused_in_a_line(tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "ledger"
    first = ["claims", str(saved(tmp_path / "one", seed=0)), "--out", str(folder)]
    assert CliRunner().invoke(app, first).exit_code == 0
    if damage == "no keys":
        (folder / "run.json").write_text(json.dumps({"kind": "claims"}))
    elif damage == "no table":
        (folder / "claims.csv").unlink()
    else:
        (folder / "claims.csv").write_text("" if damage == "empty" else "claim,model\na,b\n")
    words = said("claims", folder, "--out", tmp_path / "out")
    assert words.startswith(f"The claims in {folder} cannot be read; seen: ")


@pytest.mark.parametrize("command", ["claims", "report"])
def test_what_a_command_does_not_take_is_named(tmp_path: Path, command: str) -> None:
    held = "comparison" if command == "claims" else "claims"
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "run.json").write_text(json.dumps({"kind": held}))
    words = {"nothere": "is no file or folder", "empty": "holds no results"}
    words["one/profile.nc"] = "is a file"
    words["other"] = f"holds a {'ledger of ' * (held == 'claims')}{held}"
    saved(tmp_path / "one", seed=0)
    out = ["--out", tmp_path / "out"] * (command == "claims")
    for place, what in words.items():
        line = said(command, tmp_path / place, *out)
        assert line.startswith(f"{tmp_path / place} {what}; try: ")
