"""Reach of heads and attributions of planes, compared with loops, edits and laws."""

import gc
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import xarray as xr
from oracles.recording import attention_calls
from oracles.tiny import TEN, random_tokens, tiny
from tiny_checkpoints import save_tiny

import ropelens as rl
from ropelens.attention.call import AttentionCall
from ropelens.errors import BadArgument
from ropelens.interventions.reach import share_found, two_copies
from ropelens.measured_rotation.probe import RotationProbe
from ropelens.model.as_live_model import as_live_model
from ropelens.model.bridge import bridge
from ropelens.profiles.measurement import Measurement
from ropelens.rope.select import PlaneNumbers

COPIED = 6
NEAR = 7
FAR = 12
RISING = torch.arange(40)[None]


@dataclass(frozen=True, eq=False)
class LayerScores:
    """Scores [head, row, key] of a layer, and the keys [row, key] that each row sees."""

    scores: np.ndarray
    visible: np.ndarray

    def finds(self, head: int, row: int, key: int) -> bool:
        """Whether no other earlier key except position 0 has a higher score."""
        others = self.others(row, key)
        return bool(self.visible[row, key]) and bool(
            self.scores[head, row, key] > self.best(head, row, others)
        )

    def others(self, row: int, key: int) -> list[int]:
        """The earlier keys that the row sees, except `key` and position 0."""
        seen = np.flatnonzero(self.visible[row, :row])
        return [other for other in seen.tolist() if other not in (0, key)]

    def best(self, head: int, row: int, keys: list[int]) -> float:
        return max((self.scores[head, row, key] for key in keys), default=-np.inf)


