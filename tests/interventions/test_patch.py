"""Patches between prompts, compared with hooks at the projections and with the source."""

from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import pytest
import scipy
import torch
import xarray as xr
from oracles.tiny import FAMILIES as TINY
from oracles.tiny import logits, random_tokens, tiny
from small_measurements import observed_calls
from tiny_checkpoints import save_tiny
from torch import nn
from transformers import DynamicCache, PreTrainedModel

import ropelens as rl
from ropelens.errors import BadArgument, UnsupportedModel
from ropelens.interventions.changes import changes_of_edits
from ropelens.model.bridge import bridge
from ropelens.report import describe
from ropelens.rope.select import PlaneNumbers

FAMILIES = (
    *(
        "llama_gqa",
        "llama_dynamic",
        "gemma2",
        "gpt_oss",
        "cohere",
        "phi",
        "deepseek_v3",
    ),
    *("nanochat", "phi3_longrope"),
)
PROJECTED = ("llama_gqa", "mistral_sliding", "gemma2", "cohere", "phi", "glm")
"""Families that rotate the outputs of `q_proj` and `k_proj`, with both pairings."""
PARTS = ("query", "key", "both", "value", "output")
LENGTH = 20

tokens = partial(random_tokens, sequences=1, length=LENGTH)


def head_outputs(
    model: PreTrainedModel, given: torch.Tensor, *, layer: int
) -> torch.Tensor:
    return observed_calls(model, given)[layer][0].output


@pytest.mark.parametrize("name", FAMILIES)
def test_a_patch_from_itself_changes_no_bit(name: str):
    model = tiny(name)
    plain = logits(model, tokens())
    for part in PARTS:
        with rl.patch_planes(model, tokens(), of=part):
            patched = logits(model, tokens())
            assert torch.equal(patched, plain), part


@pytest.mark.parametrize("name", FAMILIES)
def test_patching_a_whole_layer_gives_the_attention_of_the_source(name: str):
    model = tiny(name)
    source = head_outputs(model, tokens(1), layer=1)
    with ExitStack() as stack:
        for part in ("query", "key", "value"):
            patch = rl.patch_planes(model, tokens(1), heads="1.*", of=part)
            stack.enter_context(patch)
        patched = head_outputs(model, tokens(), layer=1)
        by_parts = logits(model, tokens())
    torch.testing.assert_close(patched, source, rtol=1e-5, atol=1e-5)
    with rl.patch_planes(model, tokens(1), heads="1.*", of="output"):
        whole = logits(model, tokens())
    torch.testing.assert_close(by_parts, whole, rtol=1e-5, atol=1e-4)
    unpatched = logits(model, tokens())
    assert not torch.allclose(whole, unpatched, atol=1e-2)


@pytest.mark.parametrize("name", PROJECTED)
@pytest.mark.parametrize("select", [None, PlaneNumbers((0, 3)), rl.Slowest(0.5)])
@pytest.mark.parametrize("part", ["query", "key", "value"])
def test_hooks_at_the_projections_give_the_same(name: str, part: Any, select: Any):
    if part == "value" and select is not None:
        return
    model = tiny(name)
    attention = model.get_decoder().layers[1].self_attn
    projection: nn.Module = getattr(attention, f"{part[0]}_proj")
    size = attention.head_dim
    chosen = coordinates_of(name, size, select)
    positions = range(4, 11)
    head = 3 if part == "query" else 1  # two query heads share a key head
    recorded: list[torch.Tensor] = []

    def record(module: nn.Module, inputs: Any, out: torch.Tensor) -> None:
        recorded.append(by_head(out))

    def by_head(projected: torch.Tensor) -> torch.Tensor:
        """[sequence, position, head, coordinate]"""
        return projected.unflatten(-1, (-1, size)).clone()

    def put(module: nn.Module, inputs: Any, out: torch.Tensor) -> torch.Tensor:
        patched = by_head(out)
        here = patched[:, positions, head]
        there = recorded[0][:, positions, head]
        patched[:, positions, head] = torch.where(chosen, there, here)
        return patched.flatten(-2)

    with projection.register_forward_hook(record):
        logits(model, tokens(1))
    with projection.register_forward_hook(put):
        expected = logits(model, tokens())
    heads = "1.3" if part == "query" else "1.2,1.3"
    with rl.patch_planes(
        model, tokens(1), heads=heads, positions=positions, of=part, planes=select
    ):
        patched = logits(model, tokens())
    torch.testing.assert_close(patched, expected, rtol=1e-5, atol=1e-5)


