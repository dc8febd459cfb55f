"""Evaluations of edits, compared with losses of transformers, profiles and laws; and tasks."""

import itertools
from functools import partial

import numpy as np
import pytest
import torch
import xarray as xr
from oracles.copying import copying
from oracles.tiny import random_tokens, tiny
from scipy import stats
from torch.nn.functional import cross_entropy, pad
from transformers import PreTrainedModel

import ropelens as rl
from ropelens.errors import BadArgument
from ropelens.profiles.measurement import Measurement
from ropelens.profiles.needles import TRIALS, Needles, found_needles, hide_needles
from ropelens.profiles.tasks import repeated_tokens

ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
P_ROPE = {**ROPE, "rope_type": "proportional", "partial_rotary_factor": 0.5}
LENGTHS = torch.tensor([40, 33, 7, 2])
tokens = partial(random_tokens, sequences=4, length=40)


@torch.no_grad()
def true_losses(model: PreTrainedModel) -> list[float]:
    losses = []
    for row, length in zip(tokens(), LENGTHS, strict=True):
        sequence = row[None, :length]
        outputs = model(sequence, labels=sequence, use_cache=False)
        losses.append(float(outputs.loss))
    return losses


def test_loss_matches_transformers_with_and_without_an_edit():
    model = tiny("llama_gqa", rope_parameters=ROPE)
    edits = {"half": rl.stop_slowest(0.5), "by name": "p-rope:0.5", "both": ["nope"]}
    text = rl.Text(tokens(), lengths=LENGTHS)
    result = rl.evaluate(model, text, edits=edits, measures=["loss"], batch_size=3)
    assert list(result.edit.values) == ["none", "half", "by name", "both"]
    loss = result.loss
    np.testing.assert_allclose(loss.sel(edit="none"), true_losses(model), rtol=1e-5)
    expected = true_losses(tiny("llama_gqa", rope_parameters=P_ROPE))
    np.testing.assert_allclose(loss.sel(edit="half"), expected, rtol=1e-4)
    np.testing.assert_allclose(loss.sel(edit="by name"), expected, rtol=1e-4)
    assert (loss.sel(edit="both") != loss.sel(edit="half")).any()
    assert list(result.predicted_tokens.values) == [39, 32, 6, 1]


class Names:
    def decode(self, token_ids: list[int], **_: object) -> str:
        texts = ["<s>", "a", "b", "'", " Call", "7", "\n", " 12", ",", "me"]
        return "".join(texts[token] for token in token_ids)


CLASSES = {"digits": (5, 7), "newline": (6,), "capital": (4,)}
OF_CLASSES = tokens() % 7 + 3  # seven tokens, so that most are repeated
NOPE = {"nope": "nope"}


def evaluate_classes(model: PreTrainedModel, measure: str) -> xr.Dataset:
    return rl.evaluate(
        model,
        rl.Text(OF_CLASSES, lengths=LENGTHS),
        edits=NOPE,
        measures=[measure],
        tokenizer=Names(),
        batch_size=2,
    )


@torch.no_grad()
def losses_by_position(model: PreTrainedModel) -> torch.Tensor:
    """The loss [sequence, position] of each token; NaN for the first one."""
    log_chances = model(OF_CLASSES).logits[:, :-1].double().log_softmax(-1)
    following = OF_CLASSES[:, 1:, None]
    losses = -log_chances.gather(2, following)[..., 0]
    return pad(losses, (1, 0), value=torch.nan)


def mean_or_nan(values: list[float]) -> float:
    return float(np.mean(values)) if values else np.nan


def test_loss_of_repeated_tokens_by_brute_force():
    model = tiny("llama_gqa")
    losses = losses_by_position(model)
    result = evaluate_classes(model, "loss")
    for sequence, length in enumerate(LENGTHS.tolist()):
        ids = OF_CLASSES[sequence].tolist()
        seen = [n for n in range(1, length) if ids[n] in ids[:n]]
        expected = mean_or_nan(losses[sequence, seen].tolist())
        assert int(result.seen_tokens[sequence]) == len(seen)
        np.testing.assert_allclose(result.seen_loss[0, sequence], expected, rtol=1e-5)


