"""`ropelens claims` on folders of results, and refused arguments."""

import json
import shutil
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


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ledger of two analyses, which are in the same folder."""
    place = tmp_path_factory.mktemp("ledger")
    folders = [saved(place / name, seed=n) for n, name in enumerate(("one", "two"))]
    return written(*folders, place / "both")


def written(*folders: Path) -> Path:
    """Write the ledger of all folders except the last to the last folder."""
    *inputs, out = map(str, folders)
    ended = CliRunner().invoke(app, ["claims", *inputs, "--out", out])
    assert (ended.exit_code, ended.stdout) == (0, f"{out}/index.html\n"), ended.output
    assert "null_high  q_value\n" in ended.stderr
    assert "q_value: among claims" in ended.stderr
    assert "  band: planes between a layer's longest plane and" in ended.stderr
    return folders[-1]


def error_line(*words: str | Path) -> str:
    """The error of a command that is refused."""
    with pytest.raises(rl.RopelensError) as refused:
        CliRunner().invoke(app, [*map(str, words)], catch_exceptions=False)
    return refused.value.line


def test_saved_analyses_become_a_ledger_and_ledgers_one(ledger: Path, tmp_path: Path):
    table = pd.read_csv(ledger / "claims.csv")
    assert table["model"].unique().tolist() == ["one", "two"]
    record = json.loads((ledger / "run.json").read_text())
    assert record["kind"] == "claims"
    assert record["findings"][0].startswith("Of ")
    last = written(saved(tmp_path / "last", seed=9), tmp_path / "of last")
    joint = pd.read_csv(written(ledger, last, tmp_path / "all") / "claims.csv")
    assert joint["model"].unique().tolist() == ["one", "two", "last"]
    pd.testing.assert_frame_equal(joint.iloc[: len(table)], table)


def test_an_analysis_stays_and_no_model_is_in_a_ledger_twice(ledger: Path, tmp_path: Path):
    first, second = (ledger.parent / name for name in ("one", "two"))
    assert "would replace" in error_line("claims", first, "--out", first)
    text = ("--text", first / "run.json")
    words = error_line("claims", ledger, first, *text, "--out", tmp_path / "out")
    assert words == "Saved results are not measured again; try: without --text"
    for more in ([ledger, first], [second, ledger]):
        words = error_line("claims", *more, "--out", tmp_path / "out")
        assert words.startswith("A ledger has each model once; seen: ")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "damage", ["run.json kind", "claims.csv claim,model", "claims.csv", ""]
)
def test_a_broken_ledger_is_refused_in_one_line(ledger: Path, tmp_path: Path, damage: str):
    folder = Path(shutil.copytree(ledger, tmp_path / "ledger"))
    name, _, content = damage.partition(" ")
    if name == "run.json":
        (folder / name).write_text('{"kind": "claims"}')
    elif name:
        (folder / name).write_text(content)
    else:
        (folder / "claims.csv").unlink()
    words = error_line("claims", folder, "--out", tmp_path / "out")
    assert words.startswith(f"The claims in {folder} cannot be read; seen: ")


@pytest.mark.parametrize("command", ["claims", "report"])
def test_an_unsuitable_folder_is_described(tmp_path: Path, command: str):
    kind = "comparison" if command == "claims" else "claims"
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "run.json").write_text(json.dumps({"kind": kind}))
    words = {"nothere": "does not exist", "empty": "holds no results"}
    words["one/profile.nc"] = "is a file"
    words["other"] = f"holds a {'ledger of ' * (kind == 'claims')}{kind}"
    saved(tmp_path / "one", seed=0)
    out = ["--out", tmp_path / "out"] * (command == "claims")
    for place, what in words.items():
        line = error_line(command, tmp_path / place, *out)
        assert line.startswith(f"{tmp_path / place} {what}; try: ")
