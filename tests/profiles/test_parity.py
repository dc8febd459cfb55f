"""All numbers of a profile, compared with dense float64 computations or transformers."""

from collections.abc import Mapping, Sequence
from functools import partial, reduce

import numpy as np
import pytest
import torch
import xarray as xr
from oracles.dense import dense
from oracles.logit import PARTS, HeadRows, gain, head_rows, information
from oracles.recording import MASKS, attention_calls, with_mask
from oracles.tiny import SUPPORTED, random_tokens, rotations, tiny
from small_measurements import token_progress
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import ropelens as rl
from ropelens.attention.formulas import GAINS, attention_budget
from ropelens.attention.visibility import offset_edges
from ropelens.budget.logit import RIDGE
from ropelens.measured_rotation.probe import RotationProbe
from ropelens.model.as_live_model import as_live_model
from ropelens.profiles.layer_fits import LayerFitter
from ropelens.profiles.measurement import Measurement
from ropelens.profiles.measures import MEASURES
from ropelens.profiles.passes import collect
from ropelens.profiles.summary import summarize
from ropelens.profiles.tasks import REPEATS, Repeats, repeated_tokens
from ropelens.schema.rows import Derived, Statistic
from ropelens.text.text import Text

LENGTHS = (40, 23, 31)
LONG = (150, 97, 128)  # beyond offset 64, bins have several offsets

Values = Mapping[str, np.ndarray]
NAMED = (5, 40, 41)
"""Tokens that are sinks at any position, in addition to BOS and position 0."""

SAVED = [row for row in MEASURES if row.saved and row.dims[0] == "layer"]
OF_LAYERS = [row for row in SAVED if isinstance(row, Statistic | Derived)]
"""Everything that sums of one pass give of layers: each has an entry in the dense oracle."""


def assert_close(ours: np.ndarray, true: np.ndarray, *, rtol: float, what: str) -> None:
    np.testing.assert_array_equal(np.isnan(ours), np.isnan(true), err_msg=what)
    scale = np.nanmax(np.abs(true), initial=1e-2)
    np.testing.assert_allclose(ours, true, rtol=0, atol=rtol * scale, err_msg=what)


def profile_of(
    model,
    tokens: torch.Tensor,
    lengths: Sequence[int],
    *,
    surrogates: int = 0,
    **options: int,
) -> xr.Dataset:
    live = as_live_model(model)
    probe = RotationProbe(live)
    planes = probe.planes()
    text = Text(tokens, torch.tensor(lengths), bos=1, sink_ids=NAMED)
    measurement = Measurement(live, text, probe, **options)
    fits = {}
    if surrogates:
        fits = LayerFitter(measurement, planes, surrogates=surrogates).fit_layers()
    sums = collect(measurement, planes, fits=fits)
    return summarize(sums, planes, fits)


def true_values(
    model, tokens: torch.Tensor, lengths: Sequence[int], *, name: str
) -> Values:
    length = tokens.shape[1]
    edges = offset_edges(length).numpy()
    bins = np.stack([edges[:-1], edges[1:]], axis=1)
    at_0 = np.arange(length) == 0
    sinks = np.isin(tokens, [1, *NAMED]) | at_0
    turning = rotations(model, name=name)
    return dense(model, tokens, lengths, rotations=turning, bins=bins, sinks=sinks)


def assert_frequencies_agree(profile: xr.Dataset, true: Values, *, rtol: float) -> None:
    """The oracle adds planes that p-RoPE stopped to the other coordinates without rotation.

    Only selectivity can be compared for them, because it adds up.
    """
    by_plane = [row.name for row in OF_LAYERS if "frequency" in row.saved_dims]
    for layer, inv_freq in enumerate(profile["inv_freq"].values):
        turns = inv_freq > 0
        stays = inv_freq == 0
        count = int(turns.sum())
        for name in by_plane:
            what = f"{name} {layer}"
            ours = profile[name].values[layer]
            theirs = true[name][layer]
            assert_close(ours[:, turns], theirs[:, :count], rtol=rtol, what=what)
            adds_up = name.startswith("selectivity")
            if stays.sum() == 1 or (stays.any() and adds_up):
                rest = ours[:, stays].sum(1)
                assert_close(rest, theirs[:, -1], rtol=rtol, what=f"rest of {what}")
        expected = true["inv_freq"][layer, :count]
        assert_close(inv_freq[turns], expected, rtol=1e-7, what="w")