def test_a_text_without_repeated_tokens_has_no_loss_of_them():
    different = torch.arange(3, 40)[None]
    result = rl.evaluate(tiny("llama_gqa"), different, measures=["loss"])
    assert int(result.seen_tokens[0]) == 0
    assert np.isnan(result.seen_loss).all()


@pytest.mark.parametrize("name", CLASSES)
def test_loss_of_classes_by_brute_force(name: str):
    model = tiny("llama_gqa")
    losses = losses_by_position(model)
    result = evaluate_classes(model, "loss").sel(token_class=name)
    for sequence, length in enumerate(LENGTHS.tolist()):
        ids = OF_CLASSES[sequence].tolist()
        positions = [n for n in range(1, length) if ids[n] in CLASSES[name]]
        expected = mean_or_nan(losses[sequence, positions].tolist())
        assert int(result.class_tokens[sequence]) == len(positions)
        np.testing.assert_allclose(result.class_loss[0, sequence], expected, rtol=1e-5)


@torch.no_grad()
def attentions(model: PreTrainedModel) -> torch.Tensor:
    """Attention [layer, sequence, head, row, key] of transformers, in float64."""
    outputs = model(OF_CLASSES, output_attentions=True)
    return torch.stack(outputs.attentions).double()


@pytest.mark.parametrize("name", ["digits", "newline"])
def test_change_of_attention_of_classes_by_brute_force(name: str):
    model = tiny("llama_gqa")
    before = attentions(model)
    with rl.edit_rope(model, "nope"):
        after = attentions(model)
    log_ratio = (before / after).log2().nan_to_num()  # 0 / 0 for hidden keys
    divergence = (before * log_ratio).sum(-1)
    rows = torch.isin(OF_CLASSES, torch.tensor(CLASSES[name]))
    rows &= torch.arange(40) < LENGTHS[:, None]
    rows[:, 0] = False
    expected = divergence.transpose(2, 3)[:, rows].mean(1)
    result = evaluate_classes(model, "change")
    change = result.class_change.sel(edit="nope", token_class=name)
    np.testing.assert_allclose(change, expected, 1e-3, 1e-5)


def test_labels_match_a_profile_of_the_edited_model():
    model = tiny("llama_gqa", rope_parameters=ROPE)
    text = rl.Text(tokens(), lengths=LENGTHS)
    result = rl.evaluate(model, text, edits={"half": "p-rope:0.5"}, measures=["labels"])
    for name, rope in (("none", ROPE), ("half", P_ROPE)):
        configured = tiny("llama_gqa", rope_parameters=rope)
        profile = rl.profile(configured, text, surrogates=0)
        heads = rl.classify_heads(profile)
        entry = result.sel(edit=name)
        assert list(entry.label.values.ravel()) == list(heads["label"])
        for bits in ("total_bits", "sink_bits", "position_bits", "content_bits"):
            np.testing.assert_allclose(entry[bits], profile[bits], rtol=1e-3, atol=1e-4)
        fraction = heads["positional_fraction"].to_numpy()
        evaluated = entry.positional_fraction.values.ravel()
        np.testing.assert_allclose(evaluated, fraction, rtol=1e-2, atol=1e-3)


def test_labels_of_a_class_come_from_its_rows():
    ids = tokens() % 2 * 2 + 5  # only digits
    result = rl.evaluate(
        tiny("llama_gqa"),
        ids,
        edits={"half": "p-rope:0.5"},
        measures=["labels"],
        tokenizer=Names(),
    )
    assert "untested" not in result.label
    digits = result.class_label.sel(token_class="digits", drop=True)
    xr.testing.assert_equal(digits, result.label.rename("class_label"))
    assert (result.class_label.sel(token_class="newline") == "").all()
    assert result.class_label_change_confidence.isnull().all()  # too few sequences


