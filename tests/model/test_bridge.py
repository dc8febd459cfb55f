"""TransformerLens models give the same numbers as transformers, or a clear error."""

from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr
from oracles.tiny import random_tokens, tiny
from tiny_checkpoints import save_tiny
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import ropelens as rl
from ropelens.errors import BadArgument, UnsupportedModel
from ropelens.model.as_live_model import as_live_model
from ropelens.model.bridge import BridgeModel, bridge

LENGTHS = torch.tensor([40, 23, 31])
TOKENS = random_tokens(sequences=3, length=40)

# The bridge must pass on windows (Mistral's module has none, Exaone's module has one in every
# layer), soft-caps, sinks, unrotated coordinates, pairing and NoPE layers.
BRIDGED = (
    *("llama_gqa", "llama_yarn", "mistral_sliding", "exaone4", "gemma2", "gemma3"),
    *("gpt_oss", "phi", "cohere", "smollm3", "olmo2"),
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
    tiny(name).save_pretrained(save_tiny(folder))
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    return model, AutoTokenizer.from_pretrained(folder)


def assert_same_profile(one: xr.Dataset, other: xr.Dataset) -> None:
    for name in one.variables:
        a, b = one[name].values, other[name].values
        if a.dtype.kind != "f":
            np.testing.assert_array_equal(a, b, err_msg=name)
            continue
        of_logits = name == "excerpt_lead" or one[name].attrs["units"] == "bit"
        scale = np.abs(a[np.isfinite(a)]).max(initial=1.0 if of_logits else 1e-2)
        digits = (
            1e-3 if str(name).endswith(("_still", "_gradient")) else 0
        )  # half precision
        np.testing.assert_allclose(b, a, rtol=digits, atol=1e-5 * scale, err_msg=name)
    assert one.attrs["loss"] == pytest.approx(other.attrs["loss"], rel=1e-5)
    for name in ("tokens", "sequences", "model", "context"):
        assert one.attrs[name] == other.attrs[name]


@pytest.mark.thorough
@pytest.mark.parametrize("name", BRIDGED)
def test_a_bridge_gives_the_profile_of_the_model(name: str, tmp_path: Path):
    model, tokenizer = saved(name, tmp_path)
    model.set_attn_implementation("eager")
    budget = {"surrogates": 1} if name in EDITED else {"budget": False}
    text, options = rl.Text(TOKENS, lengths=LENGTHS), {"tokenizer": tokenizer} | budget
    plain, rope = rl.profile(model, text, **options), rl.measure_rope(model)
    bridged = bridge(model, tokenizer)  # changes the model
    assert isinstance(as_live_model(bridged), BridgeModel)
    assert_same_profile(plain, rl.profile(bridged, text, **options))
    np.testing.assert_allclose(
        rl.measure_rope(bridged)["inv_freq"], rope["inv_freq"], 1e-6
    )


EDITS = {
    "planes stopped": [rl.stop_slowest(0.25)],
    "one head": [rl.stop(rl.PlaneNumbers([0, 2]), heads="0.0,0.1,1.2,1.3")],
    "a variant, then another edit": ["yarn:4", rl.drop(rl.Fastest(0.25))],
}


@contextmanager
def changed(model: torch.nn.Module, name: str):
    with ExitStack() as blocks:
        if name in EDITS:
            blocks.enter_context(rl.edit_rope(model, *EDITS[name]))
        else:
            blocks.enter_context(rl.silence_heads(model, "0.1,1.*", to=name))  # type: ignore[arg-type]
        yield


@torch.no_grad()
def outputs(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    run = lambda: getattr(result := model(TOKENS[:2]), "logits", result)  # noqa: E731
    logits = {"before": run()}
    for name in (*EDITS, "zero", "mean", "resample"):
        with changed(model, name):
            logits[name] = run()
    silence = rl.silence_heads(model, "0.*", to="mean", text=TOKENS)
    with rl.edit_rope(model, rl.stop(rl.Fastest(0.5))), silence:
        logits["both"] = run()
    return logits | {"after": run()}


@pytest.mark.thorough
@pytest.mark.parametrize("name", EDITED)
def test_edits_and_silence_change_a_bridge_in_the_same_way(name: str, tmp_path: Path):
    model, tokenizer = saved(name, tmp_path)
    model.set_attn_implementation("eager")
    expected, seen = outputs(model), rl.capture(model, TOKENS[0])
    with rl.edit_rope(model, "p-rope:0.5"):
        edited, rope = rl.capture(model, TOKENS[0]), rl.measure_rope(model)
    bridged = bridge(model, tokenizer)
    ours = outputs(bridged)
    for change, logits in expected.items():
        scale = logits.abs().max()
        torch.testing.assert_close(
            ours[change] / scale, logits / scale, rtol=0, atol=1e-5
        )
        if change not in ("before", "after"):
            assert (logits - expected["before"]).abs().max() > 1e-3 * scale, change
    assert torch.equal(ours["before"], ours["after"])
    with rl.edit_rope(bridged, "p-rope:0.5"):
        again = rl.capture(bridged, TOKENS[0])
        for part in ("score", "attention", "contribution"):
            np.testing.assert_allclose(again[part], edited[part], rtol=1e-5, atol=1e-4)
            assert not np.allclose(seen[part], edited[part], atol=1e-3, equal_nan=True)
        np.testing.assert_allclose(
            rl.measure_rope(bridged)["inv_freq"], rope["inv_freq"]
        )


def test_blocks_on_a_bridge_nest_in_any_order(tmp_path: Path):
    bridged = bridge(*saved("llama_gqa", tmp_path))
    inside, outside, plain = [], [], []
    with torch.no_grad():
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
    assert not torch.equal(outside[0][0].query, plain[0])
    assert not cache["blocks.0.attn.hook_z"].any()
    queries = cache["blocks.1.attn.hook_rot_q"].transpose(1, 2)
    torch.testing.assert_close(queries, outside[3][0].query)


def test_errors_of_a_bridge_name_the_hook(tmp_path: Path):
    bridged = bridge(*saved("llama_gqa", tmp_path))
    with torch.no_grad():
        before = bridged(TOKENS)
        words = "At hook_rot_k, a bridge has one key"
        edit = rl.edit_rope(bridged, rl.stop_slowest(0.5, heads="0.0"))
        with edit, pytest.raises(UnsupportedModel, match=words):
            bridged(TOKENS)
        # TransformerLens 4.3 does not know the name of the cache since transformers 5.24.
        rename = lambda module, args, options: (  # noqa: E731
            args,
            options
            | {"past_key_values": options.get("cache", options.get("past_key_values"))},
        )
        for block in bridged.blocks:
            block.attn.register_forward_pre_hook(rename, with_kwargs=True)
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


def test_an_edit_uses_the_positions_of_the_call(tmp_path: Path):
    model, tokenizer = saved("llama_gqa", tmp_path)
    model.set_attn_implementation("eager")
    apart = 2 * torch.arange(40)[None]
    with torch.no_grad(), rl.edit_rope(model, rl.stop(rl.Fastest(0.5))):
        expected = model(TOKENS[:1], position_ids=apart).logits
    bridged = bridge(model, tokenizer)
    with torch.no_grad(), rl.edit_rope(bridged, rl.stop(rl.Fastest(0.5))):
        ours = bridged(TOKENS[:1], position_ids=apart)
        assert not torch.allclose(bridged(TOKENS[:1]), ours, atol=1e-2)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", SILENT)
def test_a_family_without_its_hooks_is_refused(name: str, tmp_path: Path):
    bridged = bridge(*saved(name, tmp_path))
    module, seen = SILENT[name]
    for measure in (
        rl.measure_rope,
        lambda model: rl.profile(model, TOKENS),
        lambda model: rl.edit_rope(model, "nope").__enter__(),
        lambda model: rl.silence_heads(model, "0.0").__enter__(),
    ):
        with pytest.raises(UnsupportedModel) as refused:
            measure(bridged)
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
