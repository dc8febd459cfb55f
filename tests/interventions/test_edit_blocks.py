"""Blocks of edits: nested, closed by errors, with caches and observers, and their errors."""

import copy
import pickle
import re
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from oracles.tiny import logits, random_tokens, tiny
from torch import nn
from transformers import LlamaForCausalLM, PreTrainedModel

import ropelens as rl
from ropelens.errors import BadArgument


def state(model: PreTrainedModel) -> list[object]:
    groups = [vars(module).get("num_key_value_groups") for module in model.modules()]
    facts = [groups, [len(module._forward_pre_hooks) for module in model.modules()]]
    buffers = {name: tensor.tolist() for name, tensor in model.named_buffers()}
    return [facts, model.config._attn_implementation, buffers]


def test_an_error_at_the_attention_restores_the_model(llama, monkeypatch):
    """The error is raised while the module expects a key for every query head."""
    plain, before = logits(llama), state(llama)
    groups = []

    def fail(module: nn.Module, *args: object, **kwargs: object) -> None:
        groups.append(module.num_key_value_groups)
        raise ZeroDivisionError

    eager = "transformers.models.llama.modeling_llama.eager_attention_forward"
    edit = rl.edit_rope(llama, rl.stop(rl.PlaneNumbers([3]), heads="*.1"))
    with monkeypatch.context() as patch, edit:
        patch.setattr(eager, fail)
        with pytest.raises(ZeroDivisionError):
            logits(llama)
    assert groups == [1]
    assert state(llama) == before
    assert torch.equal(logits(llama), plain)


def test_edits_nest_and_add_up(llama: LlamaForCausalLM):
    plain = logits(llama)
    with rl.edit_rope(llama, rl.stop(rl.PlaneNumbers([6, 7]))):
        outer = logits(llama)
        with rl.edit_rope(llama, rl.stop(rl.PlaneNumbers([4, 5]))):
            both = logits(llama)
        assert torch.equal(logits(llama), outer)
        with pytest.raises(IndexError), rl.edit_rope(llama, rl.stop(rl.PlaneNumbers([4, 5]))):
            llama(torch.tensor([[999]]))
        assert torch.equal(logits(llama), outer)
    assert torch.equal(logits(llama), plain)
    with rl.edit_rope(llama, rl.stop_slowest(0.5)):
        assert torch.equal(logits(llama), both)
    separate = [rl.stop(rl.PlaneNumbers(numbers)) for numbers in ([4, 6], [5, 7])]
    by_heads = rl.stop_slowest(0.5, heads="0.*, 1.0,1.1 ,1.2,*.3")
    for edits in (separate, [by_heads]):
        with rl.edit_rope(llama, *edits):
            assert torch.equal(logits(llama), both)


def test_attention_factors_do_not_add_up(llama: LlamaForCausalLM):
    """The inner attention factor replaces the outer factor. Dropped planes stay dropped."""
    plain = logits(llama)
    with rl.edit_rope(llama, "yarn:16"):
        once = logits(llama)
        assert not torch.allclose(once, plain, atol=0.01)
        with rl.edit_rope(llama, "rope"):
            torch.testing.assert_close(logits(llama), plain, rtol=0, atol=1e-5)
    with rl.edit_rope(llama, "yarn:16", "yarn:16"):
        assert torch.equal(logits(llama), once)
    with rl.edit_rope(llama, rl.drop(rl.Slowest(1))):
        dropped = logits(llama)
        with rl.edit_rope(llama, "yarn:16"):
            torch.testing.assert_close(logits(llama), dropped, rtol=0, atol=1e-5)


