"""Order and place if keys move away, and the change of attention by edits."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from numpy.testing import assert_allclose, assert_array_equal
from oracles.divergence import attention_divergence, attentions
from oracles.handmade import call_of
from oracles.recording import AttentionCall, Floats, LayerRotation, attention_calls
from oracles.tiny import keep, random_tokens, rotations, tiny
from small_measurements import assert_alike
from torch import Tensor
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
BINS = 2 ** np.arange(6)
"""The first distance of each bin, in tokens."""


def cos_and_sin(model: Any, x: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    """The tables [1, position, coordinate] of the model for the positions of `x`."""
    rotary = model.base_model.rotary_emb
    positions = torch.arange(x.shape[1])[None]
    if model.config.model_type.startswith("gemma3"):
        return rotary(x, positions, model.config.layer_types[layer])
    return rotary(x, positions)


def rotate_anew(model: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x` [head, position, coordinate], rotated by the function of the model."""
    module = sys.modules[type(model).__module__]
    rotary, rest = x[None].tensor_split([cos.shape[-1]], dim=-1)
    turned, _ = module.apply_rotary_pos_emb(rotary, rotary, cos, sin)
    return torch.cat([turned, rest], dim=-1)[0]


def rotated_scores(model: Any, q: Tensor, k: Tensor, layer: int) -> Tensor:
    """q . k [head, row, key, distance]; functions of the model rotate each key anew."""
    cos, sin = cos_and_sin(model, q, layer)
    last = q.shape[1] - 1
    query = rotate_anew(model, q, cos[:, [last]], sin[:, [last]])
    scores = []
    for distance in range(last + 1):
        position = [last - distance]
        key = rotate_anew(model, k, cos[:, position], sin[:, position])
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


def lengths_of_terms(q: Tensor, k: Tensor, rotation: LayerRotation) -> Tensor:
    """Norm over planes of |q_f| |k_f| [head, row, key]. The rest of a head is a plane."""
    terms = []
    for pair in rotation.pairs:
        q_norm = q[..., pair].norm(dim=-1)
        k_norm = k[..., pair].norm(dim=-1)
        terms.append(q_norm[..., None] * k_norm[:, None])
    terms.append(q[..., rotation.rest] @ k[..., rotation.rest].mT)
    return torch.stack(terms).norm(dim=0)


@dataclass(frozen=True, eq=False)
class MovingKeys:
    """The scores of one row if its keys move away, and the sampled distances that it sees."""

    scores: Floats  # [key, distance]
    lengths: Floats  # [key]
    near: np.ndarray
    far: np.ndarray
    start: np.ndarray  # first distance of the bin

    def locality(self, key: int) -> np.ndarray:
        score = self.scores[key]
        return score[self.near] > score[self.far]

    def position_sensitivity(self, key: int) -> np.ndarray:
        """The mean step of the score, which is the same for all distances."""
        score = self.scores[key]
        steps = abs(score[self.far] - score[self.far - 1]) / self.lengths[key]
        mean = np.average(steps, weights=self.start)
        return np.full(len(self.far), mean)

    def reversal(self, keys: list[int]) -> np.ndarray | None:
        """Whether two keys change their order; None if their contents do not differ."""
        if not keys:
            return None
        lead = self.scores[keys[0]] - self.scores[keys[-1]]
        if abs(lead).max() <= 1e-6:
            return None
        return lead[self.far] * lead[0] < 0

    def measures(self, pair: list[int], even: list[int]) -> dict[str, np.ndarray]:
        """Numbers of each distance, for keys drawn by attention and for keys drawn evenly."""
        measures = {}
        if pair:
            measures["locality"] = self.locality(pair[0])
            measures["position_sensitivity"] = self.position_sensitivity(pair[0])
        reversal = self.reversal(pair)
        if reversal is not None:
            measures["reversal"] = reversal
        uniform_reversal = self.reversal(even)
        if uniform_reversal is not None:
            measures["uniform_reversal"] = uniform_reversal
        return measures

    def by_bin(self, numbers: np.ndarray) -> Floats:
        """Mean over the distances of each bin; NaN for a bin without distances."""
        means = np.full(len(BINS), np.nan)
        for index, start in enumerate(BINS):
            in_bin = self.start == start
            if in_bin.any():
                means[index] = numbers[in_bin].mean()
        return means


