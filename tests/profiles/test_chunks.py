"""Sequences that run in chunks with a cache give the numbers of one pass."""

import pytest
import torch
import xarray as xr
from measured import assert_alike, token_progress
from oracles.tiny import random_tokens, tiny
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

import ropelens as rl
from ropelens.attention.call import AttentionCall
from ropelens.interventions.truncation_table import DEFAULT_MEASURES
from ropelens.model import live_model
from ropelens.model.as_live_model import as_live_model
from ropelens.profiles.measurement import Measurement
from ropelens.profiles.passes import collect
from ropelens.rope.planes import Planes, unrotate

CHUNK = 23
TOKENS = random_tokens(sequences=3, length=80)
LENGTHS = torch.tensor([80, 61, 80])


def profile(family: str, rows: int | str, heads: str | None) -> tuple[xr.Dataset, list[int]]:
    """A profile, and the number of earlier tokens in every call of the first pass."""
    model, past, progress = tiny(family), [], []
    options = {"rows": rows, "surrogates": 2, "batch_size": len(TOKENS)}
    edits = [rl.stop(rl.PlaneNumbers([1]), heads=heads)] if heads else []

    def see(call: AttentionCall) -> None:
        if len(call.query) == 2:
            past.append(call.past)

    with rl.edit_rope(model, *edits), as_live_model(model).observe(see):
        text, shown = rl.Text(TOKENS, lengths=LENGTHS), token_progress(progress.append)
        result = rl.profile(model, text, progress=shown, **options)
    assert sum(progress) == LENGTHS.sum()
    return result, past


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("family", "rows", "heads"),
    [
        ("llama_gqa", 16, None),
        ("llama_gqa", "all", "0.1"),  # heads of a group differ
        ("gemma2", 16, None),  # a sliding window, a soft-cap
        ("gpt_oss", "all", None),  # sink logits
    ],
)
def test_chunks_give_the_numbers_of_one_pass(family, rows, heads, monkeypatch):
    expected, past = profile(family, rows, heads)
    assert set(past) == {0}
    monkeypatch.setattr(live_model, "ONE_PASS", CHUNK)
    result, past = profile(family, rows, heads)
    assert set(past) == {0, 23, 46, 69}
    assert result.attrs["loss"] == pytest.approx(expected.attrs["loss"], rel=1e-6)
    assert_alike(result, expected)


def test_edits_are_evaluated_in_chunks_as_in_one_pass(monkeypatch: pytest.MonkeyPatch):
    model, sizes, text = tiny("gemma2"), set(), rl.Text(TOKENS, lengths=LENGTHS)
    edits = {"head": rl.stop(rl.PlaneNumbers([1]), heads="0.1"), "none turns": "nope"}
    options = {"edits": edits, "rows": 16, "prompt_lengths": [60], "distances": [30]}
    options["measures"] = (*DEFAULT_MEASURES, "copying")

    def evaluate() -> xr.Dataset:
        sizes.clear()
        with as_live_model(model).observe(lambda call: sizes.add(call.query.shape[2])):
            return rl.evaluate(model, text, **options)

    expected = evaluate()
    assert max(sizes - {1 + 2 * 64}) == 80  # without the repeated tokens
    monkeypatch.setattr(live_model, "ONE_PASS", CHUNK)
    result = evaluate()
    assert max(sizes) == CHUNK
    assert_alike(result, expected)


def test_only_the_rows_of_an_earlier_chunk_stay_in_memory(monkeypatch: pytest.MonkeyPatch):
    """The keys of all chunks, and their values, share one buffer.

    A growing cache would leave its earlier tensors in memory, because views keep them.
    """
    monkeypatch.setattr(live_model, "ONE_PASS", CHUNK)
    live, alive = as_live_model(tiny("llama_gqa")), []
    seen: dict[int, list[StorageWeakRef]] = {}
    rooms: dict[int, set[tuple[int, int]]] = {}

    def see(call: AttentionCall) -> None:
        earlier = seen.setdefault(call.layer, [])
        if call.past == 0:
            earlier.clear()
            rooms[call.layer] = set()
        alive.append(sum(not storage.expired() for storage in earlier))
        earlier += [StorageWeakRef(x.untyped_storage()) for x in (call.query, call.output)]
        room = [part.untyped_storage().data_ptr() for part in (call.key, call.value)]
        rooms[call.layer].add((room[0], room[1]))

    measured = Measurement.of(live, TOKENS, rows=16, batch_size=len(TOKENS))
    with live.observe(see):
        collect(measured, measured.rotation.planes(80))
    assert len(seen[0]) == 4 * 2  # four chunks
    assert set(alive) == {0}
    assert [len(of_layer) for of_layer in rooms.values()] == [1] * len(rooms)


def test_models_without_chunks_run_in_one_pass(monkeypatch: pytest.MonkeyPatch):
    plain = as_live_model(tiny("llama_gqa"))
    assert plain.chunk_length(2**16) is None
    assert plain.chunk_length(2**17) == 256  # keeps the mask of rows and keys small
    assert as_live_model(tiny("llama_dynamic")).chunk_length(2**17) is None


def test_a_rotation_is_undone_with_the_rounded_angles_of_the_model():
    """Angles of 131,072 rad have steps of 0.008 in float32, and this rounding cancels."""
    rotary = LlamaRotaryEmbedding(LlamaConfig(hidden_size=128, num_attention_heads=2))
    planes = Planes(rotary.inv_freq, 64, "half")
    positions = torch.arange(2**17 - 256, 2**17)
    x = torch.randn(1, 2, 256, 64, generator=torch.Generator().manual_seed(0))
    turned, _ = apply_rotary_pos_emb(x, x, *rotary(x, positions[None]))
    torch.testing.assert_close(unrotate(turned, positions, planes), x, rtol=0, atol=2e-6)
    angle = positions.double()[:, None] * rotary.inv_freq.double()
    real, imaginary = turned.double().chunk(2, dim=-1)
    still = torch.complex(real, imaginary) * torch.polar(torch.ones_like(angle), -angle)
    error = torch.cat([still.real, still.imag], dim=-1) - x
    assert error.abs().max() > 1e-3  # with angles in float64