def scores_of(model, sequence: np.ndarray) -> list[LayerScores]:
    layers = []
    calls, _ = attention_calls(model, sequence)
    for call in calls:
        keys = call.key.repeat_interleave(len(call.query) // len(call.key), dim=0)
        scores = call.scale * call.query @ keys.mT
        layers.append(LayerScores(scores.numpy(), call.visible.numpy()))
    return layers


@pytest.mark.parametrize("name", TEN)
def test_a_turned_key_scores_as_in_a_run_at_that_distance(name: str):
    """In layer 0, the key of a token does not depend on its position."""
    model = tiny(name)
    live = as_live_model(model)
    rotation = RotationProbe(live)
    near = two_copies(Measurement.of(model, RISING), NEAR, COPIED, 0)
    between = near.new_full((1, FAR - NEAR), 7)
    far = torch.cat([near[:, : COPIED + 1], between, near[:, COPIED + 1 :]], 1)

    def see(call: AttentionCall) -> torch.Tensor:
        planes = rotation.planes()[call.layer]
        distances = torch.tensor([NEAR, FAR]).double()
        call = call.of_heads(torch.arange(call.query.shape[1]))
        return share_found(call, planes, COPIED, NEAR, distances)

    wins = live.record_calls(near, see)[0].numpy()
    in_near = scores_of(model, near[0])[0]
    in_far = scores_of(model, far[0])[0]
    expected = np.zeros((len(in_near.scores), 3))
    for head, number in np.ndindex(len(expected), COPIED - 1):
        row = near.shape[1] - COPIED + number
        key = 2 + number  # the token after the first copy of the row's token
        best = in_near.best(head, row, in_near.others(row, key))
        score = in_near.scores[head, row, key]
        turned = in_far.scores[head, row + FAR - NEAR, key]
        expected[head] += np.array([score, score, turned]) > best
    np.testing.assert_allclose(wins, expected / (COPIED - 1), atol=1e-9)
    assert expected.any()


@pytest.mark.parametrize(
    ("name", "copied"),
    [("llama_gqa", 48), ("gemma2", 48), ("gpt_oss", 48), ("phi", 48), ("llama_gqa", 3)],
)
def test_shares_of_found_copies_match_loops_over_a_run(name: str, copied: int):
    model = tiny(name)
    tokens = random_tokens(sequences=2, length=40)
    distances = (48, 96)
    draws = 2
    reach = rl.reach(model, tokens, copied=copied, copies=distances, draws=draws)
    assert reach.attrs["copied"] == copied
    found_share = reach["found_share"].isel(variant=0)
    assert found_share.notnull().any()
    shares = np.zeros((draws, *reach["found_share"].shape[1:]))
    for draw in range(draws):
        for number, distance in enumerate(distances):
            measurement = Measurement.of(model, tokens)
            sequence = two_copies(measurement, distance, copied, draw)[0]
            assert (sequence[1 : copied + 1] == sequence[-copied:]).all()
            assert len(sequence) == 1 + distance + copied
            shares[draw, :, :, number] = shares_by_loops(model, sequence, copied)
    expected = np.where(found_share.isnull(), np.nan, shares.mean(0))
    np.testing.assert_allclose(found_share, expected, atol=1e-6)


def shares_by_loops(model, sequence: np.ndarray, copied: int) -> np.ndarray:
    """Share [layer, head] of the rows of the second copy that find their copy."""
    shares = []
    for layer in scores_of(model, sequence):
        found = np.zeros(len(layer.scores))
        for head, number in np.ndindex(len(found), copied - 1):
            row = len(sequence) - copied + number
            found[head] += layer.finds(head, row, key=2 + number)
        shares.append(found / (copied - 1))
    return np.array(shares)


def test_the_induction_head_finds_copies():
    model, _ = rl.load("bundled")
    text = torch.randint(
        5, model.config.vocab_size, (4, 100), generator=torch.Generator().manual_seed(0)
    )
    reach = rl.reach(model, text, heads="4.4,2.0", variants=("own", "nope"))
    one_head = reach.sel(layer=4, head=4)
    own, nope = [one_head.sel(variant=name) for name in ("own", "nope")]
    assert (own["found_share"].sel(run_distance=[48, 96]) > 0.5).all()
    assert (own["found_low"] <= own["found_share"]).all()
    assert (reach["found_share"].sel(layer=2, head=0) < 0.1).all()
    assert (nope["found_share"] < 0.1).all()
    assert reach["found_share"].sel(layer=0).isnull().all()
    far = own["extrapolated_share"]
    assert (far["distance"] > reach["run_distance"].max()).all()
    assert (far[-8:] < own["found_share"].max()).all()
    foretold = own["foretold_share"].values
    assert math.isnan(foretold[0])
    assert (abs(foretold[1:] - own["found_share"][1:]) < 0.3).all()


def test_copies_must_be_in_the_context():
    model = tiny("llama_gqa")
    context = model.config.max_position_embeddings
    with pytest.raises(BadArgument, match="must lie in the context"):
        rl.reach(model, RISING, copies=(context,))
    unmodified = rl.reach(model, RISING, copies=(48,), draws=1, variants=[])
    assert unmodified["variant"].values.tolist() == ["own"]


def test_a_rotation_that_depends_on_the_length_is_taken_from_the_run():
    """Past 16 tokens, this rotation equals linear scaling with factor 4."""
    factors = {
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
        "attention_factor": 1.0,
    }
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 1.0, **factors}
    long = {**rope, "original_max_position_embeddings": 16}
    linear = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    models = [
        tiny("llama_gqa", rope_parameters=parameters) for parameters in (long, linear)
    ]
    reach, expected = [rl.reach(x, RISING, copied=6, copies=(24, 48)) for x in models]
    xr.testing.assert_equal(reach, expected)
    assert reach["foretold_share"].sel(run_distance=48).any()


FAMILIES = ("llama_gqa", "gemma2", "cohere", "phi", "deepseek_v3", "nanochat")
TOKENS = random_tokens(sequences=1, length=16, seed=3)


def lost(logits: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits[8:-1], TOKENS[0, 9:])


@torch.no_grad()
def loss_of(model) -> float:
    logits = model(TOKENS).logits[0]
    return float(lost(logits))


