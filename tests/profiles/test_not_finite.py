"""Models in float16 whose numbers overflow: errors and warnings name the layer and float16."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from oracles.tiny import tiny

import ropelens as rl
from ropelens.errors import BadCheckpoint, UnsupportedModel

LARGE = 7  # the token that overflows
PLACE = (
    r"layer 0 \(model\.layers\.0\.mlp\.\w+\) in float16, whose largest number is 65,504"
)
REMEDY = 'dtype="bfloat16" or dtype="float32"'

rounded = pytest.mark.filterwarnings("ignore:.*rounded to half precision")


def overflowing(dtype: torch.dtype = torch.float16) -> Any:
    """A model whose first layer overflows in float16 for one token, and only there."""
    model = tiny("llama_gqa", vocab_size=96)
    embeddings = model.model.embed_tokens.weight.data
    embeddings[:, -1] = 0
    embeddings[LARGE] = 0
    embeddings[LARGE, -1] = 1
    layer = model.model.layers[0]
    layer.self_attn.o_proj.weight.data[-1] = 0
    layer.mlp.gate_proj.weight.data[:, -1] = 1e3
    layer.mlp.up_proj.weight.data[:, -1] = 1e3
    return model.to(dtype)


def tokens(*, sequences: int = 4) -> torch.Tensor:
    ids = torch.randint(LARGE + 1, 96, (sequences, 48))
    ids[-1, 20] = LARGE
    return ids


CALLS: dict[str, Callable[[Any], Any]] = {
    "capture": lambda model: rl.capture(model, tokens()[-1], values=True),
    "attribute_planes": lambda model: rl.attribute_planes(model, tokens()[-1], (9, 10)),
    "attribute in steps": lambda model: rl.attribute_planes(
        model, tokens()[-1], (9, 10), steps=3
    ),
    "patch_each": lambda model: rl.patch_each(
        model, tokens()[-1], tokens()[0], answer=(9, 10), over="layer"
    ),
    "evaluate": lambda model: rl.evaluate(
        model, tokens(), edits={"p-rope": "p-rope:0.5"}, measures=["loss", "change"]
    ),
    "truncate": lambda model: rl.truncate(
        model, tokens(), keep=[0.5], measures=["loss"], controls=0
    ),
}


@rounded
@pytest.mark.parametrize("name", CALLS)
def test_a_result_that_is_not_finite_is_announced_with_its_layer(name: str):
    with pytest.warns(UserWarning, match=f"^not finite: .*first in {PLACE}") as warned:
        CALLS[name](overflowing())
    assert REMEDY in str(warned[-1].message)
    CALLS[name](overflowing(torch.float32))  # without a warning


@rounded
def test_a_profile_that_is_not_finite_is_refused_or_announced():
    with pytest.raises(UnsupportedModel, match="layer 1: NaN or infinity in float16"):
        rl.profile(overflowing(), tokens(), surrogates=0)
    model = overflowing()
    excerpts = [tokens()[0, :16]]
    with pytest.warns(UserWarning, match=f"not finite: loss, entropy.*{PLACE}"):
        profile = rl.profile(model, tokens(), excerpts=excerpts, budget=False)
    assert np.isnan(profile.attrs["loss"]), "not the mean of the other tokens"


@rounded
def test_logits_that_are_nan_name_the_first_module():
    model = tiny("llama_gqa")
    model.model.layers[1].mlp.down_proj.weight.data.mul_(1e6)
    words = r"computes NaN[\s\S]*layer 1 \(model.layers.1.mlp.down_proj\) in float16"
    with pytest.raises(UnsupportedModel, match=words) as refused:
        rl.profile(model.half(), tokens(), surrogates=0)
    assert REMEDY in refused.value.line


def always_overflowing(weight: str) -> Any:
    model = tiny("llama_gqa").half()
    model.get_parameter(weight).data.mul_(6e4)
    return model


@rounded
def test_queries_that_overflow_name_float16_instead_of_other_weights():
    model = always_overflowing("model.layers.1.self_attn.q_proj.weight")
    model.model.layers[1].input_layernorm.weight.data.mul_(100)
    words = "layer 1 in float16, whose largest number is 65,504"
    with pytest.raises(UnsupportedModel, match=words) as refused:
        rl.measure_rope(model)
    assert REMEDY in refused.value.line


@rounded
def test_measure_rope_announces_an_overflow_after_the_rotation():
    model = always_overflowing("model.layers.1.mlp.down_proj.weight")
    model.model.layers[1].post_attention_layernorm.weight.data.mul_(100)
    with pytest.warns(
        UserWarning, match=r"layer 1 \(model.layers.1.mlp.\w+\) in float16"
    ):
        rotation = rl.measure_rope(model)
    assert np.isfinite(rotation["inv_freq"]).all()


def test_load_names_the_layer_and_float16(tmp_path):
    model = tiny("llama_gqa")
    model.model.layers[1].mlp.down_proj.weight.data.mul_(1e6)
    model.save_pretrained(tmp_path)
    with pytest.raises(
        BadCheckpoint, match=r"does not run in torch\.float16"
    ) as refused:
        rl.load(tmp_path, dtype="float16")
    assert "layer 1 (model.layers.1.mlp.down_proj) in float16" in refused.value.line
    assert REMEDY in refused.value.line
    rl.load(tmp_path, dtype="bfloat16")