def assert_profile_agrees(profile: xr.Dataset, true: Values, *, rtol: float) -> None:
    assert_frequencies_agree(profile, true, rtol=rtol)
    for row in OF_LAYERS:
        name = row.name
        if name != "learned_sink_mass" and "frequency" not in row.saved_dims:
            assert_close(profile[name].values, true[name], rtol=rtol, what=name)
    learned = profile["learned_sink_mass"].values  # a share, with rounding errors at 0
    np.testing.assert_allclose(learned, true["learned_sink_mass"], rtol=0, atol=rtol)
    np.testing.assert_allclose(profile.attrs["loss"], true["loss"], rtol=rtol)
    assert profile.attrs["tokens"] == true["tokens"]
    assert profile.attrs["rows_measured"] == true["rows"]


def assert_parity(
    model, name: str, *, lengths=LENGTHS, seed=0, **options: int
) -> tuple:
    model = model.double()
    tokens = random_tokens(seed, sequences=len(lengths), length=max(lengths))
    profile = profile_of(model, tokens, lengths, **options)
    true = true_values(model, tokens, lengths, name=name)
    assert_profile_agrees(profile, true, rtol=2e-6)
    return profile, true


@pytest.mark.parametrize("name", SUPPORTED)
def test_every_family(name: str):
    model = tiny(name)
    if name not in ("gemma2", "gpt_oss"):
        model.set_attn_implementation("sdpa")
    _, true = assert_parity(model, name=name)
    assert (true["total_bits"] > 0.1).all(), "attention is not nearly uniform"


@pytest.mark.parametrize("name", ["mistral_sliding", "gpt_oss"])
def test_beyond_the_exact_bins(name: str):
    assert_parity(tiny(name, seed=1), name=name, lengths=LONG, seed=1, batch_size=1)