@pytest.mark.parametrize("name", FAMILIES)
def test_an_attribution_is_the_slope_along_a_plane(name: str):
    """The slope is the change of the answer if `rescale` makes one plane slightly longer."""
    model = tiny(name).double()
    result = rl.attribute_planes(model, TOKENS, lost, pairs="1.*")
    rotations = RotationProbe(as_live_model(model)).layers()
    there = result["attribution"].values
    turning = there[..., : len(rotations[0].planes.inv_freq)]
    for place in np.argsort(-np.abs(turning), axis=None)[:3]:
        layer, head, plane = map(int, np.unravel_index(place, turning.shape))
        inv_freq = rotations[layer].planes.inv_freq.abs()
        ends = []
        for size in (1.01, 0.99):
            edit = rl.rescale(
                inv_freq,
                attention_factor=math.sqrt(size),
                select=PlaneNumbers((plane,)),
                heads=f"{layer}.{head}",
            )
            with rl.edit_rope(model, edit):
                ends.append(loss_of(model))
        assert there[layer, head, plane] == pytest.approx(
            (ends[0] - ends[1]) / 0.02, rel=2e-2
        )
    by_pair = result["pair_attribution"].sum(["query", "key"])
    total = result["attribution"].sel(layer=1)
    np.testing.assert_allclose(by_pair, total, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["llama_gqa", "gemma2", "phi"])
def test_attributions_over_many_steps_sum_to_the_change_from_even_attention(name: str):
    result = rl.attribute_planes(tiny(name), TOKENS, (3, 5), heads="0.*,1.1", steps=40)
    total = result.attrs["answer"] - result.attrs["answer_without"]
    assert float(result["attribution"].sum()) == pytest.approx(
        total, rel=0.02, abs=0.02
    )
    assert abs(total) > 0.1


def kept_for_backward(layers: int) -> int:
    sizes: list[int] = []
    pack = lambda x: sizes.append(x.numel()) or x  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        rl.attribute_planes(tiny("llama_gqa", num_hidden_layers=layers), TOKENS, 7)
    return sum(sizes)


def test_the_backward_pass_keeps_one_layer_at_a_time():
    hidden_state = TOKENS.numel() * 64
    assert kept_for_backward(6) - kept_for_backward(2) == 4 * hidden_state


def test_layers_run_again_without_dropout():
    plain, training = [tiny("phi", resid_pdrop=0.4) for _ in range(2)]
    expected = rl.attribute_planes(plain, TOKENS, 7)["attribution"]
    result = rl.attribute_planes(training.train(), TOKENS, 7)["attribution"]
    np.testing.assert_allclose(result, expected, atol=1e-6)
    assert training.training


@pytest.mark.parametrize("name", [*FAMILIES[:1], *FAMILIES[2:], "gpt_oss"])
def test_the_gradient_of_a_score_matches_a_change_of_the_mask(name: str):
    model = tiny(name).double()
    model.set_attn_implementation("eager")
    excerpts = [TOKENS[0].flip(0), TOKENS[0]]  # they run together
    data = rl.profile(model, TOKENS, excerpts=excerpts, budget=False).isel(excerpt=1)
    gradient = data["excerpt_score_gradient"]
    first, second = [int(token[1:]) for token in data["excerpt_answer"].values]

    @torch.no_grad()
    def lead_with(size: float, layer: int, head: int, query: int, key: int) -> float:
        def add(module: torch.nn.Module, given: tuple, options: dict) -> tuple:
            mask = options["attention_mask"].repeat(1, 4, 1, 1)
            mask[0, head, query, key] += size
            return given, options | {"attention_mask": mask}

        attending = model.get_decoder().layers[layer].self_attn
        with attending.register_forward_pre_hook(add, with_kwargs=True):
            logits = model(TOKENS).logits[0, -1]
        return float(logits[first] - logits[second])

    assert lead_with(0.0, 0, 0, 0, 0) == pytest.approx(
        float(data["excerpt_lead"]), abs=1e-9
    )
    sizes = np.abs(gradient.values)
    for place in np.argsort(-sizes, axis=None)[:40:10]:
        index = np.unravel_index(int(place), gradient.shape)
        slope = (lead_with(1e-2, *index) - lead_with(-1e-2, *index)) / 2e-2
        assert float(gradient[index]) == pytest.approx(
            slope, rel=2e-3
        )  # stored with 11 bits
    if name != "gpt_oss":  # its learned sinks take part in the softmax
        assert abs(gradient.sum("excerpt_key")).max() < 1e-2 * abs(gradient).max()


