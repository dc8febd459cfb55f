"""Differences between two implementations, and between a model and its configuration."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from oracles.tiny import tiny
from oracles.versions import skip_before
from tiny_checkpoints import edit_config, save_tiny
from torch import nn
from transformers import LlamaForCausalLM
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral

import ropelens as rl
from ropelens.errors import BadArgument, UnsupportedModel
from ropelens.model.bridge import bridge

ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
YARN = {
    **ROPE,
    "rope_type": "yarn",
    "factor": 2.0,
    "original_max_position_embeddings": 4096,
}
TL = (
    "transformer_lens.model_bridge.generalized_components.position_embeddings_attention"
)


def llama(**rope: object) -> nn.Module:
    return tiny("llama_gqa", rope_parameters=rope or ROPE)


Rotated = tuple[torch.Tensor, torch.Tensor]


def neighbour_swapped(x: torch.Tensor) -> torch.Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def neighbours(q, k, cos, sin) -> Rotated:
    """The pairing of GPT-J, with weights for the pairing of Llama."""
    half = cos.shape[-1] // 2
    cos_of_pair = cos[:, None, :, :half].repeat_interleave(2, -1)
    sin_of_pair = sin[:, None, :, :half].repeat_interleave(2, -1)
    rotated_q = q * cos_of_pair + neighbour_swapped(q) * sin_of_pair
    rotated_k = k * cos_of_pair + neighbour_swapped(k) * sin_of_pair
    return rotated_q, rotated_k


def test_an_implementation_agrees_with_itself():
    comparison = rl.compare_rope(tiny("gemma3"), tiny("gemma3"), context=500)
    words = "All planes of 2 layers rotate alike: the largest difference is 0 rad "
    assert comparison.attrs["verdict"] == "same"
    assert comparison.attrs["why"] == f"{words}(layer 0, plane 0, position 499)."

    inv_freq = rl.measure_rope(tiny("gemma3"))["inv_freq"].values
    expected = inv_freq[:, :, None] * comparison["position"].values
    difference = comparison["angle"].values - expected
    within_half_a_turn = (difference + math.pi) % (2 * math.pi) - math.pi
    np.testing.assert_allclose(within_half_a_turn, 0, atol=1e-4)


def test_an_attention_factor_that_is_left_out():
    with_factor = llama(**YARN)
    without_factor = llama(**YARN, attention_factor=1.0)
    comparison = rl.compare_rope(with_factor, without_factor)
    expected = (1 + 0.1 * math.log(2)) ** -2
    assert comparison.attrs["verdict"] == "different"
    assert comparison.attrs["why"].startswith("Layer 0: ")
    assert f"but scores are {expected:.4g} times as large" in comparison.attrs["why"]


def test_the_plane_that_differs_is_named():
    model = llama()
    other = llama()
    other.model.rotary_emb.inv_freq[5] *= 1.01
    comparison = rl.compare_rope(model, other, context=64)

    speed = 0.01 * 10_000 ** (-5 / 8)  # rad by which plane 5 differs per token
    expected = speed * comparison["position"]
    difference = comparison["difference"].isel(layer=1)
    np.testing.assert_allclose(difference.sel(frequency=5), expected, atol=1e-5)
    assert float(difference.drop_isel(frequency=5).max()) < 1e-5
    words = f"is {speed * 63:.2g} rad (layer 0, plane 5, position 63)"
    assert words in comparison.attrs["why"]


rotate = modeling_mistral.apply_rotary_pos_emb
ANGLES = "Layer 0: planes rotate differently: the largest difference is"
MORE = "Layer 0: more than the angles of planes changes with position (residual"


def clockwise(q, k, cos, sin) -> Rotated:
    return rotate(q, k, cos, -sin)


def only_queries(q, k, cos, sin) -> Rotated:
    rotated_q, _ = rotate(q, k, cos, sin)
    return rotated_q, k


def not_at_all(q, k, cos, sin) -> Rotated:
    return q, k


@pytest.mark.parametrize(
    ("turn", "why"),
    [
        (neighbours, MORE),
        (clockwise, ANGLES),
        (only_queries, MORE),
        (not_at_all, ANGLES),
    ],
    ids=["interleaved", "clockwise", "only queries", "not at all"],
)
def test_a_wrong_implementation(turn, why: str, monkeypatch: pytest.MonkeyPatch):
    model = tiny("mistral_sliding")
    other = llama()
    other.load_state_dict(model.state_dict())
    right = rl.compare_rope(model, other, context=128)
    assert right.attrs["verdict"] == "same"

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", turn)
    wrong = rl.compare_rope(model, other, context=128)
    assert wrong.attrs["verdict"] == "different"
    assert wrong.attrs["why"].startswith(why)
    wrong_first = rl.compare_rope(other, model, context=128)
    assert wrong_first.attrs["verdict"] == "different"


@pytest.mark.parametrize(
    ("name", "parameter"), [("llama_gqa", "weight"), ("qwen2", "bias")]
)
def test_rows_in_another_order_are_found_although_angles_agree(
    name: str, parameter: str
):
    one = tiny(name).requires_grad_(False)
    other = tiny(name).requires_grad_(False)
    for layer in other.model.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            weights = getattr(projection, parameter)
            pairs = weights.data.unflatten(0, (-1, 2, 8))
            weights.data = pairs.transpose(1, 2).reshape(weights.shape)

    comparison = rl.compare_rope(one, other, context=64)
    assert comparison["difference"].max() < 1e-3
    assert comparison.attrs["verdict"] == "different"
    assert "rows of q and k are in another order" in comparison.attrs["why"]
    with_itself = rl.compare_rope(one, one, context=64)
    assert with_itself["score_difference"].max() == 0


def test_a_scale_inside_the_queries():
    one = llama()
    other = llama()
    for layer in other.model.layers:
        layer.self_attn.q_proj.weight.data *= layer.self_attn.scaling
        layer.self_attn.scaling = 1.0
    assert rl.compare_rope(one, other).attrs["verdict"] == "same"


def test_models_that_cannot_be_compared():
    words = "not two implementations of one model"
    expected = "2 layers, heads of 16 and 4 layers, heads of 16"
    with pytest.raises(BadArgument, match=words) as refused:
        rl.compare_rope(llama(), tiny("smollm3"))
    assert refused.value.parts["seen"] == expected
    with pytest.raises(UnsupportedModel, match="hides its attention"):
        rl.compare_rope(tiny("falcon"), tiny("falcon"))


def half_of_the_angle(
    self: object, embeddings: tuple[torch.Tensor, ...]
) -> list[torch.Tensor]:
    """cos and sin of half of the angle that a bridge should use."""
    cos, sin = embeddings
    angle = torch.atan2(sin, cos) / 2
    return [angle.cos(), angle.sin()]


def test_a_bridge_of_the_same_model(tmp_path, monkeypatch: pytest.MonkeyPatch):
    model, _ = rl.load(save_tiny(tmp_path))
    other = bridge(*rl.load(tmp_path))  # a bridge changes its model
    same = rl.compare_rope(model, other)
    expected = "All planes of 2 layers rotate alike: the largest"
    assert same.attrs["verdict"] == "same"
    assert same.attrs["why"].startswith(expected)

    name = f"{TL}.PositionEmbeddingsAttentionBridge._apply_position_embedding_hooks"
    monkeypatch.setattr(name, half_of_the_angle)
    different = rl.compare_rope(model, other)
    expected_difference = "Layer 0: planes rotate differently: the largest"
    assert different.attrs["verdict"] == "different"
    assert different.attrs["why"].startswith(expected_difference)


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SCALED = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
UNREAD = "has a key that the model does not read:"


def rounded(rotary: nn.Module) -> nn.Module:
    rotary.inv_freq = rotary.inv_freq.bfloat16().float()
    return rotary


def without_scaling(rotary: nn.Module) -> nn.Module:
    return llama().model.rotary_emb


def unchanged(rotary: nn.Module) -> nn.Module:
    return rotary


@dataclass(frozen=True, eq=False)
class Deviation:
    """A model that does not rotate as configured, and words of the warning.

    - keys: changed keys of the configuration.
    - change: change of the rotary module.
    """

    name: str
    words: str
    keys: Mapping[str, Any] = field(default_factory=dict)
    change: Callable[[nn.Module], nn.Module] = unchanged


DEVIATIONS = [
    Deviation(
        "llama3 without scaling",
        "layer 0: the frequencies differ from its configuration: plane 3 rotates by",
        keys={"rope_parameters": LLAMA3},
        change=without_scaling,
    ),
    Deviation(
        "rounded",
        "the frequencies are rounded to half precision: plane",
        change=rounded,
    ),
    Deviation(
        "no_rope_layers",
        "layer 1: the configuration asks for no rotation",
        keys={"no_rope_layers": [1, 0]},
    ),
    Deviation(
        "partial_rotary_factor",
        "16 coordinates of a head rotate, not 8",
        keys={"partial_rotary_factor": 0.5},
    ),
    Deviation(
        "rotary_dim",
        f"{UNREAD} rotary_dim 8, but 16 coordinates rotate",
        keys={"rotary_dim": 8},
    ),
    Deviation(
        "rotary_pct",
        f"{UNREAD} rotary_pct 0.5, but 16 coordinates rotate",
        keys={"rotary_pct": 0.5},
    ),
    Deviation(
        "rope_interleave",
        f"{UNREAD} rope_interleave, a key of other families",
        keys={"rope_interleave": True},
    ),
    Deviation(
        "rotary_emb_base",
        f"{UNREAD} rotary_emb_base 500, unlike the base",
        keys={"rotary_emb_base": 500},
    ),
    Deviation(
        "a misspelt attention factor",
        f"{UNREAD} attn_factor 0.8 in rope_parameters",
        keys={"rope_parameters": {**SCALED, "attn_factor": 0.8}},
    ),
    Deviation(
        "scaling with another rope_type",
        f"{UNREAD} factor 4 in rope_parameters",
        keys={"rope_parameters": {**SCALED, "rope_type": "default", "type": "yarn"}},
    ),
]


@pytest.mark.parametrize("deviation", DEVIATIONS, ids=lambda deviation: deviation.name)
def test_a_model_that_does_not_rotate_as_configured(deviation: Deviation):
    model = tiny("llama_gqa", **deviation.keys)
    model.model.rotary_emb = deviation.change(model.model.rotary_emb)
    with pytest.warns(UserWarning, match=deviation.words):
        rl.measure_rope(model)


def test_a_family_that_reads_a_key_does_not_warn():
    rl.measure_rope(tiny("gpt_neox", rotary_pct=0.25, rotary_emb_base=500))
    rl.measure_rope(tiny("deepseek_v3", rope_interleave=True))


def test_a_base_that_differs_from_rope_parameters(tmp_path):
    """transformers drops this base when it reads the file."""
    tiny("llama_gqa").save_pretrained(tmp_path)
    edit_config(tmp_path, rope_theta=5e5)
    model = LlamaForCausalLM.from_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="rope_theta 500000, unlike the base"):
        rl.measure_rope(model)


def test_parameters_that_transformers_drops_for_older_ones(tmp_path):
    """A file with both names: transformers takes rope_scaling and its default base."""
    tiny("llama_gqa").save_pretrained(tmp_path)
    parameters = {"rope_type": "default", "rope_theta": 5e5}
    scaling = {"type": "linear", "factor": 2.0}
    edit_config(tmp_path, rope_parameters=parameters, rope_scaling=scaling)
    model = LlamaForCausalLM.from_pretrained(tmp_path)
    dropped = f"{UNREAD} rope_theta 500000 in rope_parameters of its file"
    with pytest.warns(UserWarning, match=dropped):
        rl.measure_rope(model)


@pytest.mark.filterwarnings("ignore:.*rope_scaling:FutureWarning")
def test_scaling_that_is_assigned_after_the_model_was_made():
    model = tiny("llama_gqa")
    model.config.rope_scaling = {"type": "yarn", "factor": 4.0}
    without = f"{UNREAD} rope_type 'yarn' without rope_theta"
    with pytest.warns(UserWarning, match=without):
        rl.measure_rope(model)


@pytest.mark.parametrize("rope_type", ["linear", "dynamic", "yarn"])
def test_scaling_under_its_older_names_does_not_warn(rope_type, tmp_path):
    if rope_type == "dynamic":
        skip_before("transformers", "5.15", "is refused with dynamic RoPE")
    tiny("llama_gqa").save_pretrained(tmp_path)
    scaling = {"type": rope_type, "factor": 4.0}
    edit_config(tmp_path, rope_parameters=None, rope_theta=5e5, rope_scaling=scaling)
    rope = rl.measure_rope(LlamaForCausalLM.from_pretrained(tmp_path))
    assert rope.attrs["verdict"] == "same"
