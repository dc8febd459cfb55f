"""Attention hooks change no bit of a model, and show the calls that the model computes."""

import sys
from functools import partial

import numpy as np
import pytest
import torch
import xarray as xr
from measured import differs_when_observed, observed_calls
from oracles.recording import attention_calls
from oracles.tiny import FAMILIES, SUPPORTED, TEN, WINDOW, logits, of_kind, tiny
from oracles.tiny import random_tokens as tokens
from torch.nn.functional import cross_entropy
from transformers import AttentionInterface, DynamicCache, LlamaForCausalLM, StaticCache
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


@pytest.mark.parametrize(("name", "implementation"), IMPLEMENTATIONS)
def test_calls_give_the_attention_of_the_model_and_outputs_keep_every_bit(
    name, implementation
):
    model, ids = tiny(name), tokens()
    expected, _ = attention_calls(model, ids[0])
    model.set_attn_implementation(implementation)
    plain, config = logits(model, ids), model.config.to_dict()
    calls: list[AttentionCall] = []
    with as_live_model(model).observe(calls.append):
        assert torch.equal(plain, logits(model, ids))
        assert model.config.to_dict() == config
    assert [call.layer for call in calls] == list(range(model.config.num_hidden_layers))
    assert torch.equal(plain, logits(model, ids))
    assert len(calls) == len(expected), "a closed block shows no calls"
    for call, true in zip(calls, expected, strict=True):
        weights = attention_map(call)
        torch.testing.assert_close(
            weights[0].double(), true.attention, rtol=1e-4, atol=1e-5
        )
        assert output_error(call, weights).norm() < 1e-5
        assert (call.scale, call.softcap) == (true.scale, true.softcap)
        np.testing.assert_array_equal(
            call.visibility.first[0], true.visible.int().argmax(1)
        )


@pytest.mark.parametrize("name", ["phi", "gpt_neox"])
def test_a_model_in_training_is_measured_without_dropout(name: str):
    dropout = {"phi": "resid_pdrop", "gpt_neox": "hidden_dropout"}[name]
    model = tiny(name, **{dropout: 0.4})
    options = {"surrogates": 0} if name == "phi" else {"budget": False}
    plain = rl.profile(model, tokens(), **options)
    model.train()
    frozen = next(iter(model.children()))
    frozen.training = False
    xr.testing.assert_equal(rl.profile(model, tokens(), **options), plain)
    assert [m for m in model.modules() if not m.training] == [frozen]
    assert model.training


@pytest.mark.parametrize("name", ["llama_gqa", "gpt_oss", "cohere", "norms in float32"])
def test_autocast_applies_only_to_the_model(name: str):
    """The rotation is measured without autocast if all weights have one dtype."""
    model = tiny(name if name in FAMILIES else "llama_gqa")
    for part, weight in model.named_parameters() if name not in FAMILIES else ():
        weight.data = weight.data if "norm" in part else weight.data.bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        profile = rl.profile(model, tokens(), surrogates=0)
        seen = rl.capture(model, tokens()[0])
    assert profile["total_bits"].notnull().all()
    total = seen["contribution"].sum("frequency")
    np.testing.assert_allclose(total, seen["score"].fillna(0), atol=1e-4)


