"""Layers that do not attend, or have fewer heads than the configuration states; vision."""

from typing import Any

import families
import numpy as np
import pytest
import torch
import xarray as xr
from oracles.tiny import random_tokens, sighted, tiny
from tiny_checkpoints import save_tiny
from torch.nn import Parameter
from transformers import AutoModelForImageTextToText, PreTrainedModel

import ropelens as rl
from ropelens.analysis.options import Options
from ropelens.analysis.plan import plan_analysis
from ropelens.errors import BadArgument

HYBRIDS = (
    *("Qwen3_5", "Qwen3Next", "Lfm2", "Lfm3", "FalconH1", "Bamba", "GraniteMoeHybrid"),
    *("MiniMax", "OlmoHybrid"),
)
SEEING = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
TOKENS = torch.randint(3, 39, (4, 24), generator=torch.Generator().manual_seed(0))


def attend_alike(model: PreTrainedModel, plain: PreTrainedModel) -> list[int]:
    seen = rl.capture(model, TOKENS[0])
    layers = sorted(set(seen["layer"].values.tolist()))
    with torch.no_grad():
        given = plain(TOKENS[:1], output_attentions=True, use_cache=False).attentions
    theirs = [x for x in given if x is not None and x.shape[-1] == TOKENS.shape[1]]
    assert len(theirs) == len(layers)
    np.testing.assert_allclose(seen["attention"], torch.cat(theirs, 1)[0], atol=1e-5)
    return layers


@pytest.mark.thorough
@pytest.mark.parametrize("name", HYBRIDS)
def test_layers_of_a_hybrid_that_attend_are_measured(name: str):
    model = families.tiny(f"{name}ForCausalLM")
    layers = attend_alike(model, model)
    kinds = model.config.get_text_config().layer_types
    assert layers == [
        n for n, kind in enumerate(kinds) if "linear" not in kind != "conv"
    ]
    rope = rl.measure_rope(model)
    assert rope["residual"].notnull().values.nonzero()[0].tolist() == layers
    assert (
        rope["inv_freq"].notnull().any("frequency").values.nonzero()[0].tolist()
        == layers
    )
    last = int((rope["inv_freq"] > 0).sum("frequency").max()) - 1
    with torch.no_grad():
        with rl.edit_rope(model, rl.stop(rl.PlaneNumbers((last,)))):
            edited = model(TOKENS, use_cache=False).logits
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("inv_freq") and len(buffer) > last:
                buffer[last] = 0
        plain = model(TOKENS, use_cache=False).logits
    torch.testing.assert_close(edited, plain, rtol=1e-5, atol=1e-4)


def test_layers_that_do_not_attend_are_empty_in_all_results():
    model = families.tiny("Lfm2ForCausalLM")
    profile = rl.profile(model, TOKENS, surrogates=2)
    for name in (
        "q_norm",
        "selectivity",
        "induction",
        "total_bits",
        "excerpt_attention",
    ):
        by_layer = (
            profile[name].notnull().any([d for d in profile[name].dims if d != "layer"])
        )
        assert by_layer.values.tolist() == [False, True, False, True], name
    assert profile["layer_type"].values.tolist() == ["recurrent", "full"] * 2
    grey = [x for x in rl.plot_head_map(profile).data if x.name == "no attention"]
    assert np.isnan(grey[0].z).all(1).tolist() == [False, True, False, True]
    assert set(grey[0].customdata[0]) == {"recurrent"}
    heads = rl.classify_heads(profile)
    assert heads["layer"].tolist() == [1] * 4 + [3] * 4
    swept = rl.truncate(
        model, TOKENS, keep=[1, 0.5], controls=0, measures=["change", "labels"]
    )
    assert swept["attention_change"][:, [0, 2]].isnull().all()
    assert (swept["attention_change"][1:, [1, 3]] > 0).all()
    found_share = rl.reach(model, TOKENS, copies=[48])["found_share"]
    reached = found_share.notnull().any(("variant", "run_distance"))
    assert reached.all("head").values.tolist() == [False, True, False, True]
    edits = {"dropped": rl.drop(rl.Slowest(1.0)), "nope": "nope"}
    losses = rl.evaluate(model, TOKENS, edits=edits, measures=["loss"])[
        "mean_loss"
    ].values
    assert len(set(losses.round(6))) == 3
    assert set(rl.capture(model, TOKENS[0], heads="*.1")["head"].values) == {
        "1.1",
        "3.1",
    }
    for heads in ("0.1", "0.*", "1.0,2.3"):
        with pytest.raises(BadArgument, match=r"(?s)has no head .*attend\)"):
            rl.capture(model, TOKENS[0], heads=heads)
        with pytest.raises(BadArgument, match=r"has no head .*that rotates"):
            plan_analysis(model, TOKENS, Options(), truncation={"heads": heads})


@pytest.mark.parametrize("name", SEEING)
def test_a_vision_model_is_loaded_and_measured_on_text(name: str, tmp_path):
    folder = save_tiny(tmp_path)
    sighted(name).save_pretrained(folder)
    loaded, tokenizer = rl.load(folder)
    plain = AutoModelForImageTextToText.from_pretrained(
        folder, attn_implementation="eager"
    )
    assert attend_alike(loaded, plain.eval()) == [0, 1]
    assert tokenizer is not None
    assert rl.profile(loaded, TOKENS, surrogates=2)["total_bits"].notnull().all()
    assert rl.measure_rope(loaded).sizes["frequency"] == 8


IDS = random_tokens(length=48)
REMAINING: dict[str, Any] = {"heads": "0.0-1,1.0", "source": IDS[1], "check": 24}
EDITS = {"one": rl.stop_slowest(0.5, heads="0.1")}
COPIES: dict[str, Any] = {"copied": 4, "copies": (20,), "draws": 2, "distances": ()}


def in_block(model: PreTrainedModel, block: Any) -> xr.Dataset:
    with block:
        return xr.Dataset(
            {"logits": (("sequence", "row", "token"), model(IDS).logits.numpy())}
        )


def in_edit(model: PreTrainedModel, call) -> xr.Dataset:
    with rl.edit_rope(model, rl.stop_slowest(0.5, heads="0.1,1.3")):
        return call()


CALLS = {
    "profile": lambda m: rl.profile(m, IDS, surrogates=0),
    "capture": lambda m: rl.capture(m, IDS[0], heads="0.0-1,1.*", values=True),
    "attribute": lambda m: rl.attribute_planes(m, IDS[0], (5, 6), **REMAINING),
    "reach": lambda m: rl.reach(m, IDS, **COPIES),
    "evaluate": lambda m: rl.evaluate(m, IDS, edits=EDITS, measures=("loss", "change")),
    "profile of an edit": lambda m: in_edit(
        m, lambda: rl.profile(m, IDS, surrogates=0).drop_dims("kv_head")
    ),
    "edit": lambda m: in_block(
        m, rl.edit_rope(m, rl.stop_slowest(0.5, heads="0.1,1.3"))
    ),
    "silence": lambda m: in_block(m, rl.silence_heads(m, "0.1", to="mean", text=IDS)),
    "patch": lambda m: in_block(m, rl.patch_planes(m, IDS[:1], heads="0.1", of="both")),
    "outputs": lambda m: in_block(
        m, rl.patch_planes(m, IDS[:1], heads="0.1", of="output")
    ),
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
