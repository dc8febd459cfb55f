"""Attention hooks change no bit of a model, and show the calls that the model computes."""

import sys
from functools import partial

import numpy as np
import pytest
import torch
import xarray as xr
from oracles.recording import AttentionCall as RecordedCall
from oracles.recording import attention_calls
from oracles.tiny import FAMILIES, SUPPORTED, TEN, WINDOW, logits, of_kind, tiny
from oracles.tiny import random_tokens as tokens
from small_measurements import differs_when_observed
from torch.nn.functional import cross_entropy
from transformers import (
    AttentionInterface,
    Cache,
    DynamicCache,
    LlamaForCausalLM,
    PreTrainedModel,
    StaticCache,
)
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention

import ropelens as rl
from ropelens.attention.call import AttentionCall, attention_map, output_error
from ropelens.errors import UnsupportedModel
from ropelens.model import live_model
from ropelens.model.as_live_model import as_live_model
from ropelens.runtime.progress import Stage, silent

NO_SDPA = ("gemma2", "gpt_oss")
IMPLEMENTATIONS = [(name, "eager") for name in TEN]
IMPLEMENTATIONS += [(name, "sdpa") for name in TEN if name not in NO_SDPA]
SLIDING = [name for name in SUPPORTED if "sliding_window" in FAMILIES[name].config]
LENGTH = 30  # more than twice the window


@pytest.fixture(autouse=True)
def nothing_stays_wrapped():
    before = dict(ALL_ATTENTION_FUNCTIONS)
    yield
    assert dict(ALL_ATTENTION_FUNCTIONS) == before
    assert type(ALL_ATTENTION_FUNCTIONS) is AttentionInterface


def observed_calls(model: PreTrainedModel, ids: torch.Tensor) -> list[AttentionCall]:
    calls: list[AttentionCall] = []
    with as_live_model(model).observe(calls.append):
        logits(model, ids)
    return calls


@pytest.mark.parametrize(("name", "implementation"), IMPLEMENTATIONS)
def test_calls_give_the_attention_of_the_model_and_outputs_keep_every_bit(
    name, implementation
):
    model = tiny(name)
    ids = tokens()
    expected, _ = attention_calls(model, ids[0])
    model.set_attn_implementation(implementation)
    plain = logits(model, ids)
    config = model.config.to_dict()
    calls: list[AttentionCall] = []
    with as_live_model(model).observe(calls.append):
        assert torch.equal(plain, logits(model, ids))
        assert model.config.to_dict() == config
    assert [call.layer for call in calls] == list(range(model.config.num_hidden_layers))
    assert torch.equal(plain, logits(model, ids))
    assert len(calls) == len(expected), "a closed block shows no calls"
    for call, recorded in zip(calls, expected, strict=True):
        assert_same_attention(call, recorded)


def assert_same_attention(call: AttentionCall, recorded: RecordedCall) -> None:
    weights = attention_map(call)
    ours = weights[0].double()
    torch.testing.assert_close(ours, recorded.attention, rtol=1e-4, atol=1e-5)
    assert output_error(call, weights).norm() < 1e-5
    assert call.scale == recorded.scale
    assert call.softcap == recorded.softcap
    first_key = recorded.visible.int().argmax(1)
    np.testing.assert_array_equal(call.visibility.first[0], first_key)


def with_dropout(name: str) -> PreTrainedModel:
    if name == "phi":
        return tiny("phi", resid_pdrop=0.4)
    return tiny("gpt_neox", hidden_dropout=0.4)


@pytest.mark.parametrize("name", ["phi", "gpt_neox"])
def test_a_model_in_training_is_measured_without_dropout(name: str):
    model = with_dropout(name)
    budget = name == "phi"
    expected = rl.profile(model, tokens(), budget=budget, surrogates=0)
    model.train()
    frozen = next(iter(model.children()))
    frozen.training = False
    profile = rl.profile(model, tokens(), budget=budget, surrogates=0)
    xr.testing.assert_equal(profile, expected)
    assert [m for m in model.modules() if not m.training] == [frozen]
    assert model.training


