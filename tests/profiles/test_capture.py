"""Tests of `capture` against the attention of the model and against laws."""

from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import xarray as xr
from oracles.recording import AttentionCall, LayerRotation, attention_calls
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
    contribution = seen["contribution"]
    score = seen["score"]
    total = contribution.sum("frequency", min_count=1)
    assert (total.isnull() == score.isnull()).all()
    scale = float(abs(contribution).sum("frequency").max())
    difference = float(abs(total - score).max())
    assert difference < 1e-5 * scale


def keys_of_heads(call: AttentionCall) -> torch.Tensor:
    """The keys [head, position, coordinate] of a call, repeated for each head of a group."""
    group = len(call.query) // len(call.key)
    return call.key.repeat_interleave(group, dim=0)


def assert_scores_match(of_layer: xr.Dataset, call: AttentionCall) -> None:
    scores = call.scale * call.query @ keys_of_heads(call).mT
    expected = scores.masked_fill(~call.visible, torch.nan)
    atol = 1e-5 * float(expected.nan_to_num().abs().max())
    np.testing.assert_allclose(of_layer["score"], expected, rtol=0, atol=atol)


def assert_value_norms_match(of_layer: xr.Dataset, call: AttentionCall) -> None:
    group = len(call.query) // len(call.key)
    expected = call.value.norm(dim=-1).repeat_interleave(group, dim=0)
    np.testing.assert_allclose(of_layer["value_norm"], expected, rtol=1e-5)


def rotating_planes(of_layer: xr.Dataset, turning: LayerRotation) -> np.ndarray:
    """Numbers of the planes that rotate: some planes, and the last term, may not rotate."""
    inv_freq = of_layer["inv_freq"]
    rotating = np.flatnonzero((inv_freq != 0) & inv_freq.notnull())
    return rotating[: len(turning.inv_freq)]


def assert_vectors_match(
    of_layer: xr.Dataset, turning: LayerRotation, side: str, x: torch.Tensor
) -> None:
    """Compare vectors without rotation, and their norms, with the rotated vectors `x`."""
    rotating = rotating_planes(of_layer, turning)
    pairs = torch.from_numpy(turning.pairs)
    expected = turning.unrotate(x)[..., pairs].numpy()
    atol = 1e-4 * float(x.abs().max())
    vectors = of_layer[f"{side}_still"].values[:, :, rotating]
    np.testing.assert_allclose(vectors, expected, rtol=1e-3, atol=atol)
    norm = of_layer[f"{side}_norm"].values
    length = np.sqrt((norm**2).sum(-1, where=~np.isnan(norm)))
    np.testing.assert_allclose(length, x.norm(dim=-1), rtol=1e-4)
    expected_norm = np.linalg.norm(expected, axis=-1)
    rotating_norm = norm[:, :, rotating]
    np.testing.assert_allclose(rotating_norm, expected_norm, rtol=1e-3, atol=atol)


@pytest.mark.parametrize("name", SUPPORTED)
def test_against_the_model(name: str):
    model = tiny(name)
    seen = rl.capture(model, tokens(), values=True)
    names = []
    for layer in range(model.config.num_hidden_layers):
        names += [f"{layer}.{head}" for head in range(HEADS)]
    assert seen["head"].values.tolist() == names
    attention = true_attention(model, tokens())
    np.testing.assert_allclose(seen["attention"], attention, rtol=0, atol=1e-5)
    assert_contributions_are_scores(seen)
    calls, _ = attention_calls(model, tokens())
    rotation = rotations(model, name=name)
    for layer, (call, turning) in enumerate(zip(calls, rotation, strict=True)):
        of_layer = seen.isel(head=seen["layer"] == layer)
        assert_scores_match(of_layer, call)
        assert_value_norms_match(of_layer, call)
        inv_freq = of_layer["inv_freq"][0, rotating_planes(of_layer, turning)]
        np.testing.assert_allclose(inv_freq, turning.inv_freq, rtol=1e-6)
        assert_vectors_match(of_layer, turning, "q", call.query)
        assert_vectors_match(of_layer, turning, "k", keys_of_heads(call))


