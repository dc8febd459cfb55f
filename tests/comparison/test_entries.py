"""Tests of the entries of a comparison: runs, studies, and refused folders."""

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from trained import NANO, VARIANTS, copy_of, run_folder, runs_in

from ropelens.comparison.entries import find_entries
from ropelens.errors import BadArgument, RopelensError


def test_a_study_gives_its_runs_in_order(study: Path):
    entries = runs_in(study)
    assert [(e.variant, e.seed) for e in entries] == [(v, s) for s in (0, 1) for v in VARIANTS]
    assert entries[0].name == "rope seed 0"
    assert {e.group for e in entries} == set(VARIANTS)
    assert list(entries[0].checkpoints()) == [1, 2]


def test_unfinished_runs_of_a_study_are_left_out(study: Path, tmp_path: Path):
    copy = copy_of(study, tmp_path)
    unfinished = run_folder(copy, "nope", 1)
    change(unfinished, without="finished")
    shutil.rmtree(run_folder(copy, "p-rope:0.5", 0))
    with pytest.warns(UserWarning, match=r"left out: .*p-rope-0.5/seed-0, .*nope/seed-1"):
        entries, left_out = find_entries([copy])
    names = ["rope seed 0", "nope seed 0", "rope seed 1", "p-rope:0.5 seed 1"]
    assert [e.name for e in entries] == names
    assert left_out == ["nano/p-rope-0.5/seed-0", "nano/nope/seed-1"]
    with pytest.raises(BadArgument, match=r"seed-1 cannot be compared with"):
        find_entries([unfinished, run_folder(copy, "rope", 0)])


def test_folders_that_cannot_be_compared_are_refused(study: Path, tmp_path: Path):
    rope, again = (run_folder(x, "rope", 0) for x in (study, copy_of(study, tmp_path)))
    cases = {
        "both runs are rope seed 0": [rope, again],
        "cannot be compared with": [study, tmp_path],
        "needs two or more folders": [rope, rope / ".." / rope.name],
    }
    for words, paths in cases.items():
        with pytest.raises(BadArgument, match=words):
            find_entries(paths)


def change(run: Path, *, without: str = "", **settings: object) -> None:
    record = json.loads((run / "run.json").read_text())
    record.pop(without, None)
    record["settings"] |= settings
    (run / "run.json").write_text(json.dumps(record))


def test_runs_with_different_settings_are_refused(study: Path, tmp_path: Path):
    copy = copy_of(study, tmp_path)
    first, other = (run_folder(copy, name, 0) for name in ("rope", "nope"))
    change(other, learning_rate=1.0)
    with pytest.raises(RopelensError, match=r"learning_rate: 0\.01 and 1\.0"):
        find_entries([first, other])
    change(other, size=asdict(replace(NANO, layers=3)))  # another size may have another rate
    entries, _ = find_entries([first, other])
    assert [entry.group for entry in entries] == ["nano rope", "3x32x2x1 nope"]
    change(other, context=64, steps=9)
    with pytest.raises(RopelensError, match="context: 32 and 64; steps: 2 and 9"):
        find_entries([first, other])


def test_damaged_records_are_refused(study: Path, tmp_path: Path):
    copy = copy_of(study, tmp_path)
    for file in (run_folder(copy, "nope", 0) / "run.json", copy / "study.json"):
        file.write_text("{")
        with pytest.raises(BadArgument, match=rf"{file.name} cannot be read"):
            find_entries([copy])