def with_norms_in_float32() -> PreTrainedModel:
    """A model in bfloat16 whose norms have other weights."""
    model = tiny("llama_gqa")
    for name, weight in model.named_parameters():
        if "norm" not in name:
            weight.data = weight.data.bfloat16()
    return model


@pytest.mark.parametrize("name", ["llama_gqa", "gpt_oss", "cohere", "norms in float32"])
def test_autocast_applies_only_to_the_model(name: str):
    """The rotation is measured without autocast if all weights have one dtype."""
    model = tiny(name) if name in FAMILIES else with_norms_in_float32()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        profile = rl.profile(model, tokens(), surrogates=0)
        captured = rl.capture(model, tokens()[0])
    assert profile["total_bits"].notnull().all()
    total = captured["contribution"].sum("frequency")
    np.testing.assert_allclose(total, captured["score"].fillna(0), atol=1e-4)


TOP_K = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 2,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 8,  # a row attends to fewer keys than the sequence has
    "num_key_value_heads": 4,
}


def assert_maps_in_steps(model: PreTrainedModel, cache: Cache) -> None:
    """Feed a text in parts, and compare the attention of each part with transformers."""
    single_tokens = [slice(n, n + 1) for n in range(25, LENGTH)]
    for part in [slice(0, 20), slice(20, 25), *single_tokens]:
        maps, attentions = attend_to_part(model, tokens()[:, part], cache)
        for ours, expected in zip(maps, attentions, strict=True):
            expected = expected[..., : part.stop]
            torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)


def attend_to_part(
    model: PreTrainedModel, ids: torch.Tensor, cache: Cache
) -> tuple[list[torch.Tensor], tuple[torch.Tensor, ...]]:
    """The observed attention of each layer, and the attention that the model returns."""
    maps: list[torch.Tensor] = []
    with rl.observe(model, lambda call, _: maps.append(attention_map(call))):
        result = model(ids, past_key_values=cache, output_attentions=True)
    return maps, result.attentions


@torch.no_grad()
def test_rows_that_do_not_see_their_own_key_are_still_rows():
    """A mask of the top keys, in steps on a cache."""
    model = of_kind("deepseek_v32", **TOP_K)
    assert_maps_in_steps(model, DynamicCache(config=model.config))
    static = StaticCache(config=model.config, max_cache_len=LENGTH + 5)
    assert_maps_in_steps(model, static)


@torch.no_grad()
def test_rows_that_do_not_see_their_own_key_are_silenced():
    """A mask of the top keys, in the mean of a batch and in a resampled output."""
    model = of_kind("deepseek_v32", **TOP_K)
    call = observed_calls(model, tokens())[0]
    own_keys = call.visibility.sees().diagonal(dim1=1, dim2=2)
    assert not own_keys.all()
    outputs: list[torch.Tensor] = []
    projection = model.model.layers[0].self_attn.o_proj
    with projection.register_forward_pre_hook(lambda _, args: outputs.append(args[0])):
        with rl.silence_heads(model, "0.*", to="mean"):
            logits(model)
        with rl.silence_heads(model, "0.*", to="resample"):
            logits(model)
    mean, resampled = outputs
    plain = call.output.flatten(2)
    torch.testing.assert_close(mean[0, 0], plain.mean((0, 1)))
    assert torch.equal(resampled, plain.flip(0))


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize(("kind", "more"), [("deepseek_v32", TOP_K), ("doge", {})])
def test_model_code_takes_the_branch_of_its_implementation(kind, more, implementation):
    """DeepSeek makes its mask by the name of the implementation; Doge has its own interface."""
    model = of_kind(kind, how=implementation, **more)
    plain = logits(model)
    calls: list[AttentionCall] = []
    with as_live_model(model).observe(calls.append):
        assert torch.equal(logits(model), plain)
    assert [call.layer for call in calls] == [0, 1]