def as_complex(vectors: xr.DataArray) -> xr.DataArray:
    return vectors[..., 0] + 1j * vectors[..., 1]


@pytest.mark.parametrize(
    "name", ["llama_gqa", "nanochat", "cohere", "gemma2", "deepseek_v3"]
)
def test_contributions_follow_from_vectors_without_rotation(name: str):
    """scale Re(q~ conj(k~) exp(i w (query - key))), also for clockwise planes."""
    seen = rl.capture(tiny(name), tokens(), heads="0.*,1.2")
    q = as_complex(seen["q_still"])
    k = as_complex(seen["k_still"])
    angle = seen["inv_freq"] * (seen["query"] - seen["key"])
    turn = np.exp(1j * angle)
    expected = (seen["scale"] * q * np.conj(k) * turn).real
    contribution = seen["contribution"]
    difference = contribution - expected.transpose(*contribution.dims)
    rotated = np.isfinite(expected).any(["query", "key"])
    seen_pairs = seen["score"].notnull()
    assert (difference.notnull() == (seen_pairs & rotated)).all()
    largest = float(abs(expected).max())
    assert float(abs(difference).max()) < 1e-4 * largest
    bound = seen["scale"] * seen["q_norm"] * seen["k_norm"]
    within = abs(contribution) <= bound + 1e-4
    assert within.where(seen_pairs, True).all()


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
        expected = terms[:, key] - mean
        np.testing.assert_allclose(result, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["llama_gqa", "glm", "gpt_oss", "mistral_sliding"])
def test_a_contrast_with_a_runner_up_sums_to_the_odds(name: str):
    model = tiny(name).double()
    against_4 = rl.capture(model, tokens(length=9), runner_up=4)
    for head in against_4["head"].values:
        of_head = against_4.sel(head=head)
        weight = of_head["attention"].values[4:]
        of_runner_up = weight[:, 4:5]
        there = (weight > 0) & (of_runner_up > 0)
        log_weight = np.log(weight, where=there, out=weight * 0)
        odds = log_weight - np.log(of_runner_up)
        total = of_head["contrast"].sum("frequency", min_count=1).values[4:]
        np.testing.assert_allclose(total[there], odds[there], rtol=0, atol=1e-8)


def test_contrasts_leave_out_common_terms_of_a_row():
    generator = torch.Generator().manual_seed(0)
    terms = 10 * torch.randn(5, 30, 30, generator=generator, dtype=torch.float64)
    attention = terms.sum(0).softmax(-1)
    shift = 100 * torch.randn(5, 30, 1, generator=generator, dtype=torch.float64)
    rounded = terms.float()
    rounded_attention = rounded.sum(0).softmax(-1)
    for runner_up in (None, 2):
        expected = contrasts(terms, attention, runner_up=runner_up)
        shifted = contrasts(terms + shift, attention, runner_up=runner_up)
        torch.testing.assert_close(shifted, expected)
        single = contrasts(rounded, rounded_attention, runner_up=runner_up)
        torch.testing.assert_close(single.double(), expected, rtol=0, atol=0.01)
    assert float(attention.max()) > 1 - 1e-9


def test_chosen_heads_equal_a_capture_of_all_heads(llama: LlamaForCausalLM):
    all_heads = rl.capture(llama, tokens())
    names = [f"#{token}" for token in tokens()]
    assert all_heads["key_token"].values.tolist() == names
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
) -> tuple[dict[str, tuple[torch.Tensor, torch.Tensor]], torch.Tensor]:
    """The first input and the output of each of `modules`, and the logits of the model."""
    seen: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    with ExitStack() as hooks:
        for name, module in modules.items():

            def note(_: object, x: tuple, y: torch.Tensor, name: str = name) -> None:
                seen[name] = x[0][0], y[0].reshape(x[0].shape[1], -1)

            hooks.enter_context(module.register_forward_hook(note))
        return seen, model(ids[None], use_cache=False).logits[0]


def output_projections(model: PreTrainedModel, end: str) -> dict[str, torch.nn.Module]:
    """The output projections of the attention of all layers, whose names have this end."""
    projections = {}
    for name, module in model.named_modules():
        if name.endswith(end) and "mlp" not in name:
            projections[name] = module
    return projections


