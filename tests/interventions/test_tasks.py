"""Tests of needles, repeats and copies, also with a hand-built model that finds them."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from oracles.copying import copying
from oracles.tiny import tiny
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

import ropelens as rl
from ropelens.errors import BadArgument
from ropelens.interventions.tasks import TRIALS, found_needles, hide_needles
from ropelens.interventions.tasks import needles as hidden_needles
from ropelens.profiles.induction import repeated_tokens
from ropelens.profiles.measurement import Measurement

TEXT = torch.from_numpy(np.random.default_rng(0).integers(1, 25, size=(4, 96)))
TEXT[:, 0] = 0


def needles(**changed: object) -> tuple[torch.Tensor, torch.Tensor]:
    options = {"vocabulary": 64, "length": 61, "first_token": 63, "seed": 0} | changed
    return hide_needles(TEXT.flatten(), **options)


@torch.no_grad()
def true_losses(model: PreTrainedModel, distance: int) -> torch.Tensor:
    """Losses [sequence, position] of the repeated tokens, by the cross entropy of torch."""
    tokens = repeated_tokens(int(TEXT[0, 0]), distance, vocabulary=96, seed=3)
    return cross_entropy(model(tokens).logits[:, :-1].mT, tokens[:, 1:], reduction="none")


def test_losses_of_repeats_leave_out_the_first_token_of_each_copy():
    """Nothing announces the first token."""
    model = tiny("llama_gqa", max_position_embeddings=41)
    results = rl.evaluate(model, TEXT, measures="induction", seed=3).isel(edit=0)
    losses = true_losses(model, 20)
    np.testing.assert_allclose(results.first_loss, losses[:, 1:20].mean(1), rtol=1e-5)
    np.testing.assert_allclose(results.repeat_loss, losses[:, 21:].mean(1), rtol=1e-5)


def test_losses_of_copies_by_their_distance():
    model = tiny("llama_gqa", max_position_embeddings=41)
    options = {"measures": "copying", "distances": [5, 30], "seed": 3}
    results = rl.evaluate(model, TEXT, edits={"still": "nope"}, **options)
    assert results.copy_loss.dims == ("edit", "copy_distance", "trial")
    for distance in (5, 30):
        for edit, block in (("none", nullcontext()), ("still", rl.edit_rope(model, "nope"))):
            with block:
                losses = true_losses(model, distance)
            copy_loss = results.copy_loss.sel(edit=edit, copy_distance=distance)
            np.testing.assert_allclose(copy_loss, losses[:, distance + 1 :].mean(1), rtol=1e-5)
    within = rl.evaluate(model, TEXT, measures="copying")
    assert within.copy_distance.values.tolist() == [8, 16]


def test_a_prompt_has_each_needle_once_and_ends_with_a_key():
    of_depths, of_trials = needles()
    assert of_depths.shape == (3, TRIALS, 61)
    assert of_trials.shape == (TRIALS, 8)
    text = " ".join(map(str, TEXT.flatten().tolist()))
    for depth, before in enumerate((3, 17, 31)):  # the text has 34 tokens
        for prompt, values in zip(of_depths[depth], of_trials.tolist(), strict=True):
            first, *rest = prompt.tolist()
            body, key = rest[:-2], rest[-2:]
            assert first == 63
            places = [body.index(value) - 2 for value in values]
            needle_tokens = [body[start + n] for start in places for n in range(3)]
            assert [body[places[0] + n] for n in range(3)] == [*key, values[0]]
            assert len({*needle_tokens}) == 24
            hay = [token for token in body if token not in needle_tokens]
            assert " ".join(map(str, hay)) in text
            assert len(hay) + 24 == len(body)
            assert sum(token in hay for token in body[: places[0]]) == before


def test_needles_are_the_same_at_every_depth_and_depend_on_the_seed():
    prompts, values = needles()
    sorted_prompts = prompts.sort(-1).values
    assert (sorted_prompts == sorted_prompts[0]).all()
    assert torch.equal(needles()[0], prompts)
    assert not torch.equal(needles(seed=1)[0], prompts)
    assert torch.equal(needles(seed=-1)[0], needles(seed=-1)[0])
    assert not (values[..., None] == TEXT.unique()).all()
    text = torch.cat([torch.zeros(40, dtype=torch.long), torch.arange(30)])
    _, values = hide_needles(text, first_token=1, vocabulary=99, length=32, seed=0)
    assert int(values.max()) < 30


def test_a_short_text_and_a_small_vocabulary():
    prompts, _ = needles(length=2000, vocabulary=25, first_token=24)
    assert prompts.shape == (3, TRIALS, 2000)
    assert len(prompts.unique()) == 25
    with pytest.raises(BadArgument, match=r"24 different[^$]*a vocabulary of 23"):
        needles(vocabulary=23)


def test_a_needle_is_found_if_its_value_has_the_highest_logit():
    """Token 0 is not a candidate. In the second row another candidate has the same logit."""
    logits = torch.tensor([[9, 1, 2, 3], [0, 3, 2, 3], [0, 1, 4, 3], [0, 0, 0, 0]]).float()
    results = found_needles(logits[None], torch.tensor([[3, 1, 2]] * 4))
    assert results.tolist() == [[True, False, False, False]]


def test_default_lengths_are_parts_of_the_context():
    for context, lengths in ((512, [128, 256, 512]), (40, [32, 40])):
        model = tiny("llama_gqa", max_position_embeddings=context)
        text = TEXT.tile(1, 6)[:, :context]
        task = hidden_needles(Measurement.of(model, text), None)
        assert task.coordinates["retrieval_length"].tolist() == lengths
        with pytest.raises(BadArgument, match="has 32 tokens or more"):
            hidden_needles(Measurement.of(model, text), [512, 31])


def test_a_model_that_copies_finds_every_needle():
    """Slow planes copy. Fast planes look one token back, or two tokens at half the speed."""
    model = copying()
    speeds = model.model.rotary_emb.inv_freq
    edits = {"slow": rl.stop_slowest(0.25), "half": rl.rescale(speeds / 2, heads="0.*")}
    options = {"distances": (8, 40), "prompt_lengths": (48, 96), "prompts": 7}
    measures = ("retrieval", "induction", "copying")
    results = rl.evaluate(model, TEXT, edits=edits, measures=measures, **options)
    assert results.sizes["retrieval_trial"] == 7
    assert results.retrieval_length.values.tolist() == [48, 96]
    assert (results.retrieval.sel(edit=["none", "slow"]) > 0.99).all()
    assert (results.retrieval.sel(edit="half") < 0.3).all()
    hits = results.retrieval_hit.mean("retrieval_trial")
    np.testing.assert_array_equal(results.retrieval, hits)
    assert (results.induction.sel(edit="none", layer=1) > 0.98).all()  # 63 of 64 rows
    assert (results.induction.sel(edit="half", layer=1) < 0.1).all()
    copies = results.copy_loss.mean("trial")
    assert (copies.sel(edit="none") < copies.sel(edit="half") - 0.9).all()
    gain = (results.first_loss - results.repeat_loss).mean("trial")
    assert gain.sel(edit="none") > 1
    assert gain.sel(edit="half") < 0.1
