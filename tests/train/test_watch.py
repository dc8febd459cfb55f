"""A training that is measured is bit-identical to one that is not; the numbers and the page."""

import random
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forked import forked
from oracles.tiny import random_tokens, tiny
from safetensors.torch import load_file
from torch import nn
from trained import OPTIONS, metrics, train
from transformers import Trainer, TrainerCallback, TrainingArguments

import ropelens as rl
from ropelens.analysis.open_folder import rewrite_page
from ropelens.errors import BadArgument
from ropelens.train import watch
from ropelens.train.watched_numbers import step_folders, watched_numbers

TEXT = random_tokens(sequences=3)
MODES: dict[str, dict[str, Any]] = {
    "plain": {"eval_strategy": "steps", "eval_steps": 2},
    "checkpointing": {"gradient_checkpointing": True},
    "bf16": {"bf16": True},
    "compiled": {"torch_compile": True, "torch_compile_backend": "aot_eager"},
    "peft": {},
    "saving": {"save_strategy": "steps", "save_steps": 2},
}


class Logged(TrainerCallback):
    """What loggers such as tensorboard receive."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_log(self, args, state, control, logs, **_) -> None:
        self.rows.append(dict(logs))


def trainer_of(mode: str, out: Path) -> Trainer:
    torch.manual_seed(0)
    model: Any = tiny("llama_gqa", attention_dropout=0.1)
    if mode == "peft":
        peft = pytest.importorskip("peft", reason="peft is not installed")
        model = peft.get_peft_model(model, peft.LoraConfig(lora_dropout=0.1))
    rows = [{"input_ids": ids, "labels": ids} for ids in random_tokens(1, sequences=8)]
    arguments = TrainingArguments(
        str(out),
        max_steps=4,
        logging_steps=1,
        per_device_train_batch_size=2,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        **{"save_strategy": "no", **MODES[mode]},
    )
    return Trainer(
        model,
        arguments,
        train_dataset=rows,
        eval_dataset=rows[:2],
        callbacks=[Logged()],
    )


def rows_sent(trainer: Trainer) -> list[dict[str, float]]:
    """The rows with numbers of RoPE that loggers received."""
    (logged,) = [
        callback
        for callback in trainer.callback_handler.callbacks
        if isinstance(callback, Logged)
    ]
    return [row for row in logged.rows if "rope/induction" in row]


LOSSES = ("loss", "grad_norm", "eval_loss")


def outcome(trainer: Trainer) -> dict[str, Any]:
    """Everything that must be equal to the last bit after the training."""
    trainer.train()
    rows = []
    for row in trainer.state.log_history:
        losses = {name: row[name] for name in LOSSES if name in row}
        if losses:
            rows.append(losses)
    return {
        "weights": trainer.model.state_dict(),
        "rows": rows,
        "optimizer": trainer.optimizer.state_dict(),
        "python": random.getstate(),
        "numpy": np.random.get_state()[1:3],
        "torch": torch.get_rng_state(),
        "flags": [module.training for module in trainer.model.modules()],
    }


def draw_and_profile(*args: Any, **options: Any) -> Any:
    """A measurement that draws from every generator."""
    random.random()
    np.random.rand()
    torch.rand(3)
    return rl.profile(*args, **options)


thorough = pytest.mark.thorough


@pytest.mark.filterwarnings("ignore")  # of torch.compile and transformers
@pytest.mark.parametrize(
    "mode",
    [
        "plain",
        "bf16",
        pytest.param("checkpointing", marks=thorough),
        pytest.param("compiled", marks=thorough),
        pytest.param("peft", marks=thorough),
    ],
)
def test_training_is_bit_identical(mode: str, tmp_path: Path, monkeypatch: Any):
    expected = outcome(trainer_of(mode, tmp_path))
    evaluations = 2 if mode == "plain" else 0
    assert len(expected["rows"]) == 4 + evaluations
    monkeypatch.setattr(watch, "profile", draw_and_profile)
    trainer = trainer_of(mode, tmp_path)
    every = None if mode == "plain" else 2
    rl.RopeCallback(TEXT, every=every).attach(trainer)
    watched = outcome(trainer)
    torch.testing.assert_close(watched, expected, rtol=0, atol=0)
    steps: Any = rl.open(tmp_path / "rope")
    assert steps["step"].values.tolist() == [0, 2, 4]
    sent = rows_sent(trainer)
    assert len(sent) == 3
    names = [name for name in sent[0] if name != "epoch"]
    assert len(names) == 12
    last = rl.profile(trainer.model, TEXT, budget=False, statistics=["reversal"])
    max_score = float(last["max_score"].max())
    reversal = float(last["reversal"].mean())
    rtol = 1e-2 if mode == "bf16" else 1e-6
    assert sent[-1]["rope/max_score"] == pytest.approx(max_score, rel=rtol)
    assert sent[-1]["rope/reversal"] == pytest.approx(reversal, rel=0.2)


def test_numbers_of_a_profile():
    profile = rl.profile(tiny("llama_gqa"), TEXT, budget=True, surrogates=0)
    numbers = watched_numbers(profile)
    # By layer and plane; the slow planes are the second half.
    lengths = profile["q_norm"].values.mean(1) * profile["k_norm"].values.mean(1)
    half = lengths.shape[1] // 2
    slow_share = lengths[:, half:].sum() / lengths.sum()
    assert numbers["slow_share"] == pytest.approx(slow_share)
    assert numbers["band_plane"] == np.median(lengths.argmax(1))
    labels = rl.classify_heads(profile)["label"].tolist()
    for label in set(labels):
        assert numbers[f"{label}_heads"] == labels.count(label)
    assert numbers["previous_token"] == profile["previous_token"].values.max()
    assert numbers["sink_mass"] == pytest.approx(profile["sink_mass"].values.mean())


def test_a_loop_has_a_page(tmp_path: Path, monkeypatch: Any):
    model = tiny("llama_gqa").train()
    out = tmp_path / "watch"
    compiled = torch.compile(model, backend="eager")
    with rl.watch(compiled, TEXT, every=2, measures=["labels"], out=out) as watching:
        measured = [watching.step() for _ in range(4)]
        assert [bool(numbers) for numbers in measured] == [False, True, False, True]
        assert "rope/mixed_heads" in measured[1]
        assert "rope/reversal" not in measured[1]
        nn.init.constant_(model.model.norm.weight, torch.nan)
        with pytest.warns(UserWarning, match="step 6 was not measured: "):
            assert watching.measure(6) == {}
    page = rewrite_page(out).read_text()
    assert "mixed heads: " in page
    assert "at step 4" in page
    assert "<h1>" in rewrite_page(out / "step-000004").read_text()
    rl.RopeCallback(TEXT, out=out).begin(tiny("llama_gqa"), step=4)
    assert (out / "index.html").read_text() == page, "training goes on after step 4"
    with rl.watch(tiny("llama_gqa"), TEXT, out=out):
        assert [*step_folders(out)] == [0], "later steps are of an earlier run"


def test_refusals(tmp_path: Path):
    with pytest.raises(BadArgument, match=r"There is no statistic 'x'"):
        rl.RopeCallback(TEXT, measures=["x"])
    trainer = trainer_of("bf16", tmp_path)
    rl.RopeCallback(TEXT).attach(trainer)
    with pytest.raises(BadArgument, match="this Trainer has none"):
        trainer.train()


def test_a_first_measurement_that_fails_leaves_no_results(tmp_path: Path):
    out = tmp_path / "watch"
    with pytest.raises(BadArgument), rl.watch(tiny("llama_gqa"), TEXT + 10**6, out=out):
        pass
    with pytest.raises(BadArgument, match="watch"):
        rl.open(out)


def test_without_attach(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    trainer = trainer_of("bf16", tmp_path)
    trainer.add_callback(rl.RopeCallback(TEXT, every=4))
    trainer.train()
    steps = [
        row["step"] for row in trainer.state.log_history if "rope/induction" in row
    ]
    assert steps == [0, 4]
    assert capsys.readouterr().err.count("RopeCallback(...).attach(trainer)") == 1


def files_in(folder: Path) -> dict[str, bytes]:
    """The content of all files, by path."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_one_callback_gives_each_trainer_its_own_folder(tmp_path: Path):
    callback = rl.RopeCallback(TEXT, every=2)
    for name in ("first", "second"):
        trainer = trainer_of("bf16", tmp_path / name)
        callback.attach(trainer)
        trainer.train()
        assert callback.out == tmp_path / name / "rope"
        if name == "first":
            kept = files_in(tmp_path / "first")
    assert files_in(tmp_path / "first") == kept
    assert [*step_folders(tmp_path / "second/rope")] == [0, 2, 4]


