"""Studies of variants and seeds, their paired runs, and refused studies."""

import json
import re
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file
from trained import STUDY
from transformers import AutoModelForCausalLM

from ropelens.errors import BadArgument, RopelensError
from ropelens.measured_rotation.measure import measure_rope
from ropelens.runtime.records import write_json
from ropelens.train.run import read_study, run_study, runs_of
from ropelens.train.steps import TrainingFailed

SMALL = 'sizes = ["nano"]\ncontext = 32\nvocabulary = 300\n'


@pytest.fixture
def story(trained_study: Path) -> Path:
    return trained_study.parent / "story.txt"


def run_json(run: Path) -> dict:
    return json.loads((run / "run.json").read_text())


def test_runs_share_one_tokenizer_and_the_tokens(trained_study: Path):
    runs = [path.parent for path in trained_study.rglob("run.json")]
    assert {run_json(run)["data"] for run in runs} == {"../../../data"}
    assert len({(run / "tokenizer.json").read_bytes() for run in runs}) == 1
    assert len(list(trained_study.rglob("train.npy"))) == 1
    names = sorted(run.relative_to(trained_study).as_posix() for run in runs)
    variants = ["nope", "p-rope-0.5", "rope"]
    assert names == [f"nano/{name}/seed-{seed}" for name in variants for seed in (0, 1)]
    assert all("finished" in run_json(run) for run in runs)
    history = trained_study / "nano/p-rope-0.5/seed-1/history"
    assert sorted(p.name for p in history.iterdir()) == ["step-000001", "step-000002"]


def test_one_seed_starts_from_the_same_weights(trained_study: Path):
    """The learning rate of the first step is 0."""
    first = "history/step-000001/model.safetensors"
    runs = ("rope/seed-0", "rope/seed-1", "nope/seed-0")
    rope, other, nope = [
        load_file(trained_study / "nano" / run / first) for run in runs
    ]
    assert all(torch.equal(rope[name], nope[name]) for name in rope)
    name = "model.embed_tokens.weight"
    assert not torch.equal(rope[name], other[name])


@pytest.mark.parametrize(
    ("name", "turning"), [("rope", 8), ("p-rope-0.5", 4), ("nope", 0)]
)
def test_a_trained_model_rotates_as_its_variant(
    trained_study: Path, name: str, turning: int
):
    model = AutoModelForCausalLM.from_pretrained(
        trained_study / "nano" / name / "seed-0"
    )
    inv_freq = model.model.rotary_emb.inv_freq
    plain = 10_000.0 ** -(torch.arange(8) / 8)
    assert int((inv_freq != 0).sum()) == turning
    torch.testing.assert_close(inv_freq[inv_freq != 0], plain[inv_freq != 0])
    if turning:
        assert int((measure_rope(model)["inv_freq"][0] > 0).sum()) == turning


def test_finished_runs_are_skipped(
    trained_study: Path, capfd: pytest.CaptureFixture[str]
):
    before = {p: p.stat().st_mtime_ns for p in trained_study.rglob("*.safetensors")}
    run_study(trained_study.parent / "study.toml", out=trained_study)
    assert {
        p: p.stat().st_mtime_ns for p in trained_study.rglob("*.safetensors")
    } == before
    assert capfd.readouterr().err.count("is finished already") == 6


def test_a_run_of_another_process_is_skipped(story, tmp_path, capfd):
    file = tmp_path / "study.toml"
    file.write_text(f'variants = ["rope", "nope"]\nsteps = 1\n{SMALL}')
    busy = tmp_path / "out/nano/rope/seed-0"
    busy.mkdir(parents=True)
    write_json(tmp_path / "out/study.json", read_study(file))
    with FileLock(busy / ".lock"):
        run_study(file, out=tmp_path / "out", text=[story])
    assert capfd.readouterr().err.endswith(
        "another process works on nano/rope/seed-0\n"
    )
    assert not (busy / "model.safetensors").exists()
    assert (tmp_path / "out/nano/nope/seed-0/model.safetensors").exists()


def test_a_run_that_diverges_does_not_stop_the_others(story, tmp_path, capfd):
    file = tmp_path / "study.toml"
    file.write_text(
        f'variants = ["rope", "nope"]\nsteps = 9\nlearning_rate = 1e30\n{SMALL}'
    )
    with pytest.raises(TrainingFailed) as caught:
        run_study(file, out=tmp_path / "out", text=[story])
    assert caught.value.what == "2 of 2 runs of the study diverged."
    assert caught.value.parts["seen"] == "nano/rope/seed-0, nano/nope/seed-0"
    err = capfd.readouterr().err
    assert (
        len(re.findall(r"stopped at step \d+: the loss is not a finite number", err))
        == 2
    )
    weights = list(tmp_path.rglob("*.safetensors"))
    assert {path.parents[1].name for path in weights} == {"history"}
    assert all(x.isfinite().all() for path in weights for x in load_file(path).values())


def test_a_changed_study_is_refused(trained_study: Path, tmp_path: Path, story: Path):
    file = tmp_path / "study.toml"
    file.write_text(STUDY.replace("steps = 2", "steps = 4"))
    with pytest.raises(BadArgument) as caught:
        run_study(file, out=trained_study, text=[story])
    assert (
        caught.value.what
        == f"the study in {trained_study} was made with other settings."
    )
    assert caught.value.parts["seen"] == "steps: 2, now 4"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"none\.toml is not a study"),
        ("variants = [", "is not a study"),
        ('variants = ["rope"]', "Text to train on is missing"),
        (
            'variants = ["rope"]\nlearning_rate = nan',
            r"rate must be .*\s+seen:  float nan",
        ),
        ("seeds = [1]", "KeyError: 'variants'"),
        ('variants = ["rope"]\nlayers = 3', "unexpected keyword argument 'layers'"),
        (
            'variants = ["rope"]\ncontext = 2',
            r"context must be int, at least 3\.\s+seen: ",
        ),
        ('variants = ["warp"]', "There is no RoPE variant 'warp'"),
        ('variants = ["rope"]\nsizes = ["huge"]', "No model has the size 'huge'"),
        (
            'variants = ["rope"]\nlearning_rate = "low"',
            r"_rate must be .*\s+seen:  str 'low'",
        ),
    ],
)
def test_files_that_are_not_a_study(text: str | None, message: str, tmp_path: Path):
    file = tmp_path / ("none.toml" if text is None else "study.toml")
    if text is not None:
        file.write_text(text)
    with pytest.raises(RopelensError, match=message):
        run_study(file, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_all_variants_of_a_seed_come_before_the_next():
    runs = runs_of({"variants": ["rope", "longrope:4/1,2/3,4"], "seeds": [0, 1]})
    names = ("rope", "longrope-4-1-2-3-4")
    expected = [f"tiny/{name}/seed-{seed}" for seed in (0, 1) for name in names]
    assert [folder.as_posix() for folder in runs] == expected
