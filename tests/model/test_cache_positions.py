"""Positions of cached tokens: an edit uses the position at which the model rotated a key."""

import copy
from contextlib import nullcontext
from typing import Any

import families
import numpy as np
import pytest
import torch
from oracles.tiny import random_tokens, sighted, tiny
from torch import nn
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

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
UNKNOWN = pytest.raises(UnsupportedModel, match="positions of the keys in this cache")


def stopped(model: nn.Module) -> nn.Module:
    other = copy.deepcopy(model)
    for name, buffer in other.named_buffers():
        if name.endswith("inv_freq") and "rotary_emb." in name:
            buffer[4:] = 0
    return other


def on_a_grid() -> torch.Tensor:
    """Positions of six tokens of text, an image of 3 x 4 patches, and six more tokens."""
    patches = torch.stack(
        [torch.zeros(12), torch.arange(12) // 4, torch.arange(12) % 4]
    ).long()
    rows = [
        torch.arange(6).expand(3, -1),
        6 + patches,
        10 + torch.arange(6).expand(3, -1),
    ]
    return torch.cat(rows, dim=1)[:, None].expand(-1, 2, -1)


@torch.no_grad()
def in_steps(
    model: nn.Module, positions: torch.Tensor, *, first: int = 20
) -> torch.Tensor:
    cache, logits = DynamicCache(), []
    for begin, end in [(0, first), *((n, n + 1) for n in range(first, 24))]:
        part = {
            "input_ids": TOKENS[:, begin:end],
            "position_ids": positions[..., begin:end],
        }
        logits.append(model(**part, past_key_values=cache).logits)
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_each_plane_rotates_with_its_own_axis(kind: str):
    model = sighted(kind)
    expected = in_steps(stopped(model), on_a_grid())
    with rl.edit_rope(model, EDIT):
        edited = in_steps(model, on_a_grid())
    torch.testing.assert_close(edited, expected, rtol=0, atol=1e-4)
    assert (in_steps(model, on_a_grid()) - expected).abs().max() > 1e-2


def test_text_on_three_axes_is_measured_and_images_are_not():
    model, places = sighted("qwen2_vl"), torch.arange(24).expand(3, 2, -1)
    measured = rl.profile(
        model, {"input_ids": TOKENS, "position_ids": places}, budget=False
    )
    alone = rl.profile(model, TOKENS, budget=False)
    np.testing.assert_array_equal(measured["selectivity"], alone["selectivity"])
    image = {"input_ids": TOKENS, "position_ids": on_a_grid()}
    for measure in (rl.profile, rl.evaluate):
        with pytest.raises(
            BadArgument, match="tokens of an image, whose positions differ by"
        ):
            measure(model, image)


@torch.no_grad()
def go_on(
    model: nn.Module, mask, where, *edits, cropped=0, inside=False
) -> torch.Tensor:
    """Logits of a token on a cache that was filled before or `inside` the block of `edits`."""
    cache = DynamicCache()

    def run(at: slice) -> torch.Tensor:
        part = {"attention_mask": mask[:, : at.stop], "position_ids": where[..., at]}
        return model(TOKENS[:, at], past_key_values=cache, **part).logits

    edit = rl.edit_rope(model, *edits) if edits else nullcontext()
    whole, last = (edit, nullcontext()) if inside else (nullcontext(), edit)
    with whole:
        run(slice(20))
        cache.crop(-cropped)
        with last:
            return run(slice(20 - cropped, 21 - cropped))


def masked(hidden: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """A mask that hides these tokens of the first sequence, and positions of visible tokens."""
    mask = torch.ones(2, 24, dtype=torch.long)
    mask[0, hidden] = 0
    return mask, (mask.cumsum(1) - 1).clamp(min=0)


def test_tokens_count_from_the_start_of_their_sequence():
    one_token_first = torch.tensor([[0, 0, 1, 2, 0, 1]])
    assert torch.equal(places_in_sequence(one_token_first), one_token_first)
    late = torch.tensor([[5, 6, 0, 1, 2]])
    assert places_in_sequence(late).tolist() == [[0, 1, 0, 1, 2]]
    assert places_in_sequence(late[:, :2], 5).tolist() == [[5, 6]]


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16", "float32", "float64"])
def test_a_mark_depends_on_every_number_of_a_key(dtype: str):
    key = torch.ones(2, 3, 5, 4).to(getattr(torch, dtype))
    changed = key.clone()
    changed[1, 2, 4, 3] = 1.5
    assert (key_marks(key) != key_marks(changed)).nonzero().tolist() == [[1, 4]]


def test_rows_are_the_last_tokens_and_a_mask_may_have_a_value_for_each_key():
    """Gemma 4 has layers in which only some tokens are rows. Flash attention has such masks."""
    given, key = torch.tensor([[3, 4, 5, 9, 10, 11]]), torch.zeros(1, 2, 6, 8)
    of_last = CallRows(range(4, 6), dropped=0)
    found = call_positions(nn.Identity(), of_last, key, given, None)
    assert found.of_rows.tolist() == [[10, 11]]
    assert torch.equal(found.of_keys, given)
    attention, key = (
        tiny("llama_gqa").model.layers[0].self_attn,
        torch.zeros(1, 2, 5, 16),
    )
    told = torch.tensor([[2]]), torch.tensor([[0, 0, 1, 1, 1]])
    found = call_positions(attention, CallRows(range(4, 5), dropped=0), key, *told)
    assert found.of_keys.tolist() == [[-2, -1, 0, 1, 2]]


@torch.no_grad()
def test_each_of_two_caches_has_its_own_positions():
    """As in classifier-free guidance: one prompt has hidden tokens without positions."""
    model, (mask, where) = tiny("llama_gqa"), masked(slice(8, 13))

    def last(model: nn.Module) -> torch.Tensor:
        def part(row: int, at: slice, cache: DynamicCache) -> torch.Tensor:
            one = slice(row, row + 1)
            options = {
                "position_ids": where[one, at],
                "attention_mask": mask[one, : at.stop],
            }
            return model(TOKENS[one, at], past_key_values=cache, **options).logits

        caches = DynamicCache(), DynamicCache()
        for row, cache in enumerate(caches):
            part(row, slice(0, 23), cache)
        return torch.cat([part(row, slice(23, 24), c) for row, c in enumerate(caches)])

    expected = last(stopped(model))
    with rl.edit_rope(model, EDIT):
        torch.testing.assert_close(last(model), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["GraniteMoeHybrid", "Zaya", "Llama4", "Persimmon"])
@torch.no_grad()
def test_positions_that_attention_does_not_receive_are_known(name: str):
    model, ids = families.tiny(f"{name}ForCausalLM"), TOKENS % 39
    where = torch.arange(24)[None] + (torch.arange(24) >= 12) * 57
    options = {"attention_mask": torch.ones_like(ids), "use_cache": False}
    with rl.edit_rope(model, "nope"):
        plain = model(ids, **options).logits
        jumping = model(ids, position_ids=where, **options).logits
    torch.testing.assert_close(jumping, plain, rtol=0, atol=1e-4)


KINDS = ("llama_gqa", "mistral_sliding")
COUNTED = torch.arange(24).expand(2, -1)
LEFT, HOLE, NOTHING = slice(0, 4), slice(14, 18), slice(0)
BEFORE = [
    *((name, NOTHING, COUNTED, cropped, True) for name in KINDS for cropped in (0, 4)),
    *((name, NOTHING, 3 * COUNTED, 4, False) for name in KINDS),
    *((name, LEFT, where, 0, True) for name in KINDS for where in (COUNTED, None)),
    *(
        (name, HOLE, where, 0, where is COUNTED)
        for name in KINDS
        for where in (COUNTED, None)
    ),
    ("mistral_sliding", NOTHING, COUNTED % 18, 0, False),
    ("qwen2_vl", LEFT, None, 0, True),
    ("qwen2_vl", NOTHING, on_a_grid(), 0, False),
    # with sliding layers, earlier sequences of packed rows look like padding
    *(("gemma3", NOTHING, where, 0, False) for where in (COUNTED % 12, on_a_grid()[1])),
]
"""Hidden tokens, positions, cropped tokens, and whether a new token reveals the positions."""


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("how", ["eager", "sdpa"])
@pytest.mark.parametrize(("name", "hidden", "where", "cropped", "known"), BEFORE)
def test_an_earlier_cache_is_known_or_refused(
    name, hidden, where, cropped, known, how, inside
):
    sees, (mask, own) = name == "qwen2_vl", masked(hidden)
    layers = 2 if name == "gemma3" else 1  # one layer has the same keys under an edit
    model = sighted(name) if sees else tiny(name, num_hidden_layers=layers)
    if sees:
        text = model.config.text_config
        text.num_hidden_layers, text.layer_types = 1, text.layer_types[:1]
        del model.model.language_model.layers[1:]
    model.set_attn_implementation(how)
    where = own.expand(*[3] * sees, -1, -1) if where is None else where
    expected = go_on(stopped(model), mask, where, cropped=cropped)
    with nullcontext() if inside or known else UNKNOWN:
        edited = go_on(model, mask, where, EDIT, cropped=cropped, inside=inside)
        torch.testing.assert_close(edited, expected, rtol=0, atol=1e-4)


ROWS = {
    "select": ([1, 0], lambda cache: cache.batch_select_indices(torch.tensor([1, 0]))),
    "drop": ([1], lambda cache: cache.batch_select_indices(torch.tensor([1]))),
    "reorder": ([1, 1], lambda cache: cache.reorder_cache(torch.tensor([1, 1]))),
    "repeat": ([0, 0, 1, 1], lambda cache: cache.batch_repeat_interleave(2)),
    "crop": ([0, 1], lambda cache: cache.crop(-3)),
    "a copy": ([0, 1], lambda cache: None),
    "evict": (None, lambda cache: keep(cache, [*range(4), *range(12, 20)])),
    "recent": (None, lambda cache: keep(cache, range(8, 20))),
    "add noise": (None, lambda cache: keep(cache, range(20), 0.01)),
}
"""The rows that a change of a cache leaves (None: it is refused), and the change."""


def keep(cache: DynamicCache, keys: Any, noise: float = 0) -> None:
    for layer in cache.layers:
        layer.keys = layer.keys[:, :, list(keys)] + noise
        layer.values = layer.values[:, :, list(keys)]


@pytest.mark.parametrize("change", ROWS)
@pytest.mark.parametrize("name", ["llama_gqa", "cohere", "qwen2_vl"])
@torch.no_grad()
def test_positions_follow_the_rows_of_a_cache(name: str, change: str):
    model = sighted(name) if name == "qwen2_vl" else tiny(name)
    (mask, where), (rows, act) = masked(slice(0, 4)), ROWS[change]
    where = where if name != "qwen2_vl" else where.expand(3, -1, -1)

    def run(model: nn.Module) -> torch.Tensor:
        cache, chosen = DynamicCache(config=model.config), rows or [0, 1]
        part = {"attention_mask": mask[:, :20], "position_ids": where[..., :20]}
        model(TOKENS[:, :20], past_key_values=cache, **part)
        cache = copy.deepcopy(cache) if change == "a copy" else cache
        act(cache)
        size = cache.get_seq_length()
        begin = size if rows else 20
        part["attention_mask"] = mask[chosen][:, : size + 2]
        part["position_ids"] = where[..., chosen, begin : begin + 2]
        return model(TOKENS[chosen, 20:22], past_key_values=cache, **part).logits

    expected = run(stopped(model))
    with rl.edit_rope(model, EDIT), nullcontext() if rows else UNKNOWN:
        torch.testing.assert_close(run(model), expected, rtol=0, atol=1e-4)


class SinkLayer(DynamicLayer):
    """Layer of a cache that keeps four sinks and the latest eight keys."""

    def update(self, *states: Any, **options: Any) -> Any:
        result = super().update(*states[:2])
        kept = [*range(4), *range(max(4, self.keys.shape[2] - 8), self.keys.shape[2])]
        self.keys, self.values = self.keys[:, :, kept], self.values[:, :, kept]
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
