"""A trial that was stopped goes on as if it had not been."""

from __future__ import annotations

import csv
import random
import subprocess
import sys
from pathlib import Path

TOOLS = Path(__file__).parents[2] / "tools"
SMALL = ["--size", "1x32x1x1", "--vocabulary", "300", "--context", "64", "--batch", "4"]


def run(script: str, *arguments: str | Path) -> None:
    command = [sys.executable, TOOLS / script, *arguments]
    subprocess.run(command, check=True, capture_output=True)


def rows(out: Path) -> list[dict[str, str]]:
    with (out / "trials.csv").open(newline="") as file:
        return [row | {"cpu_seconds": ""} for row in csv.DictReader(file)]


def test_a_resumed_trial_writes_the_same_rows(tmp_path: Path) -> None:
    r = random.Random(0)
    words = [f"{a}{b}" for a in "abcdefghij" for b in "klmnopqrst"]
    lines = [" ".join(r.choices(words, k=10)) for _ in range(2_000)]
    (tmp_path / "novel.txt").write_text("\n".join(lines))
    for part, seed in (("train", "0"), ("valid", "1")):
        options = ["--characters", "8e4", "--seed", seed]
        run("mixture.py", tmp_path / "novel.txt", tmp_path / "mixture" / part, *options)
    for out, stops in (("whole", ["2048"]), ("resumed", ["1024", "2048"])):
        for tokens in stops:
            where = ["--mixture", tmp_path / "mixture", "--out", tmp_path / out]
            run("trials.py", "t", *where, *SMALL, "--tokens", tokens, "--look", "1024")
    whole = rows(tmp_path / "whole")
    assert [row["step"] for row in whole] == ["4", "8"]
    assert rows(tmp_path / "resumed") == whole
