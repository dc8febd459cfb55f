"""Studies: variants and seeds, in pairs, shared out, passed over and refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from forked import forked
from safetensors.torch import load_file
from trained import NANO, OPTIONS, STUDY, small, study, train
from transformers import AutoModelForCausalLM

from ropelens.errors import BadArgument, RopelensError
from ropelens.models.rope import measure_rope
from ropelens.train import study as studies
from ropelens.train.loop import TrainingFailed
from ropelens.train.study import read_study, run_study

__all__ = ["small", "study"]


@pytest.fixture
def place(study: Path) -> Path:
    """The folder of the study's file and its text."""
    return study.parent


def run_json(run: Path) -> dict:
    return json.loads((run / "run.json").read_text())


def test_runs_share_one_tokenizer_and_the_tokens(study: Path) -> None:
    runs = [path.parent for path in study.rglob("run.json")]
    assert {run_json(run)["data"] for run in runs} == {"../../../data"}
    assert len({(run / "tokenizer.json").read_bytes() for run in runs}) == 1
    assert len(list(study.rglob("train.npy"))) == 1
    names = sorted(run.relative_to(study).as_posix() for run in runs)
    variants = ["nope", "p-rope-0.5", "rope"]
    assert names == [f"nano/{name}/seed-{seed}" for name in variants for seed in (0, 1)]
    assert all("finished" in run_json(run) for run in runs)
    history = study / "nano/p-rope-0.5/seed-1/history"
    assert sorted(p.name for p in history.iterdir()) == ["step-000001", "step-000002"]


def test_one_seed_starts_from_the_same_weights(study: Path) -> None:
    """The first step's rate is so small that the models of step 1 have hardly moved."""
    first = "history/step-000001/model.safetensors"
    embedding = {
        (name, seed): load_file(study / "nano" / name / f"seed-{seed}" / first)[
            "model.embed_tokens.weight"
        ]
        for name in ("rope", "nope")
        for seed in (0, 1)
    }
    apart = (embedding["rope", 0] - embedding["rope", 1]).abs().mean()
    assert (embedding["rope", 0] - embedding["nope", 0]).abs().mean() < apart / 2