def written_by_heads(
    module: torch.nn.Module, outputs: torch.Tensor
) -> list[torch.Tensor]:
    """What each head writes: its outputs times its columns of the output projection."""
    columns = module.weight.detach().chunk(HEADS, -1)
    parts = zip(outputs.chunk(HEADS, -1), columns, strict=True)
    return [z @ w.T for z, w in parts]


@pytest.mark.parametrize(
    "name", ["llama_gqa", "gemma2", "gpt_oss", "cohere", "gpt_neox", "deepseek_v3"]
)
def test_written_outputs_match_the_output_projection(name: str):
    model = tiny(name)
    end = "dense" if name == "gpt_neox" else "o_proj"
    modules = output_projections(model, end)
    given, _ = running(model, tokens(), modules)
    seen = rl.capture(model, tokens(), values=True)
    for layer, (place, module) in enumerate(modules.items()):
        outputs, expected = given[place]
        written = written_by_heads(module, outputs)
        bias = module.bias if module.bias is not None else 0
        total = sum(written) + bias
        torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-5)
        of_layer = seen.isel(head=seen["layer"] == layer)
        norms = torch.stack(written).norm(dim=-1)
        np.testing.assert_allclose(of_layer["written_norm"], norms, rtol=1e-5)
        # The first row has one key.
        first = of_layer["attention"][:, 0, 0] * of_layer["write_norm"][:, 0]
        np.testing.assert_allclose(first, of_layer["written_norm"][:, 0], rtol=1e-5)


@dataclass(frozen=True)
class Stream:
    """The modules of a model that write to the residual stream, and the last norm."""

    embed: torch.nn.Module
    outputs: list[torch.nn.Module]
    mlps: list[torch.nn.Module]
    norm: torch.nn.Module
    centers: bool  # whether the norm subtracts the mean

    @classmethod
    def of(cls, model: PreTrainedModel, name: str) -> "Stream":
        embed = model.get_input_embeddings()
        if name == "gpt_neox":
            neox = model.gpt_neox
            outputs = [layer.attention.dense for layer in neox.layers]
            mlps = [layer.mlp for layer in neox.layers]
            return cls(embed, outputs, mlps, neox.final_layer_norm, centers=True)
        outputs = [layer.self_attn.o_proj for layer in model.model.layers]
        mlps = [layer.mlp for layer in model.model.layers]
        centers = name == "cohere"
        return cls(embed, outputs, mlps, model.model.norm, centers)

    def modules(self) -> dict[str, torch.nn.Module]:
        modules = {"embed": self.embed, "norm": self.norm}
        for layer, mlp in enumerate(self.mlps):
            modules[f"mlp {layer}"] = mlp
        return modules

    def normed(self, rest: torch.Tensor, x: torch.Tensor, y: torch.Tensor):
        """Apply the norm to a part of its input, with the scale by which `x` became `y`."""
        if not self.centers:
            return rest * y / x
        bias = vars(self.norm)["_parameters"].get("bias")
        shift = torch.zeros(()) if bias is None else bias.detach()
        centered = rest - rest.mean(-1, keepdim=True)
        scaled = centered * (y - shift) / (x - x.mean(-1, keepdim=True))
        return scaled + shift


# Constant factors of configurations. Granite divides its logits by `logits_scaling`.
SCALED: dict[str, dict[str, float]] = {
    "cohere": {"logit_scale": 0.0625},
    "granite": {
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "logits_scaling": 8.0,
    },
}


