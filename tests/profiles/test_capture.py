"""Tests of `capture` against the attention of the model and against laws."""

from contextlib import ExitStack

import numpy as np
import pytest
import torch
import xarray as xr
from oracles.recording import attention_calls
from oracles.tiny import SUPPORTED, not_as_configured, random_tokens, rotations, tiny
from tiny_checkpoints import save_tiny
from transformers import LlamaForCausalLM, PreTrainedModel

import ropelens as rl
from ropelens.attention.formulas import contrasts
from ropelens.errors import BadArgument, UnsupportedModel
from ropelens.model.bridge import bridge

LENGTH = 20
HEADS = 4


def tokens(*, length: int = LENGTH) -> torch.Tensor:
    return random_tokens(sequences=1, length=length)[0]


@torch.no_grad()
def true_attention(model: PreTrainedModel, ids: torch.Tensor) -> np.ndarray:
    """Attention of transformers [head, query, key], with the heads of all layers in order."""
    attentions = model(ids[None], output_attentions=True, use_cache=False).attentions
    return torch.cat([layer[0] for layer in attentions]).float().numpy()


def assert_contributions_are_scores(seen: xr.Dataset) -> None:
    total = seen["contribution"].sum("frequency", min_count=1)
    assert (total.isnull() == seen["score"].isnull()).all()
    scale = float(abs(seen["contribution"]).sum("frequency").max())
    assert float(abs(total - seen["score"]).max()) < 1e-5 * scale


@pytest.mark.parametrize("name", SUPPORTED)
def test_against_the_model(name: str):
    model = tiny(name)
    seen = rl.capture(model, tokens(), values=True)
    layers = model.config.num_hidden_layers
    assert seen["head"].values.tolist() == [
        f"{x}.{y}" for x in range(layers) for y in range(4)
    ]
    attention = true_attention(model, tokens())
    np.testing.assert_allclose(seen["attention"], attention, rtol=0, atol=1e-5)
    assert_contributions_are_scores(seen)
    calls, _ = attention_calls(model, tokens())
    rotation = rotations(model, name=name)
    for layer, (call, turning) in enumerate(zip(calls, rotation, strict=True)):
        group = len(call.query) // len(call.key)
        key = call.key.repeat_interleave(group, dim=0)
        score = (call.scale * call.query @ key.mT).masked_fill(~call.visible, torch.nan)
        of_layer = seen.isel(head=seen["layer"] == layer)
        atol = 1e-5 * float(score.nan_to_num().abs().max())
        np.testing.assert_allclose(of_layer["score"], score, rtol=0, atol=atol)
        norms = call.value.norm(dim=-1).repeat_interleave(group, dim=0)
        np.testing.assert_allclose(of_layer["value_norm"], norms, rtol=1e-5)
        # Only rotating entries: some planes, and the last term, may have no rotation.
        inv_freq = of_layer["inv_freq"]
        rotating = np.flatnonzero((inv_freq != 0) & inv_freq.notnull())
        rotating = rotating[: len(turning.inv_freq)]
        np.testing.assert_allclose(inv_freq[0, rotating], turning.inv_freq, rtol=1e-6)
        for side, x in (("q", call.query), ("k", key)):
            still = turning.unrotate(x)[..., torch.from_numpy(turning.pairs)].numpy()
            vectors = of_layer[f"{side}_still"].values
            norm = of_layer[f"{side}_norm"].values
            atol = 1e-4 * float(x.abs().max())
            np.testing.assert_allclose(
                vectors[:, :, rotating], still, rtol=1e-3, atol=atol
            )
            length = np.sqrt((norm**2).sum(-1, where=~np.isnan(norm)))
            np.testing.assert_allclose(length, x.norm(dim=-1), rtol=1e-4)
            length = np.linalg.norm(still, axis=-1)
            np.testing.assert_allclose(
                norm[:, :, rotating], length, rtol=1e-3, atol=atol
            )


