"""`observe` calls a function with every attention call and the planes of its layer."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from oracles.recording import attention_calls
from oracles.tiny import TEN, logits, random_tokens, rotations, tiny
from transformers import DynamicCache, StaticCache
from transformers.models.llama.modeling_llama import LlamaAttention, eager_attention_forward

import ropelens as rl
from ropelens.attention.call import AttentionCall, attention_map
from ropelens.errors import UnsupportedModel
from ropelens.rope.planes import Planes

LENGTH = 30
Seen = dict[int, tuple[AttentionCall, Planes]]


def noting(seen: Seen) -> Callable[[AttentionCall, Planes], None]:
    return lambda call, planes: seen.update({call.layer: (call, planes)})


@pytest.mark.parametrize("name", TEN)
def test_planes_match_the_rotation_of_the_call(name: str):
    model, seen = tiny(name), {}
    plain, (true, _) = logits(model), attention_calls(model, random_tokens()[0])
    with rl.observe(model, noting(seen)):
        assert torch.equal(logits(model), plain)
    assert sorted(seen) == list(range(len(true)))
    for layer, rotation in enumerate(rotations(model, name=name)):
        call, planes = seen[layer]
        turning = planes.inv_freq != 0
        np.testing.assert_allclose(planes.inv_freq[turning], rotation.inv_freq, rtol=1e-6)
        still = rotation.unrotate(true[layer].query)
        first, second = torch.from_numpy(rotation.pairs).unbind(-1)
        expected = torch.complex(still[..., first], still[..., second])
        q = torch.complex(call.query[0][..., planes.first], call.query[0][..., planes.second])
        q = q * torch.exp(-1j * torch.arange(LENGTH)[:, None] * planes.inv_freq)
        atol = 1e-4 * float(call.query.abs().max())
        torch.testing.assert_close(q[..., turning], expected.to(q.dtype), rtol=1e-3, atol=atol)


@torch.no_grad()
def test_a_step_on_a_cache_is_checked_after_a_plain_pass(llama, monkeypatch):
    def other(module, query, key, value, attention_mask, **kwargs):
        inputs = (module, query, key, value, attention_mask)
        out, weights = eager_attention_forward(*inputs, **kwargs)
        return out * (1.1 if key.shape[2] > query.shape[2] else 1.0), weights

    monkeypatch.setattr(f"{LlamaAttention.__module__}.eager_attention_forward", other)
    llama.set_attn_implementation("eager")
    ids, cache = random_tokens()[:, :2], DynamicCache()
    with rl.observe(llama, lambda call, planes: None):
        llama(ids[:, :1], past_key_values=cache)
        with pytest.raises(UnsupportedModel, match="attends in a way"):
            llama(ids[:, 1:], past_key_values=cache)


@pytest.mark.parametrize("inside", [False, True], ids=["edit outside", "edit inside"])
def test_the_edited_model_is_observed(inside: bool):
    model, seen = tiny("llama_gqa"), {}
    edit = rl.edit_rope(model, rl.stop_slowest(0.5))
    outer, inner = rl.observe(model, noting(seen)), edit
    if not inside:
        outer, inner = inner, outer
    with outer, inner:
        logits(model)
    call, planes = seen[0]
    assert planes.inv_freq.tolist()[4:] == [0.0] * 4
    assert (planes.inv_freq[:4] > 0).all()
    with rl.observe(model, noting(seen)):
        logits(model)
    plain, unedited = seen[0]
    assert (unedited.inv_freq > 0).all()
    assert (call.query - plain.query).abs().max() > 0.1
    one_head = rl.edit_rope(model, rl.stop(rl.PlaneNumbers([1, 5]), heads="0.2"))
    with one_head, rl.observe(model, noting(seen)):
        logits(model)
    call, planes = seen[0]
    assert (planes.inv_freq == 0).nonzero().tolist() == [[2, 1], [2, 5]]
    assert call.key.shape[1] == call.query.shape[1] == 4
    assert seen[1][1].inv_freq.ndim == 1
    assert seen[1][0].key.shape[1] == 2


def test_a_rotation_that_depends_on_the_length():
    model, seen = tiny("llama_dynamic", max_position_embeddings=16), {}
    with rl.observe(model, noting(seen)):
        for length in (10, 40, 12):
            logits(model, random_tokens(length=length))
            assert torch.equal(seen[1][1].inv_freq, model.model.rotary_emb.inv_freq), length
    with rl.observe(model, noting(seen)):
        logits(model, random_tokens(length=40))
        assert (seen[1][1].inv_freq < model.model.rotary_emb.original_inv_freq).any()


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["llama_gqa", "mistral_sliding"])
def test_padding_is_hidden(name: str, side: str, implementation: str):
    model, seen, alone, length = tiny(name), {}, {}, 15
    model.set_attn_implementation(implementation)
    ids = random_tokens()
    mask = torch.ones_like(ids)
    real = slice(LENGTH - length, LENGTH) if side == "left" else slice(0, length)
    mask[1] = 0
    mask[1, real] = 1
    inputs = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    plain = logits(model, **inputs)
    assert not torch.allclose(plain, logits(model), atol=1e-3)
    with rl.observe(model, noting(seen)):
        assert torch.equal(logits(model, **inputs), plain)
    with rl.observe(model, noting(alone)):
        logits(model, ids[1:, real])
    for layer in range(2):
        weights = attention_map(seen[layer][0])[1, :, real, real]
        expected = attention_map(alone[layer][0])[0]
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-5)
    with rl.observe(model, noting(alone)):
        logits(model, ids[:1])
    first, by_itself = (attention_map(calls[1][0])[0] for calls in (seen, alone))
    torch.testing.assert_close(first, by_itself, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("padded", "edited"), [(0, False), (7, True)])
@pytest.mark.parametrize(
    ("implementation", "cache"), [("eager", "dynamic"), ("sdpa", "dynamic"), ("sdpa", "static")]
)
@pytest.mark.parametrize("name", ["llama_gqa", "gemma3"])
def test_generation(name: str, implementation: str, cache: str, padded: int, edited: bool):
    model = tiny(name)
    model.set_attn_implementation(implementation)
    mask = torch.ones_like(random_tokens())
    mask[0, :padded] = 0
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    options |= {"attention_mask": mask}
    edits = (rl.stop(rl.PlaneNumbers([1]), heads="*.1"),) if edited else ()
    whole: list[torch.Tensor] = []
    cached: list[tuple[torch.Tensor, int]] = []

    def note(call: AttentionCall, planes: Planes) -> None:
        cached.append((attention_map(call), call.past))

    with rl.edit_rope(model, *edits):
        expected = model.generate(random_tokens(), **options, cache_implementation=cache)
        with rl.observe(model, lambda call, planes: whole.append(attention_map(call))):
            model.generate(random_tokens(), **options, use_cache=False)
        with rl.observe(model, note):
            again = model.generate(random_tokens(), **options, cache_implementation=cache)
    assert torch.equal(again, expected)
    assert [weights.shape[2] for weights, _ in cached] == [LENGTH] * 2 + [1] * 6
    for true, (weights, past) in zip(whole, cached, strict=True):
        rows, keys = weights.shape[2:]
        assert past == keys - rows
        real = slice(padded if rows > 1 else 0, None)
        seen, true = weights[:, :, real], true[:, :, -rows:][:, :, real]
        torch.testing.assert_close(seen, true[..., -keys:], rtol=1e-4, atol=1e-5)
        assert float(true[..., :-keys].sum()) == 0, "keys that left the cache are not visible"


@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
@torch.no_grad()
def test_a_part_that_is_padded_on_the_right_continues_the_cache(kind):
    """The length of the cache gives the positions of the new rows, also of padding."""
    model, seen = tiny("llama_gqa"), {}
    cache = kind(config=model.config, max_cache_len=40) if kind is StaticCache else kind()
    ids, mask = random_tokens(), torch.ones(2, LENGTH, dtype=torch.long)
    mask[:, 24:] = 0
    with rl.observe(model, noting(seen)):
        model(ids[:, :18], attention_mask=mask[:, :18], past_key_values=cache)
        model(ids[:, 18:], attention_mask=mask, past_key_values=cache)
    assert [call.past for call, _ in seen.values()] == [18, 18]


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_cache_of_keys_with_another_rotation_is_refused(kind: str):
    """Both change past 16 tokens; longrope changes its buffer in place."""
    rope = tiny(f"llama_{kind}").config.rope_parameters
    rope = {**rope, "original_max_position_embeddings": 16}
    model = tiny("llama_gqa", max_position_embeddings=16, rope_parameters=rope)
    words = "rotation of the keys in this cache"
    with rl.observe(model, noting({})), pytest.raises(UnsupportedModel, match=words) as refused:
        model.generate(random_tokens(length=14), max_new_tokens=8, do_sample=False)
    assert refused.value.parts["try"] == "call the model with use_cache=False"


@pytest.mark.parametrize(
    ("name", "hidden"), [("llama_gqa", [0]), ("mistral_sliding", range(1, 20))]
)
@pytest.mark.parametrize("row", [0, 1])
def test_a_row_that_sees_no_key(name: str, hidden: list[int], row: int):
    """In float64, eager attention of transformers returns NaN for it, and sdpa does not."""
    marks = torch.zeros(2, 40, dtype=torch.bool)
    marks[row, list(hidden)] = True
    text = rl.Text(random_tokens(sequences=2, length=40), hidden=marks)
    model = tiny(name).double()
    words = r"computes NaN|squares are not finite"
    with pytest.raises(UnsupportedModel, match=words) as refused:
        rl.profile(model, text)
    assert 'attn_implementation="sdpa"' in refused.value.parts["try"]
    model.set_attn_implementation("sdpa")
    ours, expected = (rl.profile(m, text)["entropy_bits"] for m in (model, model.float()))
    np.testing.assert_allclose(ours, expected, rtol=1e-4)
