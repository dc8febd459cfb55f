"""Order and place if keys move away, and the change of attention by edits."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from oracles.handmade import call_of
from oracles.recording import AttentionCall, LayerRotation, attention_calls
from oracles.tiny import keep, random_tokens, rotations, tiny
from small_measurements import assert_alike
from torch import Tensor
from torch.distributions import Categorical, kl_divergence
from transformers import PreTrainedModel

import ropelens as rl
from ropelens.attention import distances, fast_products
from ropelens.attention.attention_change import attention_change
from ropelens.attention.block import Block
from ropelens.attention.exchange import exchange_order
from ropelens.attention.visibility import Visibility
from ropelens.errors import BadArgument
from ropelens.interventions.plane_edits import Edit
from ropelens.model import live_model
from ropelens.profiles.measures import REQUESTED
from ropelens.text.rows import all_rows

NAMES = [*REQUESTED]
TOKENS = random_tokens(sequences=3, length=40)
OPTIONS = {"statistics": NAMES, "budget": False}


def rotated_scores(model: Any, q: Tensor, k: Tensor, layer: int) -> Tensor:
    """q . k [head, row, key, distance]; functions of the model rotate each key anew."""
    count = q.shape[1]
    module = sys.modules[type(model).__module__]
    kinds = [model.config.layer_types[layer]] if "gemma3" in module.__name__ else []
    cos, sin = model.base_model.rotary_emb(q, torch.arange(count)[None], *kinds)

    def rotate(x: Tensor, at: int) -> Tensor:
        turning = x[None, ..., : cos.shape[-1]]
        waves = (cos[:, at, None], sin[:, at, None])
        turned, _ = module.apply_rotary_pos_emb(turning, turning, *waves)
        return torch.cat([turned[0], x[..., cos.shape[-1] :]], dim=-1)

    query = rotate(q, count - 1)
    scores = []
    for distance in range(count):
        key = rotate(k, count - 1 - distance)
        scores.append(query @ key.mT)
    return torch.stack(scores, dim=-1)


def draw(weight: np.ndarray, numbers: Tensor) -> list[int]:
    """Two keys other than position 0; the second is drawn without the first."""
    drawn = [0]
    for number in numbers.tolist():
        left = weight.copy()
        left[drawn] = 0
        if left.sum() > 0:
            key = np.searchsorted(left.cumsum(), number * left.sum(), "right")
            drawn.append(int(key))
    return drawn[1:]


BINS = 2 ** np.arange(6)  # the first distance of each bin
NEAR, FAR, START = distances.sampled_distances(len(BINS))


@dataclass(frozen=True, eq=False)
class Row:
    """Scores [key, distance] of a query, and the two pairs of keys that are compared."""

    score: np.ndarray
    length: np.ndarray  # [key]: length of the terms of all planes
    pair: list[int]  # drawn by attention
    even_pair: list[int]  # drawn with equal chances
    farthest: int  # distance of the first key that the query sees

    @property
    def sees(self) -> np.ndarray:
        return self.farthest >= FAR

    def measures(self) -> dict[str, np.ndarray]:
        """The values of each measure by sampled distance."""
        near = NEAR * self.sees
        far = FAR * self.sees
        measures = {}
        if self.pair:
            key = self.pair[0]
            score = self.score[key]
            steps = abs(score[far] - score[far - 1]) / self.length[key]
            mean_step = np.average(steps, weights=START * self.sees)
            measures["locality"] = score[near] > score[far]
            measures["position_sensitivity"] = np.full(len(FAR), mean_step)
        for name, keys in (
            ("reversal", self.pair),
            ("uniform_reversal", self.even_pair),
        ):
            if not keys:
                continue
            lead = self.score[keys[0]] - self.score[keys[-1]]
            if abs(lead).max() > 1e-6:  # two keys with different contents
                measures[name] = lead[far] * lead[0] < 0
        return measures

    def mean_by_bin(self, values: np.ndarray) -> np.ndarray:
        """Mean of values by distance in each bin that the query reaches; NaN in the rest."""
        means = np.full(len(BINS), np.nan)
        reached = FAR[self.sees].max()
        for number, begin in enumerate(BINS):
            if begin <= reached:
                means[number] = values[self.sees & (begin == START)].mean()
        return means


def lengths_of_terms(q: Tensor, k: Tensor, turning: LayerRotation) -> Tensor:
    """Length [head, row, key] of the terms of all planes, and of the rest."""
    terms = []
    for pair in turning.pairs:
        q_norm = q[..., pair].norm(dim=-1)
        k_norm = k[..., pair].norm(dim=-1)
        terms.append(q_norm[..., None] * k_norm[:, None])
    terms.append(q[..., turning.rest] @ k[..., turning.rest].mT)
    return torch.stack(terms).norm(dim=0)


def rows_of_layer(
    model: Any, call: AttentionCall, turning: LayerRotation, layer: int
) -> Iterator[tuple[int, int, Row]]:
    """The head, the position and the case of each row except the first."""
    q = turning.unrotate(call.query)
    k = turning.unrotate(call.key)
    k = k.repeat_interleave(len(q) // len(k), dim=0)
    scores = call.scale * rotated_scores(model, q, k, layer)
    lengths = call.scale * lengths_of_terms(q, k, turning)
    heads, count = scores.shape[:2]
    order = exchange_order(torch.tensor([count]), width=count, seed=0, numbers=[0])
    for head in range(heads):
        for position in range(1, count):
            seen = call.visible[position].numpy()
            weight = call.attention[head, position].numpy()
            numbers = order[0, :, position]
            row = Row(
                score=scores[head, position].numpy(),
                length=lengths[head, position].numpy(),
                pair=draw(weight * seen, numbers[:2]),
                even_pair=draw(1.0 * seen, numbers[2:]),
                farthest=position - seen.argmax(),
            )
            yield head, position, row


def true_measures(model: Any, tokens: Tensor, name: str) -> dict[str, np.ndarray]:
    """Means over rows [layer, head, bin]; `position_sensitivity` is the same in all bins."""
    calls, _ = attention_calls(model, tokens)
    shape = (len(calls), 4, len(tokens), len(BINS))
    by_row = {measure: np.full(shape, np.nan) for measure in NAMES}
    turnings = rotations(model, name=name)
    for layer, (call, turning) in enumerate(zip(calls, turnings, strict=True)):
        for head, position, row in rows_of_layer(model, call, turning, layer):
            for measure, values in row.measures().items():
                means = row.mean_by_bin(values)
                by_row[measure][layer, head, position] = means
    true = {}
    for measure, values in by_row.items():
        count = np.isfinite(values).sum(2)
        with np.errstate(invalid="ignore"):
            true[measure] = np.nansum(values, 2) / count
    return true


@pytest.mark.parametrize(
    "name", ["llama_gqa", "gpt_neox", "phi", "glm", "gemma2", "gemma3"]
)
def test_keys_are_read_as_if_they_were_rotated_anew(name: str):
    model = tiny(name).double()
    profile = rl.profile(model, TOKENS[:1], **OPTIONS)
    assert profile["distance_stop"].values.tolist() == [2, 4, 8, 16, 32, 64]
    true = true_measures(model, TOKENS[0], name)
    for measure, by_bin in true.items():
        ours = profile[measure]
        expected = by_bin if ours.ndim == 3 else by_bin[..., 0]
        np.testing.assert_allclose(ours, expected, atol=1e-6, err_msg=measure)


def single_plane(wavelength: float) -> Any:
    factor = wavelength / (2 * np.pi)
    rope = {"rope_type": "linear", "factor": factor, "rope_theta": 1e4}
    model = tiny("llama_gqa", head_dim=2, rope_parameters=rope).double()
    return rl.profile(model, random_tokens(sequences=4, length=256), **OPTIONS)


def test_one_plane_of_many_turns_is_chance_and_a_falling_score_is_local(monkeypatch):
    fast = single_plane(2 * np.pi)
    for name in NAMES[:3]:
        chance = fast[name][..., 5:].mean()
        assert chance == pytest.approx(0.5, abs=0.02), name

    drawn_keys = distances.drawn_keys

    def exchanged_keys(*args: Any, **options: Any) -> Iterator:
        first, second = drawn_keys(*args, **options)
        yield second
        yield first

    monkeypatch.setattr(distances, "drawn_keys", exchanged_keys)
    exchanged = single_plane(2 * np.pi)
    assert exchanged["reversal"].equals(fast["reversal"])

    def equal_keys(*args: Any, **options: Any) -> Iterator:
        for key in drawn_keys(*args, **options):
            yield replace(key, terms=torch.ones_like(key.terms))

    monkeypatch.setattr(distances, "drawn_keys", equal_keys)
    falling = single_plane(600)
    assert (falling["locality"] == 1).all()
    no_order = falling["reversal"].isnull()
    assert no_order.all(), "two keys with the same content have no order"


def test_many_planes_agree_with_the_normal_approximation():
    """With mean m and deviation s of D over W distances, Phi(-m / s) of the signs differ."""

    def normal(block: Block) -> Tensor:
        first, second = distances.drawn_keys(block, evenly=True)
        waves = distances.waves(block, torch.arange(512))
        lead = ((first.terms - second.terms) @ waves.to(first.terms)).real
        z = -lead[..., 0].sign() * lead.mean(-1) / lead.std(-1)
        share = torch.special.ndtr(z)
        return share.where(second.exists, 0).unflatten(1, block.q.shape[1:3])

    approximation = rl.Statistic(
        "normal", ("layer", "head"), "1", "approximation", values=normal
    )
    profile = rl.profile(
        tiny("llama_gqa", head_dim=128),
        random_tokens(length=512),
        statistics=["uniform_reversal", approximation],
        budget=False,
    )
    by_distance = profile["uniform_reversal"].weighted(profile["distance_start"])
    ours = by_distance.mean(("distance_bin", "head"))
    expected = profile["normal"].mean("head")
    np.testing.assert_allclose(ours, expected, atol=0.02)


def test_a_head_that_does_not_rotate_keeps_every_order():
    model = tiny("llama_gqa").double()
    others = [0, 2, 3]
    plain = rl.profile(model, TOKENS, **OPTIONS)
    stopped = rl.stop(rl.PlaneNumbers(range(8)), heads="0.1")
    with rl.edit_rope(model, stopped):
        edited = rl.profile(model, TOKENS, **OPTIONS)
    for name in NAMES:
        of_layer = edited[name][0]
        np.testing.assert_allclose(of_layer[others], plain[name][0, others])
        expected = 0.5 if name == "locality" else 0
        assert (of_layer[1] == expected).all()


@pytest.mark.parametrize("rows", ["all", 9])
def test_batches_and_chunks_do_not_change_the_numbers(
    rows, monkeypatch: pytest.MonkeyPatch
):
    model = tiny("gemma2").double()
    text = rl.Text(TOKENS, lengths=(40, 23, 40))
    expected = rl.profile(model, text, batch_size=3, rows=rows, **OPTIONS)
    in_other_batches = rl.profile(model, text, batch_size=1, rows=rows, **OPTIONS)
    assert_alike(in_other_batches, expected)
    monkeypatch.setattr(live_model, "ONE_PASS", 23)
    in_chunks = rl.profile(model, text, batch_size=3, rows=rows, **OPTIONS)
    assert_alike(in_chunks, expected)


def test_names_of_statistics_reach_the_table_of_heads():
    options = rl.Options(statistics=("locality",), surrogates=0)
    analysis = rl.analyze(tiny("llama_gqa"), TOKENS[:, :30], options)
    names = ["max_score", *(f"locality_{2**n}" for n in range(5))]
    assert analysis.heads.columns[-6:].tolist() == names
    locality = analysis.profile["locality"][..., 2].values.ravel()
    np.testing.assert_array_equal(analysis.heads["locality_4"], locality)
    words = r"statistic 'max'(?s:.)*reversal, uniform_rev"
    for wrong in ("max", ["locality", "max"]):
        with pytest.raises(BadArgument, match=words):
            rl.profile(analysis.model, TOKENS, statistics=wrong)


ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
P_ROPE = {**ROPE, "rope_type": "proportional", "partial_rotary_factor": 0.25}
# Families whose rotary modules read rope_parameters of any type, over the whole head; with
# grouped queries, sliding windows, soft-caps, layers without rotation, neighbouring pairs.
CONFIGURED = (
    "llama_gqa",
    "llama_mqa",
    "mistral_sliding",
    "gemma2",
    "cohere",
    "smollm3",
)
LENGTHS = torch.tensor([30, 17, 2])
tokens = partial(random_tokens, sequences=3)


@torch.no_grad()
def attentions(model: PreTrainedModel) -> list[torch.Tensor]:
    """The attention that the model returns, in float64; a learned sink is the last key."""
    layers = model(tokens(), use_cache=False, output_attentions=True).attentions
    weights = [layer.double() for layer in layers]
    if "sinks" not in str(model.state_dict().keys()):
        return weights
    with_sink = []
    for weight in weights:
        on_sink = 1 - weight.sum(-1, keepdim=True)
        with_sink.append(torch.cat([weight, on_sink], dim=-1))
    return with_sink


def divergence(before: PreTrainedModel, after: PreTrainedModel) -> np.ndarray:
    """Mean divergence in bits [layer, head] over all rows but the first, without padding."""
    counts = torch.arange(30) < LENGTHS[:, None]
    counts[:, 0] = False
    layers = []
    for old, new in zip(attentions(before), attentions(after), strict=True):
        rows = kl_divergence(Categorical(probs=old), Categorical(probs=new))
        layers.append(rows.transpose(1, 2)[counts].mean(0) / np.log(2))
    return torch.stack(layers).numpy()


def change_under(model: PreTrainedModel, edit: Edit) -> np.ndarray:
    """Change of attention [layer, head] under the edit, as `rl.evaluate` measures it."""
    text = rl.Text(tokens(), lengths=LENGTHS)
    evaluation = rl.evaluate(model, text, edits={"edited": edit}, measures="change")
    change = evaluation["attention_change"]
    assert not change.sel(edit="none").any()
    return change.sel(edit="edited").values


@pytest.mark.parametrize("name", CONFIGURED)
def test_against_transformers_p_rope(name: str, monkeypatch: pytest.MonkeyPatch):
    if name == "gemma2":  # in many blocks
        monkeypatch.setitem(fast_products.BLOCK_ELEMENTS, "cpu", 1)
    model = tiny(name, rope_parameters=ROPE)
    change = change_under(model, rl.stop_slowest(0.75))
    other = tiny(name, rope_parameters=P_ROPE)
    expected = divergence(model, other)
    assert expected.max() > 0.05
    np.testing.assert_allclose(change, expected, rtol=1e-3, atol=1e-5)


def test_a_learned_sink_is_one_key_more():
    change = change_under(tiny("gpt_oss"), rl.stop_slowest(0.75))
    # In float64, because the share of the sink is 1 minus the sum over the keys.
    model = tiny("gpt_oss").double()

    def fast(count):
        return torch.arange(count) < count // 4

    other = keep(tiny("gpt_oss"), fast).double()
    assert attentions(model)[0][..., -1].max() > 0.1
    expected = divergence(model, other)
    np.testing.assert_allclose(change, expected, rtol=1e-3, atol=1e-5)


def test_rows_that_see_other_keys_afterwards_have_no_divergence():
    x = torch.randn(1, 2, 6, 4, generator=torch.manual_seed(0))
    mask = torch.rand(1, 6, 6, generator=torch.manual_seed(1)) < 0.5
    seen = mask | torch.eye(6).bool()
    other = mask | torch.ones(6, 6).tril().bool()
    call = call_of(x, x)
    before = replace(call, visibility=Visibility.from_mask(seen, range(6)))
    after = replace(call, visibility=Visibility.from_mask(other, range(6)))
    rows = all_rows(torch.tensor([6]))
    every = torch.ones(1, 1, 6, dtype=torch.bool)
    assert attention_change(before, after, rows, every).isnan().all()
    assert not attention_change(before, before, rows, every).any()
