"""Evaluations as a whole: what is asked for, how often the model runs, families, long text."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import xarray as xr
from evaluated import evaluate, tokens
from oracles.copying import copying
from oracles.tiny import random_tokens, tiny
from torch import nn

import ropelens as rl
from ropelens.interventions.evaluate import MEASURES
from ropelens.profiles.heads import resample_labels

# what is asked for


EDITS = {"half": "p-rope:0.5", "a head": rl.stop(rl.PlaneNumbers([0]), heads="1.2")}


@pytest.fixture(scope="module")
def whole() -> xr.Dataset:
    return evaluate(tiny("llama_gqa"), edits=EDITS)


@pytest.mark.parametrize(
    "measures", [[name] for name in MEASURES] + [["loss", "change"], ["change", "induction"]]
)
def test_some_measures_are_a_part_of_all(measures: list[str], whole: xr.Dataset):
    """Each alone gives its own variables, with the numbers that it has among all."""
    part = evaluate(tiny("llama_gqa"), edits=EDITS, measures=measures)
    groups = {
        "loss": {
            *("loss", "predicted_tokens", "mean_loss", "mean_loss_se"),
            *("seen_loss", "seen_tokens", "far_loss", "far_tokens"),
            *("position_loss", "position_loss_se"),
        },
        "induction": {
            *("induction", "duplicate_token", "trial_induction"),
            *("repeat_loss", "first_loss"),
        },
        "retrieval": {"retrieval", "retrieval_hit"},
        "change": {"attention_change"},
        "labels": {
            *("total_bits", "sink_bits", "position_bits", "content_bits", "interaction_bits"),
            *("label", "labels_changed_resampled", "positional_fraction"),
        },
    }
    assert set(groups) == set(MEASURES)
    assert set(whole.data_vars) == set().union(*groups.values())
    assert set(part.data_vars) == set().union(*(groups[name] for name in measures))
    assert ("group" in part.coords) == ("loss" in measures)
    for name in part.variables:
        np.testing.assert_array_equal(part[name], whole[name], err_msg=str(name))


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shape of the tokens of every forward pass."""
    shapes: list[tuple[int, ...]] = []
    forward = type(tiny("llama_gqa")).forward

    def counted(self: nn.Module, input_ids: torch.Tensor, **options: object) -> object:
        shapes.append(tuple(input_ids.shape))
        return forward(self, input_ids, **options)

    monkeypatch.setattr(type(tiny("llama_gqa")), "forward", counted)
    return shapes


def test_text_is_read_once_by_each_entry(shapes: list[tuple[int, ...]]):
    """One forward pass a batch and entry; labels take one more, of half a fold each.

    Besides, one sequence runs plain and observed.
    """
    edits = {"a": "nope", "b": "p-rope:0.5", "c": "linear:2"}
    measures = ["loss", "change"]
    evaluate(tiny("llama_gqa"), edits=edits, measures=measures, rows=7, batch_size=2)
    assert shapes.count((2, 40)) == shapes.count((1, 40)) - 2 == 4
    shapes.clear()
    evaluate(tiny("llama_gqa"), measures=["loss", "labels"])
    text = [shape for shape in shapes if shape[1] == 40]
    assert sorted(text) == [(1, 40), (1, 40), (2, 40), (3, 40)]


def test_labels_that_change():
    """The head that looks one token back cannot without rotation; the one that copies can."""
    text = torch.from_numpy(np.random.default_rng(0).integers(1, 64, size=(4, 64)))
    found = rl.evaluate(
        copying(), text, edits={"nope": "nope", "none too": []}, measures="labels"
    )
    label = found.label
    changed = label != label.sel(edit="none")
    assert label.sel(edit="none", layer=0, head=0) == "positional"
    assert changed.sel(edit="nope", layer=0).all()
    assert not changed.sel(edit=["none", "none too"]).any()


def test_label_changes_have_the_documents_drawn_again():
    """Every draw is of the gains of a profile's groups, the same draw in both entries."""
    model = tiny("llama_gqa")
    given = random_tokens(sequences=9, length=12)
    options = {"documents": torch.arange(9).clamp(max=7)}
    found = rl.evaluate(model, given, edits={"nope": "nope"}, measures="labels", **options)
    profiles = [rl.profile(model, given, surrogates=0, **options)]
    with rl.edit_rope(model, "nope"):
        profiles.append(rl.profile(model, given, surrogates=0, **options))
    assert profiles[0].sizes["group"] == 8
    before, after = (resample_labels(p, resamples=400, seed=0) for p in profiles)
    again = found["labels_changed_resampled"].values
    assert (again[0] == 0).all()
    np.testing.assert_array_equal(again[1], (before != after).sum((1, 2)))
    alone = rl.evaluate(model, given[:1], measures="labels")["labels_changed_resampled"]
    assert alone.isnull().all()


