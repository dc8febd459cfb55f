"""Evaluations: choice of measures, number of model runs, families, long text."""

import numpy as np
import pytest
import torch
import xarray as xr
from oracles.copying import copying
from oracles.tiny import random_tokens, tiny
from small_measurements import evaluate, tokens

import ropelens as rl
from ropelens.errors import BadArgument
from ropelens.interventions.evaluate import DEFAULT_MEASURES
from ropelens.profiles.heads import resample_labels

EDITS = {"half": "p-rope:0.5", "a head": rl.stop(rl.PlaneNumbers([0]), heads="0.2")}
VARIABLES = {
    "loss": "loss predicted_tokens mean_loss mean_loss_se seen_loss seen_tokens far_loss "
    "far_tokens position_loss position_loss_se",
    "induction": "induction duplicate_token trial_induction repeat_loss first_loss",
    "retrieval": "retrieval retrieval_hit",
    "change": "attention_change",
    "labels": "total_bits sink_bits position_bits content_bits interaction_bits label "
    "label_change_confidence labels_changed_resampled positional_fraction",
}


@pytest.fixture(scope="module")
def whole() -> xr.Dataset:
    return evaluate(tiny("llama_gqa", num_hidden_layers=1), edits=EDITS)


@pytest.mark.parametrize(
    "measures",
    [[name] for name in DEFAULT_MEASURES]
    + [["loss", "change"], ["change", "induction"]],
)
def test_some_measures_are_a_part_of_all(measures: list[str], whole: xr.Dataset):
    part = evaluate(
        tiny("llama_gqa", num_hidden_layers=1), edits=EDITS, measures=measures
    )
    assert set(VARIABLES) == set(DEFAULT_MEASURES)
    all_names = " ".join(VARIABLES.values())
    assert set(whole.data_vars) == set(all_names.split())
    assert set(part.data_vars) == {
        x for name in measures for x in VARIABLES[name].split()
    }
    assert ("group" in part.coords) == ("loss" in measures)
    for name in part.variables:
        np.testing.assert_array_equal(part[name], whole[name], err_msg=str(name))


def test_labels_that_change():
    text = torch.from_numpy(np.random.default_rng(0).integers(1, 64, size=(4, 64)))
    edits = {"nope": "nope", "none too": []}
    label = rl.evaluate(copying(), text, edits=edits, measures="labels").label
    changed = label != label.sel(edit="none")
    assert label.sel(edit="none", layer=0, head=0) == "positional"
    assert changed.sel(edit="nope", layer=0).all()
    assert not changed.sel(edit=["none", "none too"]).any()


def test_label_changes_resample_documents():
    model = tiny("llama_gqa", num_hidden_layers=1)
    ids = random_tokens(sequences=9, length=12)
    text = rl.Text(ids, documents=torch.arange(9).clamp(max=7))
    results = rl.evaluate(model, text, edits={"nope": "nope"}, measures="labels")
    profiles = [rl.profile(model, text, surrogates=0)]
    with rl.edit_rope(model, "nope"):
        profiles.append(rl.profile(model, text, surrogates=0))
    assert profiles[0].sizes["group"] == 8
    before, after = [resample_labels(p, resamples=400, seed=0) for p in profiles]
    again = results["labels_changed_resampled"].values
    assert (again[0] == 0).all()
    np.testing.assert_array_equal(again[1], (before != after).sum((1, 2)))
    confidence = results["label_change_confidence"].values
    np.testing.assert_array_equal(confidence[1], (before != after).mean(0))
    single = rl.evaluate(model, ids[:1], measures="labels")
    assert single["labels_changed_resampled"].isnull().all()
    assert single["label_change_confidence"].isnull().all()


def test_the_changes_of_heads_are_a_table():
    text = torch.from_numpy(np.random.default_rng(0).integers(1, 64, size=(8, 32)))
    edits = {"nope": "nope", "none too": []}
    results = rl.evaluate(copying(), text, edits=edits, measures=["change", "labels"])
    table = rl.paired_changes(results, by="head").set_index("edit")
    assert len(table) == 2 * results.label[0].size
    head = table.loc["nope"].iloc[0]
    assert head["label_before"] == "positional"
    assert head["label_after"] == "diffuse"
    assert head["decided_by"] == "total_bits"
    assert head["deciding_before"] == results.total_bits[0, 0, 0]
    assert head["deciding_after"] == results.total_bits[1, 0, 0]
    assert head["threshold"] == 0.1
    assert head["attention_change"] == results.attention_change[1, 0, 0] > 0.1
    assert head["label_change_confidence"] == 1
    assert table.loc["nope", "changed"].any()
    assert not table.loc["none too", "changed"].any()
    counts = rl.paired_changes(results)["labels_changed"]
    changed = table.groupby("edit")["changed"].sum()
    assert counts.tolist() == [0, changed["nope"], 0]


