"""Patches of each head, layer or position, compared with one block at a time."""

import numpy as np
import pytest
import scipy
import torch
from oracles.tiny import random_tokens, tiny

import ropelens as rl
from ropelens.interventions.truncation_table import changes_of_edits
from ropelens.report import describe
from ropelens.rope.select import PlaneNumbers

TOKENS = random_tokens(sequences=1, length=9)
SOURCE = (TOKENS + 1)[:, :7] % 50


@pytest.mark.parametrize(
    ("name", "of", "over"),
    [
        *(("gemma3", "both", "head"), ("llama_gqa", "value", "head"), ("phi", "key", "layer")),
        *(("gemma3", "key", "position"), ("llama_gqa", "output", "position")),
    ],
)
def test_each_patch_equals_a_block(name: str, of: str, over: str):
    model, planes = tiny(name), None if of in ("value", "output") else PlaneNumbers((1, 3))
    options = {"planes": planes, "of": of}
    result = rl.patch_each(model, TOKENS, SOURCE, (3, 5), over=over, heads="0.1,1.*", **options)
    for place, change in np.ndenumerate(result["change"].values):
        layer = place[0]
        heads = {"head": f"{layer}.{place[-1]}"}.get(over, "0.1" if layer == 0 else "1.*")
        positions = [place[1]] if over == "position" else None
        if over == "head" and heads not in ("0.1", *(f"1.{n}" for n in range(4))):
            assert np.isnan(change)
        elif positions == [7] or positions == [8]:
            assert np.isnan(change), "the source is shorter"
        else:
            block = rl.patch_planes(model, SOURCE, heads=heads, positions=positions, **options)
            with block, torch.no_grad():
                logits = model(TOKENS).logits[0, -1]
            expected = float(logits[3] - logits[5]) - result.attrs["answer"]
            assert change == pytest.approx(expected, abs=1e-4)
    figure = rl.plot_effects(result)
    assert np.nanmax(np.abs(figure.data[0].z)) == pytest.approx(abs(result["change"]).max())


def test_answers_of_all_positions_run_in_small_batches(monkeypatch):
    model = tiny("llama_gqa")
    monkeypatch.setattr("ropelens.interventions.patch_each.MOST_LOGITS", 2000)
    by_function = rl.patch_each(model, TOKENS, SOURCE, lambda x: x[-1, 3] - x[-1, 5])
    by_pair = rl.patch_each(model, TOKENS, SOURCE, (3, 5), progress=True)
    np.testing.assert_allclose(by_function["change"], by_pair["change"], atol=1e-5)


def test_the_rank_correlation_is_over_the_planes_with_the_largest_attribution():
    result = rl.attribute_planes(tiny("llama_gqa"), TOKENS, (3, 5), check=6)
    table = rl.top_planes(result, 6)
    assert table["attribution"].abs().is_monotonic_decreasing
    rank = scipy.stats.spearmanr(table["attribution"], -table["dropped"]).statistic
    assert result.attrs["rank_correlation"] == pytest.approx(rank)
    wrong = (np.sign(table["attribution"]) == np.sign(table["dropped"])).sum()
    assert result.attrs["wrong_signs"] == wrong
    assert "random_rank_correlation" in result.attrs
    bars = rl.plot_top_planes(result, count=6).data[0]
    np.testing.assert_allclose(bars.x, table["attribution"])
    assert f"{bars.customdata[0][0]}.{bars.customdata[0][1]}" == table["head"][0]


def test_a_silenced_head_counts_with_an_induction_of_zero():
    model, _ = rl.load("bundled")
    text = torch.randint(5, 90, (2, 60), generator=torch.manual_seed(0))
    before = rl.evaluate(model, text, measures="induction", progress=True)
    layer, head = np.unravel_index(
        before["induction"][0].values.argmax(), before["induction"][0].shape
    )
    edits = {
        "silent": rl.silence_heads(model, f"{layer}.{head}"),
        "other": rl.silence_heads(model, "0.0"),
    }
    result = rl.evaluate(model, text, edits=edits, measures=["induction", "loss"])
    table = changes_of_edits(result).set_index("edit")
    assert table.loc["silent", "induction_change"] == pytest.approx(
        -table.loc["none", "induction"]
    )
    assert abs(table.loc["other", "induction_change"]) < 0.5
    assert result["induction"][1, layer, head] == before["induction"][0, layer, head]
    losses = rl.position_losses(result)
    assert len(losses) == result["position_loss"].size
    assert (losses["change"][losses["edit"] == "none"] == 0).all()
    assert len(rl.plot_position_losses(result).data) == 6
    (words,) = describe(result)
    assert "budget" not in words
    assert "Under silent, the induction score" in words