def test_a_model_without_gradients_has_no_lead():
    model = tiny("llama_gqa")
    mlp = model.model.layers[0].mlp
    mlp.register_forward_hook(lambda module, given, out: Undifferentiable.apply(out))
    data = rl.profile(model, TOKENS, excerpts=[TOKENS[0]], budget=False)
    assert not {"excerpt_score_gradient", "excerpt_answer", "excerpt_lead"} & {
        *data.variables
    }
    assert data["excerpt_attention"].notnull().any()


class Undifferentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()


def test_a_bridge_has_the_same_attributions(tmp_path):
    model, tokenizer = rl.load(save_tiny(tmp_path))
    given = TOKENS % 28
    expected = rl.attribute_planes(model, given, (3, 5), pairs="1.2", check=2)
    result = rl.attribute_planes(
        bridge(model, tokenizer), given, (3, 5), pairs="1.2", check=2
    )
    for name in ("attribution", "pair_attribution", "dropped"):
        np.testing.assert_allclose(result[name], expected[name], rtol=1e-3, atol=1e-4)


def test_a_mask_hides_tokens_from_the_answer():
    model = tiny("llama_gqa")
    mask = torch.ones_like(TOKENS)
    mask[0, 5] = 0
    text = {"input_ids": TOKENS, "attention_mask": mask}
    result = rl.attribute_planes(model, text, 7, pairs="1.2", check=1, source=text)
    with torch.no_grad():
        answer = float(model(TOKENS, attention_mask=mask).logits[0, -1, 7])
    assert result.attrs["answer"] == pytest.approx(answer, abs=1e-5)
    assert result.attrs["source_answer"] == pytest.approx(answer, abs=1e-5)
    np.testing.assert_allclose(
        result["patched"].stack(all=[...]).dropna("all"), 0, atol=1e-6
    )
    assert result["pair_attribution"].sel(query=slice(6, None), key=5).isnull().all()


def test_dropped_and_patched_planes_match_edits():
    model = tiny("llama_gqa")
    other = (TOKENS + 1) % 50
    result = rl.attribute_planes(
        model, TOKENS, (3, 5), heads="1.*", check=4, source=other
    )
    assert int(result["dropped"].notnull().sum()) == 8
    assert (result["patched"].notnull() == result["dropped"].notnull()).all()
    place = abs(result["attribution"]).argmax(...)
    layer, head, plane = [int(place[dim]) for dim in ("layer", "head", "frequency")]
    planes = PlaneNumbers((plane,))
    heads = f"{layer}.{head}"
    for name, block in (
        ("dropped", rl.edit_rope(model, rl.drop(planes, heads=heads))),
        ("patched", rl.patch_planes(model, other, planes=planes, heads=heads)),
    ):
        with block, torch.no_grad():
            logits = model(TOKENS).logits[0, -1]
        changed = float(logits[3] - logits[5]) - result.attrs["answer"]
        assert float(result[name][layer, head, plane]) == pytest.approx(
            changed, abs=1e-5
        )
    assert np.isnan(result["attribution"].sel(layer=0)).all()
    assert {"rank_correlation", "worst"} <= set(result.attrs)


def test_invalid_answers_are_refused():
    model = tiny("llama_gqa")
    for answer, words in (
        (99_999, "99999 is not one token"),
        ("a", "needs the tokenizer"),
        (lambda logits: logits[-1], "one number"),
        (lambda logits: torch.tensor(1.0), "that depends on the logits"),
    ):
        with pytest.raises(BadArgument, match=words):
            rl.attribute_planes(model, TOKENS, answer)


def test_a_call_keeps_no_tensors():
    """Checkpoints of the backward pass must not keep the graph of the model."""
    model = tiny("llama_gqa")
    tokens = random_tokens(sequences=2)
    counts = []
    for _ in range(3):
        rl.profile(model, tokens, surrogates=0)
        gc.collect()
        tensors = [x for x in gc.get_objects() if isinstance(x, torch.Tensor)]
        counts.append(len(tensors))
        del tensors
    assert counts[2] <= counts[1], counts