@dataclass(frozen=True, eq=False)
class Layer:
    """The scores of a layer whose keys move away, and the lengths of their terms."""

    call: AttentionCall
    scores: Floats  # [head, row, key, distance]
    lengths: Floats  # [head, row, key]

    @classmethod
    def of(
        cls, model: Any, layer: int, call: AttentionCall, rotation: LayerRotation
    ) -> "Layer":
        q = rotation.unrotate(call.query)
        by_kv_head = rotation.unrotate(call.key)
        k = by_kv_head.repeat_interleave(len(q) // len(by_kv_head), dim=0)
        scores = call.scale * rotated_scores(model, q, k, layer)
        lengths = call.scale * lengths_of_terms(q, k, rotation)
        return cls(call, scores.numpy(), lengths.numpy())

    def row(self, head: int, position: int) -> MovingKeys:
        near, far, start = distances.sampled_distances(len(BINS))
        first_key = self.call.visible[position].numpy().argmax()
        sees = far <= position - first_key
        return MovingKeys(
            scores=self.scores[head, position],
            lengths=self.lengths[head, position],
            near=near[sees],
            far=far[sees],
            start=start[sees],
        )

    def measures(self, numbers: Tensor) -> dict[str, Floats]:
        """Numbers [head, row, bin]; random `numbers` [4, row] draw the keys of each row."""
        heads, count = self.call.attention.shape[:2]
        nothing = np.full((heads, count, len(BINS)), np.nan)
        measures = {name: nothing.copy() for name in NAMES}
        for head in range(heads):
            for position in range(1, count):
                seen = self.call.visible[position].numpy()
                attention = self.call.attention[head, position].numpy()
                pair = draw(attention * seen, numbers[:2, position])
                even = draw(1.0 * seen, numbers[2:, position])
                row = self.row(head, position)
                for name, by_distance in row.measures(pair, even).items():
                    measures[name][head, position] = row.by_bin(by_distance)
        return measures


def mean_over_rows(x: Floats) -> Floats:
    """Mean over the axis 1 without NaN; NaN if all numbers are NaN."""
    with np.errstate(invalid="ignore"):
        return np.nansum(x, 1) / np.isfinite(x).sum(1)


def true_measures(model: Any, tokens: Tensor, name: str) -> dict[str, np.ndarray]:
    """Means over rows [layer, head, bin]; `position_sensitivity` is the same in all bins."""
    calls = attention_calls(model, tokens)[0]
    count = len(tokens)
    order = exchange_order(torch.tensor([count]), width=count, seed=0, numbers=[0])
    true_rotations = rotations(model, name=name)
    means: dict[str, list[Floats]] = {name: [] for name in NAMES}
    for number, call in enumerate(calls):
        layer = Layer.of(model, number, call, true_rotations[number])
        for measure, by_row in layer.measures(order[0]).items():
            means[measure].append(mean_over_rows(by_row))
    return {measure: np.stack(of_layers) for measure, of_layers in means.items()}


@pytest.mark.parametrize(
    "name", ["llama_gqa", "gpt_neox", "phi", "glm", "gemma2", "gemma3"]
)
def test_keys_are_read_as_if_they_were_rotated_anew(name: str):
    model = tiny(name).double()
    profile = rl.profile(model, TOKENS[:1], statistics=NAMES, budget=False)
    assert profile["distance_stop"].values.tolist() == [2, 4, 8, 16, 32, 64]
    for measure, by_bin in true_measures(model, TOKENS[0], name).items():
        has_bins = profile[measure].ndim == 3
        expected = by_bin if has_bins else by_bin[..., 0]
        assert_allclose(profile[measure], expected, atol=1e-6, err_msg=measure)


def single_plane(wavelength: float) -> Any:
    """A profile of a model whose heads have one plane."""
    rope = {
        "rope_type": "linear",
        "factor": wavelength / (2 * np.pi),
        "rope_theta": 1e4,
    }
    model = tiny("llama_gqa", head_dim=2, rope_parameters=rope).double()
    tokens = random_tokens(sequences=4, length=256)
    return rl.profile(model, tokens, statistics=NAMES, budget=False)


def test_one_plane_of_many_turns_is_chance_and_a_falling_score_is_local(monkeypatch):
    drawn_keys = distances.drawn_keys

    def swapped_keys(*arguments: Any, **options: Any) -> Iterator[distances.DrawnKey]:
        first, second = drawn_keys(*arguments, **options)
        return iter([second, first])

    def equal_keys(*arguments: Any, **options: Any) -> Iterator[distances.DrawnKey]:
        for key in drawn_keys(*arguments, **options):
            yield replace(key, terms=0 * key.terms + 1)

    fast = single_plane(2 * np.pi)
    for name in NAMES[:3]:
        mean = fast[name][..., 5:].mean()
        assert mean == pytest.approx(0.5, abs=0.02), name

    monkeypatch.setattr(distances, "drawn_keys", swapped_keys)
    swapped = single_plane(2 * np.pi)
    assert swapped["reversal"].equals(fast["reversal"])

    monkeypatch.setattr(distances, "drawn_keys", equal_keys)
    falling = single_plane(600)
    assert (falling["locality"] == 1).all()
    has_no_order = falling["reversal"].isnull()
    assert has_no_order.all()


def normal_reversal(block: Block) -> Tensor:
    """With mean m and deviation s of D over W distances, Phi(-m / s) of the signs differ."""
    first, second = distances.drawn_keys(block, evenly=True)
    difference = first.terms - second.terms
    waves = distances.waves(block, torch.arange(512)).to(difference)
    lead = (difference @ waves).real
    sign = lead[..., 0].sign()
    share = torch.special.ndtr(-sign * lead.mean(-1) / lead.std(-1))
    return share.where(second.exists, 0).unflatten(1, block.q.shape[1:3])


def test_many_planes_agree_with_the_normal_approximation():
    approximation = rl.Statistic(
        name="normal",
        dims=("layer", "head"),
        units="1",
        long_name="approximation",
        values=normal_reversal,
    )
    model = tiny("llama_gqa", head_dim=128)
    tokens = random_tokens(length=512)
    statistics = ["uniform_reversal", approximation]
    profile = rl.profile(model, tokens, statistics=statistics, budget=False)
    by_distance = profile["uniform_reversal"].weighted(profile["distance_start"])
    reversal = by_distance.mean("distance_bin")
    expected = profile["normal"].mean("head")
    assert_allclose(reversal.mean("head"), expected, atol=0.02)


def test_a_head_that_does_not_rotate_keeps_every_order():
    model = tiny("llama_gqa").double()
    others = [0, 2, 3]
    plain = rl.profile(model, TOKENS, statistics=NAMES, budget=False)
    all_planes = rl.PlaneNumbers(range(8))
    stopped = rl.stop(all_planes, heads="0.1")
    with rl.edit_rope(model, stopped):
        edited = rl.profile(model, TOKENS, statistics=NAMES, budget=False)
    for name in NAMES:
        assert_allclose(edited[name][0, others], plain[name][0, others])
        expected = 0.5 if name == "locality" else 0
        assert (edited[name][0, 1] == expected).all()


@pytest.mark.parametrize("rows", ["all", 9])
def test_batches_and_chunks_do_not_change_the_numbers(
    rows, monkeypatch: pytest.MonkeyPatch
):
    model = tiny("gemma2").double()
    text = rl.Text(TOKENS, lengths=(40, 23, 40))

    def profile(batch_size: int) -> xr.Dataset:
        return rl.profile(
            model,
            text,
            batch_size=batch_size,
            rows=rows,
            statistics=NAMES,
            budget=False,
        )

    expected = profile(batch_size=3)
    assert_alike(profile(batch_size=1), expected)
    monkeypatch.setattr(live_model, "ONE_PASS", 23)
    assert_alike(profile(batch_size=3), expected)


def test_names_of_statistics_reach_the_table_of_heads():
    options = rl.Options(statistics=("locality",), surrogates=0)
    analysis = rl.analyze(tiny("llama_gqa"), TOKENS[:, :30], options)
    names = ["max_score", *(f"locality_{2**n}" for n in range(5))]
    assert analysis.heads.columns[-6:].tolist() == names
    locality = analysis.profile["locality"][..., 2].values.ravel()
    assert_array_equal(analysis.heads["locality_4"], locality)
    message = r"statistic 'max'(?s:.)*reversal, uniform_rev"
    for wrong in ("max", ["locality", "max"]):
        with pytest.raises(BadArgument, match=message):
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
RANDOM = random_tokens(sequences=3)


def change_under(model: PreTrainedModel, edit: Edit) -> np.ndarray:
    text = rl.Text(RANDOM, lengths=LENGTHS)
    evaluation = rl.evaluate(model, text, edits={"e": edit}, measures="change")
    change = evaluation.attention_change
    assert not change.sel(edit="none").any()
    return change.sel(edit="e").values


@pytest.mark.parametrize("name", CONFIGURED)
def test_against_transformers_p_rope(name: str, monkeypatch: pytest.MonkeyPatch):
    if name == "gemma2":  # in many blocks
        monkeypatch.setitem(fast_products.BLOCK_ELEMENTS, "cpu", 1)
    model = tiny(name, rope_parameters=ROPE)
    change = change_under(model, rl.stop_slowest(0.75))
    with_p_rope = tiny(name, rope_parameters=P_ROPE)
    expected = attention_divergence(model, with_p_rope, RANDOM, LENGTHS)
    assert expected.max() > 0.05
    assert_allclose(change, expected, rtol=1e-3, atol=1e-5)


def test_a_learned_sink_is_one_key_more():
    change = change_under(tiny("gpt_oss"), rl.stop_slowest(0.75))
    # In float64, because the share of the sink is 1 minus the sum over the keys.
    model = tiny("gpt_oss").double()

    def fast(count: int) -> Tensor:
        return torch.arange(count) < count // 4

    only_fast = keep(tiny("gpt_oss"), fast).double()
    on_learned_sink = attentions(model, RANDOM)[0][..., -1]
    expected = attention_divergence(model, only_fast, RANDOM, LENGTHS)
    assert on_learned_sink.max() > 0.1
    assert_allclose(change, expected, rtol=1e-3, atol=1e-5)


def test_rows_that_see_other_keys_afterwards_have_no_divergence():
    x = torch.randn(1, 2, 6, 4, generator=torch.Generator().manual_seed(0))
    mask = torch.rand(1, 6, 6, generator=torch.Generator().manual_seed(1)) < 0.5
    own_key = torch.eye(6).bool()
    all_keys = torch.ones(6, 6).tril().bool()
    sees_some = Visibility.from_mask(mask | own_key, range(6))
    sees_all = Visibility.from_mask(mask | all_keys, range(6))
    before = replace(call_of(x, x), visibility=sees_some)
    after = replace(call_of(x, x), visibility=sees_all)
    rows = all_rows(torch.tensor([6]))
    every_row = torch.ones(1, 1, 6, dtype=torch.bool)
    change = attention_change(before, after, rows, every_row)
    no_change = attention_change(before, before, rows, every_row)
    assert change.isnan().all()
    assert not no_change.any()