def test_under_an_open_edit_that_is_the_model_as_it_is():
    """Also one that makes heads differ, under which every entry has a budget too."""
    model = tiny("llama_gqa")
    with rl.edit_rope(model, "p-rope:0.5"):
        inside = evaluate(model, edits={"fast too": rl.stop(rl.Fastest(0.5))})
    outside = evaluate(model, edits={"half": "p-rope:0.5", "all": "nope"})
    pairs = (("none", "half"), ("fast too", "all"))
    for name in ("loss", "induction", "repeat_loss", "retrieval_hit", "total_bits"):
        for own, other in pairs:
            np.testing.assert_array_equal(
                inside[name].sel(edit=own), outside[name].sel(edit=other), err_msg=name
            )
    assert (inside.attention_change.sel(edit="none") == 0).all()
    assert (inside.wavelength == torch.inf).sum() == 2 * 4
    with rl.edit_rope(model, rl.stop(rl.PlaneNumbers([0]), heads="0.1")):
        found = evaluate(model, edits={"more": rl.drop(rl.Slowest(0.5))})
    assert (found.label != "").all()
    assert found.total_bits.notnull().all()
    assert np.isinf(found.head_wavelength.sel(layer=0, head=1)[0])


@pytest.mark.parametrize("family", ["gemma4", "gpt_oss", "smollm3"])
def test_families(family: str):
    """Other head sizes by layer, learned sinks, layers without rotation."""
    model = tiny(family)
    edits = {"half": rl.stop_slowest(0.5), "head": rl.drop(rl.Slowest(1), heads="0.0")}
    found = evaluate(model, edits=edits, measures=("loss", "change", "labels"), rows=7)
    assert (found.attention_change.sel(edit="head", layer=0, head=0) > 1e-3).all()
    others = found.attention_change.sel(edit="head", layer=0, head=[1, 2, 3])
    assert float(abs(others).max()) < 1e-6
    assert np.isfinite(found.loss).all()
    with rl.edit_rope(model, rl.stop_slowest(0.5)):
        profile = rl.profile(model, tokens(), surrogates=0, rows=7)
    np.testing.assert_allclose(
        found.total_bits.sel(edit="half"), profile["total_bits"], rtol=1e-4, atol=1e-6
    )


# longer than trained for


def test_a_context_past_the_trained_one():
    context = 13
    model = tiny("llama_gqa", max_position_embeddings=context)
    found = evaluate(model, edits={"linear": "linear:4"}, measures=["loss"])
    assert found.attrs["trained_context"] == context
    assert context in found.position_start.values
    assert context in found.position_stop.values
    with torch.no_grad(), rl.edit_rope(model, "linear:4"):
        expected = [float(model(row[None], labels=row[None]).loss) for row in tokens()]
    np.testing.assert_allclose(found.loss.sel(edit="linear"), expected, rtol=1e-5)


def test_a_rotation_that_remembers_its_longest_sequence():
    """Dynamic RoPE: one entry's long prompts must not slow the planes of the next one's."""
    found = rl.evaluate(
        tiny("llama_dynamic", max_position_embeddings=16),
        tokens(),
        edits={"no edit": []},
        measures=("retrieval", "loss"),
        prompt_lengths=(60, 200),
    )
    for name in ("loss", "retrieval_hit"):
        one, other = found[name]
        np.testing.assert_array_equal(one, other)


# standard errors


def test_standard_errors_are_those_of_the_jackknife():
    """Of documents left out one by one, of unequal lengths; close, where there are many."""
    lengths = torch.from_numpy(np.random.default_rng(1).integers(8, 41, size=60))
    document = np.sort(np.random.default_rng(2).integers(0, 40, size=60))
    found = rl.evaluate(
        tiny("llama_gqa"),
        rl.Text(tokens(sequences=60), lengths=lengths, documents=torch.from_numpy(document)),
        edits={"nope": "nope"},
        measures="loss",
    )
    loss, weight = found.loss.values, found.predicted_tokens.values
    whole = (loss * weight).sum(1) / weight.sum()
    kept = [document != out for out in np.unique(document)]
    left = np.array([loss[:, keep] @ weight[keep] / weight[keep].sum() for keep in kept])
    share = (len(kept) - 1) / len(kept)
    error = np.sqrt(share * ((left - left.mean(0)) ** 2).sum(0))
    np.testing.assert_allclose(found.mean_loss, whole, rtol=1e-12)
    np.testing.assert_allclose(found.mean_loss_se, error, rtol=0.05)
    assert (np.diff(found.group) == (np.diff(document) > 0)).all()


def test_a_loss_that_is_no_number_is_not_left_out():
    model = tiny("llama_gqa")
    with torch.no_grad():
        model.model.embed_tokens.weight[95] = torch.nan
    text = tokens().clamp(max=94)
    text[1, 20] = 95
    found = evaluate(model, text, measures="loss")
    assert found.loss.isnull().values.tolist() == [[False, True, False]]
    assert found.mean_loss.isnull().all()


def test_the_first_tokens_error_is_that_of_a_mean():
    """Of sixteen sequences, each a stretch of its own: the first bin has one token of each."""
    text = tokens(sequences=16)
    one = evaluate(tiny("llama_gqa"), text, measures="loss").isel(edit=0, position_bin=0)
    with torch.no_grad():
        first = tiny("llama_gqa")(text).logits[:, 0].double().log_softmax(-1)
    loss = -first.gather(1, text[:, 1:2])[:, 0]
    assert float(one.position_loss) == pytest.approx(float(loss.mean()), rel=1e-5)
    assert float(one.position_loss_se) == pytest.approx(float(loss.std() / 4), rel=1e-5)
