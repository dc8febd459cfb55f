"""Positions of cached tokens: an edit uses the position at which the model rotated a key."""

import copy
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from oracles.tiny import random_tokens, sighted, tiny
from oracles.versions import tiny_class
from torch import nn
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer, QuantizedLayer

import ropelens as rl
from ropelens.errors import BadArgument, UnsupportedModel
from ropelens.model.cache_positions import (
    CallRows,
    call_positions,
    key_marks,
    places_in_sequence,
)

TOKENS = random_tokens(sequences=2, length=24, vocabulary=80)
EDIT = rl.stop_slowest(0.5)
NO_BLOCK: AbstractContextManager[None] = nullcontext()
UNKNOWN = pytest.raises(UnsupportedModel, match="positions of the keys in this cache")


def stopped(model: nn.Module) -> nn.Module:
    other = copy.deepcopy(model)
    for name, buffer in other.named_buffers():
        if name.endswith("inv_freq") and "rotary_emb." in name:
            buffer[4:] = 0
    return other


def on_a_grid() -> torch.Tensor:
    """Positions of six tokens of text, an image of 3 x 4 patches, and six more tokens."""
    patch = torch.arange(12)
    image = torch.stack([0 * patch, patch // 4, patch % 4])
    text = torch.arange(6).expand(3, -1)
    positions = torch.cat([text, 6 + image, 10 + text], dim=1)
    return positions[:, None].expand(-1, 2, -1)


@torch.no_grad()
def in_steps(model: nn.Module, positions: torch.Tensor) -> torch.Tensor:
    """Logits of 20 tokens in one pass, and of four more tokens one by one."""
    cache = DynamicCache()
    logits = []
    for at in (slice(20), *(slice(n, n + 1) for n in range(20, 24))):
        result = model(
            input_ids=TOKENS[:, at],
            position_ids=positions[..., at],
            past_key_values=cache,
        )
        logits.append(result.logits)
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_each_plane_rotates_with_its_own_axis(kind: str):
    model = sighted(kind)
    expected = in_steps(stopped(model), on_a_grid())
    plain = in_steps(model, on_a_grid())
    with rl.edit_rope(model, EDIT):
        edited = in_steps(model, on_a_grid())
    torch.testing.assert_close(edited, expected, rtol=0, atol=1e-4)
    assert (plain - expected).abs().max() > 1e-2


def test_text_on_three_axes_is_measured_and_images_are_not():
    model = sighted("qwen2_vl")
    expected = rl.profile(model, TOKENS, budget=False)
    on_axes = torch.arange(24).expand(3, 2, -1)
    text = {"input_ids": TOKENS, "position_ids": on_axes}
    profile = rl.profile(model, text, budget=False)
    np.testing.assert_array_equal(profile["selectivity"], expected["selectivity"])
    image = {"input_ids": TOKENS, "position_ids": on_a_grid()}
    words = "tokens of an image, whose positions differ by"
    for measure in (rl.profile, rl.evaluate):
        with pytest.raises(BadArgument, match=words):
            measure(model, image)


@torch.no_grad()
def run(
    model: nn.Module,
    cache: DynamicCache,
    at: slice,
    *,
    mask: torch.Tensor,
    where: torch.Tensor,
) -> torch.Tensor:
    """Logits of the tokens `at`, which continue the cache."""
    result = model(
        TOKENS[:, at],
        attention_mask=mask[:, : at.stop],
        position_ids=where[..., at],
        past_key_values=cache,
    )
    return result.logits


def go_on(
    model: nn.Module,
    *,
    mask: torch.Tensor,
    where: torch.Tensor,
    cropped: int,
    block: AbstractContextManager[None] = NO_BLOCK,
) -> torch.Tensor:
    """Logits of a token in `block`, on a cache that was filled before the block."""
    cache = DynamicCache()
    run(model, cache, slice(20), mask=mask, where=where)
    if cropped:  # crop(0) removed all keys before transformers 5.15
        cache.crop(-cropped)
    with block:
        last = slice(20 - cropped, 21 - cropped)
        return run(model, cache, last, mask=mask, where=where)


def masked(hidden: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """A mask that hides these tokens of the first sequence, and positions of visible tokens."""
    mask = torch.ones(2, 24, dtype=torch.long)
    mask[0, hidden] = 0
    positions = mask.cumsum(1) - 1
    return mask, positions.clamp(min=0)


def test_tokens_count_from_the_start_of_their_sequence():
    one_token_first = torch.tensor([[0, 0, 1, 2, 0, 1]])
    assert torch.equal(places_in_sequence(one_token_first), one_token_first)
    late = torch.tensor([[5, 6, 0, 1, 2]])
    assert places_in_sequence(late).tolist() == [[0, 1, 0, 1, 2]]
    of_two = places_in_sequence(late[:, :2], 5)
    assert of_two.tolist() == [[5, 6]]


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16", "float32", "float64"])
def test_a_mark_depends_on_every_number_of_a_key(dtype: str):
    key = torch.ones(2, 3, 5, 4).to(getattr(torch, dtype))
    changed = key.clone()
    changed[1, 2, 4, 3] = 1.5
    differs = key_marks(key) != key_marks(changed)
    assert differs.nonzero().tolist() == [[1, 4]]


def test_rows_are_the_last_tokens_and_a_mask_may_have_a_value_for_each_key():
    """Gemma 4 has layers in which only some tokens are rows. Flash attention has such masks."""
    positions = torch.tensor([[3, 4, 5, 9, 10, 11]])
    key = torch.zeros(1, 2, 6, 8)
    last_two = CallRows(range(4, 6), dropped=0)
    found = call_positions(nn.Identity(), last_two, key, positions, None)
    assert found.of_rows.tolist() == [[10, 11]]
    assert torch.equal(found.of_keys, positions)

    attention = tiny("llama_gqa").model.layers[0].self_attn
    position = torch.tensor([[2]])
    key = torch.zeros(1, 2, 5, 16)
    mask = torch.tensor([[0, 0, 1, 1, 1]])
    last = CallRows(range(4, 5), dropped=0)
    found = call_positions(attention, last, key, position, mask)
    assert found.of_keys.tolist() == [[-2, -1, 0, 1, 2]]


@torch.no_grad()
def test_each_of_two_caches_has_its_own_positions():
    """As in classifier-free guidance: one prompt has hidden tokens without positions."""
    model = tiny("llama_gqa")
    mask, where = masked(slice(8, 13))

    def run_row(model: nn.Module, row: int, at: slice, cache: DynamicCache):
        result = model(
            TOKENS[row : row + 1, at],
            attention_mask=mask[row : row + 1, : at.stop],
            position_ids=where[row : row + 1, at],
            past_key_values=cache,
        )
        return result.logits

    def last_logits(model: nn.Module) -> torch.Tensor:
        caches = [DynamicCache(), DynamicCache()]
        for row, cache in enumerate(caches):
            run_row(model, row, slice(0, 23), cache)
        logits = []
        for row, cache in enumerate(caches):
            last = run_row(model, row, slice(23, 24), cache)
            logits.append(last)
        return torch.cat(logits)

    expected = last_logits(stopped(model))
    with rl.edit_rope(model, EDIT):
        edited = last_logits(model)
    torch.testing.assert_close(edited, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["GraniteMoeHybrid", "Zaya", "Llama4", "Persimmon"])
@torch.no_grad()
def test_positions_that_attention_does_not_receive_are_known(name: str):
    model = tiny_class(f"{name}ForCausalLM")
    ids = TOKENS % 39
    mask = torch.ones_like(ids)
    where = torch.arange(24)[None].clone()
    where[:, 12:] += 57
    with rl.edit_rope(model, "nope"):
        plain = model(ids, attention_mask=mask, use_cache=False)
        jumping = model(ids, attention_mask=mask, position_ids=where, use_cache=False)
    torch.testing.assert_close(jumping.logits, plain.logits, rtol=0, atol=1e-4)


COUNTED = torch.arange(24).expand(2, -1)
NOTHING = slice(0)
LEFT = slice(0, 4)
HOLE = slice(14, 18)
BEFORE = [
    ("llama_gqa", NOTHING, COUNTED, 0, True),
    ("llama_gqa", NOTHING, COUNTED, 4, True),
    ("mistral_sliding", NOTHING, COUNTED, 0, True),
    ("mistral_sliding", NOTHING, COUNTED, 4, True),
    ("llama_gqa", NOTHING, 3 * COUNTED, 4, False),
    ("mistral_sliding", NOTHING, 3 * COUNTED, 4, False),
    ("llama_gqa", LEFT, COUNTED, 0, True),
    ("llama_gqa", LEFT, None, 0, True),
    ("mistral_sliding", LEFT, COUNTED, 0, True),
    ("mistral_sliding", LEFT, None, 0, True),
    ("llama_gqa", HOLE, COUNTED, 0, True),
    ("llama_gqa", HOLE, None, 0, False),
    ("mistral_sliding", HOLE, COUNTED, 0, True),
    ("mistral_sliding", HOLE, None, 0, False),
    ("mistral_sliding", NOTHING, COUNTED % 18, 0, False),
    ("qwen2_vl", LEFT, None, 0, True),
    ("qwen2_vl", NOTHING, on_a_grid(), 0, False),
    # with sliding layers, earlier sequences of packed rows look like padding
    ("gemma3", NOTHING, COUNTED % 12, 0, False),
    ("gemma3", NOTHING, on_a_grid()[1], 0, False),
]
"""Hidden tokens, positions, cropped tokens, and whether a new token reveals the positions."""


def shallow(name: str) -> nn.Module:
    """A model of one layer (gemma3: two). One layer has the same keys under an edit."""
    if name == "qwen2_vl":
        model = sighted(name)
        text = model.config.text_config
        text.num_hidden_layers = 1
        text.layer_types = text.layer_types[:1]
        del model.model.language_model.layers[1:]
        return model
    return tiny(name, num_hidden_layers=2 if name == "gemma3" else 1)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("how", ["eager", "sdpa"])
@pytest.mark.parametrize(("name", "hidden", "where", "cropped", "known"), BEFORE)
def test_an_earlier_cache_is_known_or_refused(
    name, hidden, where, cropped, known, how, inside
):
    model = shallow(name)
    model.set_attn_implementation(how)
    mask, of_visible = masked(hidden)
    if where is None:
        where = of_visible.expand(3, -1, -1) if name == "qwen2_vl" else of_visible
    expected = go_on(stopped(model), mask=mask, where=where, cropped=cropped)
    edit = rl.edit_rope(model, EDIT)
    if inside:
        with edit:
            edited = go_on(model, mask=mask, where=where, cropped=cropped)
        torch.testing.assert_close(edited, expected, rtol=0, atol=1e-4)
    elif known:
        edited = go_on(model, mask=mask, where=where, cropped=cropped, block=edit)
        torch.testing.assert_close(edited, expected, rtol=0, atol=1e-4)
    else:
        with UNKNOWN:
            go_on(model, mask=mask, where=where, cropped=cropped, block=edit)


@dataclass(frozen=True)
class CacheChange:
    """A change of a cache, and the rows that it leaves (None: the cache is refused)."""

    change: Callable[[DynamicCache], object]
    rows: list[int] | None


ROWS = {
    "select": CacheChange(
        lambda cache: cache.batch_select_indices(torch.tensor([1, 0])), rows=[1, 0]
    ),
    "drop": CacheChange(
        lambda cache: cache.batch_select_indices(torch.tensor([1])), rows=[1]
    ),
    "reorder": CacheChange(
        lambda cache: cache.reorder_cache(torch.tensor([1, 1])), rows=[1, 1]
    ),
    "repeat": CacheChange(
        lambda cache: cache.batch_repeat_interleave(2), rows=[0, 0, 1, 1]
    ),
    "crop": CacheChange(lambda cache: cache.crop(-3), rows=[0, 1]),
    "a copy": CacheChange(lambda cache: None, rows=[0, 1]),
    "evict": CacheChange(
        lambda cache: keep(cache, [*range(4), *range(12, 20)]), rows=None
    ),
    "recent": CacheChange(lambda cache: keep(cache, range(8, 20)), rows=None),
    "add noise": CacheChange(lambda cache: keep(cache, range(20), 0.01), rows=None),
}


def keep(cache: DynamicCache, keys: Iterable[int], noise: float = 0) -> None:
    kept = list(keys)
    for layer in cache.layers:
        layer.keys = layer.keys[:, :, kept] + noise
        layer.values = layer.values[:, :, kept]


@pytest.mark.parametrize("change", ROWS)
@pytest.mark.parametrize("name", ["llama_gqa", "cohere", "qwen2_vl"])
@torch.no_grad()
def test_positions_follow_the_rows_of_a_cache(name: str, change: str):
    model = sighted(name) if name == "qwen2_vl" else tiny(name)
    mask, where = masked(LEFT)
    if name == "qwen2_vl":
        where = where.expand(3, -1, -1)
    rows = ROWS[change].rows

    def go_on_after_change(model: nn.Module) -> torch.Tensor:
        cache = DynamicCache(config=model.config)
        run(model, cache, slice(20), mask=mask, where=where)
        if change == "a copy":
            cache = copy.deepcopy(cache)
        ROWS[change].change(cache)
        size = cache.get_seq_length()
        begin = size if rows else 20
        left = rows or [0, 1]
        result = model(
            TOKENS[left, 20:22],
            attention_mask=mask[left, : size + 2],
            position_ids=where[..., left, begin : begin + 2],
            past_key_values=cache,
        )
        return result.logits

    expected = go_on_after_change(stopped(model))
    outcome = nullcontext() if rows else UNKNOWN
    with rl.edit_rope(model, EDIT), outcome:
        edited = go_on_after_change(model)
        torch.testing.assert_close(edited, expected, rtol=0, atol=1e-4)


class CoarseLayer(QuantizedLayer):
    """Layer of a cache that rounds keys to multiples of a quarter if they are old."""

    def __init__(self) -> None:
        super().__init__(residual_length=2)

    def _quantize(self, tensor: torch.Tensor, axis: int) -> torch.Tensor:
        return (4 * tensor).round()

    def _dequantize(self, q_tensor: torch.Tensor) -> torch.Tensor:
        return q_tensor / 4


@torch.no_grad()
def go_on_coarsely(model: nn.Module) -> torch.Tensor:
    cache = Cache(layer_class_to_replicate=CoarseLayer)
    model(TOKENS[:, :18], past_key_values=cache)
    for token in range(18, 23):
        logits = model(TOKENS[:, token : token + 1], past_key_values=cache).logits
    return logits


def test_a_cache_that_quantizes_old_keys_can_be_observed_and_not_edited(llama: Any):
    keys: list[torch.Tensor] = []

    def keep_keys(call: Any, planes: Any) -> None:
        if call.layer == 1:
            keys.append(call.key)

    expected = go_on_coarsely(llama)
    with rl.observe(llama, keep_keys):
        assert torch.equal(go_on_coarsely(llama), expected)
    assert [x.shape[2] for x in keys] == [18, *range(19, 24)]
    old = keys[-1][:, :, :18]
    torch.testing.assert_close(old, (4 * old).round() / 4)
    assert not torch.equal(old, keys[0])
    with rl.edit_rope(llama, EDIT), UNKNOWN as refused:
        go_on_coarsely(llama)
    assert "a Cache, which rounds old keys" in refused.value.line


class SinkLayer(DynamicLayer):
    """Layer of a cache that keeps four sinks and the latest eight keys."""

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any
    ) -> Any:
        result = super().update(keys, values)
        size = self.keys.shape[2]
        kept = [*range(4), *range(max(4, size - 8), size)]
        self.keys = self.keys[:, :, kept]
        self.values = self.values[:, :, kept]
        return result


@pytest.mark.parametrize(
    ("inside", "sinks"), [(False, True), (True, False), (True, True)]
)
@pytest.mark.parametrize("block", ["edit", "observe"])
@torch.no_grad()
def test_caches_that_drop_keys_are_refused(
    llama: Any, block: str, inside: bool, sinks: bool
):
    cache = Cache(layer_class_to_replicate=SinkLayer) if sinks else DynamicCache()
    opened = rl.edit_rope(llama, EDIT) if block == "edit" else rl.observe(llama, print)
    with opened if inside else nullcontext():
        llama(TOKENS[:, :20], past_key_values=cache)
        if not sinks:
            keep(cache, range(4, 20))
        with nullcontext() if inside else opened, UNKNOWN:
            llama(TOKENS[:, 20:21], past_key_values=cache)