@pytest.mark.parametrize(
    "name", ["llama_gqa", "nanochat", "cohere", "gemma2", "deepseek_v3"]
)
def test_contributions_follow_from_vectors_without_rotation(name: str):
    """scale Re(q~ conj(k~) exp(i w (query - key))), also for clockwise planes."""
    seen = rl.capture(tiny(name), tokens(), heads="0.*,1.2")
    q, k = [
        seen[side][..., 0] + 1j * seen[side][..., 1] for side in ("q_still", "k_still")
    ]
    angle = seen["inv_freq"] * (seen["query"] - seen["key"])
    expected = (seen["scale"] * q * np.conj(k) * np.exp(1j * angle)).real
    difference = seen["contribution"] - expected.transpose(*seen["contribution"].dims)
    rotated = np.isfinite(expected).any(["query", "key"])
    seen_pairs = seen["score"].notnull()
    assert (difference.notnull() == (seen_pairs & rotated)).all()
    assert float(abs(difference).max()) < 1e-4 * float(abs(expected).max())
    bound = seen["scale"] * seen["q_norm"] * seen["k_norm"]
    assert (abs(seen["contribution"]) <= bound + 1e-4).where(seen_pairs, True).all()


@pytest.mark.parametrize("name", ["llama_gqa", "glm", "gpt_oss", "mistral_sliding"])
def test_a_contrast_is_relative_to_the_other_keys_of_the_row(name: str):
    model = tiny(name).double()
    seen = rl.capture(model, tokens(length=9))
    for head, query, key in np.ndindex(seen["attention"].shape):
        of_row = seen.isel(head=head, query=query)
        weight = of_row["attention"].values
        terms = of_row["contribution"].values
        others = np.flatnonzero(weight * (np.arange(9) != key))
        result = of_row["contrast"].values[:, key]
        if weight[key] == 0 or not len(others):
            assert np.isnan(result).all()
            continue
        mean = terms[:, others] @ weight[others] / weight[others].sum()
        np.testing.assert_allclose(result, terms[:, key] - mean, rtol=1e-9, atol=1e-9)
    seen = rl.capture(model, tokens(length=9), runner_up=4)
    for head in seen["head"].values:
        weight = seen["attention"].sel(head=head).values[4:]
        total = seen["contrast"].sel(head=head).sum("frequency", min_count=1).values[4:]
        there = (weight > 0) & (weight[:, 4:5] > 0)
        odds = np.log(weight, where=there, out=weight * 0) - np.log(weight[:, 4:5])
        np.testing.assert_allclose(total[there], odds[there], rtol=0, atol=1e-8)


def test_contrasts_leave_out_common_terms_of_a_row():
    generator = torch.Generator().manual_seed(0)
    terms = 10 * torch.randn(5, 30, 30, generator=generator, dtype=torch.float64)
    attention = terms.sum(0).softmax(-1)
    shift = 100 * torch.randn(5, 30, 1, generator=generator, dtype=torch.float64)
    for options in ({}, {"runner_up": 2}):
        separate = contrasts(terms, attention, **options)
        torch.testing.assert_close(
            contrasts(terms + shift, attention, **options), separate
        )
        single = contrasts(terms.float(), terms.float().sum(0).softmax(-1), **options)
        torch.testing.assert_close(single.double(), separate, rtol=0, atol=0.01)
    assert float(attention.max()) > 1 - 1e-9


def test_chosen_heads_equal_a_capture_of_all_heads(llama: LlamaForCausalLM):
    all_heads = rl.capture(llama, tokens())
    assert all_heads["key_token"].values.tolist() == [f"#{token}" for token in tokens()]
    chosen = rl.capture(llama, tokens()[None], heads="1.1,0.3")
    assert "value_norm" not in chosen
    assert chosen["head"].values.tolist() == ["0.3", "1.1"]
    assert chosen["layer"].values.tolist() == [0, 1]
    assert chosen["head_of_layer"].values.tolist() == [3, 1]
    expected = all_heads.sel(head=["0.3", "1.1"]).drop_attrs(deep=False)
    xr.testing.assert_identical(chosen.drop_attrs(deep=False), expected)


@torch.no_grad()
def running(
    model: PreTrainedModel, ids: torch.Tensor, modules: dict[str, torch.nn.Module]
):
    seen: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    with ExitStack() as hooks:
        for name, module in modules.items():

            def note(_: object, x: tuple, y: torch.Tensor, name: str = name) -> None:
                seen[name] = x[0][0], y[0].reshape(x[0].shape[1], -1)

            hooks.enter_context(module.register_forward_hook(note))
        return seen, model(ids[None], use_cache=False).logits[0]


