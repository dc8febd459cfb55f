"""Layers that do not attend, or have fewer heads than the configuration states; vision."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import families
import numpy as np
import pytest
import torch
import xarray as xr
from oracles.tiny import random_tokens, sighted, tiny
from tiny_checkpoints import save_tiny
from torch.nn import Linear, Parameter
from transformers import AutoModelForImageTextToText, PreTrainedModel

import ropelens as rl
from ropelens.analysis.options import Options
from ropelens.analysis.plan import plan_analysis
from ropelens.errors import BadArgument

HYBRIDS = (
    "Qwen3_5",
    "Qwen3Next",
    "Lfm2",
    "Lfm3",
    "FalconH1",
    "Bamba",
    "GraniteMoeHybrid",
    "MiniMax",
    "OlmoHybrid",
)
SEEING = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
TOKENS = torch.randint(3, 39, (4, 24), generator=torch.Generator().manual_seed(0))


def attending_layers(model: PreTrainedModel, plain: PreTrainedModel) -> list[int]:
    """Layers whose attention is captured. It equals the attention that `plain` returns."""
    captured = rl.capture(model, TOKENS[0])
    layers = sorted(set(captured["layer"].values.tolist()))
    with torch.no_grad():
        result = plain(TOKENS[:1], output_attentions=True, use_cache=False)
    length = TOKENS.shape[1]
    expected = [
        attention
        for attention in result.attentions
        if attention is not None and attention.shape[-1] == length
    ]
    assert len(expected) == len(layers)
    by_head = torch.cat(expected, dim=1)[0]
    np.testing.assert_allclose(captured["attention"], by_head, atol=1e-5)
    return layers


def layers_with_numbers(variable: xr.DataArray) -> list[int]:
    others = [dim for dim in variable.dims if dim != "layer"]
    return np.flatnonzero(variable.notnull().any(others)).tolist()


@pytest.mark.thorough
@pytest.mark.parametrize("name", HYBRIDS)
def test_layers_of_a_hybrid_that_attend_are_measured(name: str):
    model = families.tiny(f"{name}ForCausalLM")
    layers = attending_layers(model, model)
    layer_types = model.config.get_text_config().layer_types
    assert layers == [
        layer
        for layer, layer_type in enumerate(layer_types)
        if "linear" not in layer_type and layer_type != "conv"
    ]
    rope = rl.measure_rope(model)
    assert layers_with_numbers(rope["residual"]) == layers
    assert layers_with_numbers(rope["inv_freq"]) == layers
    planes = (rope["inv_freq"] > 0).sum("frequency")
    last = int(planes.max()) - 1
    edit = rl.edit_rope(model, rl.stop(rl.PlaneNumbers((last,))))
    with torch.no_grad():
        with edit:
            edited = model(TOKENS, use_cache=False).logits
        stop_in_buffers(model, last)
        expected = model(TOKENS, use_cache=False).logits
    torch.testing.assert_close(edited, expected, rtol=1e-5, atol=1e-4)


def stop_in_buffers(model: PreTrainedModel, plane: int) -> None:
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq") and len(buffer) > plane:
            buffer[plane] = 0


@pytest.fixture(scope="module")
def hybrid() -> PreTrainedModel:
    """Layers 1 and 3 attend, and layers 0 and 2 are convolutions."""
    return families.tiny("Lfm2ForCausalLM")


def test_layers_that_do_not_attend_are_empty_in_all_results(hybrid: PreTrainedModel):
    profile = rl.profile(hybrid, TOKENS, surrogates=2)
    for name in (
        "q_norm",
        "selectivity",
        "induction",
        "total_bits",
        "excerpt_attention",
    ):
        assert layers_with_numbers(profile[name]) == [1, 3], name
    assert profile["layer_type"].values.tolist() == ["recurrent", "full"] * 2
    heads = rl.classify_heads(profile)
    assert heads["layer"].tolist() == [1] * 4 + [3] * 4
    traces = rl.plot_head_map(profile).data
    grey = next(trace for trace in traces if trace.name == "no attention")
    assert np.isnan(grey.z).all(1).tolist() == [False, True, False, True]
    assert set(grey.customdata[0]) == {"recurrent"}


def test_layers_that_do_not_attend_are_empty_in_a_truncation(hybrid: PreTrainedModel):
    measures = ["change", "labels"]
    swept = rl.truncate(hybrid, TOKENS, keep=[1, 0.5], controls=0, measures=measures)
    change = swept["attention_change"]
    assert layers_with_numbers(change) == [1, 3]
    assert (change[1:, [1, 3]] > 0).all()


def test_layers_that_do_not_attend_reach_no_copy(hybrid: PreTrainedModel):
    found_share = rl.reach(hybrid, TOKENS, copies=[48])["found_share"]
    reached = found_share.notnull().any(("variant", "run_distance"))
    assert reached.all("head").values.tolist() == [False, True, False, True]


def test_edits_of_a_hybrid_change_its_loss(hybrid: PreTrainedModel):
    edits = {"dropped": rl.drop(rl.Slowest(1.0)), "nope": "nope"}
    result = rl.evaluate(hybrid, TOKENS, edits=edits, measures=["loss"])
    losses = result["mean_loss"].values.round(6)
    assert len(set(losses)) == 3


def test_heads_of_layers_that_do_not_attend_cannot_be_named(hybrid: PreTrainedModel):
    captured = rl.capture(hybrid, TOKENS[0], heads="*.1")
    assert set(captured["head"].values) == {"1.1", "3.1"}
    for heads in ("0.1", "0.*", "1.0,2.3"):
        with pytest.raises(BadArgument, match=r"(?s)has no head .*attend\)"):
            rl.capture(hybrid, TOKENS[0], heads=heads)
        with pytest.raises(BadArgument, match=r"has no head .*that rotates"):
            plan_analysis(hybrid, TOKENS, Options(), truncation={"heads": heads})


@pytest.mark.parametrize("name", SEEING)
def test_a_vision_model_is_loaded_and_measured_on_text(name: str, tmp_path):
    folder = save_tiny(tmp_path)
    sighted(name).save_pretrained(folder)
    loaded, tokenizer = rl.load(folder)
    plain = AutoModelForImageTextToText.from_pretrained(
        folder, attn_implementation="eager"
    )
    assert attending_layers(loaded, plain.eval()) == [0, 1]
    assert tokenizer is not None
    profile = rl.profile(loaded, TOKENS, surrogates=0)
    assert profile["total_bits"].notnull().all()
    assert rl.measure_rope(loaded).sizes["frequency"] == 8


IDS = random_tokens(length=48)
TWO_HEADS = rl.stop_slowest(0.5, heads="0.1,1.3")


def logits_in(
    block: AbstractContextManager[None], model: PreTrainedModel
) -> xr.Dataset:
    with block:
        logits = model(IDS).logits
    return xr.Dataset({"logits": (("sequence", "row", "token"), logits.numpy())})


def profile_of_edit(model: PreTrainedModel) -> xr.Dataset:
    with rl.edit_rope(model, TWO_HEADS):
        profile = rl.profile(model, IDS, surrogates=0)
    return profile.drop_dims("kv_head")


def attribute(model: PreTrainedModel) -> xr.Dataset:
    return rl.attribute_planes(
        model, IDS[0], answer=(5, 6), heads="0.0-1,1.0", source=IDS[1], check=24
    )


def reach(model: PreTrainedModel) -> xr.Dataset:
    return rl.reach(model, IDS, copied=4, copies=(20,), draws=2, distances=())


def evaluate(model: PreTrainedModel) -> xr.Dataset:
    edits = {"one": rl.stop_slowest(0.5, heads="0.1")}
    return rl.evaluate(model, IDS, edits=edits, measures=("loss", "change"))


def edit(model: PreTrainedModel) -> xr.Dataset:
    return logits_in(rl.edit_rope(model, TWO_HEADS), model)


def silence(model: PreTrainedModel) -> xr.Dataset:
    block = rl.silence_heads(model, "0.1", to="mean", text=IDS)
    return logits_in(block, model)


def patch(model: PreTrainedModel) -> xr.Dataset:
    block = rl.patch_planes(model, IDS[:1], heads="0.1", of="both")
    return logits_in(block, model)


def patch_outputs(model: PreTrainedModel) -> xr.Dataset:
    block = rl.patch_planes(model, IDS[:1], heads="0.1", of="output")
    return logits_in(block, model)


CALLS: dict[str, Callable[[PreTrainedModel], xr.Dataset]] = {
    "profile": lambda model: rl.profile(model, IDS, surrogates=0),
    "capture": lambda model: rl.capture(model, IDS[0], heads="0.0-1,1.*", values=True),
    "attribute": attribute,
    "reach": reach,
    "evaluate": evaluate,
    "profile of an edit": profile_of_edit,
    "edit": edit,
    "silence": silence,
    "patch": patch,
    "outputs": patch_outputs,
}


@pytest.fixture
def models() -> tuple[PreTrainedModel, PreTrainedModel]:
    """The complete model, and the model that keeps heads 0 and 1 (one key) of layer 0."""
    complete = tiny("llama_gqa").requires_grad_(False)
    pruned = tiny("llama_gqa").requires_grad_(False)
    two_heads = 2 * complete.config.head_dim
    complete.model.layers[0].self_attn.o_proj.weight[:, two_heads:] = 0
    attention = pruned.model.layers[0].self_attn
    keep_rows(attention.q_proj, two_heads)
    keep_rows(attention.k_proj, two_heads // 2)
    keep_rows(attention.v_proj, two_heads // 2)
    weight = attention.o_proj.weight[:, :two_heads]
    attention.o_proj.weight = Parameter(weight, requires_grad=False)
    return complete, pruned


def keep_rows(linear: Linear, rows: int) -> None:
    linear.weight = Parameter(linear.weight[:rows], requires_grad=False)


@pytest.mark.parametrize("name", CALLS)
@torch.no_grad()
def test_the_remaining_heads_are_those_of_the_complete_model(name: str, models: tuple):
    complete, pruned = models
    expected = CALLS[name](complete)
    ours = CALLS[name](pruned)
    for key, variable in ours.data_vars.items():
        of_text = str(key).startswith(("excerpt", "group", "chance"))
        if variable.dtype.kind == "f" and not of_text:
            assert_remaining(variable, expected[key])


def assert_remaining(ours: xr.DataArray, complete: xr.DataArray) -> None:
    """Lost heads of layer 0 have no number, and the remaining heads have equal numbers."""
    for heads, remaining in {"head": 2, "kv_head": 1}.items():
        if {"layer", heads} <= set(ours.dims):
            lost = (ours["layer"] == 0) & (ours[heads] >= remaining)
            assert ours.where(lost).isnull().all(), ours.name
            complete = complete.where(~lost)
    np.testing.assert_allclose(
        ours, complete, rtol=1e-4, atol=1e-4, err_msg=str(ours.name)
    )


def test_heads_that_are_pruned_cannot_be_named(models: tuple):
    complete, pruned = models
    with pytest.raises(BadArgument, match=r"no head '0\.2'"):
        rl.silence_heads(pruned, "0.2")
    exchange_layers(complete, pruned)
    rl.silence_heads(pruned, "0.2")
    with pytest.raises(BadArgument, match=r"no head '1\.2'"):
        rl.silence_heads(pruned, "1.2")


def exchange_layers(complete: PreTrainedModel, pruned: PreTrainedModel) -> None:
    """Let layer 1 of `pruned` lack heads, and give it a complete layer 0."""
    whole = complete.model.layers[1].self_attn
    lacking = pruned.model.layers[0].self_attn
    whole.layer_idx = 0
    lacking.layer_idx = 1
    pruned.model.layers[0].self_attn = whole
    pruned.model.layers[1].self_attn = lacking