def coordinates_of(name: str, size: int, select: Any) -> torch.Tensor:
    """Which coordinates of a head belong to the planes 0 and 3, or to the slow half."""
    if select is None:
        return torch.ones(size, dtype=torch.bool)
    family = TINY[name]
    count = (size - family.unrotated) // 2
    coordinate = torch.arange(2 * count)
    plane = coordinate % count if family.pairing == "half" else coordinate // 2
    if select == PlaneNumbers((0, 3)):
        chosen = (plane == 0) | (plane == 3)
    else:
        chosen = plane >= count // 2
    rest = torch.zeros(size - 2 * count, dtype=torch.bool)
    return torch.cat([chosen, rest])


@pytest.mark.parametrize("edited", [False, True])
def test_patched_vectors_turn_to_new_positions(llama, edited: bool):
    moved = {9: 2, 15: 17}
    with ExitStack() as stack:
        if edited:
            edit = rl.edit_rope(llama, rl.stop_slowest(0.5))
            stack.enter_context(edit)
        source = rl.capture(llama, tokens(1), heads="0.*")
        stack.enter_context(
            rl.patch_planes(llama, tokens(1), heads="0.*", positions=moved)
        )
        patched = rl.capture(llama, tokens(), heads="0.*")
    for side, dim in (("q_still", "query"), ("k_still", "key")):
        here = patched[side].sel({dim: [*moved]}).values
        there = source[side].sel({dim: [*moved.values()]}).values
        assert abs(here - there).max() < 1e-5


def test_other_heads_with_the_same_key_keep_it(llama):
    plain = head_outputs(llama, tokens(), layer=0)
    for part in ("key", "value"):
        with rl.patch_planes(llama, tokens(1), heads="0.2", of=part):
            output = head_outputs(llama, tokens(), layer=0)
        changed = (output - plain).abs().amax((0, 1, 3)) > 1e-3
        assert changed.tolist() == [False, False, True, False]


@pytest.mark.parametrize("part", PARTS)
def test_every_sequence_of_a_batch_is_patched(llama, part: Any):
    batch = tokens(sequences=3)
    mask = torch.ones(3, LENGTH, dtype=torch.long)
    mask[1, 12:] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)

    def logits_of(sequences: slice) -> torch.Tensor:
        return logits(
            llama,
            batch[sequences],
            attention_mask=mask[sequences],
            position_ids=positions[sequences],
        )

    with rl.patch_planes(llama, tokens(1), heads="*.1", of=part):
        together = logits_of(slice(0, 3))
        separate = [logits_of(slice(n, n + 1)) for n in range(3)]
    torch.testing.assert_close(together, torch.cat(separate), rtol=1e-5, atol=1e-5)