@pytest.mark.parametrize(
    "name", ["llama_gqa", "gemma2", "gpt_oss", "cohere", "gpt_neox", "deepseek_v3"]
)
def test_written_outputs_match_the_output_projection(name: str):
    model = tiny(name)
    end = "dense" if name == "gpt_neox" else "o_proj"
    named = [n for n in dict(model.named_modules()) if n.endswith(end)]
    modules = {n: model.get_submodule(n) for n in named if "mlp" not in n}
    given, _ = running(model, tokens(), modules)
    seen = rl.capture(model, tokens(), values=True)
    for layer, module in enumerate(modules):
        weight = modules[module].weight.detach()
        parts = zip(
            given[module][0].chunk(HEADS, -1), weight.chunk(HEADS, -1), strict=True
        )
        written = [(z @ w.T) for z, w in parts]
        bias = modules[module].bias if modules[module].bias is not None else 0
        torch.testing.assert_close(
            sum(written) + bias, given[module][1], rtol=1e-4, atol=1e-5
        )
        of_layer = seen.isel(head=seen["layer"] == layer)
        norms = torch.stack(written).norm(dim=-1)
        np.testing.assert_allclose(of_layer["written_norm"], norms, rtol=1e-5)
        first = of_layer["attention"][:, 0, 0] * of_layer["write_norm"][:, 0]  # one key
        np.testing.assert_allclose(first, of_layer["written_norm"][:, 0], rtol=1e-5)


@pytest.mark.parametrize("name", ["llama_gqa", "smollm3", "gpt_oss", "gpt_neox"])
def test_heads_and_the_rest_of_the_stream_sum_to_the_logit(name: str):
    model = tiny(name)
    answers = [7, 40]
    neox = name == "gpt_neox"
    layers = model.gpt_neox.layers if neox else model.model.layers
    norm = model.gpt_neox.final_layer_norm if neox else model.model.norm
    modules = {"embed": model.get_input_embeddings(), "norm": norm}
    modules |= {f"mlp {n}": layer.mlp for n, layer in enumerate(layers)}
    given, logits = running(model, tokens(), modules)
    seen = rl.capture(model, tokens(), logits_of=answers)
    (x, y) = given["norm"]
    unembed = model.get_output_embeddings().weight.detach()[answers]
    mean = x.mean(-1, keepdim=True) if neox else 0
    shift = norm.bias.detach() if neox else 0
    rest = given["embed"][1] + sum(given[f"mlp {n}"][1] for n in range(len(layers)))
    for layer in layers:
        output = layer.attention.dense if neox else layer.self_attn.o_proj
        rest = rest + (output.bias.detach() if output.bias is not None else 0)
    rest = rest - rest.mean(-1, keepdim=True) if neox else rest
    direct = (rest * (y - shift) / (x - mean) + shift) @ unembed.T
    total = (
        seen["logit"].sum(("head", "key")).transpose("query", "answer") + direct.numpy()
    )
    atol = 1e-3 * float(logits.abs().max())
    np.testing.assert_allclose(total, logits[:, answers], rtol=1e-3, atol=atol)


def test_heads_of_a_bridge_write_the_same(tmp_path):
    model, tokenizer = rl.load(save_tiny(tmp_path / "model"))
    expected = rl.capture(model, torch.arange(3, 15), values=True, logits_of=[5])
    seen = rl.capture(
        bridge(model, tokenizer), torch.arange(3, 15), values=True, logits_of=[5]
    )
    for name in ("write_norm", "written_norm", "logit"):
        np.testing.assert_allclose(seen[name], expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore")  # warnings of peft
def test_heads_and_answers_that_cannot_be_captured_are_refused(llama: LlamaForCausalLM):
    with pytest.raises(IndexError, match="index 99 is out of bounds"):
        rl.capture(llama, tokens(), runner_up=99)
    llama.model.layers[1].self_attn.register_forward_hook(
        lambda m, x, y: (y[0] * 0.5, y[1])
    )
    for model in (tiny("gemma2"), tiny("gemma3").requires_grad_(False), llama):
        with pytest.raises(UnsupportedModel, match="to the logits is not linear"):
            rl.capture(model, tokens(), logits_of=[7])
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["o_proj"], r=4, init_lora_weights=False)
    adapted = peft.get_peft_model(tiny("llama_gqa"), config).eval()
    with pytest.raises(
        UnsupportedModel, match="passes the outputs of its heads to no linear"
    ):
        rl.capture(adapted, tokens(), values=True)