def test_the_model_runs_the_function_that_it_asks_for(llama, monkeypatch):
    """The file of the class has another function under the usual name."""

    class OfAnotherFile(LlamaAttention):
        pass

    monkeypatch.setattr(
        sys.modules[__name__],
        "eager_attention_forward",
        windowed_attention,
        raising=False,
    )
    llama.model.layers[0].self_attn.__class__ = OfAnotherFile
    plain = logits(llama)
    with as_live_model(llama).observe(lambda call: None):
        assert torch.equal(logits(llama), plain)


def reach(model: PreTrainedModel, ids: torch.Tensor, *, progress: object) -> xr.Dataset:
    return rl.reach(model, ids, copies=[48, 50], progress=progress)


TOKENS_OF_CHECK = {rl.profile: 30, rl.evaluate: 30, rl.truncate: 30, rl.analyze: 30}
TOKENS_OF_CHECK[reach] = 99
"""Calls, and the number of tokens with which each of them checks the model."""


def test_a_model_that_changes_when_it_is_observed_is_refused(llama: LlamaForCausalLM):
    attention = llama.model.layers[1].self_attn
    attention.forward = partial(differs_when_observed, attention.forward)
    stages: list[str] = []

    def progress(*shown: Stage):
        stages.extend(stage.what for stage in shown)
        return silent()

    words = "else while it is observed"
    for measure, length in TOKENS_OF_CHECK.items():
        with pytest.raises(UnsupportedModel, match=words) as refused:
            measure(llama, tokens(), progress=progress)
        seen = refused.value.parts["seen"]
        assert f"logits of {length} tokens: a relative change of" in seen, measure
    assert set(stages) <= {"reading", "loading", "probing"}


def layer_types_of(model: PreTrainedModel) -> list[str]:
    stated = getattr(model.config, "layer_types", None)
    return stated or ["sliding_attention"] * model.config.num_hidden_layers


@pytest.mark.parametrize("length", [WINDOW - 1, WINDOW, WINDOW + 1, LENGTH])
@pytest.mark.parametrize("name", SLIDING)
def test_windows_are_read_at_every_length(name: str, length: int):
    """Only long sequences have a mask, but the window is the same."""
    row = torch.arange(length)
    first_key = {
        "sliding_attention": (row - WINDOW + 1).clamp_min(0),
        "full_attention": torch.zeros_like(row),
    }
    for implementation in ("eager",) if name in NO_SDPA else ("eager", "sdpa"):
        model = tiny(name)
        model.set_attn_implementation(implementation)
        calls = observed_calls(model, tokens(length=length))
        for call, layer_type in zip(calls, layer_types_of(model), strict=True):
            expected = first_key[layer_type]
            seen = call.visibility.first[0]
            assert torch.equal(seen, expected), (implementation, layer_type)


def windowed_attention(module, query, key, value, attention_mask, **kwargs):
    """Attention that takes no mask and applies the window itself, like flash attention."""
    assert attention_mask is None
    row = torch.arange(query.shape[2])
    later = row > row[:, None]
    before_window = row <= row[:, None] - kwargs["sliding_window"]
    mask = torch.zeros(len(row), len(row))
    mask = mask.masked_fill(later | before_window, -1e9)
    eager = sys.modules[type(module).__module__].eager_attention_forward
    return eager(module, query, key, value, mask[None, None], **kwargs)


