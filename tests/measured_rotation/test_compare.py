"""Differences between two implementations, and between a model and its configuration."""

import math

import numpy as np
import pytest
import torch
from oracles.tiny import tiny
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


def neighbours(q, k, cos, sin) -> tuple[torch.Tensor, torch.Tensor]:
    """The pairing of GPT-J, with weights for the pairing of Llama."""
    cos, sin = [
        x[:, None, :, : x.shape[-1] // 2].repeat_interleave(2, -1) for x in (cos, sin)
    ]
    swap = lambda x: torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)  # noqa: E731
    return q * cos + swap(q) * sin, k * cos + swap(k) * sin


def test_an_implementation_agrees_with_itself():
    found = rl.compare_rope(tiny("gemma3"), tiny("gemma3"), context=500)
    assert found.attrs["verdict"] == "same"
    words = "All planes of 2 layers rotate alike: the largest difference is 0 rad "
    assert found.attrs["why"] == f"{words}(layer 0, plane 0, position 499)."
    inv_freq = rl.measure_rope(tiny("gemma3"))["inv_freq"].values
    expected = inv_freq[:, :, None] * found["position"].values
    apart = (found["angle"].values - expected + math.pi) % (2 * math.pi) - math.pi
    np.testing.assert_allclose(apart, 0, atol=1e-4)


def test_an_attention_factor_that_is_left_out():
    found = rl.compare_rope(llama(**YARN), llama(**YARN, attention_factor=1.0))
    assert found.attrs["verdict"] == "different"
    assert found.attrs["why"].startswith("Layer 0: ")
    factor = (1 + 0.1 * math.log(2)) ** -2
    assert f"but scores are {factor:.4g} times as large" in found.attrs["why"]


def test_the_plane_that_differs_is_named():
    model = llama()
    other = llama()
    other.model.rotary_emb.inv_freq[5] *= 1.01
    found = rl.compare_rope(model, other, context=64)
    w = 10_000 ** (-5 / 8)
    difference = found["difference"].isel(layer=1)
    change = difference.sel(frequency=5)
    np.testing.assert_allclose(change, 0.01 * w * found["position"], atol=1e-5)
    assert float(difference.drop_isel(frequency=5).max()) < 1e-5
    assert (
        f"is {0.01 * w * 63:.2g} rad (layer 0, plane 5, position 63)"
        in found.attrs["why"]
    )


rotate = modeling_mistral.apply_rotary_pos_emb
ANGLES = "Layer 0: planes rotate differently: the largest difference is"
MORE = "Layer 0: more than the angles of planes changes with position (residual"


@pytest.mark.parametrize(
    ("turn", "why"),
    [
        (neighbours, MORE),
        (lambda q, k, cos, sin: rotate(q, k, cos, -sin), ANGLES),
        (lambda q, k, cos, sin: (rotate(q, k, cos, sin)[0], k), MORE),
        (lambda q, k, cos, sin: (q, k), ANGLES),
    ],
    ids=["interleaved", "clockwise", "only queries", "not at all"],
)
def test_a_wrong_implementation(turn, why: str, monkeypatch: pytest.MonkeyPatch):
    model = tiny("mistral_sliding")
    other = llama()
    other.load_state_dict(model.state_dict())
    assert rl.compare_rope(model, other, context=128).attrs["verdict"] == "same"
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", turn)
    found = rl.compare_rope(model, other, context=128)
    assert found.attrs["verdict"] == "different"
    assert found.attrs["why"].startswith(why)
    assert rl.compare_rope(other, model, context=128).attrs["verdict"] == "different"