@pytest.mark.filterwarnings("ignore")  # warnings of peft
def test_logits_contain_the_adapter_of_the_unembedding():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["lm_head"], r=4, init_lora_weights=False)
    adapted = peft.get_peft_model(tiny("llama_gqa"), config).eval()
    with torch.autocast("cpu"):
        under_autocast = rl.capture(adapted, tokens(), logits_of=[7])["logit"]
    found = rl.capture(adapted, tokens(), logits_of=[7])["logit"]
    merged = rl.capture(adapted.merge_and_unload(), tokens(), logits_of=[7])["logit"]
    np.testing.assert_allclose(found, merged, rtol=1e-4, atol=1e-5)
    assert np.linalg.norm(under_autocast - merged) < 0.08 * np.linalg.norm(merged)


@not_as_configured
def test_logits_in_bfloat16_are_rounded_logits_in_float32():
    exact = rl.capture(tiny("llama_gqa"), tokens(), logits_of=[7])["logit"]
    rounded = rl.capture(tiny("llama_gqa").bfloat16(), tokens(), logits_of=[7])
    assert abs(rounded["logit"] - exact).mean() < 0.05 * abs(exact).mean()
    np.testing.assert_allclose(rounded["attention"].sum("key"), 1, rtol=1e-6)


def test_an_edit_of_one_head_of_a_group(llama: LlamaForCausalLM):
    edits = [rl.stop(rl.PlaneNumbers([1, 2]), heads="0.1")]
    edits += [
        rl.drop(rl.PlaneNumbers((n,)), heads=x) for n, x in ((3, "0.0"), (0, "1.3"))
    ]
    plain = rl.capture(llama, tokens())
    with rl.edit_rope(llama, *edits):
        expected = true_attention(llama, tokens())
        seen = rl.capture(llama, tokens())
    np.testing.assert_allclose(seen["attention"], expected, rtol=0, atol=1e-5)
    assert_contributions_are_scores(seen)
    assert np.argwhere((seen["inv_freq"] == 0).values).tolist() == [[1, 1], [1, 2]]
    # The input of the first layer does not change, and keys are compared without rotation.
    first, before = [x.isel(head=slice(0, 4)) for x in (seen, plain)]
    np.testing.assert_allclose(first["k_still"], before["k_still"], rtol=0, atol=1e-4)
    changed = abs(first - before)["attention"].max(["query", "key"]) > 1e-3
    assert changed.values.tolist() == [True, True, False, False]
    assert float(abs(seen["contribution"]).sel(head="1.3", frequency=0).max()) == 0
    again = rl.capture(llama, tokens()).drop_attrs(deep=False)
    xr.testing.assert_identical(again, plain.drop_attrs(deep=False))


def test_a_rotation_that_depends_on_the_length():
    model = tiny("llama_dynamic", max_position_embeddings=16)
    for edits in ((), (rl.stop(rl.PlaneNumbers([1]), heads="0.1"),)):
        with rl.edit_rope(model, *edits):
            seen = rl.capture(model, tokens())
            expected = true_attention(model, tokens())
        np.testing.assert_allclose(seen["attention"], expected, rtol=0, atol=1e-5)
        stated = model.model.rotary_emb.inv_freq
        np.testing.assert_allclose(seen["inv_freq"][0], stated, rtol=1e-6)
        assert_contributions_are_scores(seen)


