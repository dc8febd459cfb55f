"""Several processes write one result; several checkpoints are each measured once."""

import re
import shutil
import signal
from pathlib import Path

import pandas as pd
import pytest
import torch
from cli_runs import MAIN, NAMES, PAGELESS_MAIN, without_page
from forked import forked, together
from oracles.tiny import tiny
from safetensors.torch import load_file
from small_measurements import assert_same
from tiny_checkpoints import edit_config, edit_weights, save_tiny
from trained import OPTIONS as RECIPE
from trained import metrics, train

import ropelens as rl
from ropelens.analysis.plan import plan_analysis
from ropelens.analysis.saved_numbers import is_measured
from ropelens.checkpoints.names import name_checkpoints
from ropelens.errors import BadArgument
from ropelens.train import loop

# All processes save after each batch. The last process is killed after two batches of a stage.
DIES = """
import os, signal
from ropelens.commands.app import main
from ropelens.runtime import savepoint
savepoint.SECONDS = 0
save, batches = savepoint.SavedProgress.save, []
def die(self, state):
    save(self, state)
    if self.path.name.startswith("{stage}-") and state.sums.sequences:
        batches.append(1)
    if len(batches) == 2 and int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        os.kill(os.getpid(), signal.SIGKILL)
savepoint.SavedProgress.save = die
main()
"""

# The second process does not see finished measurements, as if it had another disk.
ONE_DISK = """
import os
from ropelens.analysis import saved_numbers
is_measured = saved_numbers.is_measured
saved_numbers.is_measured = lambda *args: os.environ["RANK"] == "0" and is_measured(*args)
"""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


def messages(err: str) -> list[str]:
    return [line for line in err.splitlines() if line.startswith("ropelens: ")]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Use one thread, as torchrun does, so that float32 sums are rounded equally."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# One process that is killed after its third step.
DIES_LEARNING = """
import os, signal, sys
from pathlib import Path
import torch
from ropelens.runtime import savepoint
from ropelens.train import loop
from trained import OPTIONS, train
save = loop.save_checkpoint
def save_and_die(path, *state):
    save(path, *state)
    if state[-1].step == 3:
        os.kill(os.getpid(), signal.SIGKILL)
loop.save_checkpoint, savepoint.SECONDS = save_and_die, 0
text, out, threads = sys.argv[1:]
torch.set_num_threads(int(threads))
train([Path(text)], out=Path(out), **OPTIONS)
"""

OPTIONS = rl.Options(context=32, sequences=5, rows=8, surrogates=2)
SWEEP = {"keep": [0.5], "controls": 0, "measures": ("loss", "induction", "change")}
SWEPT = ("--keep", 0.5, "--controls", 0, "--measures", "loss,induction,change")


@pytest.fixture(scope="module")
def args(tmp_path_factory: pytest.TempPathFactory) -> tuple[object, ...]:
    folder = tmp_path_factory.mktemp("measured")
    model = save_tiny(folder / "model", num_hidden_layers=1)
    text = folder / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog " * 20)
    sizes = ("--context", 32, "--sequences", 5, "--rows", 8, "--surrogates", 2)
    return model, "--text", text, *sizes


@pytest.fixture(scope="module")
def single(args: tuple, one_thread: None) -> rl.Analysis:
    model, _, text, *_ = args
    return rl.analyze(model, text, OPTIONS, truncation=SWEEP)


@pytest.mark.thorough
def test_three_processes_give_the_same_sweep_as_one(args, single, tmp_path):
    out = tmp_path / "three"
    ended = forked(3, MAIN, "truncate", *args, *SWEPT, "--out", out)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == f"{out / 'index.html'}\n"
    (plan,) = messages(ended.stderr)
    assert plan.startswith("ropelens: plan: model, 1 layers")
    shared = rl.open(out)
    assert_same(shared.profile, single.profile)
    assert_same(shared.truncation, single.truncation)