@pytest.mark.parametrize(("name", "of"), [("llama_gqa", "weight"), ("qwen2", "bias")])
def test_rows_in_another_order_are_found_although_angles_agree(name: str, of: str):
    one, other = [tiny(name).requires_grad_(False) for _ in range(2)]
    for layer in other.model.layers:
        for part in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            weight = getattr(part, of)
            pairs = weight.data.unflatten(0, (-1, 2, 8))
            weight.data = pairs.transpose(1, 2).reshape(weight.shape)
    found = rl.compare_rope(one, other, context=64)
    assert found["difference"].max() < 1e-3
    assert found.attrs["verdict"] == "different"
    assert "rows of q and k are in another order" in found.attrs["why"]
    assert rl.compare_rope(one, one, context=64)["score_difference"].max() == 0


def test_a_scale_inside_the_queries():
    one = llama()
    other = llama()
    for layer in other.model.layers:
        layer.self_attn.q_proj.weight.data *= layer.self_attn.scaling
        layer.self_attn.scaling = 1.0
    assert rl.compare_rope(one, other).attrs["verdict"] == "same"


def test_models_that_cannot_be_compared():
    with pytest.raises(
        BadArgument, match="not two implementations of one model"
    ) as refused:
        rl.compare_rope(llama(), tiny("smollm3"))
    assert (
        refused.value.parts["seen"] == "2 layers, heads of 16 and 4 layers, heads of 16"
    )
    with pytest.raises(UnsupportedModel, match="hides its attention"):
        rl.compare_rope(tiny("falcon"), tiny("falcon"))


def test_a_bridge_of_the_same_model(tmp_path, monkeypatch: pytest.MonkeyPatch):
    model, _ = rl.load(save_tiny(tmp_path))
    other = bridge(*rl.load(tmp_path))  # a bridge changes its model
    found = rl.compare_rope(model, other)
    assert found.attrs["verdict"] == "same"
    assert found.attrs["why"].startswith(
        "All planes of 2 layers rotate alike: the largest"
    )

    def linear(
        self: object, embeddings: tuple[torch.Tensor, ...]
    ) -> list[torch.Tensor]:
        angle = torch.atan2(embeddings[1], embeddings[0]) / 2
        return [angle.cos(), angle.sin()]

    name = f"{TL}.PositionEmbeddingsAttentionBridge._apply_position_embedding_hooks"
    monkeypatch.setattr(name, linear)
    found = rl.compare_rope(model, other)
    assert found.attrs["verdict"] == "different"
    assert found.attrs["why"].startswith(
        "Layer 0: planes rotate differently: the largest"
    )


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
}
LLAMA3["high_freq_factor"] = 4.0
LLAMA3["original_max_position_embeddings"] = 64
UNREAD = "has a key that the model does not read:"


def rounded(rotary: nn.Module) -> nn.Module:
    rotary.inv_freq = rotary.inv_freq.bfloat16().float()
    return rotary


@pytest.mark.parametrize(
    ("keys", "change", "words"),
    [
        ({"rope_parameters": LLAMA3}, lambda _: llama().model.rotary_emb,
         "layer 0: the frequencies differ from its configuration: plane 3 rotates by"),
        ({}, rounded, "the frequencies are rounded to half precision: plane"),
        ({"no_rope_layers": [1, 0]}, None, "layer 1: the configuration asks for no rotation"),
        ({"partial_rotary_factor": 0.5}, None, "16 coordinates of a head rotate, not 8"),
        ({"rotary_dim": 8}, None, f"{UNREAD} rotary_dim 8, but 16 coordinates rotate"),
        ({"rotary_pct": 0.5}, None, f"{UNREAD} rotary_pct 0.5, but 16 coordinates rotate"),
        ({"rope_interleave": True}, None, f"{UNREAD} rope_interleave, a key of other families"),
        ({"rotary_emb_base": 500}, None, f"{UNREAD} rotary_emb_base 500, unlike the base"),
    ],
)  # fmt: skip
def test_a_model_that_does_not_rotate_as_configured(keys: dict, change, words: str):
    model = tiny("llama_gqa", **keys)
    if change is not None:
        model.model.rotary_emb = change(model.model.rotary_emb)
    with pytest.warns(UserWarning, match=words):
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