def test_variables_have_names_and_units_and_can_be_saved(tmp_path):
    model, tokenizer = rl.load(save_tiny(tmp_path / "model"))
    seen = rl.capture(
        model, "aabca", tokenizer=tokenizer, heads="1.*", values=True, logits_of=["b"]
    )
    assert [text.strip() for text in seen["answer"].values] == ["b"]
    for name, variable in seen.variables.items():
        assert variable.attrs["long_name"], name
        assert "units" in variable.attrs, name
    for name in ("key_token", "query_token"):
        assert [text.strip() for text in seen[name].values] == ["<s>", *"aabca"]
    assert (seen.attrs["kind"], seen.attrs["tokens"]) == ("capture", 6)
    seen.to_netcdf(tmp_path / "plain.nc", engine="h5netcdf")
    rl.save(seen, tmp_path / "ours.nc")
    for name in ("plain.nc", "ours.nc"):
        again = xr.load_dataset(tmp_path / name, engine="h5netcdf")
        xr.testing.assert_equal(again, seen)
        assert again["score"].attrs == seen["score"].attrs


def test_answers_of_any_type_and_texts_of_any_length(tmp_path):
    model, tokenizer = rl.load(save_tiny(tmp_path / "model"))
    capture = rl.capture(model, torch.arange(3, 9), logits_of=[np.int64(7)])
    xr.testing.assert_equal(
        capture, rl.capture(model, torch.arange(3, 9), logits_of=[7])
    )
    text = rl.capture(model, "aabca", tokenizer=tokenizer, logits_of="b")
    assert [answer.strip() for answer in text["answer"].values] == ["b"]
    with pytest.raises(BadArgument, match="'ab' is not one token of the model"):
        rl.capture(model, "aabca", tokenizer=tokenizer, logits_of="ab")
    with pytest.warns(
        UserWarning, match="beyond the 64 tokens that the model was made for"
    ):
        rl.capture(model, 70 * "a", tokenizer=tokenizer, heads="0.0")


def test_several_prompts_equal_separate_captures(llama: LlamaForCausalLM, tmp_path):
    prompts = [tokens(length=6), tokens()]
    seen = rl.capture(llama, prompts, heads="0.1,1.2", values=True)
    for number, prompt in enumerate(prompts):
        separate = rl.capture(llama, prompt, heads="0.1,1.2", values=True)
        places = {name: slice(separate.sizes[name]) for name in ("query", "key")}
        for name in separate.data_vars:
            values = seen[name].sel(prompt=number)
            values = values.isel(
                {dim: places[dim] for dim in places if dim in values.dims}
            )
            np.testing.assert_array_equal(values, separate[name])
        assert (
            seen["query_token"][number, : len(prompt)] == separate["query_token"]
        ).all()
    assert seen["attention"].sel(prompt=0, query=slice(6, None)).isnull().all()
    assert set(seen["query_token"].values[0, 6:]) == {""}
    rl.save(seen, tmp_path / "seen.nc")
    xr.testing.assert_identical(rl.open(tmp_path / "seen.nc"), seen)


def test_memory_is_checked_first(llama: LlamaForCausalLM):
    seen = rl.capture(llama, tokens()).variables.values()
    needed = sum(x.nbytes for x in seen if x.dtype == "f4")
    rl.capture(llama, tokens(), max_bytes=needed)
    with pytest.raises(BadArgument) as refused:
        rl.capture(llama, tokens(), max_bytes=needed - 1)
    words = (
        f"This capture takes {needed:,} bytes, more than the {needed - 1:,} allowed."
    )
    assert refused.value.what == words
    assert refused.value.parts["seen"] == "8 heads, 20 tokens, 8 frequencies"
    assert refused.value.parts["try"].endswith(f"max_bytes={needed}")


def test_memory_of_a_list_is_the_memory_of_all_prompts(llama: LlamaForCausalLM):
    prompts = [tokens()[:6], tokens()]
    seen = rl.capture(llama, prompts).variables.values()
    needed = sum(x.nbytes for x in seen if "prompt" in x.dims and x.dtype == "f4")
    with pytest.raises(BadArgument, match="2 prompts, 8 heads, 20 tokens") as refused:
        rl.capture(llama, prompts, max_bytes=needed - 1)
    suggested = int(refused.value.parts["try"].rpartition("=")[2])
    xr.testing.assert_equal(
        rl.capture(llama, prompts, max_bytes=suggested), rl.capture(llama, prompts)
    )
