"""A layer with fewer heads than its configuration states; the call gives their number.

The oracle is the complete model in which the output projection ignores the other heads.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from oracles.tiny import random_tokens, tiny
from torch.nn import Parameter
from transformers import PreTrainedModel

import ropelens as rl
from ropelens.errors import BadArgument

IDS = random_tokens(length=48)
REMAINING: dict[str, Any] = {"heads": "0.0-1,1.0", "source": IDS[1], "check": 24}
EDITS = {"one": rl.stop_slowest(0.5, heads="0.1")}
COPIES: dict[str, Any] = {"copied": 4, "copies": (20,), "draws": 2, "distances": ()}


def in_block(model: PreTrainedModel, block: Any) -> xr.Dataset:
    with block:
        return xr.Dataset({"logits": (("sequence", "row", "token"), model(IDS).logits.numpy())})


def in_edit(model: PreTrainedModel, call: Callable[[], xr.Dataset]) -> xr.Dataset:
    with rl.edit_rope(model, rl.stop_slowest(0.5, heads="0.1,1.3")):
        return call()


CALLS: dict[str, Callable[[PreTrainedModel], xr.Dataset]] = {
    "profile": lambda m: rl.profile(m, IDS, surrogates=0),
    "capture": lambda m: rl.capture(m, IDS[0], heads="0.0-1,1.*", values=True),
    "attribute": lambda m: rl.attribute_planes(m, IDS[0], (5, 6), **REMAINING),
    "reach": lambda m: rl.reach(m, IDS, **COPIES),
    "evaluate": lambda m: rl.evaluate(m, IDS, edits=EDITS, measures=("loss", "change")),
    "profile of an edit": lambda m: in_edit(
        m, lambda: rl.profile(m, IDS, surrogates=0).drop_dims("kv_head")
    ),
    "edit": lambda m: in_block(m, rl.edit_rope(m, rl.stop_slowest(0.5, heads="0.1,1.3"))),
    "silence": lambda m: in_block(m, rl.silence_heads(m, "0.1", to="mean", text=IDS)),
    "patch": lambda m: in_block(m, rl.patch_planes(m, IDS[:1], heads="0.1", of="both")),
    "outputs": lambda m: in_block(m, rl.patch_planes(m, IDS[:1], heads="0.1", of="output")),
}


@pytest.fixture
def models() -> tuple[PreTrainedModel, PreTrainedModel]:
    """The complete model, and the model that keeps heads 0 and 1 (one key) of layer 0."""
    complete, pruned = (tiny("llama_gqa").requires_grad_(False) for _ in range(2))
    size = complete.config.head_dim
    complete.model.layers[0].self_attn.o_proj.weight[:, 2 * size :] = 0
    attention = pruned.model.layers[0].self_attn
    for name, heads in {"q_proj": 2, "k_proj": 1, "v_proj": 1}.items():
        linear = attention.get_submodule(name)
        linear.weight = Parameter(linear.weight[: heads * size], requires_grad=False)
    weight = attention.o_proj.weight[:, : 2 * size]
    attention.o_proj.weight = Parameter(weight, requires_grad=False)
    return complete, pruned


@pytest.mark.parametrize("name", CALLS)
@torch.no_grad()
def test_the_remaining_heads_are_those_of_the_complete_model(name: str, models: tuple):
    complete, pruned = map(CALLS[name], models)
    for key, x in pruned.data_vars.items():
        if x.dtype.kind != "f" or str(key).startswith(("excerpt", "group", "chance")):
            continue
        there = complete[key]
        for heads in {"head", "kv_head"} & {*x.dims} if "layer" in x.dims else ():
            lost = (x["layer"] == 0) & (x[heads] >= (2 if heads == "head" else 1))
            assert x.where(lost).isnull().all(), key
            there = there.where(~lost)
        np.testing.assert_allclose(x, there, rtol=1e-4, atol=1e-4, err_msg=str(key))


def test_heads_that_are_pruned_cannot_be_named(models: tuple):
    _, pruned = models
    with pytest.raises(BadArgument, match=r"no head '0\.2'"):
        rl.silence_heads(pruned, "0.2")
    layers = [model.model.layers for model in models]  # the other layer is pruned next
    for attention, index in ((layers[1][0].self_attn, 1), (layers[0][1].self_attn, 0)):
        attention.layer_idx = index
        layers[1][index].self_attn = attention
    rl.silence_heads(pruned, "0.2")
    with pytest.raises(BadArgument, match=r"no head '1\.2'"):
        rl.silence_heads(pruned, "1.2")