@pytest.mark.parametrize(
    "name", ["llama_gqa", "smollm3", "gpt_oss", "gpt_neox", "cohere", "granite"]
)
def test_heads_and_the_rest_of_the_stream_sum_to_the_logit(name: str):
    factors = SCALED.get(name, {})
    model = tiny(name, **factors)
    answers = [7, 40]
    stream = Stream.of(model, name)
    given, logits = running(model, tokens(), stream.modules())
    seen = rl.capture(model, tokens(), logits_of=answers)
    rest = factors.get("embedding_multiplier", 1.0) * given["embed"][1]
    for layer, output in enumerate(stream.outputs):
        of_mlp = given[f"mlp {layer}"][1]
        rest = rest + factors.get("residual_multiplier", 1.0) * of_mlp
        if output.bias is not None:
            rest = rest + output.bias.detach()
    unembed = model.get_output_embeddings().weight.detach()[answers]
    factor = factors.get("logit_scale", 1 / factors.get("logits_scaling", 1.0))
    assert seen.attrs["logit_factor"] == pytest.approx(factor)
    of_rest = factor * stream.normed(rest, *given["norm"]) @ unembed.T
    of_heads = seen["logit"].sum(("head", "key")).transpose("query", "answer")
    total = of_heads + of_rest.numpy()
    atol = 1e-3 * float(logits.abs().max())
    np.testing.assert_allclose(total, logits[:, answers], rtol=1e-3, atol=atol)


def test_a_cap_of_the_logits_is_undone():
    model = tiny("nanochat")
    assert model.config.final_logit_softcapping == 15.0
    seen = rl.capture(model, tokens(), logits_of=[7])
    assert seen.attrs["logit_factor"] == 1.0


def test_weights_from_inference_mode_have_no_parts_of_logits():
    with torch.inference_mode():
        model = tiny("llama_gqa")
    words = "has no gradients in torch.inference_mode"
    with pytest.raises(UnsupportedModel, match=words):
        rl.capture(model, tokens(), logits_of=[7])
    rl.capture(model, tokens(), values=True)
    usual = tiny("llama_gqa")
    with torch.inference_mode(), pytest.raises(UnsupportedModel, match=words):
        rl.capture(usual, tokens(), logits_of=[7])


def test_heads_of_a_bridge_write_the_same(tmp_path):
    model, tokenizer = rl.load(save_tiny(tmp_path / "model"))
    ids = torch.arange(3, 15)
    expected = rl.capture(model, ids, values=True, logits_of=[5])
    bridged = bridge(model, tokenizer)  # it changes the attention of the model
    seen = rl.capture(bridged, ids, values=True, logits_of=[5])
    for name in ("write_norm", "written_norm", "logit"):
        np.testing.assert_allclose(seen[name], expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore")  # warnings of peft
def test_heads_and_answers_that_cannot_be_captured_are_refused(llama: LlamaForCausalLM):
    with pytest.raises(IndexError, match="index 99 is out of bounds"):
        rl.capture(llama, tokens(), runner_up=99)
    llama.model.layers[1].self_attn.register_forward_hook(
        lambda m, x, y: (y[0].tanh(), y[1])
    )
    for model in (tiny("gemma2"), tiny("gemma3").requires_grad_(False), llama):
        with pytest.raises(UnsupportedModel, match="to the logits is not linear"):
            rl.capture(model, tokens(), logits_of=[7])
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["o_proj"], r=4, init_lora_weights=False)
    adapted = peft.get_peft_model(tiny("llama_gqa"), config).eval()
    words = "passes the outputs of its heads to no linear"
    with pytest.raises(UnsupportedModel, match=words):
        rl.capture(adapted, tokens(), values=True)


@pytest.mark.filterwarnings("ignore")  # warnings of peft
def test_logits_contain_the_adapter_of_the_unembedding():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["lm_head"], r=4, init_lora_weights=False)
    adapted = peft.get_peft_model(tiny("llama_gqa"), config).eval()
    with torch.autocast("cpu"):
        under_autocast = rl.capture(adapted, tokens(), logits_of=[7])["logit"]
    found = rl.capture(adapted, tokens(), logits_of=[7])["logit"]
    merged = adapted.merge_and_unload()
    expected = rl.capture(merged, tokens(), logits_of=[7])["logit"]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    error = np.linalg.norm(under_autocast - expected)
    assert error < 0.08 * np.linalg.norm(expected)


@not_as_configured
def test_logits_in_bfloat16_are_rounded_logits_in_float32():
    exact = rl.capture(tiny("llama_gqa"), tokens(), logits_of=[7])["logit"]
    model = tiny("llama_gqa").bfloat16()
    rounded = rl.capture(model, tokens(), logits_of=[7])
    error = abs(rounded["logit"] - exact).mean()
    assert error < 0.05 * abs(exact).mean()
    np.testing.assert_allclose(rounded["attention"].sum("key"), 1, rtol=1e-6)