def test_labels_of_a_class_change_as_labels_of_all_rows_do():
    ids = random_tokens(sequences=8, length=20) % 2 * 2 + 5  # only digits
    edits = {"nope": "nope"}
    result = rl.evaluate(
        tiny("llama_gqa"), ids, edits=edits, measures="labels", tokenizer=Names()
    )
    confidence = result.label_change_confidence
    assert confidence.sel(edit="nope").max() > 0
    of_digits = result.class_label_change_confidence.sel(token_class="digits")
    np.testing.assert_array_equal(of_digits, confidence)


def test_loss_by_position_sums_to_the_loss():
    model = tiny("llama_gqa")
    text = rl.Text(tokens(), lengths=LENGTHS)
    result = rl.evaluate(model, text, edits={"a": "nope"}, measures="loss")
    start = result.position_start.values
    stop = result.position_stop.values
    assert list(start) == [1, 2, 3, 4, 6, 8, 11, 16, 23, 32]
    assert list(stop) == [*start[1:], 40]
    rows_at_position = (np.arange(40) < LENGTHS.numpy()[:, None]).sum(0)
    counts = [
        rows_at_position[first:end].sum()
        for first, end in zip(start, stop, strict=True)
    ]
    for edit in ("none", "a"):
        entry = result.sel(edit=edit)
        total = float((entry.loss * entry.predicted_tokens).sum())
        by_position = float((entry.position_loss * counts).sum())
        assert by_position == pytest.approx(total, rel=1e-9)
        mean = float(entry.mean_loss)
        assert mean * sum(counts) == pytest.approx(total, rel=1e-9)
        # The bins from 23 on begin in the second half of 40 tokens.
        far = LENGTHS.numpy() > 23
        far_bins = start >= 23
        far_total = float((entry.far_loss * entry.far_tokens)[far].sum())
        of_bins = np.array(counts)[far_bins] @ entry.position_loss.values[far_bins]
        assert of_bins == pytest.approx(far_total, rel=1e-9)
        assert entry.far_loss[~far].isnull().all()
    assert result.far_tokens.values.tolist() == [17, 10, 0, 0]


@pytest.fixture(scope="module")
def silenced() -> tuple[PreTrainedModel, xr.Dataset]:
    model = tiny("llama_gqa")
    mean = partial(rl.silence_heads, model, to="mean", text=tokens())
    edits = {
        "silent": mean("0.1,1.0"),
        "stopped": rl.stop_slowest(0.5, heads="1.2"),
        "means": [mean("0.1,1.0"), mean("1.1")],
        "both": [rl.silence_heads(model, "1.0"), rl.stop_slowest(0.5, heads="1.0,1.3")],
        "everywhere": "nope",
    }
    return model, rl.evaluate(
        model,
        rl.Text(tokens(), documents=torch.arange(4)),
        edits=edits,
        controls=8,
        measures=["loss"],
        batch_size=2,
    )


def loss_now(model: PreTrainedModel) -> xr.DataArray:
    """The loss of each sequence in the blocks that are open."""
    evaluation = rl.evaluate(model, tokens(), measures="loss", batch_size=2)
    return evaluation["loss"].sel(edit="none")


def test_a_silence_among_edits_equals_its_block(silenced: tuple):
    model, result = silenced
    block = rl.silence_heads(model, "0.1,1.0", to="mean", text=tokens())
    with block:
        expected = loss_now(model)
    with block:
        in_a_second_block = loss_now(model)
    ours = result["loss"].sel(edit="silent")
    assert (ours == expected).all()
    assert (in_a_second_block == expected).all()


def test_two_silences_among_edits_equal_nested_blocks(silenced: tuple):
    model, result = silenced
    outer = rl.silence_heads(model, "0.1,1.0", to="mean", text=tokens())
    inner = rl.silence_heads(model, "1.1", to="mean", text=tokens())
    with outer, inner:
        expected = loss_now(model)
    assert (result["loss"].sel(edit="means") == expected).all()