TOP_K = {  # a row attends to fewer keys than the sequence has
    **{
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
    },
    **{"v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1},
    **{
        "topk_group": 1,
        "first_k_dense_replace": 2,
        "index_n_heads": 2,
        "index_head_dim": 16,
    },
    **{"index_topk": 8, "num_key_value_heads": 4},
}


@torch.no_grad()
def test_rows_that_do_not_see_their_own_key_are_still_rows():
    """A mask of the top keys: in steps on a cache, and in the mean of a batch."""
    model, ids = of_kind("deepseek_v32", **TOP_K), tokens()
    for cache in (DynamicCache, partial(StaticCache, max_cache_len=LENGTH + 5)):
        past = cache(config=model.config)
        for begin, end in ((0, 20), (20, 25), *((n, n + 1) for n in range(25, LENGTH))):
            maps: list[torch.Tensor] = []
            with rl.observe(model, lambda call, _: maps.append(attention_map(call))):  # noqa: B023
                result = model(
                    ids[:, begin:end], past_key_values=past, output_attentions=True
                )
            for ours, true in zip(maps, result.attentions, strict=True):
                torch.testing.assert_close(ours, true[..., :end], rtol=0, atol=1e-5)
    read: list[torch.Tensor] = []
    projection = model.model.layers[0].self_attn.o_proj
    call, _ = observed_calls(model, ids)[0]
    assert not call.visibility.sees().diagonal(dim1=1, dim2=2).all()
    with projection.register_forward_pre_hook(lambda _, args: read.append(args[0])):
        for to in ("mean", "resample"):
            with rl.silence_heads(model, "0.*", to=to):
                logits(model, ids)
    expected = call.output.flatten(2)
    torch.testing.assert_close(read[0][0, 0], expected.mean((0, 1)))
    assert torch.equal(read[1], expected.flip(0))


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize(("kind", "more"), [("deepseek_v32", TOP_K), ("doge", {})])
def test_model_code_takes_the_branch_of_its_implementation(kind, more, implementation):
    """DeepSeek makes its mask by the name of the implementation; Doge has its own interface."""
    model = of_kind(kind, how=implementation, **more)
    plain, calls = logits(model, tokens()), []
    with as_live_model(model).observe(calls.append):
        assert torch.equal(logits(model, tokens()), plain)
    assert [call.layer for call in calls] == [0, 1]


def test_the_model_runs_the_function_that_it_asks_for(llama, monkeypatch):
    """The file of the class has another function under the usual name."""

    class OfAnotherFile(LlamaAttention):
        pass

    file = sys.modules[__name__]
    monkeypatch.setattr(
        file, "eager_attention_forward", windowed_attention, raising=False
    )
    llama.model.layers[0].self_attn.__class__ = OfAnotherFile
    plain = logits(llama, tokens())
    with as_live_model(llama).observe(lambda call: None):
        assert torch.equal(logits(llama, tokens()), plain)


def test_a_model_that_changes_when_it_is_observed_is_refused(llama: LlamaForCausalLM):
    attention, stages = llama.model.layers[1].self_attn, list[str]()
    attention.forward = partial(differs_when_observed, attention.forward)

    def progress(*shown: Stage):
        stages.extend(stage.what for stage in shown)
        return silent()

    for measure in (rl.profile, rl.evaluate, rl.truncate, rl.reach, rl.analyze):
        more = {"copies": [48, 50]} if measure is rl.reach else {}
        with pytest.raises(
            UnsupportedModel, match="else while it is observed"
        ) as refused:
            measure(llama, tokens(), progress=progress, **more)
        seen = f"logits of {99 if measure is rl.reach else 30} tokens: a relative change of"
        assert seen in refused.value.parts["seen"], measure
    assert set(stages) <= {"reading", "loading", "probing"}


@pytest.mark.parametrize("length", [WINDOW - 1, WINDOW, WINDOW + 1, LENGTH])
@pytest.mark.parametrize("name", SLIDING)
def test_windows_are_read_at_every_length(name: str, length: int):
    """Only long sequences have a mask, but the window is the same."""
    row = torch.arange(length)
    windowed = (row - WINDOW + 1).clamp_min(0)
    for implementation in ("eager",) if name in NO_SDPA else ("eager", "sdpa"):
        model = tiny(name)
        model.set_attn_implementation(implementation)
        calls = [call for call, _ in observed_calls(model, tokens(length=length))]
        kinds = getattr(model.config, "layer_types", None) or [
            "sliding_attention"
        ] * len(calls)
        for call, kind in zip(calls, kinds, strict=True):
            expected = (
                windowed if kind == "sliding_attention" else torch.zeros_like(row)
            )
            assert torch.equal(call.visibility.first[0], expected), (
                implementation,
                kind,
            )


def windowed_attention(module, query, key, value, attention_mask, **kwargs):
    """Attention that takes no mask and applies the window itself, like flash attention."""
    assert attention_mask is None
    row = torch.arange(query.shape[2])
    hidden = (row > row[:, None]) | (row <= row[:, None] - kwargs["sliding_window"])
    mask = torch.zeros(len(row), len(row)).masked_fill(hidden, -1e9)[None, None]
    eager = sys.modules[type(module).__module__].eager_attention_forward
    return eager(module, query, key, value, mask, **kwargs)


def test_a_window_without_a_mask_is_read(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(
        AttentionInterface._global_mapping, "windowed", windowed_attention
    )
    AttentionMaskInterface.register("windowed", lambda *args, **kwargs: None)
    model = tiny("mistral_sliding")
    expected = logits(model, tokens())
    model.set_attn_implementation("windowed")
    torch.testing.assert_close(logits(model, tokens()), expected)
    first = (torch.arange(LENGTH) - WINDOW + 1).clamp_min(0)
    for call, _ in observed_calls(model, tokens()):
        assert torch.equal(call.visibility.first[0], first)
    rl.capture(model, tokens()[0])


def test_an_error_closes_the_block(llama: LlamaForCausalLM):
    with (
        pytest.raises(ZeroDivisionError),
        as_live_model(llama).observe(lambda call: 1 / 0),
    ):
        logits(llama, tokens())
    with (
        pytest.raises(ZeroDivisionError),
        as_live_model(llama).observe(lambda call: None),
    ):
        raise ZeroDivisionError
    logits(llama, tokens())


@pytest.mark.parametrize("shared", [False, True], ids=["own configs", "one config"])
def test_blocks_nest_and_two_models_have_separate_hooks(
    llama: LlamaForCausalLM, shared: bool
):
    other = (
        LlamaForCausalLM(llama.config).eval() if shared else tiny("llama_gqa", seed=1)
    )
    plain, plain_other = logits(llama, tokens()), logits(other, tokens())
    outer, inner, theirs = [], [], []
    live, live_other = as_live_model(llama), as_live_model(other)
    with live.observe(outer.append), live_other.observe(theirs.append):
        with live.observe(inner.append):
            assert torch.equal(logits(llama, tokens()), plain)
        assert (len(inner), len(outer), len(theirs)) == (2, 2, 0)
        assert torch.equal(logits(llama, tokens()), plain)
        assert torch.equal(logits(other, tokens()), plain_other)
        assert (len(inner), len(outer), len(theirs)) == (2, 4, 2)


@pytest.mark.parametrize("how", ["a bias", "by head"])
@torch.no_grad()
def test_a_new_kind_of_mask_is_checked_after_a_plain_mask(
    llama: LlamaForCausalLM, how: str
):
    low = torch.finfo(torch.float32).min
    size = tokens().shape[1]
    causal = torch.full((size, size), low).triu(1).expand(1, 4, -1, -1)
    other = causal.clone()
    if how == "a bias":
        other[..., 8:12] = (other[..., 8:12] - 0.9).clamp(min=low)
    else:
        other[:, 1, :, 2:8] = low
    llama.set_attn_implementation("eager")
    with rl.observe(llama, lambda call, planes: None):
        for mask in (causal, causal[:, :1]):
            llama(tokens(), attention_mask=mask, use_cache=False)
        with pytest.raises(
            UnsupportedModel, match="the mask differs between heads or adds"
        ):
            llama(tokens(), attention_mask=other, use_cache=False)


@pytest.mark.parametrize("name", ["llama_gqa", "gemma2", "cohere", "granite", "llama4"])
def test_losses_from_pieces_of_logits_equal_losses_from_all_logits(name, monkeypatch):
    model, tokens = tiny(name).eval(), torch.randint(96, (3, 40))
    lengths = torch.tensor([40, 33, 17])
    monkeypatch.setattr(live_model, "LOGITS_AT_ONCE", {"cpu": 3 * 96 * 7})
    with torch.no_grad():
        logits = model(tokens, use_cache=False).logits
        found = as_live_model(model).losses(tokens, lengths)
        pieces = [piece for _, piece in as_live_model(model).logits(tokens)]
        last = as_live_model(model).forward(tokens, last=1)[:, -1]
        unfinished = as_live_model(model.train()).logits(tokens)
        next(unfinished)  # a caller may stop after one piece
    assert model.training
    assert len(pieces) == (1 if name == "llama4" else 6)
    torch.testing.assert_close(last, logits[:, -1], rtol=1e-5, atol=1e-4)
    assert not vars(model.base_model).keys() & {"forward"}
    every = cross_entropy(logits[:, :-1].float().mT, tokens[:, 1:], reduction="none")
    for sequence, length in enumerate(lengths.tolist()):
        expected = every[sequence, : length - 1]
        own = found[sequence, 1:length].float()
        torch.testing.assert_close(own, expected, rtol=1e-6, atol=1e-5)
        assert abs(own.mean() - expected.mean()) <= 1e-6 * expected.mean()
    assert int(found.isnan().sum()) == found.numel() - int((lengths - 1).sum())