def test_a_window_without_a_mask_is_read(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(
        AttentionInterface._global_mapping, "windowed", windowed_attention
    )
    AttentionMaskInterface.register("windowed", lambda *args, **kwargs: None)
    model = tiny("mistral_sliding")
    expected = logits(model)
    model.set_attn_implementation("windowed")
    torch.testing.assert_close(logits(model), expected)
    row = torch.arange(LENGTH)
    first_key = (row - WINDOW + 1).clamp_min(0)
    for call in observed_calls(model, tokens()):
        assert torch.equal(call.visibility.first[0], first_key)
    rl.capture(model, tokens()[0])


def test_an_error_closes_the_block(llama: LlamaForCausalLM):
    def fail(call: AttentionCall) -> None:
        raise ZeroDivisionError

    live = as_live_model(llama)
    with pytest.raises(ZeroDivisionError), live.observe(fail):
        logits(llama)
    with pytest.raises(ZeroDivisionError), live.observe(lambda call: None):
        raise ZeroDivisionError
    logits(llama)


@pytest.mark.parametrize("shared", [False, True], ids=["own configs", "one config"])
def test_blocks_nest_and_two_models_have_separate_hooks(
    llama: LlamaForCausalLM, shared: bool
):
    if shared:
        other = LlamaForCausalLM(llama.config).eval()
    else:
        other = tiny("llama_gqa", seed=1)
    plain = logits(llama)
    plain_other = logits(other)
    outer: list[AttentionCall] = []
    inner: list[AttentionCall] = []
    theirs: list[AttentionCall] = []
    live = as_live_model(llama)
    with live.observe(outer.append), as_live_model(other).observe(theirs.append):
        with live.observe(inner.append):
            assert torch.equal(logits(llama), plain)
        assert len(inner) == 2
        assert len(outer) == 2
        assert len(theirs) == 0
        assert torch.equal(logits(llama), plain)
        assert torch.equal(logits(other), plain_other)
        assert len(inner) == 2
        assert len(outer) == 4
        assert len(theirs) == 2


@pytest.mark.parametrize("how", ["a bias", "by head"])
@torch.no_grad()
def test_a_new_kind_of_mask_is_checked_after_a_plain_mask(
    llama: LlamaForCausalLM, how: str
):
    lowest = torch.finfo(torch.float32).min
    size = tokens().shape[1]
    causal = torch.full((size, size), lowest).triu(1).expand(1, 4, -1, -1)
    other = causal.clone()
    if how == "a bias":
        other[..., 8:12] = (other[..., 8:12] - 0.9).clamp(min=lowest)
    else:
        other[:, 1, :, 2:8] = lowest
    llama.set_attn_implementation("eager")
    words = "the mask differs between heads or adds"
    with rl.observe(llama, lambda call, planes: None):
        llama(tokens(), attention_mask=causal, use_cache=False)
        llama(tokens(), attention_mask=causal[:, :1], use_cache=False)
        with pytest.raises(UnsupportedModel, match=words):
            llama(tokens(), attention_mask=other, use_cache=False)


@pytest.mark.parametrize("name", ["llama_gqa", "gemma2", "cohere", "granite", "llama4"])
@torch.no_grad()
def test_losses_from_pieces_of_logits_equal_losses_from_all_logits(name, monkeypatch):
    model = tiny(name)
    ids = torch.randint(96, (3, 40))
    lengths = torch.tensor([40, 33, 17])
    monkeypatch.setattr(live_model, "LOGITS_AT_ONCE", {"cpu": 3 * 96 * 7})
    all_logits = model(ids, use_cache=False).logits
    losses = as_live_model(model).losses(ids, lengths)
    pieces = [piece for _, piece in as_live_model(model).logits(ids)]
    last = as_live_model(model).forward(ids, last=1)[:, -1]
    unfinished = as_live_model(model.train()).logits(ids)
    next(unfinished)  # a caller may stop after one piece
    assert model.training
    assert not vars(model.base_model).keys() & {"forward"}
    assert len(pieces) == (1 if name == "llama4" else 6)
    torch.testing.assert_close(last, all_logits[:, -1], rtol=1e-5, atol=1e-4)
    expected = cross_entropy(
        all_logits[:, :-1].float().mT, ids[:, 1:], reduction="none"
    )
    assert_same_losses(losses, expected, lengths)


def assert_same_losses(
    losses: torch.Tensor, expected: torch.Tensor, lengths: torch.Tensor
) -> None:
    """The first token of a sequence and the padding have no loss."""
    for sequence, length in enumerate(lengths.tolist()):
        own = losses[sequence, 1:length].float()
        true = expected[sequence, : length - 1]
        torch.testing.assert_close(own, true, rtol=1e-6, atol=1e-5)
        assert abs(own.mean() - true.mean()) <= 1e-6 * true.mean()
    predicted = int((lengths - 1).sum())
    assert int(losses.isnan().sum()) == losses.numel() - predicted