def test_a_source_of_several_sequences_is_refused(llama):
    patch = rl.patch_planes(llama, tokens(sequences=3), heads="*.1")
    with pytest.raises(BadArgument, match="one sequence"), patch:
        pass


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", ["llama_gqa", "gemma3"])
def test_positions_count_within_each_sequence_of_a_packed_row(name: str, part: Any):
    model = tiny(name)
    row = tokens()
    lengths = (8, 12)
    positions = [torch.arange(n) for n in lengths]
    where = torch.cat(positions)[None]
    with rl.patch_planes(
        model, tokens(1), heads="*.1", of=part, positions={2: 9, 9: 5}
    ):
        packed = logits(model, row, position_ids=where)
        alone = [logits(model, x) for x in row.split(lengths, dim=1)]
    torch.testing.assert_close(packed, torch.cat(alone, dim=1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("part", PARTS)
def test_generation_does_not_depend_on_a_cache(llama, part: Any):
    prompt = tokens(length=12)
    with rl.patch_planes(llama, tokens(1), heads="1.1,0.*", of=part):
        cached = llama.generate(
            prompt, max_new_tokens=6, do_sample=False, pad_token_id=0
        )
        assert torch.equal(
            cached,
            llama.generate(
                prompt,
                use_cache=False,
                max_new_tokens=6,
                do_sample=False,
                pad_token_id=0,
            ),
        )
    assert not torch.equal(
        cached,
        llama.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0),
    )


@pytest.mark.parametrize("part", PARTS)
def test_a_bridge_is_patched_like_its_model(part: Any, tmp_path):
    model, tokenizer = rl.load(save_tiny(tmp_path))
    patch = partial(
        rl.patch_planes, source=tokens(1) % 28, heads="1.2,1.3,0.*", of=part
    )
    given = tokens() % 28
    with patch(model):
        expected = logits(model, given)
    wrapped = bridge(model, tokenizer)
    with patch(wrapped), torch.no_grad():
        torch.testing.assert_close(wrapped(given), expected, rtol=1e-4, atol=1e-4)
    with rl.patch_planes(wrapped, given, of=part), torch.no_grad():
        itself = wrapped(given)
    assert torch.equal(itself, wrapped(given))
    if part == "key":
        one_head = rl.patch_planes(wrapped, tokens(1) % 28, heads="1.2", of=part)
        with one_head, pytest.raises(UnsupportedModel, match="one key for all"):
            wrapped(given)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"planes": PlaneNumbers((99,))}, "no plane"),
        ({"planes": rl.Slowest(0.5), "of": "value"}, "does not rotate"),
        ({"positions": [LENGTH]}, f"the source has {LENGTH} tokens"),
        ({"positions": {-1: 3}}, "counted from 0"),
        ({"positions": []}, "counted from 0"),
    ],
)
def test_missing_heads_planes_and_positions_are_refused(llama, options, message):
    with pytest.raises(BadArgument, match=message):
        rl.patch_planes(llama, tokens(), **options).__enter__()


def test_caches_with_keys_of_another_rotation_are_refused():
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
    model = tiny("llama_dynamic", rope_parameters=rope, max_position_embeddings=16)
    with torch.no_grad():
        cache = model(tokens(length=18), use_cache=True).past_key_values
        patch = rl.patch_planes(model, tokens(1), heads="0.*", of="key")
        with (
            patch,
            pytest.raises(UnsupportedModel, match="rotation of the keys in this cache"),
        ):
            model(tokens(2, length=4), past_key_values=cache)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", ["mistral_sliding", "gemma3"])
def test_positions_include_keys_that_a_window_dropped(name: str, part: Any):
    model = tiny(name)
    cache = DynamicCache(config=tiny(name).config)
    with rl.patch_planes(model, tokens(1), heads="*.0,*.1", of=part), torch.no_grad():
        whole = logits(model, tokens())
        steps = [tokens()[:, :15], *tokens()[:, 15:].split(1, dim=1)]
        parts = [model(step, past_key_values=cache).logits for step in steps]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=0, atol=1e-4)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("before", [0, LENGTH - 1], ids=["whole", "on a cache"])
@torch.no_grad()
def test_padding_on_the_left_is_refused(llama, before: int, part: Any):
    cache = DynamicCache()
    mask = torch.ones_like(tokens())
    mask[:, :3] = 0
    if before:
        llama(
            tokens()[:, :before], attention_mask=mask[:, :before], past_key_values=cache
        )
    patch = rl.patch_planes(llama, tokens(1), heads="0.*", of=part)
    with (
        patch,
        pytest.raises(BadArgument, match="the first token, which here is padding"),
    ):
        llama(
            tokens()[:, before:],
            past_key_values=cache,
            attention_mask=mask,
            position_ids=mask.cumsum(1)[:, before:] - 1,
        )


TOKENS = random_tokens(sequences=1, length=9)
SOURCE = (TOKENS + 1)[:, :7] % 50


