"""A trial that was stopped goes on as if it had not been."""

from __future__ import annotations

import csv
import random
from pathlib import Path

import pytest
from cli_runs import Command, python

__all__ = ["python"]

TOOLS = Path(__file__).parents[2] / "tools"
SMALL = ["--size", "1x32x1x1", "--vocabulary", "300", "--context", "64", "--batch", "4"]


def rows(out: Path) -> list[dict[str, str]]:
    with (out / "trials.csv").open(newline="") as file:
        return [row | {"cpu_seconds": ""} for row in csv.DictReader(file)]


@pytest.mark.filterwarnings("ignore:.* are also learnt from")  # of short lists
def test_a_resumed_trial_writes_the_same_rows(
    tmp_path: Path, python: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.set_num_threads", lambda count: None)  # of all tests to come
    r = random.Random(0)
    words = [f"{a}{b}" for a in "abcdefghij" for b in "klmnopqrst"]
    lines = [" ".join(r.choices(words, k=10)) for _ in range(2_000)]
    (tmp_path / "novel.txt").write_text("\n".join(lines))
    for part, seed in (("train", "0"), ("valid", "1")):
        options = ["--characters", "8e4", "--seed", seed]
        made = tmp_path / "mixture" / part
        assert python(TOOLS / "mixture.py", tmp_path / "novel.txt", made, *options).code == 0
    for out, stops in (("whole", ["2048"]), ("resumed", ["1024", "2048"])):
        for tokens in stops:
            where = ["--mixture", tmp_path / "mixture", "--out", tmp_path / out]
            looks = ["--tokens", tokens, "--look", "1024"]
            assert python(TOOLS / "trials.py", "t", *where, *SMALL, *looks).code == 0
    whole = rows(tmp_path / "whole")
    assert [row["step"] for row in whole] == ["4", "8"]
    assert rows(tmp_path / "resumed") == whole
