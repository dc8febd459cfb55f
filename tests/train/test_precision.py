"""The precision of training: the one that is faster, chosen once for a run and for a study."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from trained import NANO, OPTIONS, story, text, train

from ropelens.errors import BadArgument
from ropelens.train import settings as table
from ropelens.train.study import run_study

__all__ = ["text"]

AUTO = OPTIONS | {"precision": "auto", "steps": 2}


def precision_of(folder: Path, file: str = "run.json") -> str:
    record = json.loads((folder / file).read_text())
    return record["precision"] if file == "study.json" else record["settings"]["precision"]


def test_bf16_is_fast_where_the_processor_has_instructions_for_it() -> None:
    """By what the processor says of itself."""
    if not hasattr(torch.cpu, "get_capabilities"):
        pytest.skip("this torch does not say what the processor can")
    has = torch.cpu.get_capabilities()
    instructions = any(has.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))
    speeds = (table.bf16_speed(torch.device("cpu")) for _ in range(20))
    fast = any(speed >= table.WORTH_IT for speed in speeds)  # in a quiet moment
    assert fast == instructions


@pytest.mark.parametrize(("speed", "chosen"), [(0.1, "fp32"), (1.2, "fp32"), (3.0, "bf16")])
def test_the_faster_one_is_taken_and_said(
    speed: float,
    chosen: str,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(table, "bf16_speed", lambda _: speed)
    run = train([text], out=tmp_path / "run", **AUTO)
    assert precision_of(run) == chosen
    said = f"precision {chosen}: here bf16 is {speed:.2g} times as fast as fp32\n"
    assert capfd.readouterr().err.startswith(said)


def test_a_run_keeps_its_precision_on_another_machine(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "bf16_speed", lambda _: 3.0)
    run = train([text], out=tmp_path / "run", **AUTO)
    first = (run / "model.safetensors").read_bytes()
    record = json.loads((run / "run.json").read_text())
    del record["finished"]
    (run / "run.json").write_text(json.dumps(record))
    monkeypatch.setattr(table, "bf16_speed", lambda _: 0.1)
    train([text], out=run, **AUTO)
    assert precision_of(run) == "bf16"
    assert (run / "model.safetensors").read_bytes() == first
    with pytest.raises(BadArgument, match="precision: bf16, now fp32"):
        train([text], out=run, **AUTO | {"precision": "fp32"})


def test_the_runs_of_a_study_have_one_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever each of them is trained."""
    speeds = iter((0.1, 3.0, 3.0))
    monkeypatch.setattr(table, "bf16_speed", lambda _: next(speeds))
    monkeypatch.setattr(table, "SIZES", dict(table.SIZES) | {"nano": NANO})
    (tmp_path / "story.txt").write_text(story(100))
    file = tmp_path / "study.toml"
    file.write_text(
        'variants = ["rope", "nope"]\nsizes = ["nano"]\ntext = ["story.txt"]\n'
        "context = 32\nvocabulary = 300\nsteps = 1"
    )
    for _ in range(2):
        out = run_study(file, out=tmp_path / "out")
        assert precision_of(out, "study.json") == "fp32"
        runs = list(out.rglob("run.json"))
        assert {precision_of(run.parent) for run in runs} == {"fp32"}
    assert len(runs) == 2