@pytest.mark.parametrize(
    ("name", "of", "over"),
    [
        *(
            ("gemma3", "both", "head"),
            ("llama_gqa", "value", "head"),
            ("phi", "key", "layer"),
        ),
        *(("gemma3", "key", "position"), ("llama_gqa", "output", "position")),
    ],
)
def test_each_patch_equals_a_block(name: str, of: str, over: str):
    model = tiny(name)
    planes = None if of in ("value", "output") else PlaneNumbers((1, 3))
    result = rl.patch_each(
        model, TOKENS, SOURCE, (3, 5), over=over, heads="0.1,1.*", planes=planes, of=of
    )
    for place, change in np.ndenumerate(result["change"].values):
        layer = place[0]
        heads = {"head": f"{layer}.{place[-1]}"}.get(
            over, "0.1" if layer == 0 else "1.*"
        )
        positions = [place[1]] if over == "position" else None
        if over == "head" and heads not in ("0.1", *(f"1.{n}" for n in range(4))):
            assert np.isnan(change)
        elif positions == [7] or positions == [8]:
            assert np.isnan(change), "the source is shorter"
        else:
            block = rl.patch_planes(
                model, SOURCE, heads=heads, positions=positions, planes=planes, of=of
            )
            with block, torch.no_grad():
                logits = model(TOKENS).logits[0, -1]
            expected = float(logits[3] - logits[5]) - result.attrs["answer"]
            assert change == pytest.approx(expected, abs=1e-4)
    figure = rl.plot_effects(result, selected="1.2")
    frames = [shape for shape in figure.layout.shapes if shape.name == "selected"]
    assert len(frames) == (over == "head"), "only a map of heads has a frame"
    assert np.nanmax(np.abs(figure.data[0].z)) == pytest.approx(
        abs(result["change"]).max()
    )


def test_a_map_of_effects_has_one_other_dim():
    result = rl.patch_each(tiny("llama_gqa"), TOKENS, SOURCE, (3, 5))
    both = xr.concat([result, result], "prompt")
    with pytest.raises(BadArgument, match="A map of effects has layers") as refused:
        rl.plot_effects(both)
    assert "prompt" in refused.value.parts["seen"]


def test_answers_of_all_positions_run_in_small_batches(monkeypatch):
    model = tiny("llama_gqa")
    monkeypatch.setattr("ropelens.interventions.patch_each.MOST_LOGITS", 2000)
    by_function = rl.patch_each(model, TOKENS, SOURCE, lambda x: x[-1, 3] - x[-1, 5])
    by_pair = rl.patch_each(model, TOKENS, SOURCE, (3, 5), progress=True)
    np.testing.assert_allclose(by_function["change"], by_pair["change"], atol=1e-5)


def test_the_rank_correlation_is_over_the_planes_with_the_largest_attribution():
    result = rl.attribute_planes(tiny("llama_gqa"), TOKENS, (3, 5), check=6)
    table = rl.top_planes(result, 6)
    assert table["attribution"].abs().is_monotonic_decreasing
    rank = scipy.stats.spearmanr(table["attribution"], -table["dropped"]).statistic
    assert result.attrs["rank_correlation"] == pytest.approx(rank)
    wrong = (np.sign(table["attribution"]) == np.sign(table["dropped"])).sum()
    assert result.attrs["wrong_signs"] == wrong
    assert "random_rank_correlation" in result.attrs
    bars = rl.plot_top_planes(result, count=6).data[0]
    np.testing.assert_allclose(bars.x, table["attribution"])
    assert f"{bars.customdata[0][0]}.{bars.customdata[0][1]}" == table["head"][0]


def test_a_silenced_head_counts_with_an_induction_of_zero():
    model, _ = rl.load("bundled")
    text = torch.randint(5, 90, (2, 60), generator=torch.Generator().manual_seed(0))
    before = rl.evaluate(model, text, measures="induction", progress=True)
    scores = before["induction"][0].values
    layer, head = np.unravel_index(scores.argmax(), scores.shape)
    heads = {"silent": f"{layer}.{head}", "other": "0.0"}
    edits = {name: rl.silence_heads(model, named) for name, named in heads.items()}
    result = rl.evaluate(model, text, edits=edits, measures=["induction", "loss"])
    table = changes_of_edits(result).set_index("edit")
    change = table["induction_change"]
    assert change["silent"] == pytest.approx(-table.loc["none", "induction"])
    assert abs(change["other"]) < 0.5
    assert result["induction"][1, layer, head] == before["induction"][0, layer, head]
    losses = rl.position_losses(result)
    assert len(losses) == result["position_loss"].size
    assert (losses["change"][losses["edit"] == "none"] == 0).all()
    assert len(rl.plot_position_losses(result).data) == 6
    (words,) = describe(result)
    assert "budget" not in words
    assert "Under silent, the induction score" in words