def test_a_new_training_in_the_same_folder_keeps_the_measurements_of_the_old_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    trainer = trainer_of("bf16", tmp_path)
    rl.RopeCallback(TEXT, every=2).attach(trainer)
    trainer.train()
    kept = files_in(tmp_path / "rope")
    trainer.train()
    again = trainer_of("bf16", tmp_path)
    rl.RopeCallback(TEXT, every=4).attach(again)
    again.train()
    assert files_in(tmp_path / "rope") == kept
    assert [*step_folders(tmp_path / "rope-2")] == [0, 2, 4]
    assert [*step_folders(tmp_path / "rope-3")] == [0, 4]
    assert f"are in {tmp_path / 'rope-3'}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "named", [False, pytest.param(True, marks=pytest.mark.thorough)]
)
def test_a_training_that_resumes_continues_its_own_steps(named: bool, tmp_path: Path):
    out = tmp_path / "named" if named else None
    callback = rl.RopeCallback(TEXT, every=1, out=out)
    first = trainer_of("saving", tmp_path)
    callback.attach(first)
    first.train()
    checkpoint = shutil.copytree(tmp_path / "checkpoint-2", tmp_path / "saved")
    own = callback.out
    other = trainer_of("bf16", tmp_path)
    callback.attach(other)
    other.train()
    assert callback.out == own.with_name(f"{own.name}-2")
    of_other = files_in(callback.out)
    resumed = trainer_of("saving", tmp_path)
    callback = rl.RopeCallback(TEXT, every=2, out=out)
    callback.attach(resumed)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert callback.out == own
    assert [*step_folders(own)] == [0, 1, 2, 4]
    assert files_in(own.with_name(f"{own.name}-2")) == of_other