@pytest.mark.parametrize("name", ["llama_gqa", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("mask", MASKS)
def test_masks_with_gaps(mask: str, name: str):
    model = with_mask(tiny(name).double(), MASKS[mask])
    assert_parity(model, name=name, batch_size=2)


def test_chunks_that_do_not_see_each_other():
    model = tiny("llama4", attention_chunk_size=8)
    profile, _ = assert_parity(model, name="llama4")
    assert float(profile["offset_mass"][:3, :, 8:].max()) == 0


def test_kv_heads_that_differ_between_layers():
    model = tiny("gemma4", num_global_key_value_heads=1, attention_k_eq_v=True)
    profile, _ = assert_parity(model, name="gemma4")
    assert np.isnan(profile["k_norm"][1, 1]).all()
    assert profile["k_norm"][0].notnull().sum() == 16


def test_float32_of_a_real_checkpoint(shared):
    folder = shared / "checkpoints" / "babyllama105"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    stories = sorted((shared / "corpora" / "tinystories").glob("*.txt"))
    lengths = tuple(150 - 20 * place for place in range(len(stories)))
    tokens = torch.zeros(len(stories), 150, dtype=torch.long)
    for row, story, length in zip(tokens, stories, lengths, strict=True):
        ids = tokenizer(story.read_text())["input_ids"]
        row[:length] = torch.tensor(ids[:length])
    profile = profile_of(model, tokens, lengths)
    true = true_values(model, tokens, lengths, name="llama_gqa")
    assert_profile_agrees(profile, true, rtol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "mask"),
    [
        ("llama_gqa", ""),
        ("gpt_oss", ""),
        ("llama_gqa", "a choice"),
        ("llama_gqa", "a prefix"),
    ],
)
def test_the_budget_matches_fits_with_scipy(name: str, mask: str):
    """Models are fitted to half of the sequences, and scored on all rows of the rest."""
    model = tiny(name, seed=3)
    if mask:
        model = with_mask(model, MASKS[mask])
    tokens = random_tokens(sequences=6, length=30, vocabulary=12)
    profile = rl.profile(model, tokens, surrogates=0)
    assert profile["group_scored"].values.tolist() == [29] * 6
    heads = profile["found_sink"].isnull().values  # the oracle knows only position 0
    assert heads.sum() >= 4
    layer, head = np.argwhere(heads)[-1]
    of_head = profile.isel(layer=layer, head=head)
    rotation = rotations(model, name=name)[layer]
    rows = []
    for sequence in tokens:
        calls, _ = attention_calls(model, sequence)
        sinks = np.arange(30) == 0
        rows.append(head_rows(calls[layer], rotation, head=head, sinks=sinks))
    total = np.array([information(of_sequence) for of_sequence in rows])
    np.testing.assert_allclose(of_head["group_total"], total, rtol=1e-3)
    assert_gains_match(of_head, rows, atol=0.02 * total.mean())


def assert_gains_match(
    of_head: xr.Dataset, rows: list[HeadRows], *, atol: float
) -> None:
    """Compare the gains of each half of the sequences with scipy's fit to the other half."""
    even = reduce(HeadRows.joined, rows[::2])
    odd = reduce(HeadRows.joined, rows[1::2])
    for which, (content, offsets) in PARTS.items():
        ours = of_head[f"group_{which}_gain"]
        scipy_gain = partial(gain, ridge=RIDGE, content=content, offsets=offsets)
        on_even = scipy_gain(odd, on=even)
        np.testing.assert_allclose(ours[::2].mean(), on_even, atol=atol, err_msg=which)
        on_odd = scipy_gain(even, on=odd)
        np.testing.assert_allclose(ours[1::2].mean(), on_odd, atol=atol, err_msg=which)


@torch.no_grad()
def attentions(model: PreTrainedModel, tokens: torch.Tensor) -> np.ndarray:
    """Attention of transformers [layer, head, query, key] on one sequence."""
    model.set_attn_implementation("eager")
    out = model(tokens[None], output_attentions=True, use_cache=False)
    return torch.cat(out.attentions).double().numpy()


@torch.no_grad()
def summed_losses(
    model: PreTrainedModel, tokens: torch.Tensor, lengths: Sequence[int]
) -> np.ndarray:
    """The loss of transformers on each sequence alone, summed over its predictions."""
    losses = []
    for row, length in zip(tokens, lengths, strict=True):
        alone = row[None, :length]
        mean = model(alone, labels=alone).loss
        losses.append(float(mean) * (length - 1))
    return np.array(losses)


GROUP = np.arange(40) * 16 // 40
"""The group of each of 40 sequences, if 16 groups are consecutive sequences."""


def sum_by_group(values: np.ndarray) -> np.ndarray:
    return np.array([values[group == GROUP].sum() for group in range(16)])


def test_the_standard_error_of_the_loss_matches_the_jackknife():
    """The jackknife is over groups of sequences; the delta method approximates it."""
    model = tiny("llama_gqa").double()
    random = np.random.default_rng(0)
    lengths = tuple(int(n) for n in random.integers(5, 20, size=40))
    tokens = random_tokens(sequences=40, length=20)
    profile = profile_of(model, tokens, lengths)
    losses = summed_losses(model, tokens, lengths)
    counts = np.array(lengths) - 1
    loss_of_group = sum_by_group(losses)
    count_of_group = sum_by_group(counts)
    loss_of_others = losses.sum() - loss_of_group
    without = loss_of_others / (counts.sum() - count_of_group)
    squares = (without - without.mean()) ** 2
    jackknife = np.sqrt(15 / 16 * squares.sum())
    np.testing.assert_allclose(profile.attrs["loss"], losses.sum() / counts.sum())
    np.testing.assert_allclose(profile.attrs["loss_se"], jackknife, rtol=0.05)
    np.testing.assert_allclose(profile["group_loss"], loss_of_group / count_of_group)
    np.testing.assert_array_equal(profile["group_predicted"], count_of_group)
    single = profile_of(model, tokens[:1], lengths[:1])
    assert np.isnan(single.attrs["loss_se"])


@pytest.mark.parametrize("name", ["mistral_sliding", "gpt_oss"])
def test_the_excerpt_is_transformers_attention(name: str):
    model = tiny(name)
    tokens = random_tokens(sequences=2, length=90)
    excerpts = [tokens[0, :64], tokens[1, :64], tokens[1, 20:50]]  # two run together
    profile = rl.profile(model, tokens, excerpts=excerpts, budget=False)
    stored = profile["excerpt_attention"]
    assert stored.dtype == np.float32
    for number, excerpt in enumerate(excerpts):
        length = len(excerpt)
        ours = stored.values[number, ..., :length, :length]
        expected = attentions(model, excerpt)
        np.testing.assert_allclose(ours, expected, atol=1e-5)
        names = [f"#{token}" for token in excerpt]
        padding = [""] * (64 - length)
        assert profile["excerpt_token"].values[number].tolist() == names + padding
    assert np.isnan(stored.values[2, ..., 30:, :]).all()


def test_an_excerpt_stores_queries_of_any_size():
    """Values above 65,504, the limit of float16, also have 11 bits."""
    model = tiny("llama_gqa")
    tokens = random_tokens(sequences=3, length=40)

    def queries_of_layer_0() -> xr.DataArray:
        profile = rl.profile(model, tokens, excerpts=[tokens[0]], budget=False)
        return profile["excerpt_query_still"][:, 0]

    small = queries_of_layer_0()
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight *= 2.0**16
    large = queries_of_layer_0()
    assert abs(large).max() > 65_504
    np.testing.assert_allclose(large, small * 2.0**16, rtol=1e-3, atol=1)


@pytest.mark.parametrize("name", ["llama_gqa", "gpt_oss"])
def test_repeated_tokens_by_brute_force(name: str):
    model = tiny(name, max_position_embeddings=20)
    text = torch.ones(1, 20, dtype=torch.long)
    text[0, 1] = 2  # two BOS would be a fault
    measurement = Measurement.of(model, text, seed=4)
    repeats = Repeats(measurement, measurement.rotation.planes())
    scores = repeats.measure(lambda _: None)
    tokens = repeated_tokens(1, 9, vocabulary=measurement.live.vocabulary, seed=4)
    assert tokens.shape == (REPEATS, 19)
    assert (tokens[:, 0] == 1).all()
    assert torch.equal(tokens[:, 1:10], tokens[:, 10:])
    sequences = [tuple(row) for row in tokens.tolist()]
    assert all(len(set(row[1:10])) == 9 for row in sequences)
    assert len(set(sequences)) == REPEATS
    weights = np.stack([attentions(model, row) for row in tokens])
    if name == "gpt_oss":  # without the share of the learned sinks
        weights = weights / weights.sum(-1, keepdims=True)
    again = range(10, 19)
    after_copy = [weights[:, :, :, row, row - 8] for row in again]
    expected = np.mean(after_copy, axis=0)
    induction = scores["trial_induction"].numpy()
    assert_close(induction, expected, rtol=1e-5, what="trial_induction")
    on_copy = [weights[:, :, :, row, row - 9] for row in again]
    expected = np.mean(on_copy, axis=0).mean(0)
    duplicate = scores["duplicate_token"].numpy()
    assert_close(duplicate, expected, rtol=1e-5, what="duplicate_token")
    np.testing.assert_allclose(scores["induction"], scores["trial_induction"].mean(0))


def test_groups_add_up_to_the_whole():
    model = tiny("llama_gqa")
    lengths = np.random.default_rng(0).integers(4, 16, size=40)
    tokens = random_tokens(sequences=40, length=16)
    text = rl.Text(tokens, lengths=lengths)
    profile = rl.profile(model, text, batch_size=7, surrogates=0)
    rows = profile["group_rows"]
    expected = sum_by_group(lengths - 1)
    np.testing.assert_array_equal(rows, expected)
    # All rows are scored, because the sequences are short.
    np.testing.assert_array_equal(profile["group_scored"], expected)
    weight = rows / rows.sum()
    whole = []
    for name in GAINS:
        gains = weight * profile[f"group_{name}"]
        whole.append(gains.sum("group").values)
    for name, bits in attention_budget(*whole).items():
        np.testing.assert_allclose(profile[f"{name}_bits"], bits, rtol=1e-5, atol=1e-6)
    own = GROUP == 3  # sequences of one group
    separate = true_values(model, tokens[own], lengths[own], name="llama_gqa")
    expected = separate["total_bits"]
    np.testing.assert_allclose(profile["group_total"][3], expected, rtol=1e-4)


def test_profile_is_collect_and_summarize_with_attributes():
    model = tiny("gemma3").double()
    tokens = random_tokens(sequences=len(LENGTHS), length=max(LENGTHS))
    done: list[int] = []
    profile = rl.profile(
        model,
        rl.Text(tokens, lengths=torch.tensor(LENGTHS)),
        sinks=NAMED,
        surrogates=1,
        batch_size=2,
        progress=token_progress(done.append),
    )
    assert profile["found_sink"].isnull().all()
    plain = profile_of(model, tokens, LENGTHS, batch_size=2, surrogates=1)
    assert "group_both_gain" in plain
    for name in plain.variables:  # the profile sums the two fitted sequences first
        np.testing.assert_allclose(
            profile[name], plain[name], 1e-12, 1e-12, err_msg=name
        )
    assert sum(done) == 94
    first_batch = done[: len(done) // 2]  # layer by layer
    assert sum(first_batch) == 71
    expected = {
        "model": "Gemma3ForCausalLM",
        "dtype": "float64",
        "seed": 0,
        "rows": "all",
        "context": 40,
        "sequences": 3,
        "documents": 0,
        "tokens": 94,
    }
    assert expected.items() <= profile.attrs.items()
    for name, variable in profile.variables.items():
        if name not in profile.dims:
            assert variable.attrs["long_name"], name
            assert "units" in variable.attrs, name
    assert all(isinstance(value, str | int | float) for value in profile.attrs.values())