@pytest.mark.parametrize(("name", "turning"), [("rope", 8), ("p-rope-0.5", 4), ("nope", 0)])
def test_a_trained_model_rotates_as_its_variant(study: Path, name: str, turning: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(study / "nano" / name / "seed-0")
    inv_freq = model.model.rotary_emb.inv_freq
    plain = 10_000.0 ** -(torch.arange(8) / 8)
    assert int((inv_freq != 0).sum()) == turning
    torch.testing.assert_close(inv_freq[inv_freq != 0], plain[inv_freq != 0])
    if turning:
        assert int((measure_rope(model)["inv_freq"][0] > 0).sum()) == turning


def test_a_study_is_the_same_as_its_runs_alone(
    study: Path, place: Path, small: None, tmp_path: Path
) -> None:
    options = OPTIONS | {"steps": 3, "log_every": 10, "eval_every": 250, "variant": "nope"}
    alone = train([place / "story.txt"], out=tmp_path / "run", **options)
    theirs = load_file(study / "nano/nope/seed-0/model.safetensors")
    assert all(
        torch.equal(weight, theirs[name])
        for name, weight in load_file(alone / "model.safetensors").items()
    )


def test_what_is_done_is_passed_over(
    study: Path, place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = {p: p.stat().st_mtime_ns for p in study.rglob("*.safetensors")}
    run_study(place / "study.toml", out=study)
    assert {p: p.stat().st_mtime_ns for p in study.rglob("*.safetensors")} == before
    assert capfd.readouterr().err.count("is finished already") == 6


def test_what_another_process_does_is_left_to_it(
    place: Path, small: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "study.toml"
    file.write_text(STUDY.replace("seeds = [0, 1]", "seeds = [0]"))
    busy = tmp_path / "out/nano/rope/seed-0"
    busy.mkdir(parents=True)
    with FileLock(busy / ".lock"):
        run_study(file, out=tmp_path / "out", text=[place / "story.txt"])
        with pytest.raises(BadArgument) as caught:
            train([place / "story.txt"], out=busy, **OPTIONS)
    assert caught.value.what == f"another process is at work on the run in {busy}."
    said = capfd.readouterr().err
    assert said.endswith("another process is at work on nano/rope/seed-0\n")
    assert not (busy / "model.safetensors").exists()
    assert (tmp_path / "out/nano/nope/seed-0/model.safetensors").exists()


def test_a_run_that_diverges_does_not_stop_the_others(
    place: Path, small: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "study.toml"
    file.write_text(
        'variants = ["rope", "nope"]\nsizes = ["nano"]\ncontext = 32\n'
        "vocabulary = 300\nsteps = 40\nlearning_rate = 1e30"
    )
    with pytest.raises(TrainingFailed) as caught:
        run_study(file, out=tmp_path / "out", text=[place / "story.txt"])
    assert caught.value.what == "2 of 2 runs of the study diverged."
    assert caught.value.parts["seen"] == "nano/rope/seed-0, nano/nope/seed-0"
    assert capfd.readouterr().err.count("the loss is not a finite number") == 2


TOGETHER = """\
import math
from pathlib import Path
from ropelens.train import loop
from ropelens.train import settings as sizes
from ropelens.train.settings import Size
from ropelens.train.study import run_study
from ropelens.models.processes import processes

sizes.SIZES = dict(sizes.SIZES) | {{"nano": {size!r}}}
loss_of = loop.loss_of

def broken(model, tokens, settings, **rest):
    one = processes().process_index == 1 and settings.variant == "nope"
    return loss_of(model, tokens, settings, **rest) * (math.nan if one else 1)

loop.loss_of = broken
run_study(Path({file!r}), out=Path({out!r}), text=[Path({text!r})])
"""


def test_processes_that_train_together_stay_in_step(
    place: Path, small: None, tmp_path: Path
) -> None:
    """Past a run that another command has, and past one that diverges on one of them."""
    file, out = tmp_path / "study.toml", tmp_path / "out"
    file.write_text(
        'variants = ["rope", "nope", "p-rope:0.5"]\nsizes = ["nano"]\ncontext = 32\n'
        "vocabulary = 300\nsteps = 3"
    )
    paths = {"file": str(file), "out": str(out), "text": str(place / "story.txt")}
    script = TOGETHER.format(size=NANO, **paths)
    busy = out / "nano/rope/seed-0"
    busy.mkdir(parents=True)
    with FileLock(busy / ".lock"):
        ended = forked(2, script)
    assert ended.stderr.count("another process is at work on nano/rope/seed-0") == 1
    assert "TrainingFailed: 1 of 3 runs of the study diverged." in ended.stderr
    assert run_json(out / "nano/p-rope-0.5/seed-0")["processes"] == 2
    assert "finished" in run_json(out / "nano/p-rope-0.5/seed-0")
    assert not (busy / "model.safetensors").exists()


def test_a_changed_study_is_refused(study: Path, tmp_path: Path, place: Path) -> None:
    file = tmp_path / "study.toml"
    file.write_text(STUDY.replace("steps = 3", "steps = 4"))
    with pytest.raises(BadArgument) as caught:
        run_study(file, out=study, text=[place / "story.txt"])
    assert caught.value.what == f"the study in {study} was made with other settings."
    assert caught.value.parts["seen"] == "steps: 3, now 4"


def test_a_study_and_a_run_do_not_share_a_folder(
    study: Path, place: Path, small: None, tmp_path: Path
) -> None:
    with pytest.raises(BadArgument, match="or other results; a"):
        train([place / "story.txt"], out=study, **OPTIONS)
    run = train([place / "story.txt"], out=tmp_path / "run", **OPTIONS | {"steps": 2})
    with pytest.raises(BadArgument, match="or other results; a"):
        run_study(place / "study.toml", out=run)
    assert not (run / "study.json").exists()


def test_the_folder_of_a_run_is_a_name() -> None:
    run = studies.Run("longrope:4/1,2/3,4", 0, "tiny")
    assert run.folder == Path("tiny/longrope-4-1-2-3-4/seed-0")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("variants = [", "cannot be read as a study"),
        ("seeds = [1]", "must each name one or more"),
        ('variants = ["rope"]\nlayers = 3', "A study has no 'layers'"),
        ('variants = ["nope", "nope"]', "must each name one or more, each once"),
        ('variants = ["warp"]', "No RoPE variant is called 'warp'"),
        ('variants = ["rope", "nope-every:2"]', "cannot express nope-every:2"),
        ('variants = ["rope"]\nsizes = ["huge"]', "No model has the size 'huge'"),
        ('variants = ["rope"]\nlearning_rate = "low"', "learning_rate must be"),
    ],
)
def test_files_that_are_no_study(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "study.toml"
    file.write_text(text)
    with pytest.raises(RopelensError, match=message):
        run_study(file, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_no_text_and_no_file(tmp_path: Path) -> None:
    with pytest.raises(BadArgument, match=r"none\.toml cannot be read as a study"):
        read_study(tmp_path / "none.toml")
    (tmp_path / "study.toml").write_text('variants = ["rope"]')
    with pytest.raises(BadArgument, match="names no text to train on"):
        run_study(tmp_path / "study.toml", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_all_variants_of_a_seed_come_before_the_next() -> None:
    study = studies.Study(variants=("rope", "nope"), seeds=(0, 1))
    order = [(run.seed, run.variant) for run in study.runs()]
    assert order == [(seed, variant) for seed in (0, 1) for variant in ("rope", "nope")]
