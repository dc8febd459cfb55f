"""Silenced heads, compared with hooks at the output projection and with TransformerLens."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial

import pytest
import torch
from oracles.tiny import SUPPORTED, random_tokens, tiny
from oracles.tiny import logits as logits_of
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedModel

import ropelens as rl
from ropelens.attention.call import AttentionCall
from ropelens.errors import BadArgument, UnsupportedModel

LENGTH = 20
HEADS = 4
PROJECTIONS = ("o_proj", "out_proj", "dense", "c_proj")
Block = AbstractContextManager[None]
Change = Callable[[Tensor], Tensor]
tokens = partial(random_tokens, sequences=3, length=LENGTH)


def logits(model: PreTrainedModel, ids: Tensor | None = None, **mask: Tensor) -> Tensor:
    return logits_of(model, tokens() if ids is None else ids, **mask)


@contextmanager
def at_projections(
    model: nn.Module, hook: Callable[[int, Tensor], None]
) -> Iterator[None]:
    """Call `hook(layer, x)`, which may change the input x [sequence, position, head, _]."""
    attention = [module for module in model.modules() if hasattr(module, "layer_idx")]
    children = [child for module in attention for child in module.named_children()]
    layers = [projection for name, projection in children if name in PROJECTIONS]
    assert len(layers) == model.config.num_hidden_layers

    def before(layer: int, _: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        x = inputs[0].clone().unflatten(-1, (HEADS, -1))
        hook(layer, x)
        return (x.flatten(-2),)

    with ExitStack() as stack:
        for number, layer in enumerate(layers):
            stack.callback(
                layer.register_forward_pre_hook(partial(before, number)).remove
            )
        yield


def hooked(
    model: PreTrainedModel, heads: dict[int, list[int]], change: Change
) -> Block:
    def hook(layer: int, x: Tensor) -> None:
        for head in heads.get(layer, []):
            x[:, :, head] = change(x[:, :, head])

    return at_projections(model, hook)


@contextmanager
def projected(model: PreTrainedModel) -> Iterator[list[Tensor]]:
    seen: list[Tensor] = []
    with at_projections(model, lambda layer, x: seen.append(x)):
        yield seen


def mean(x: Tensor) -> Tensor:
    return x.mean((0, 1)).expand_as(x)


def test_a_layer_that_is_used_twice_is_refused_with_the_reason_of_a_profile():
    model = tiny("llama_gqa")
    model.model.layers[1] = model.model.layers[0]
    with pytest.raises(UnsupportedModel) as of_profile:
        rl.profile(model, random_tokens())
    assert "attends more than once in a layer" in of_profile.value.line
    with pytest.raises(UnsupportedModel) as of_silence:
        rl.silence_heads(model, "0.1")
    assert of_silence.value.line == of_profile.value.line


@pytest.mark.parametrize("name", SUPPORTED)
def test_against_hooks(name: str):
    model = tiny(name)
    plain = logits(model)
    for to, change in (("zero", torch.zeros_like), ("mean", mean)):
        with hooked(model, {0: [1], 1: [0, 3]}, change):
            expected = logits(model)
        with rl.silence_heads(model, "0.1,1.0,1.3", to=to):
            silenced = logits(model)
        scale = plain.abs().max()
        assert (silenced - expected).abs().max() < 1e-5 * scale
        assert (silenced - plain).abs().max() > 1e-4 * scale
    assert torch.equal(logits(model), plain)


@pytest.mark.parametrize(
    ("how", "to"), [("eager", "zero"), ("sdpa", "mean"), ("sdpa", "resample")]
)
def test_other_heads_keep_every_bit(llama: LlamaForCausalLM, how: str, to: str):
    llama.set_attn_implementation(how)
    with projected(llama) as plain:
        logits(llama)
    with rl.silence_heads(llama, "1.2", to=to), projected(llama) as silenced:
        logits(llama)
    assert torch.equal(silenced[0], plain[0])
    changed = (silenced[1] != plain[1]).any(-1).flatten(0, 1).any(0)
    assert changed.tolist() == [False, False, True, False]


def test_a_mean_over_a_reference(llama: LlamaForCausalLM):
    reference = tokens(sequences=4, seed=1)
    lengths = torch.tensor([20, 7, 13, 20])
    for edit in (rl.stop_slowest(0.0), rl.stop(rl.Fastest(0.5))):
        with rl.edit_rope(llama, edit):
            with projected(llama) as seen:
                for row, length in zip(reference, lengths, strict=True):
                    logits(llama, row[None, :length])
            expected_mean = torch.cat([x[0, :, 2] for x in seen[1::2]]).mean(0)
            with hooked(llama, {1: [2]}, lambda x, m=expected_mean: m.expand_as(x)):
                expected = logits(llama)
            text = rl.Text(reference, lengths=lengths)
            with rl.silence_heads(llama, "1.2", to="mean", text=text):
                torch.testing.assert_close(logits(llama), expected, rtol=0, atol=1e-4)
            assert not torch.allclose(logits(llama), expected, atol=1e-2)


@pytest.mark.parametrize("sequences", [2, 3, 8])
def test_a_resample_comes_from_another_sequence(
    llama: LlamaForCausalLM, sequences: int
):
    ids = tokens(sequences=sequences)
    with projected(llama) as plain:
        before = logits(llama, ids)
    orders = []
    for seed in range(6):
        block = rl.silence_heads(llama, "0.*", to="resample", seed=seed)
        with block, projected(llama) as resampled:
            logits(llama, ids)
        same = (resampled[0][:, None] == plain[0][None]).flatten(2).all(-1)
        assert not same.diagonal().any()
        orders.append(same.nonzero()[:, 1].tolist())
        assert sorted(orders[-1]) == list(range(sequences))
    distinct = {str(order) for order in orders}
    assert (len(distinct) > 1) == (sequences > 2)
    with hooked(llama, {0: [0, 1, 2, 3], 1: [1]}, lambda x: x[orders[3]]):
        expected = logits(llama, ids)
    with rl.silence_heads(llama, "0.*,1.1", to="resample", seed=3):
        torch.testing.assert_close(logits(llama, ids), expected, rtol=0, atol=1e-4)
    assert not torch.allclose(expected, before, atol=1e-2)


@pytest.mark.parametrize(
    ("implementation", "side"), [("eager", "left"), ("sdpa", "right")]
)
def test_padding(llama: LlamaForCausalLM, side: str, implementation: str):
    llama.set_attn_implementation(implementation)
    mask = torch.ones_like(tokens())
    if side == "left":
        mask[1, :6] = 0
    else:
        mask[1, 14:] = 0
    real = mask.bool()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    padded_logits = partial(logits, llama, attention_mask=mask, position_ids=positions)

    def mean_of_real(x: Tensor) -> Tensor:
        return x[real].mean(0).expand_as(x)

    with hooked(llama, {0: [1]}, mean_of_real):
        expected = padded_logits()
    for padding in (5, 50):
        ids = tokens().masked_fill(~real, padding)
        with rl.silence_heads(llama, "0.1", to="mean"):
            silenced = padded_logits(ids)
        torch.testing.assert_close(silenced[real], expected[real], rtol=0, atol=1e-4)


def test_the_mean_of_a_batch_in_generation(llama: LlamaForCausalLM):
    with rl.silence_heads(llama, "0.1", to="mean"):
        llama.generate(tokens(), max_new_tokens=3, do_sample=False, use_cache=False)
        with pytest.raises(BadArgument, match="1 tokens after a cache"):
            llama.generate(tokens(), max_new_tokens=3, do_sample=False)


EDIT = rl.stop(rl.PlaneNumbers([1, 2]), heads="0.1,1.3")


def test_silences_and_edits_combine_in_either_order(llama: LlamaForCausalLM):
    """Under the edit, heads with a common key have different keys."""
    plain = logits(llama)
    with rl.edit_rope(llama, EDIT), hooked(llama, {0: [0], 1: [3]}, mean):
        expected = logits(llama)
    with rl.edit_rope(llama, EDIT):
        edited = logits(llama)
        with rl.silence_heads(llama, "0.0,1.3", to="mean"):
            inside = logits(llama)
        assert torch.equal(logits(llama), edited)
    with rl.silence_heads(llama, "0.0,1.3", to="mean"), rl.edit_rope(llama, EDIT):
        outside = logits(llama)
    assert torch.equal(inside, outside)
    torch.testing.assert_close(inside, expected, rtol=0, atol=1e-4)
    assert not torch.allclose(inside, edited, atol=1e-2)
    assert torch.equal(logits(llama), plain)


def test_observers_see_outputs_before_silencing(llama: LlamaForCausalLM):
    plain: dict[int, AttentionCall] = {}
    seen: dict[int, AttentionCall] = {}
    with rl.observe(llama, lambda call, planes: plain.update({call.layer: call})):
        logits(llama)
    with rl.observe(llama, lambda call, planes: seen.update({call.layer: call})):
        with rl.silence_heads(llama, "0.1"):
            logits(llama)
        assert torch.equal(seen[0].output, plain[0].output)
        assert not torch.allclose(seen[1].query, plain[1].query, atol=1e-2)


def test_the_inner_block_counts(llama: LlamaForCausalLM):
    with rl.silence_heads(llama, "0.1", to="mean"):
        inner = logits(llama)
        with rl.silence_heads(llama, "0.2,1.0"):
            both = logits(llama)
        assert torch.equal(logits(llama), inner)
    with rl.silence_heads(llama, "0.1"), rl.silence_heads(llama, "0.1", to="mean"):
        assert torch.equal(logits(llama), inner)
    with rl.silence_heads(llama, "0.2,1.0"), rl.silence_heads(llama, "0.1", to="mean"):
        assert torch.equal(logits(llama), both)


def test_texts_that_have_no_mean_are_refused(llama: LlamaForCausalLM):
    with pytest.raises(BadArgument, match='text is only for to="mean"'):
        rl.silence_heads(llama, "0.1", text=tokens())
    llama.config.pad_token_id = 5
    reference = tokens(sequences=2).masked_fill(torch.arange(LENGTH) < 6, 5)
    text = rl.Text(reference, lengths=[14, 14])
    with pytest.raises(BadArgument, match="ids must be padded on the right"):
        rl.silence_heads(llama, "0.1", to="mean", text=text)


def test_batches_that_cannot_be_resampled_are_refused(llama: LlamaForCausalLM):
    mask = torch.ones_like(tokens())
    mask[1, 14:] = 0
    words = "another sequence of the same length"
    with rl.silence_heads(llama, "0.1", to="resample"):
        for ids, inputs in (
            (tokens(sequences=1), {}),
            (tokens(), {"attention_mask": mask}),
        ):
            with pytest.raises(BadArgument, match=words) as refused:
                logits(llama, ids, **inputs)
    assert refused.value.parts["seen"] == "sequences of 20, 14, 20 tokens"


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_a_model_need_not_rotate(name: str):
    model = tiny(name)
    with hooked(model, {0: [1]}, torch.zeros_like):
        expected = logits(model)
    with rl.silence_heads(model, "0.1"):
        torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["bloom", "falcon"])
def test_hidden_attention_is_refused(name: str):
    with pytest.raises(UnsupportedModel), rl.silence_heads(tiny(name), "0.1"):
        pytest.fail("the block was opened")
