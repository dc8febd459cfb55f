"""Labels in two profiles of one text: only certain changes count."""

import numpy as np
import pytest
import torch
import xarray as xr
from oracles.copying import copying
from oracles.tiny import random_tokens, tiny

import ropelens as rl
from ropelens.checkpoints.bundled import sample_path
from ropelens.errors import BadArgument
from ropelens.profiles.label_changes import label_changes

GROUPS = 16


@pytest.fixture(scope="module")
def measured() -> xr.Dataset:
    model = tiny("llama_gqa", num_hidden_layers=1)
    ids = random_tokens(sequences=GROUPS, length=12)
    return rl.profile(model, ids, surrogates=0)


def with_position(profile: xr.Dataset, share: np.ndarray) -> xr.Dataset:
    """The profile with 2 bits in each group, of which position explains this share."""
    changed = profile.copy(deep=True)
    by_group = np.broadcast_to(share[:, None, None], profile["group_total"].shape)
    changed["group_total"][:] = 2
    changed["group_both_gain"][:] = 2
    changed["group_sink_gain"][:] = 0
    changed["group_position_gain"][:] = 2 * by_group
    changed["group_content_gain"][:] = 2 * (1 - by_group)
    changed["total_bits"][:] = 2
    changed["sink_bits"][:] = 0
    changed["interaction_bits"][:] = 0
    return changed


def test_a_small_step_over_a_threshold_is_no_change(measured: xr.Dataset):
    spread = np.random.default_rng(0).normal(0, 0.05, GROUPS)
    share = 2 / 3 + spread - spread.mean()
    before = with_position(measured, share + 0.001)
    near = label_changes(before, with_position(measured, share - 0.001))
    assert set(near["label_before"]) == {"positional"}
    assert set(near["label_after"]) == {"mixed"}
    assert near["margin"].to_numpy() == pytest.approx(0.001)
    assert near["label_change_confidence"].max() < 0.2
    assert not near["changed"].any()
    far = label_changes(before, with_position(measured, share - 0.2))
    assert set(far["label_after"]) == {"mixed"}
    assert far["changed"].sum() == (far["label_change_confidence"] >= 0.95).sum()


def test_a_large_change_of_a_label_counts(measured: xr.Dataset):
    spread = np.random.default_rng(0).normal(0, 0.05, GROUPS)
    before = with_position(measured, 0.9 + spread)
    after = with_position(measured, 0.5 + spread)
    table = label_changes(before, after)
    assert (table["label_change_confidence"] == 1).all()
    assert table["changed"].all()
    np.testing.assert_allclose(table["deciding_before"], (0.9 + spread).mean())
    np.testing.assert_allclose(table["deciding_after"], (0.5 + spread).mean())


def test_heads_of_equal_models_do_not_change(measured: xr.Dataset):
    change = xr.zeros_like(measured["total_bits"])
    table = label_changes(measured, measured, attention_change=change)
    assert len(table) == measured["total_bits"].size
    assert (table["label_change_confidence"] == 0).all()
    assert (table["changed"] == False).all()  # noqa: E712
    assert (table["attention_change"] == 0).all()


@pytest.mark.thorough
def test_heads_whose_attention_hardly_changes_keep_their_label():
    """Without its slowest quarter of planes, the bundled model attends nearly as before."""
    model, tokenizer = rl.load("bundled")
    documents = rl.read_documents(sample_path())[50:58]
    text = rl.tokenize(documents, tokenizer, context=512, sequences=8)
    edits = {"p": "p-rope:0.75"}
    measures = ["change", "labels"]
    results = rl.evaluate(model, text, edits=edits, measures=measures)
    table = rl.paired_changes(results, by="head")
    differs = table["label_before"] != table["label_after"]
    assert differs.any()
    assert (table.loc[differs, "attention_change"] < 0.008).all()
    assert not table["changed"].any()
    counts = rl.paired_changes(results).set_index("edit").loc["p"]
    assert counts["labels_differ"] == differs.sum()
    assert counts["labels_changed"] == 0


def test_two_profiles_give_the_table_of_an_edit():
    model = copying()
    text = torch.from_numpy(np.random.default_rng(0).integers(1, 64, size=(8, 32)))
    results = rl.evaluate(
        model, text, edits={"n": "nope"}, measures=["change", "labels"]
    )
    before = rl.profile(model, text, surrogates=0)
    with rl.edit_rope(model, "nope"):
        after = rl.profile(model, text, surrogates=0)
    change = results["attention_change"].sel(edit="n")
    table = label_changes(before, after, attention_change=change)
    expected = rl.paired_changes(results, by="head").drop(columns="edit")
    assert table["changed"].any()
    for name in expected:
        if expected[name].dtype.kind == "f":
            np.testing.assert_allclose(
                table[name], expected[name], rtol=1e-6, atol=1e-6
            )
        else:
            assert table[name].tolist() == expected[name].tolist()


def test_profiles_of_other_heads_or_texts_are_refused(measured: xr.Dataset):
    other_text = random_tokens(1, sequences=GROUPS, length=12)
    model = tiny("llama_gqa", num_hidden_layers=1)
    with pytest.raises(BadArgument, match="different texts"):
        label_changes(measured, rl.profile(model, other_text, surrogates=0))
    with pytest.raises(BadArgument, match=r"\(1, 4\) and \(1, 3\) layers and heads"):
        label_changes(measured, measured.isel(head=slice(3)))