def test_a_label_that_differs_on_few_sequences_is_undecided():
    text = torch.from_numpy(np.random.default_rng(0).integers(1, 64, size=(7, 32)))
    edits = {"nope": "nope", "none too": []}
    results = rl.evaluate(copying(), text, edits=edits, measures="labels")
    table = rl.paired_changes(results, by="head")
    differs = table["label_before"] != table["label_after"]
    assert differs.any()
    assert table.loc[differs, "changed"].isna().all()
    assert not table.loc[~differs, "changed"].any()
    assert rl.paired_changes(results)["labels_changed"].isna().all()
    assert rl.paired_changes(results)["labels_differ"].tolist() == [0, differs.sum(), 0]


def test_changes_of_heads_need_labels_and_edits():
    losses = rl.evaluate(copying(), tokens() % 64, edits={"n": "nope"}, measures="loss")
    with pytest.raises(BadArgument, match="These results have no labels"):
        rl.paired_changes(losses, by="head")
    unedited = rl.evaluate(copying(), tokens() % 64, measures="labels")
    with pytest.raises(BadArgument, match="These results have no edits"):
        rl.paired_changes(unedited, by="head")
    with pytest.raises(BadArgument, match="by must be"):
        rl.paired_changes(losses, by="layer")


def test_an_open_edit_counts_as_the_unmodified_model():
    model = tiny("llama_gqa")
    with rl.edit_rope(model, "p-rope:0.5"):
        fast = rl.stop(rl.Fastest(0.5))
        inside = evaluate(model, edits={"fast too": fast})
    outside = evaluate(model, edits={"half": "p-rope:0.5", "all": "nope"})
    pairs = (("none", "half"), ("fast too", "all"))
    names = ["loss", "induction", "repeat_loss", "retrieval_hit", "total_bits"]
    for entry, other in pairs:
        first = inside[names].sel(edit=entry)
        second = outside[names].sel(edit=other)
        xr.testing.assert_equal(
            first.drop_vars(first.coords), second.drop_vars(second.coords)
        )
    assert (inside.attention_change.sel(edit="none") == 0).all()
    assert (inside.wavelength == torch.inf).sum() == 2 * 4
    one_head = rl.stop(rl.PlaneNumbers([0]), heads="0.1")
    dropped = rl.drop(rl.Slowest(0.5))
    with rl.edit_rope(model, one_head):
        results = evaluate(model, edits={"more": dropped})
    assert (results.label != "").all()
    assert results.total_bits.notnull().all()
    assert np.isinf(results.head_wavelength.sel(layer=0, head=1)[0])


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["gemma4", "gpt_oss", "smollm3"])
def test_families(family: str):
    if family == "smollm3":
        model = tiny(family, num_hidden_layers=2, no_rope_layers=[1, 0])
    else:
        model = tiny(family)
    edits = {"half": rl.stop_slowest(0.5), "head": rl.drop(rl.Slowest(1), heads="0.0")}
    results = evaluate(
        model, edits=edits, measures=("loss", "change", "labels"), rows=7
    )
    assert (results.attention_change.sel(edit="head", layer=0, head=0) > 1e-3).all()
    others = results.attention_change.sel(edit="head", layer=0, head=[1, 2, 3])
    assert float(abs(others).max()) < 1e-6
    assert np.isfinite(results.loss).all()
    with rl.edit_rope(model, rl.stop_slowest(0.5)):
        profile = rl.profile(model, tokens(), surrogates=0, rows=7)
    bits = results.total_bits.sel(edit="half")
    np.testing.assert_allclose(bits, profile["total_bits"], rtol=1e-4, atol=1e-6)


def test_a_context_past_the_trained_context():
    context = 13
    model = tiny("llama_gqa", max_position_embeddings=context)
    results = evaluate(model, edits={"linear": "linear:4"}, measures=["loss"])
    assert results.attrs["trained_context"] == context
    assert context in results.position_start.values
    assert context in results.position_stop.values
    with torch.no_grad(), rl.edit_rope(model, "linear:4"):
        expected = []
        for row in tokens():
            outputs = model(row[None], labels=row[None])
            expected.append(float(outputs.loss))
    np.testing.assert_allclose(results.loss.sel(edit="linear"), expected, rtol=1e-5)


def test_a_rotation_that_remembers_its_longest_sequence():
    """With dynamic RoPE, long prompts of an entry must not change the planes of the next."""
    model = tiny("llama_dynamic", max_position_embeddings=16)
    results = rl.evaluate(
        model,
        tokens(),
        edits={"no edit": []},
        measures=("retrieval", "loss"),
        prompt_lengths=(60, 200),
    )
    for name in ("loss", "retrieval_hit"):
        np.testing.assert_array_equal(*results[name])


def test_a_loss_of_nan_is_not_left_out():
    model = tiny("llama_gqa")
    with torch.no_grad():
        model.model.embed_tokens.weight[95] = torch.nan
    text = tokens().clamp(max=94)
    text[1, 20] = 95
    with pytest.warns(UserWarning, match=r"not finite: mean_loss.*embed_tokens"):
        results = evaluate(model, text=text, measures="loss")
    assert results.loss.isnull().values.tolist() == [[False, True, False]]
    assert results.mean_loss.isnull().all()
