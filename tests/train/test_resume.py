"""Runs that are stopped, by whatever it is, and go on; and processes that share one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from disk import full_disk
from forked import forked
from safetensors.torch import load_file
from trained import OPTIONS, metrics, run, story, text, train

from ropelens.errors import BadArgument, BadText
from ropelens.train import loop

__all__ = ["run", "text"]

HERE = os.pathsep.join(sys.path)  # where the tests import from


def stopped_after(step: int, text: Path, out: Path, **options: object) -> str:
    """What a run in `out` says that is stopped once the checkpoint of `step` is whole."""
    save = loop.save_checkpoint

    def save_and_stop(*arguments: object) -> None:
        save(*arguments)
        if arguments[-1].step == step:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "save_checkpoint", save_and_stop)
        with pytest.raises(KeyboardInterrupt) as stopped:
            train([text], out=out, checkpoint_seconds=0, **OPTIONS | options)
    return str(stopped.value)


def test_killed_and_resumed_is_bit_for_bit_the_same(
    run: Path, text: Path, tmp_path: Path
) -> None:
    out = tmp_path / "killed"
    script = (
        "from pathlib import Path; from ropelens.train.settings import Size\n"
        "from trained import train\n"
        f"train([Path({str(text)!r})], out=Path({str(out)!r}), checkpoint_seconds=0, "
        + ", ".join(f"{name}={value!r}" for name, value in OPTIONS.items())
        + ")"
    )
    threads = str(torch.get_num_threads())
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        env=os.environ | {"OMP_NUM_THREADS": threads, "PYTHONPATH": HERE},
    )
    try:
        while not (out / loop.CHECKPOINT).exists():
            assert process.poll() is None
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait()
    assert not (out / "model.safetensors").exists()
    (out / f".{loop.CHECKPOINT}.part").write_text("as a kill while it is written leaves it")
    train([text], out=out, checkpoint_seconds=0, **OPTIONS)
    assert metrics(out) == metrics(run)
    resumed, whole = load_file(out / "model.safetensors"), load_file(run / "model.safetensors")
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)


TOGETHER = """\
import sys
from pathlib import Path
from ropelens.train import loop
from ropelens.train.settings import Size
from trained import train

save = loop.save_checkpoint

def save_and_stop(*arguments):
    save(*arguments)
    if arguments[-1].step == int(sys.argv[2]) < 20:
        raise SystemExit(1)

loop.save_checkpoint = save_and_stop
train([Path({text!r})], valid=[Path({valid!r})], out=Path(sys.argv[1]), **{options!r})
"""


def test_two_processes_learn_what_one_does(text: Path, tmp_path: Path) -> None:
    """In float32, for sums in another order differ.

    Stopped between two rows of metrics.csv, they go on.
    """
    options = OPTIONS | {"precision": "fp32", "steps": 20, "checkpoint_seconds": 0}
    valid = tmp_path / "valid.txt"
    valid.write_text(story(45)[20:])  # 19 sequences, which no two share evenly
    alone = train([text], valid=[valid], out=tmp_path / "alone", **options)
    script = TOGETHER.format(text=str(text), valid=str(valid), options=options)
    for last, code in ((7, 1), (20, 0)):
        ended = forked(2, script, tmp_path / "two", last)
        assert ended.returncode == code, ended.stderr
    assert json.loads((tmp_path / "two" / "run.json").read_text())["processes"] == 2
    for ours, theirs in zip(metrics(alone), metrics(tmp_path / "two"), strict=True):
        for name in ("train_loss", "valid_loss"):
            loss = float(theirs[name] or "nan")
            assert float(ours[name] or "nan") == pytest.approx(loss, rel=1e-5, nan_ok=True)
    one, two = (load_file(run / "model.safetensors") for run in (alone, tmp_path / "two"))
    assert all(torch.allclose(one[name], two[name], atol=1e-4) for name in one)


def test_whatever_a_full_disk_stops_is_explained(run: Path, text: Path, tmp_path: Path) -> None:
    """By the largest file that the system allows: one larger than the model is not written."""
    out, largest = tmp_path / "run", int(1.5 * (run / "model.safetensors").stat().st_size)
    with full_disk(largest), pytest.raises(BadArgument) as caught:
        train([text], out=out, checkpoint_seconds=0, **OPTIONS)
    assert caught.value.what == f"The disk is full: the run in {out} cannot go on."
    train([text], out=out, **OPTIONS)
    assert metrics(out) == metrics(run)


@pytest.mark.parametrize("step", [24, 60])
def test_a_stop_after_any_step(
    run: Path, text: Path, tmp_path: Path, step: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """Between rows of metrics.csv, each the mean of five steps, and after the last."""
    told = stopped_after(step, text, tmp_path)
    assert told == "stopped; the same command resumes from its last checkpoint, if any"
    assert not (tmp_path / "model.safetensors").exists()
    train([text], out=tmp_path, **OPTIONS)
    assert f"resuming from step {step}\n" in capfd.readouterr().err
    assert not (tmp_path / loop.CHECKPOINT).exists()
    assert metrics(tmp_path) == metrics(run)
    for name in ("model.safetensors", "config.json", "generation_config.json"):
        assert (tmp_path / name).read_bytes() == (run / name).read_bytes()
    kept, expected = ((of / "history").iterdir() for of in (tmp_path, run))
    assert {folder.name for folder in kept} == {folder.name for folder in expected}


def test_a_run_that_goes_on_in_another_way_says_so(
    text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    stopped_after(5, text, tmp_path, steps=8)
    path = tmp_path / "run.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"processes": 2, "threads": 99}))
    capfd.readouterr()
    train([text], out=tmp_path, **OPTIONS | {"steps": 8})
    told = "other processes, threads: not bit for bit the run that it would have been"
    assert told in capfd.readouterr().err.splitlines()
    train([text], out=tmp_path, **OPTIONS | {"steps": 8})
    assert "not bit for bit" not in capfd.readouterr().err  # it is finished


def test_what_a_failed_start_wrote_is_not_read(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    (tmp_path / "short.txt").write_text("Too short.")
    with pytest.raises(BadText, match="The validation text is too short at a context of 32"):
        train([text], valid=[tmp_path / "short.txt"], out=out, **OPTIONS)
    assert (out / "data" / "valid.npy").exists()
    train([text], out=out, **OPTIONS | {"steps": 10, "eval_every": 10})
    assert metrics(out)[-1]["valid_loss"]
