"""Several checkpoints in one command: each is measured once, and all are compared."""

import pandas as pd
import pytest
from cli_runs import NAMES
from measured import assert_same
from tiny_checkpoints import edit_config, edit_weights, save_tiny

import ropelens as rl
from ropelens.analysis.analysis import is_measured
from ropelens.analysis.plan import plan_analysis
from ropelens.checkpoints.names import name_checkpoints
from ropelens.errors import BadArgument

STEPS = ("step-000001", "step-000002")


@pytest.fixture
def run(tmp_path):
    for size, step in enumerate(STEPS):
        model = save_tiny(tmp_path / "run" / "history" / step, num_hidden_layers=1)
        edit_weights(model, lambda weights, by=size: [w.mul_(1 + by) for w in weights.values()])
    return tmp_path / "run"


@pytest.mark.thorough
@pytest.mark.usefixtures("pageless")
def test_a_repeated_command_measures_the_remaining_checkpoints(run, text, tmp_path, ropelens):
    out, last = tmp_path / "out", run / "history" / STEPS[1] / "model.safetensors"
    options = ("--text", text, "--context", 32, "--surrogates", 2, "--out", out)
    whole, models = last.read_bytes(), [run / "history" / step for step in STEPS]
    last.write_bytes(whole[:-100])
    ended = ropelens("analyze", *models, *options)
    assert (ended.code, ended.out, ended.err.count("plan: ")) == (1, "", 2)
    assert [path.name for path in out.iterdir()] == [STEPS[0]]
    last.write_bytes(whole)
    ended = ropelens("analyze", *models, *options)
    assert (ended.code, ended.out) == (0, f"{out / 'index.html'}\n")
    assert ended.err.startswith(f"{STEPS[0]} is measured already\n")
    assert ended.err.count("plan: ") == 1
    all_files = ("comparison.csv", "comparison.nc", *NAMES, *STEPS)
    assert {path.name for path in out.iterdir()} == {*all_files} - {"profile.nc"}
    heads = pd.read_csv(out / "heads.csv")
    assert list(heads)[:3] == ["checkpoint", "layer", "head"]
    for step in STEPS:
        single = rl.analyze(run / "history" / step, text, rl.Options(context=32, surrogates=2))
        assert_same(rl.open(out / step).profile, single.profile)
        of_step = heads[heads["checkpoint"] == step]
        assert of_step["total_bits"].to_numpy() == pytest.approx(single.heads["total_bits"])

    model = run / "history" / STEPS[0]

    def same(context: int = 32) -> bool:
        options_now = rl.Options(context=context, surrogates=2)
        return is_measured(out / STEPS[0], plan_analysis(str(model), [text], options_now))

    assert same()
    assert not same(context=24)
    text.write_text(text.read_text()[::-1])
    assert not same()
    text.write_text(text.read_text()[::-1])
    assert same()
    edit_config(model, rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    assert not same()
    ended = ropelens("analyze", *models, *options)
    assert (ended.code, ended.err.count("plan: ")) == (0, 1)
    edited = rl.analyze(model, text, rl.Options(context=32, surrogates=2)).profile
    assert_same(rl.open(out / STEPS[0]).profile, edited)


def test_names_tell_checkpoints_apart(run):
    models = [str(run / "history" / step) for step in STEPS]
    assert name_checkpoints(models) == dict(zip(STEPS, models, strict=True))
    assert list(name_checkpoints(["a/model", "b/model"])) == ["a-model", "b-model"]
    for same in ([models[0], f"{models[0]}/."], ["a/m", "a/m"], ["a:m", "a?m"]):
        with pytest.raises(BadArgument, match="Two checkpoints have the same name"):
            name_checkpoints(same)
