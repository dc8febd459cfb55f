"""TransformerLens models give the same numbers as transformers, or a clear error."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr
from oracles.tiny import random_tokens, tiny
from tiny_checkpoints import save_tiny
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import ropelens as rl
from ropelens.analysis.options import Options
from ropelens.analysis.plan import plan_analysis
from ropelens.attention.call import AttentionCall
from ropelens.errors import BadArgument, UnsupportedModel
from ropelens.model.as_live_model import as_live_model
from ropelens.model.bridge import BridgeModel, bridge
from ropelens.rope.planes import Planes

LENGTHS = torch.tensor([40, 23, 31])
TOKENS = random_tokens(sequences=3, length=40)
FAST_HALF = rl.stop(rl.Fastest(0.5))

# The bridge must pass on windows (Mistral's module has none, Exaone's module has one in every
# layer), soft-caps, sinks, unrotated coordinates, pairing and NoPE layers.
BRIDGED = (
    "llama_gqa",
    "llama_yarn",
    "mistral_sliding",
    "exaone4",
    "gemma2",
    "gemma3",
    "gpt_oss",
    "phi",
    "cohere",
    "smollm3",
    "olmo2",
)
EDITED = ("llama_gqa", "mistral_sliding", "gpt_oss", "phi", "cohere")
SILENT = {
    "gpt_neox": ("GPTNeoXAttention", "layer 0: hook_rot_q did not fire"),
    "phi3": ("Phi3Attention", "layer 0: hook_rot_q did not fire"),
    "gemma4": ("Gemma4TextAttention", "layer 0: hook_rot_q did not fire"),
    "deepseek_v3": ("DeepseekV3Attention", "layer 0: v.hook_out did not fire"),
}


def saved(name: str, folder: Path) -> tuple[torch.nn.Module, PreTrainedTokenizerFast]:
    """A tiny model and a tokenizer, loaded from disk, because a bridge needs a path."""
    save_tiny(folder)
    tiny(name).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return model, tokenizer


def assert_same_profile(bridged: xr.Dataset, plain: xr.Dataset) -> None:
    for name, expected in plain.variables.items():
        if expected.dtype.kind == "f":
            assert_same_numbers(bridged[name], plain[name])
        else:
            np.testing.assert_array_equal(bridged[name], expected, err_msg=str(name))
    assert plain.attrs["loss"] == pytest.approx(bridged.attrs["loss"], rel=1e-5)
    for name in ("tokens", "sequences", "model", "context"):
        assert plain.attrs[name] == bridged.attrs[name]


def assert_same_numbers(bridged: xr.DataArray, plain: xr.DataArray) -> None:
    """Numbers agree to 1e-5 of the largest number, and of a usual number of their unit."""
    name = str(plain.name)
    of_logits = name == "excerpt_lead" or plain.attrs["units"] == "bit"
    usual = 1.0 if of_logits else 1e-2
    finite = plain.values[np.isfinite(plain.values)]
    scale = np.abs(finite).max(initial=usual)
    half_precision = name.endswith(("_still", "_gradient"))
    np.testing.assert_allclose(
        bridged.values,
        plain.values,
        rtol=1e-3 if half_precision else 0,
        atol=1e-5 * scale,
        err_msg=name,
    )


@pytest.mark.thorough
@pytest.mark.parametrize("name", BRIDGED)
def test_a_bridge_gives_the_profile_of_the_model(name: str, tmp_path: Path):
    model, tokenizer = saved(name, tmp_path)
    model.set_attn_implementation("eager")
    text = rl.Text(TOKENS, lengths=LENGTHS)

    def profile(model: torch.nn.Module | BridgeModel) -> xr.Dataset:
        budget = name in EDITED
        return rl.profile(model, text, tokenizer=tokenizer, budget=budget, surrogates=1)

    expected = profile(model)
    rope = rl.measure_rope(model)
    bridged = bridge(model, tokenizer)  # changes the model
    assert isinstance(as_live_model(bridged), BridgeModel)
    assert_same_profile(profile(bridged), expected)
    ours = rl.measure_rope(bridged)
    np.testing.assert_allclose(ours["inv_freq"], rope["inv_freq"], rtol=1e-6)


CHANGES: dict[str, Callable[[torch.nn.Module], AbstractContextManager[None]]] = {
    "planes stopped": lambda model: rl.edit_rope(model, rl.stop_slowest(0.25)),
    "one head": lambda model: rl.edit_rope(
        model, rl.stop(rl.PlaneNumbers([0, 2]), heads="0.0,0.1,1.2,1.3")
    ),
    "a variant, then another edit": lambda model: rl.edit_rope(
        model, "yarn:4", rl.drop(rl.Fastest(0.25))
    ),
    "zero": lambda model: rl.silence_heads(model, "0.1,1.*", to="zero"),
    "mean": lambda model: rl.silence_heads(model, "0.1,1.*", to="mean"),
    "resample": lambda model: rl.silence_heads(model, "0.1,1.*", to="resample"),
}


@torch.no_grad()
def logits_of(model: torch.nn.Module) -> torch.Tensor:
    """A bridge returns logits, and a model of transformers returns an object with them."""
    result = model(TOKENS[:2])
    return getattr(result, "logits", result)


def changed_logits(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    logits = {}
    for name, change in CHANGES.items():
        with change(model):
            logits[name] = logits_of(model)
    silence = rl.silence_heads(model, "0.*", to="mean", text=TOKENS)
    with rl.edit_rope(model, FAST_HALF), silence:
        logits["both"] = logits_of(model)
    return logits


@pytest.mark.thorough
@pytest.mark.parametrize("name", EDITED)
def test_edits_and_silence_change_a_bridge_in_the_same_way(name: str, tmp_path: Path):
    model, tokenizer = saved(name, tmp_path)
    model.set_attn_implementation("eager")
    plain = logits_of(model)
    expected = changed_logits(model)
    assert torch.equal(logits_of(model), plain)
    bridged = bridge(model, tokenizer)  # changes the model
    before = logits_of(bridged)
    ours = changed_logits(bridged)
    assert torch.equal(logits_of(bridged), before)
    assert_same_logits(before, plain)
    for change, logits in expected.items():
        assert_same_logits(ours[change], logits)
        least = 1e-3 * logits.abs().max()
        assert (logits - plain).abs().max() > least, change


def assert_same_logits(bridged: torch.Tensor, plain: torch.Tensor) -> None:
    scale = plain.abs().max()
    torch.testing.assert_close(bridged / scale, plain / scale, rtol=0, atol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("name", EDITED)
def test_an_edited_bridge_is_measured_like_an_edited_model(name: str, tmp_path: Path):
    model, tokenizer = saved(name, tmp_path)
    model.set_attn_implementation("eager")
    plain = rl.capture(model, TOKENS[0])
    with rl.edit_rope(model, "p-rope:0.5"):
        edited = rl.capture(model, TOKENS[0])
        rope = rl.measure_rope(model)
    bridged = bridge(model, tokenizer)
    with rl.edit_rope(bridged, "p-rope:0.5"):
        ours = rl.capture(bridged, TOKENS[0])
        our_rope = rl.measure_rope(bridged)
    for part in ("score", "attention", "contribution"):
        np.testing.assert_allclose(ours[part], edited[part], rtol=1e-5, atol=1e-4)
        assert not np.allclose(plain[part], edited[part], atol=1e-3, equal_nan=True)
    np.testing.assert_allclose(our_rope["inv_freq"], rope["inv_freq"])


@torch.no_grad()
def test_blocks_on_a_bridge_nest_in_any_order(tmp_path: Path):
    bridged = bridge(*saved("llama_gqa", tmp_path))
    plain: list[torch.Tensor] = []
    inside: list[AttentionCall] = []
    outside: list[tuple[AttentionCall, Planes]] = []
    with rl.observe(bridged, lambda call, planes: plain.append(call.query)):
        bridged(TOKENS)
    with (
        rl.observe(bridged, lambda call, planes: outside.append((call, planes))),
        rl.silence_heads(bridged, "*.*"),
        rl.edit_rope(bridged, "nope"),
        rl.observe(bridged, lambda call, planes: inside.append(call)),
    ):
        bridged(TOKENS)
        _, cache = bridged.run_with_cache(TOKENS)
    for (call, planes), again in zip(outside, inside, strict=True):
        assert torch.equal(call.query, again.query)
        assert not planes.inv_freq.any()
        assert call.output.abs().max() > 0.1  # before heads are silenced
    first_call, _ = outside[0]
    last_call, _ = outside[3]
    assert not torch.equal(first_call.query, plain[0])
    assert not cache["blocks.0.attn.hook_z"].any()
    queries = cache["blocks.1.attn.hook_rot_q"].transpose(1, 2)
    torch.testing.assert_close(queries, last_call.query)


def with_name_of_cache(module: torch.nn.Module, args: tuple, options: dict) -> tuple:
    """TransformerLens 4.3 does not know the name of the cache since transformers 5.24."""
    cache = options.get("cache", options.get("past_key_values"))
    return args, {**options, "past_key_values": cache}


def test_the_plan_of_a_bridge_names_its_library(tmp_path: Path):
    bridged = bridge(*saved("llama_gqa", tmp_path))
    plan = plan_analysis(bridged, TOKENS, Options())
    assert "transformer-lens" in plan.versions


@torch.no_grad()
def test_errors_of_a_bridge_name_the_hook(tmp_path: Path):
    bridged = bridge(*saved("llama_gqa", tmp_path))
    before = bridged(TOKENS)
    words = "At hook_rot_k, a bridge has one key"
    edit = rl.edit_rope(bridged, rl.stop_slowest(0.5, heads="0.0"))
    with edit, pytest.raises(UnsupportedModel, match=words):
        bridged(TOKENS)

    for block in bridged.blocks:
        block.attn.register_forward_pre_hook(with_name_of_cache, with_kwargs=True)
    words = "hook_rot_k fires only for the keys"
    for block in (rl.edit_rope(bridged, "nope"), rl.observe(bridged, print)):
        with block, pytest.raises(UnsupportedModel, match=words):
            bridged.generate(
                TOKENS[:1], max_new_tokens=2, do_sample=False, verbose=False
            )

    with (
        pytest.raises(KeyError),
        rl.observe(bridged, lambda call, planes: {}[call]),
    ):
        bridged(TOKENS)
    assert torch.equal(bridged(TOKENS), before)


@torch.no_grad()
def test_an_edit_uses_the_positions_of_the_call(tmp_path: Path):
    model, tokenizer = saved("llama_gqa", tmp_path)
    model.set_attn_implementation("eager")
    apart = 2 * torch.arange(40)[None]
    with rl.edit_rope(model, FAST_HALF):
        expected = model(TOKENS[:1], position_ids=apart).logits
    bridged = bridge(model, tokenizer)
    with rl.edit_rope(bridged, FAST_HALF):
        ours = bridged(TOKENS[:1], position_ids=apart)
        adjacent = bridged(TOKENS[:1])
    assert not torch.allclose(adjacent, ours, atol=1e-2)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4)


def profile(bridged: torch.nn.Module) -> None:
    rl.profile(bridged, TOKENS)


def edit(bridged: torch.nn.Module) -> None:
    with rl.edit_rope(bridged, "nope"):
        pass


def silence(bridged: torch.nn.Module) -> None:
    with rl.silence_heads(bridged, "0.0"):
        pass


@pytest.mark.parametrize("name", SILENT)
def test_a_family_without_its_hooks_is_refused(name: str, tmp_path: Path):
    bridged = bridge(*saved(name, tmp_path))
    module, seen = SILENT[name]
    for call in (rl.measure_rope, profile, edit, silence):
        with pytest.raises(UnsupportedModel) as refused:
            call(bridged)
        assert refused.value.what == f"TransformerLens hides the attention of {module}."
        assert refused.value.parts["seen"] == seen
        assert "hf" in refused.value.parts["try"]


def test_an_unknown_family_is_refused(tmp_path: Path):
    model, tokenizer = saved("helium", tmp_path)
    with pytest.raises(UnsupportedModel) as refused:
        bridge(model, tokenizer)
    assert refused.value.what == "TransformerLens cannot run HeliumForCausalLM."
    assert refused.value.parts["try"] == "the default backend, hf"
    with pytest.raises(BadArgument, match="but this checkpoint has none"):
        bridge(model, None)