def test_a_training_that_goes_on_elsewhere_does_not_change_the_first_one(
    tmp_path: Path,
):
    first = trainer_of("saving", tmp_path / "first")
    rl.RopeCallback(TEXT, every=2).attach(first)
    first.train()
    kept = files_in(tmp_path / "first")
    branch = trainer_of("bf16", tmp_path / "branch")
    rl.RopeCallback(TEXT, every=2).attach(branch)
    branch.train(resume_from_checkpoint=str(tmp_path / "first/checkpoint-2"))
    assert files_in(tmp_path / "first") == kept
    assert [*step_folders(tmp_path / "branch/rope")] == [2, 4]


def test_two_callbacks_of_a_trainer_have_two_folders_that_both_resume(tmp_path: Path):
    def trainer_with_two() -> Trainer:
        trainer = trainer_of("saving", tmp_path)
        rl.RopeCallback(TEXT, every=2).attach(trainer)
        rl.RopeCallback(TEXT, every=4).attach(trainer)
        return trainer

    trainer_with_two().train()
    folders = (tmp_path / "rope", tmp_path / "rope-2")
    assert [[*step_folders(folder)] for folder in folders] == [[0, 2, 4], [0, 4]]
    trainer_with_two().train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert [[*step_folders(folder)] for folder in folders] == [[0, 2, 4], [0, 2, 4]]
    assert not (tmp_path / "rope-3").exists()


def test_each_block_of_watch_has_its_own_folder(tmp_path: Path, monkeypatch: Any):
    monkeypatch.chdir(tmp_path)
    for name in ("watch", "watch-2"):
        with rl.watch(tiny("llama_gqa"), TEXT, every=2) as watching:
            assert watching.out == Path(name)
            assert watching.numbers["rope/text_loss"] > 0, "step 0 is measured"
            before = dict(watching.numbers)
            assert watching.step() == {}
            assert watching.numbers == before
            assert watching.step() == watching.numbers
        assert [*step_folders(tmp_path / name)] == [0, 2]


def test_a_named_folder_is_replaced_by_the_same_program(tmp_path: Path):
    out = tmp_path / "watch"
    for every in (1, 2):
        with rl.watch(tiny("llama_gqa"), TEXT, every=every, out=out) as watching:
            watching.step()
            watching.step()
    assert [*step_folders(out)] == [0, 2]
    assert [path.name for path in tmp_path.iterdir()] == ["watch"]


def test_a_folder_that_cannot_be_made_is_refused_before_the_training(tmp_path: Path):
    (tmp_path / "file").touch()
    trainer = trainer_of("bf16", tmp_path)
    trainer.args.output_dir = str(tmp_path / "file")
    rl.RopeCallback(TEXT, every=2).attach(trainer)
    with pytest.raises(BadArgument, match="rope cannot be written to"):
        trainer.train()


def test_a_run_that_is_watched(trained_run: Path, prose: Path, tmp_path: Path):
    watched = train([prose], out=tmp_path / "run", watch=True, **OPTIONS)
    one, other = [
        load_file(path / "model.safetensors") for path in (trained_run, watched)
    ]
    torch.testing.assert_close(other, one, rtol=0, atol=0)
    rows = metrics(watched)
    assert [{k: row[k] for k in metrics(trained_run)[0]} for row in rows] == metrics(
        trained_run
    )
    assert float(rows[-1]["rope/induction"]) > 0
    assert [*step_folders(watched / "watch")] == [0, 60]


TWO = """
import sys, torch, pathlib
from test_watch import TEXT, outcome, trainer_of
import ropelens as rl
out = pathlib.Path(sys.argv[1])
plain = outcome(trainer_of("plain", out))
trainer = trainer_of("plain", out)
rl.RopeCallback(TEXT).attach(trainer)
measured = outcome(trainer)
assert trainer.accelerator.num_processes == 2
torch.testing.assert_close(measured, plain, rtol=0, atol=0)
logged = sum("rope/induction" in row for row in trainer.state.log_history)
print(f"process {trainer.args.process_index} logs {logged}", flush=True)
"""


@pytest.mark.thorough
def test_one_of_two_processes_measures(tmp_path: Path, monkeypatch: Any):
    monkeypatch.syspath_prepend(Path(__file__).parent)
    done = forked(2, TWO, tmp_path)
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"process \d logs \d", done.stdout)
    assert sorted(lines) == ["process 0 logs 3", "process 1 logs 0"]