@pytest.mark.thorough
def test_remaining_checkpoints_are_shared_one_after_another(args, single, tmp_path):
    model, _, text, *_ = args
    out = tmp_path / "out"
    other = tmp_path / "other"
    same = tmp_path / "same"
    for folder in (other, same):
        shutil.copytree(model, folder)
    edit_weights(other, lambda weights: weights["lm_head.weight"].neg_())
    out.mkdir()
    with without_page():
        rl.analyze(model, text, OPTIONS).save(out / "model")
    ended = forked(
        2, ONE_DISK + PAGELESS_MAIN, "analyze", other, same, *args, "--out", out
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == f"{out / 'index.html'}\n", ended.stderr
    assert ended.stderr.count("model is measured already\n") == 1
    assert [re.split("[:,] ", line)[2] for line in messages(ended.stderr)] == [
        "other",
        "same",
    ]
    assert_same(rl.open(out / "same").profile, single.profile)
    names = ("other", "same", "model")
    first, second, third = [rl.open(out / name).profile.attrs["loss"] for name in names]
    assert second == pytest.approx(third, rel=1e-6)
    assert first != pytest.approx(third, rel=1e-6)


@pytest.mark.parametrize(
    "how", ["forked", pytest.param("torchrun", marks=pytest.mark.slow)]
)
def test_a_killed_process_ends_all_and_a_second_run_continues(
    args, single, tmp_path, how
):
    out = tmp_path / "out"
    script = tmp_path / "dies.py"
    script.write_text(DIES.format(stage=0))
    command = ("analyze", *args, "--batch-size", 1, "--out", out)
    if how == "forked":
        ended = forked(2, DIES.format(stage=0), *command)
    else:
        ended = together(*TORCHRUN, 2, script, *command)
    assert ended.returncode != 0
    assert ended.stdout == ""
    assert len(messages(ended.stderr)) == 2, ended.stderr
    lost = messages(ended.stderr)[1]
    # The other process notices the end, or torchrun stops it.
    assert lost.startswith(("ropelens: One of the processes", "ropelens: stopped"))
    assert [path.name for path in out.iterdir()] == [".unfinished"]
    ended = forked(2, PAGELESS_MAIN, *command)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("continuing from the saved progress in ") == 1
    assert not (out / ".unfinished").exists()
    assert_same(rl.open(out).profile, single.profile)


@pytest.mark.thorough
def test_a_killed_sweep_continues(args: tuple, single: rl.Analysis, tmp_path: Path):
    out = tmp_path / "out"
    command = ("truncate", *args, *SWEPT, "--batch-size", 1, "--out", out)
    assert forked(1, DIES.format(stage=1), *command).returncode == -signal.SIGKILL
    assert [path.name for path in out.iterdir()] == [".unfinished"]
    ended = forked(1, PAGELESS_MAIN, *command)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == f"{out / 'index.html'}\n", ended.stderr
    assert ended.stderr.count("continuing from the saved progress in ") == 2
    assert not (out / ".unfinished").exists()
    assert_same(rl.open(out).profile, single.profile)
    assert_same(rl.open(out).truncation, single.truncation)


IMPORTS = """
import sys, preloaded
from transformers import LlamaConfig, LlamaForCausalLM
LlamaForCausalLM(LlamaConfig.from_pretrained(sys.argv[1]))
print(preloaded.BEFORE)
"""


def test_importing_ropelens_first_is_enough(tmp_path: Path):
    """ropelens, its figures and its pages do not import torch."""
    rl.variant_config(tiny("llama_gqa").config, "partial:0.5").save_pretrained(tmp_path)
    ended = forked(1, IMPORTS, tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "set()\n", ended.stderr


@pytest.mark.thorough
def test_a_killed_run_ends_bit_for_bit_the_same(
    trained_run: Path, prose: Path, tmp_path: Path
):
    out = tmp_path / "killed"
    ended = forked(1, DIES_LEARNING, prose, out, torch.get_num_threads())
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert not (out / "model.safetensors").exists()
    (out / f".{loop.CHECKPOINT}.part").write_text(
        "as a kill while it is written leaves it"
    )
    train([prose], out=out, **RECIPE)
    assert metrics(out) == metrics(trained_run)
    resumed = load_file(out / "model.safetensors")
    whole = load_file(trained_run / "model.safetensors")
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)


MODELS = ("step-000001", "step-000002")


@pytest.fixture
def history(tmp_path: Path) -> Path:
    """Two checkpoints of one training."""
    for number, step in enumerate(MODELS):
        model = save_tiny(tmp_path / "history" / step, num_hidden_layers=1)

        def grow(weights: dict[str, torch.Tensor], factor: int = 1 + number) -> None:
            for weight in weights.values():
                weight.mul_(factor)

        edit_weights(model, grow)
    return tmp_path / "history"


@pytest.mark.thorough
@pytest.mark.usefixtures("pageless")
def test_a_repeated_command_measures_the_rest(history, text, tmp_path, ropelens):
    out = tmp_path / "out"
    models = [history / step for step in MODELS]
    last = models[1] / "model.safetensors"
    whole = last.read_bytes()
    last.write_bytes(whole[:-100] + b"\xff" * 100)  # weights that are NaN
    options = ("--text", text, "--context", 32, "--surrogates", 2, "--out", out)
    failed = ropelens("analyze", *models, *options)
    assert failed.code == 1
    assert failed.out == ""
    assert failed.err.count("plan: ") == 2
    measured = {path.name for path in out.iterdir()} & {*MODELS}
    assert measured == {MODELS[0]}
    last.write_bytes(whole)
    repeated = ropelens("analyze", *models, *options)
    assert repeated.code == 0
    assert repeated.out == f"{out / 'index.html'}\n"
    assert repeated.err.startswith(f"{MODELS[0]} is measured already\n")
    assert repeated.err.count("plan: ") == 1
    names = {path.name for path in out.iterdir()}
    without_profile = {*NAMES} - {"profile.nc"}
    assert names == {"comparison.csv", "comparison.nc", *without_profile, *MODELS}
    heads = pd.read_csv(out / "heads.csv")
    assert list(heads)[:3] == ["checkpoint", "layer", "head"]
    for step in MODELS:
        expected = rl.analyze(
            history / step, text, rl.Options(context=32, surrogates=2)
        )
        assert_same(rl.open(out / step).profile, expected.profile)
        bits = heads.loc[heads["checkpoint"] == step, "total_bits"].to_numpy()
        assert bits == pytest.approx(expected.heads["total_bits"])


@pytest.mark.thorough
@pytest.mark.usefixtures("pageless")
def test_a_changed_model_text_or_option_is_measured_again(
    history, text, tmp_path, ropelens
):
    out = tmp_path / "out"
    model = history / MODELS[0]
    other = history / MODELS[1]
    options = ("--text", text, "--context", 32, "--surrogates", 2, "--out", out)
    assert ropelens("analyze", model, other, *options).code == 0

    def measured_already(context: int = 32) -> bool:
        again = rl.Options(context=context, surrogates=2)
        return is_measured(out / MODELS[0], plan_analysis(str(model), [text], again))

    assert measured_already()
    assert not measured_already(context=24)
    text.write_text(text.read_text()[::-1])
    assert not measured_already()
    text.write_text(text.read_text()[::-1])
    assert measured_already()
    edit_config(model, rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    assert not measured_already()
    repeated = ropelens("analyze", model, other, *options)
    assert repeated.code == 0
    assert repeated.err.count("plan: ") == 1
    expected = rl.analyze(model, text, rl.Options(context=32, surrogates=2))
    assert_same(rl.open(out / MODELS[0]).profile, expected.profile)


def test_names_tell_checkpoints_apart(history):
    models = [str(history / step) for step in MODELS]
    assert name_checkpoints(models) == dict(zip(MODELS, models, strict=True))
    assert list(name_checkpoints(["a/model", "b/model"])) == ["a-model", "b-model"]
    for same in ([models[0], f"{models[0]}/."], ["a/m", "a/m"], ["a:m", "a?m"]):
        with pytest.raises(
            BadArgument, match="Two checkpoints or texts have the same name"
        ):
            name_checkpoints(same)