def test_an_edit_of_one_head_of_a_group(llama: LlamaForCausalLM):
    edits = [
        rl.stop(rl.PlaneNumbers([1, 2]), heads="0.1"),
        rl.drop(rl.PlaneNumbers((3,)), heads="0.0"),
        rl.drop(rl.PlaneNumbers((0,)), heads="1.3"),
    ]
    plain = rl.capture(llama, tokens())
    with rl.edit_rope(llama, *edits):
        expected = true_attention(llama, tokens())
        seen = rl.capture(llama, tokens())
    np.testing.assert_allclose(seen["attention"], expected, rtol=0, atol=1e-5)
    assert_contributions_are_scores(seen)
    stopped = (seen["inv_freq"] == 0).values
    assert np.argwhere(stopped).tolist() == [[1, 1], [1, 2]]
    # The input of the first layer does not change, and keys are compared without rotation.
    first = seen.isel(head=slice(0, 4))
    before = plain.isel(head=slice(0, 4))
    np.testing.assert_allclose(first["k_still"], before["k_still"], rtol=0, atol=1e-4)
    change = abs(first["attention"] - before["attention"]).max(["query", "key"])
    assert (change > 1e-3).values.tolist() == [True, True, False, False]
    dropped = seen["contribution"].sel(head="1.3", frequency=0)
    assert float(abs(dropped).max()) == 0
    again = rl.capture(llama, tokens()).drop_attrs(deep=False)
    xr.testing.assert_identical(again, plain.drop_attrs(deep=False))


def test_a_rotation_that_depends_on_the_length():
    model = tiny("llama_dynamic", max_position_embeddings=16)
    stop = rl.stop(rl.PlaneNumbers([1]), heads="0.1")
    for edits in ((), (stop,)):
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
    assert seen.attrs["kind"] == "capture"
    assert seen.attrs["tokens"] == 6
    seen.to_netcdf(tmp_path / "plain.nc", engine="h5netcdf")
    rl.save(seen, tmp_path / "ours.nc")
    for name in ("plain.nc", "ours.nc"):
        again = xr.load_dataset(tmp_path / name, engine="h5netcdf")
        xr.testing.assert_equal(again, seen)
        assert again["score"].attrs == seen["score"].attrs


def test_answers_of_any_type_and_texts_of_any_length(tmp_path):
    model, tokenizer = rl.load(save_tiny(tmp_path / "model"))
    ids = torch.arange(3, 9)
    capture = rl.capture(model, ids, logits_of=[np.int64(7)])
    expected = rl.capture(model, ids, logits_of=[7])
    xr.testing.assert_equal(capture, expected)
    text = rl.capture(model, "aabca", tokenizer=tokenizer, logits_of="b")
    assert [answer.strip() for answer in text["answer"].values] == ["b"]
    with pytest.raises(BadArgument, match="'ab' is not one token of the model"):
        rl.capture(model, "aabca", tokenizer=tokenizer, logits_of="ab")
    words = "beyond the 64 tokens that the model was made for"
    with pytest.warns(UserWarning, match=words):
        rl.capture(model, 70 * "a", tokenizer=tokenizer, heads="0.0")


def test_several_prompts_equal_separate_captures(llama: LlamaForCausalLM, tmp_path):
    prompts = [tokens(length=6), tokens()]
    seen = rl.capture(llama, prompts, heads="0.1,1.2", values=True)
    for number, prompt in enumerate(prompts):
        separate = rl.capture(llama, prompt, heads="0.1,1.2", values=True)
        own = slice(len(prompt))
        for name in separate.data_vars:
            padded = seen[name].sel(prompt=number)
            values = padded.isel(query=own, key=own, missing_dims="ignore")
            np.testing.assert_array_equal(values, separate[name])
        query_token = seen["query_token"][number, own]
        assert (query_token == separate["query_token"]).all()
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
    allowed = rl.capture(llama, prompts, max_bytes=suggested)
    xr.testing.assert_equal(allowed, rl.capture(llama, prompts))