def test_a_silence_and_an_edit_equal_their_blocks(silenced: tuple):
    model, result = silenced
    silent = rl.silence_heads(model, "1.0")
    stopped = rl.stop_slowest(0.5, heads="1.0,1.3")
    with silent, rl.edit_rope(model, stopped):
        expected = loss_now(model)
    with silent, silent, rl.edit_rope(model, stopped):
        silenced_twice = loss_now(model)
    assert (result["loss"].sel(edit="both") == expected).all()
    assert (silenced_twice == expected).all()


def test_controls_have_as_many_random_other_heads_of_the_same_layers(silenced: tuple):
    model, result = silenced
    names = result["control_of"].values.tolist()
    assert names.count("silent") == 8
    assert names.count("stopped") == 3
    assert names.count("both") == 2
    assert names.count("everywhere") == 0
    silences = {}
    for first, second in itertools.product((0, 2, 3), (1, 2, 3)):
        heads = f"0.{first},1.{second}"
        silences[heads] = rl.silence_heads(model, heads, to="mean", text=tokens())
    measured = rl.evaluate(
        model, tokens(), edits=silences, measures="loss", batch_size=2
    )
    drawn = result["loss"].values[result["control_of"].values == "silent"]
    assert len(np.unique(drawn, axis=0)) == 8
    assert all((row == measured["loss"].values[1:]).all(1).any() for row in drawn)


def test_paired_changes_are_a_table_with_intervals(silenced: tuple):
    _, result = silenced
    table = rl.paired_changes(result).set_index("edit")
    change = (result["loss"] - result["loss"].sel(edit="none")).to_pandas()
    for name, row in change.drop("none").iterrows():
        test = stats.ttest_1samp(row, 0).confidence_interval()
        ends = table.loc[name, ["loss_change_low", "loss_change_high"]]
        assert (*ends,) == pytest.approx((*test,), rel=1e-9)
    apart = (
        change.loc["stopped"] - change[table["control_of"] == "stopped"]
    ).to_numpy()
    means = apart.mean(0), apart.mean(1)
    halves = []
    for mean in means:
        quantile = stats.t.ppf(0.975, len(mean) - 1)
        halves.append(stats.sem(mean) * quantile)
    ends = [f"loss_beyond{end}" for end in ("", "_low", "_high")]
    mean, low, high = table.loc["stopped", ends]
    assert (mean, high - mean) == pytest.approx((apart.mean(), np.hypot(*halves)))
    assert mean - low == pytest.approx(high - mean)
    assert table.loc[["none", "everywhere"], "loss_beyond"].isna().all()
    sweep = rl.truncate(
        tiny("llama_gqa"), tokens(), keep=[0.5], controls=0, measures="loss"
    )
    assert rl.paired_changes(sweep)["kind"].tolist() == ["none", "slow", "fast"]
    for values in (xr.Dataset(coords={"partner": [0]}), result):
        with pytest.raises(BadArgument, match="have no pairs"):
            rl.paired_changes(values, "p-rope")


def test_impossible_silences_and_controls_are_refused():
    model = tiny("llama_gqa")
    other = tiny("llama_gqa")
    edits = {"a": rl.silence_heads(model, "1.0,1.1,1.2")}
    with pytest.raises(
        BadArgument, match="Layer 1 has too few heads for random controls"
    ):
        rl.evaluate(model, tokens(), edits=edits, controls=8, measures="loss")
    with pytest.raises(BadArgument, match="a silences heads of another model"):
        rl.evaluate(other, tokens(), edits=edits)


TEXT = torch.from_numpy(np.random.default_rng(0).integers(1, 25, size=(4, 96)))
TEXT[:, 0] = 0