@pytest.mark.parametrize("take", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_made_inside_a_block_is_the_plain_model(llama, take):
    plain = logits(llama)
    with rl.edit_rope(llama, "nope"):
        other = take(llama)
        assert torch.equal(logits(other), plain)
        assert not torch.allclose(logits(llama), plain, atol=0.01)
        with rl.edit_rope(other, "nope"):
            assert torch.equal(logits(other), logits(llama))
    assert torch.equal(logits(other), plain)
    assert type(other.config._attn_implementation) is str


def test_blocks_that_do_not_nest_restore_the_model(llama: LlamaForCausalLM):
    before, plain = state(llama), logits(llama)
    outer, inner = rl.edit_rope(llama, "nope"), rl.edit_rope(llama, "rope:500")
    outer.__enter__()
    inner.__enter__()
    for block in (outer, inner):
        assert not torch.equal(logits(llama), plain)
        block.__exit__(None, None, None)
    assert state(llama) == before
    assert torch.equal(logits(llama), plain)


Block = Callable[[PreTrainedModel], AbstractContextManager[None]]


def edited(heads: str) -> Block:
    return lambda model: rl.edit_rope(model, rl.stop(rl.Fastest(0.5), heads=heads))


def silenced(to: str) -> Block:
    reference = {"text": random_tokens(length=12)} if to == "mean" else {}
    return lambda model: rl.silence_heads(model, "0.1,1.2", to=to, **reference)


@pytest.mark.parametrize(
    ("block", "name", "implementation", "cache", "padding"),
    [
        (edited("*.*"), "llama_gqa", "eager", "dynamic", 7),
        (edited("*.1"), "llama_gqa", "sdpa", "static", 7),
        (edited("*.1"), "mistral_sliding", "eager", "static", 7),
        (edited("*.1"), "gemma3", "sdpa", "dynamic", 7),
        # Without padding, sdpa has no mask that shows the empty part of a cache.
        (edited("*.*"), "llama_gqa", "sdpa", "static", 0),
        (edited("*.*"), "persimmon", "sdpa", "static", 0),
        (silenced("zero"), "llama_gqa", "eager", "static", 7),
        (silenced("mean"), "llama_gqa", "sdpa", "static", 7),
        (silenced("mean"), "gemma3", "eager", "dynamic", 7),
        (silenced("resample"), "gemma3", "sdpa", "dynamic", 0),
    ],
)
def test_generation_with_a_cache(block, name, implementation, cache, padding):
    model = tiny(name)
    model.set_attn_implementation(implementation)
    ids = random_tokens(length=20)
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    options = {"max_new_tokens": 5, "do_sample": False, "attention_mask": mask}
    options |= {"output_logits": True, "return_dict_in_generate": True, "min_new_tokens": 5}
    plain = model.generate(ids, **options, use_cache=False)
    with block(model):
        expected = model.generate(ids, **options, use_cache=False)
        cached = model.generate(ids, **options, cache_implementation=cache)
    assert torch.equal(cached.sequences, expected.sequences)
    for ours, true in zip(cached.logits, expected.logits, strict=True):
        torch.testing.assert_close(ours, true, rtol=1e-4, atol=1e-3)
    assert (plain.logits[0] - expected.logits[0]).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: rl.stop_slowest(1.2), "from 0 to 1, not 1.2"),
        (lambda: rl.stop(rl.PlaneNumbers([8])), "no plane for Pl.*8.*; seen: planes 0 to 7"),
        (lambda: rl.stop_slowest(1, heads="2.0"), "no head '2.0'; seen: layers 0 to 1"),
        (lambda: rl.stop_slowest(1, heads="1.1,3"), "no head '3'; seen: layers 0 to 1"),
        (lambda: rl.rescale([1.0, 0.5]), "2 frequencies; layer 0 has 8 planes"),
    ],
)
def test_mistakes_in_an_edit(llama: LlamaForCausalLM, make, line: str):
    before = state(llama)
    with pytest.raises(BadArgument) as refused, rl.edit_rope(llama, make()):
        pytest.fail("the edit was opened")
    assert re.search(line, refused.value.line), refused.value.line
    assert state(llama) == before