def needles(
    *, vocabulary: int = 64, length: int = 61, first_token: int = 63, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    return hide_needles(
        TEXT.flatten(),
        vocabulary=vocabulary,
        length=length,
        first_token=first_token,
        seed=seed,
    )


@torch.no_grad()
def copy_losses(model: PreTrainedModel, distance: int) -> torch.Tensor:
    """Losses [sequence, position] of the repeated tokens, by the cross entropy of torch."""
    tokens = repeated_tokens(int(TEXT[0, 0]), distance, vocabulary=96, seed=3)
    logits = model(tokens).logits[:, :-1]
    return cross_entropy(logits.mT, tokens[:, 1:], reduction="none")


def test_losses_of_repeats_leave_out_the_first_token_of_each_copy():
    """Nothing announces the first token."""
    model = tiny("llama_gqa", max_position_embeddings=41)
    results = rl.evaluate(model, TEXT, measures="induction", seed=3).isel(edit=0)
    losses = copy_losses(model, 20)
    np.testing.assert_allclose(results.first_loss, losses[:, 1:20].mean(1), rtol=1e-5)
    np.testing.assert_allclose(results.repeat_loss, losses[:, 21:].mean(1), rtol=1e-5)


def test_losses_of_copies_by_their_distance():
    model = tiny("llama_gqa", max_position_embeddings=41)
    results = rl.evaluate(
        model,
        TEXT,
        edits={"still": "nope"},
        measures="copying",
        distances=[5, 30],
        seed=3,
    )
    assert results.copy_loss.dims == ("edit", "copy_distance", "trial")
    edits = {"none": [], "still": ["nope"]}
    for distance in (5, 30):
        for edit, given in edits.items():
            with rl.edit_rope(model, *given):
                losses = copy_losses(model, distance)
            expected = losses[:, distance + 1 :].mean(1)
            copy_loss = results.copy_loss.sel(edit=edit, copy_distance=distance)
            np.testing.assert_allclose(copy_loss, expected, rtol=1e-5)


def test_default_distances_of_copies_are_parts_of_the_context():
    model = tiny("llama_gqa", max_position_embeddings=41)
    results = rl.evaluate(model, TEXT, measures="copying")
    assert results.copy_distance.values.tolist() == [8, 16]


def test_a_prompt_has_each_needle_once_and_ends_with_a_key():
    of_depths, of_trials = needles()
    assert of_depths.shape == (3, TRIALS, 61)
    assert of_trials.shape == (TRIALS, 8)
    numbers = TEXT.flatten().tolist()
    text = " ".join(map(str, numbers))
    for depth, before in enumerate((3, 17, 31)):  # the text has 34 tokens
        for prompt, values in zip(of_depths[depth], of_trials.tolist(), strict=True):
            first, *rest = prompt.tolist()
            body = rest[:-2]
            key = rest[-2:]
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
    logits = torch.tensor(
        [[9, 1, 2, 3], [0, 3, 2, 3], [0, 1, 4, 3], [0, 0, 0, 0]]
    ).float()
    results = found_needles(logits[None], torch.tensor([[3, 1, 2]] * 4))
    assert results.tolist() == [[True, False, False, False]]


def test_default_lengths_are_parts_of_the_context():
    for context, lengths in ((512, [128, 256, 512]), (40, [32, 40])):
        model = tiny("llama_gqa", max_position_embeddings=context)
        text = TEXT.tile(1, 6)[:, :context]
        task = Needles(Measurement.of(model, text), None)
        assert task.coordinates["retrieval_length"].tolist() == lengths
        with pytest.raises(BadArgument, match="has 32 tokens or more"):
            Needles(Measurement.of(model, text), [512, 31])


def test_a_model_that_copies_finds_every_needle():
    """Slow planes copy. Fast planes look one token back, or two tokens at half the speed."""
    model = copying()
    speeds = model.model.rotary_emb.inv_freq
    edits = {"slow": rl.stop_slowest(0.25), "half": rl.rescale(speeds / 2, heads="0.*")}
    measures = ("retrieval", "induction", "copying")
    results = rl.evaluate(
        model,
        TEXT,
        edits=edits,
        measures=measures,
        distances=(8, 40),
        prompt_lengths=(48, 96),
        prompts=7,
    )
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
