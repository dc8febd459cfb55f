"""The oracles themselves: held to laws, to literal loops, and to what they were built to do."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from oracles.dense import default_bins, dense
from oracles.handmade import CONTEXT, handmade
from oracles.logit import HeadRows, bin_of_offset, gain, head_rows, information
from oracles.recording import LayerRotation, attention_calls
from oracles.tiny import (
    FAMILIES,
    SUPPORTED,
    TEN,
    random_tokens,
    rotations,
    tiny,
)
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

LENGTHS = (30, 17, 24)


def measured(name: str) -> dict[str, np.ndarray]:
    model = tiny(name)
    tokens = random_tokens(sequences=len(LENGTHS), length=max(LENGTHS))
    return dense(model, tokens, LENGTHS, rotations=rotations(model, name=name))


# every family


@pytest.mark.parametrize("name", TEN)
def test_laws(name: str):
    r = measured(name)
    assert r["rows"] == sum(LENGTHS) - len(LENGTHS)
    assert r["tokens"] == sum(LENGTHS)
    np.testing.assert_allclose(r["offset_mass"].sum(-1) + r["sink_mass"], 1, rtol=1e-12)
    np.testing.assert_allclose(
        np.nansum(r["selectivity"], -1), r["selectivity_total"], rtol=1e-10
    )
    both = r["selectivity_keys"] + r["selectivity_sink"]
    np.testing.assert_allclose(both, r["selectivity"], atol=1e-10)
    for coherence in (r["q_coherence"], r["k_coherence"]):
        assert np.nanmin(coherence) >= 0
        assert np.nanmax(coherence) <= 1 + 1e-12
    assert (r["total_bits"] > 0.1).any(), "attention is not nearly uniform"
    assert (r["learned_sink_mass"].max() > 0.01) == (name == "gpt_oss")


@pytest.mark.parametrize("name", SUPPORTED)
def test_table_states_the_rotation_of_the_live_model(name: str):
    """One token repeated: taking back the stated rotation leaves one vector everywhere."""
    model = tiny(name).double()
    for parameter, weight in model.named_parameters():
        if parameter.endswith("sinks"):  # they take less where there are more keys, so that
            weight.data.fill_(-1e9)  # the hidden state would change with position
    calls, _ = attention_calls(model, np.full(9, 5))
    for layer, (call, truth) in enumerate(zip(calls, rotations(model, name=name), strict=True)):
        assert len(truth.rest) == FAMILIES[name].unrotated_by_layer(len(calls))[layer]
        assert (layer in FAMILIES[name].nope_layers) == (len(truth.pairs) == 0)
        for x in (call.query, call.key):
            assert drift(truth.unrotate(x)) < 1e-5
            for wrong in wrong_rotations(truth):
                assert drift(wrong.unrotate(x)) > 1e-2


def drift(x: torch.Tensor) -> float:
    """Largest change of x [head, position, coordinate] from position 0, relative."""
    return float((x - x[:, :1]).norm(dim=-1).max() / x.norm(dim=-1).max())


def wrong_rotations(truth: LayerRotation) -> list[LayerRotation]:
    """The other direction, the other pairing, and 3% off in speed (none for NoPE layers)."""
    if not len(truth.pairs):
        return []
    coordinates = np.sort(truth.pairs.flatten())
    half = coordinates.reshape(2, -1).T
    repaired = coordinates.reshape(-1, 2) if (truth.pairs == half).all() else half
    if len(truth.rest) and truth.rest[0] < coordinates[-1]:  # p-RoPE: planes lie apart
        repaired = coordinates.reshape(-1, 2)
    variants = [
        (truth.pairs, -truth.inv_freq),
        (repaired, truth.inv_freq),
        (truth.pairs, truth.inv_freq * 1.03),
    ]
    return [
        LayerRotation(pairs=pairs, inv_freq=inv_freq, head_dim=truth.head_dim)
        for pairs, inv_freq in variants
    ]


# the dense computation


def test_against_literal_loops():
    """Six tokens, a grouped-query Llama, every sum written out over Python floats; queries
    and keys from the projections, turned by transformers' own function."""
    model = tiny("llama_gqa").double()
    tokens = random_tokens(sequences=1, length=6)
    r = dense(model, tokens, [6], rotations=rotations(model, name="llama_gqa"))
    inputs, position = projected(model, tokens)
    cos, sin = position
    with torch.no_grad():
        out = model(torch.from_numpy(tokens), output_attentions=True)
    loss = -out.logits.log_softmax(-1)[0, range(5), tokens[0, 1:]].mean()
    np.testing.assert_allclose(r["loss"], loss, rtol=1e-12)
    for layer, (q, k) in enumerate(inputs):
        turned_q, turned_k = apply_rotary_pos_emb(q, k, cos, sin)
        for head in range(4):
            loops = loop_statistics(
                turned_q[0, head].tolist(),
                turned_k[0, head // 2].tolist(),
                out.attentions[layer][0, head].tolist(),
            )
            for name, value in loops.items():
                got = r[name][layer, head]
                rounding = 5e-7 if name == "selectivity_sink" else 1e-7  # a difference of two
                np.testing.assert_allclose(got, value, rtol=1e-5, atol=rounding, err_msg=name)
            for name, x in (("q", q[0, head]), ("k", k[0, head // 2])):
                planes = torch.complex(x[:, :8], x[:, 8:])
                norm = planes.abs().mean(0)
                row = head if name == "q" else head // 2
                np.testing.assert_allclose(r[f"{name}_norm"][layer, row], norm, rtol=1e-6)
                np.testing.assert_allclose(
                    r[f"{name}_coherence"][layer, row],
                    planes.mean(0).abs() / norm,
                    rtol=1e-5,
                )


def projected(model, tokens):
    """Each layer's unrotated queries and keys by hooks, and the cosines and sines."""
    kept: dict[str, torch.Tensor] = {}
    hooks = [
        module.register_forward_hook(lambda _m, _i, out, name=name: kept.update({name: out}))
        for name, module in model.named_modules()
        if name.endswith(("q_proj", "k_proj", "rotary_emb"))
    ]
    try:
        with torch.no_grad():
            model(torch.from_numpy(tokens))
    finally:
        for hook in hooks:
            hook.remove()
    layers = [
        tuple(
            kept[f"model.layers.{layer}.self_attn.{name}_proj"]
            .unflatten(-1, (-1, 16))
            .transpose(1, 2)
            for name in "qk"
        )
        for layer in range(model.config.num_hidden_layers)
    ]
    return layers, kept["model.rotary_emb"]


def loop_statistics(q: list, k: list, attention: list) -> dict[str, float | list[float]]:
    """One head's row statistics over rows 1 to 5, by nothing but loops."""
    length, planes, rows = len(q), len(q[0]) // 2, len(q) - 1
    selectivity = [0.0] * planes
    by_offset = [0.0] * length
    of_keys = [0.0] * planes
    sink = self_mass = previous = entropy = total = 0.0
    for i in range(1, length):
        rest = 1 - attention[i][0]  # of which keys but position 0 have an even share each
        for j in range(i + 1):
            a = attention[i][j]
            for f in range(planes):
                product = q[i][f] * k[j][f] + q[i][f + planes] * k[j][f + planes]
                score = product / math.sqrt(2 * planes)
                selectivity[f] += (a - 1 / (i + 1)) * score / rows
                of_keys[f] += (a - rest / i) * score / rows if j > 0 else 0
            if j == 0:
                sink += a / rows
            else:
                by_offset[i - j] += a / rows
            self_mass += a / rows if j == i else 0
            previous += a / rows if j == i - 1 else 0
            if a > 0:
                entropy -= a * math.log2(a) / rows
                total += a * math.log2(a * (i + 1)) / rows
    return {
        "selectivity": selectivity,
        "selectivity_keys": of_keys,
        "selectivity_sink": [a - b for a, b in zip(selectivity, of_keys, strict=True)],
        "offset_mass_exact": by_offset,
        "sink_mass": sink,
        "self_mass": self_mass,
        "previous_token": previous,
        "entropy_bits": entropy,
        "total_bits": total,
    }


def test_padding_and_company_change_nothing():
    model = tiny("mistral_sliding")
    truth = rotations(model, name="mistral_sliding")
    tokens = random_tokens(sequences=3, length=30)
    bins = default_bins(30)
    together = dense(model, tokens, LENGTHS, rotations=truth, bins=bins)
    rubbish = tokens.copy()
    for row, length in zip(rubbish, LENGTHS, strict=True):
        row[length:] = 7
    again = dense(model, rubbish, LENGTHS, rotations=truth, bins=bins)
    for name, value in together.items():
        np.testing.assert_array_equal(value, again[name], err_msg=name)
    alone = [
        dense(model, row[None], [length], rotations=truth, bins=bins)
        for row, length in zip(tokens, LENGTHS, strict=True)
    ]
    for name, weight in (("selectivity", "rows"), ("total_bits", "rows"), ("q_norm", "tokens")):
        mean = sum(one[name] * one[weight] for one in alone) / together[weight]
        np.testing.assert_allclose(together[name], mean, rtol=1e-12)


def test_a_window_hides_what_lies_outside():
    r = measured("gemma2")
    sliding, full = r["offset_mass_exact"]
    assert sliding[:, 12:].max() == 0
    assert full[:, 12:].max() > 0
    np.testing.assert_array_equal(r["offset_share"][0, 12:], 0)


# the conditional logit


def rows_of(scores: np.ndarray, *, planes: np.ndarray, window: int = 10**6) -> HeadRows:
    """Rows of one head with these scores [row, key]; position 0 is the sink."""
    at = np.arange(len(scores))
    seen = (at <= at[:, None]) & (at > at[:, None] - window)
    weights = np.where(seen, np.exp(scores), 0)
    return HeadRows(
        attention=(weights / weights.sum(1, keepdims=True))[1:],
        seen=seen[1:],
        sink=np.broadcast_to(at == 0, seen[1:].shape).astype(float),
        offset=(at[:, None] - at)[1:].clip(0),
        planes=planes[1:],
    )


def test_a_model_explains_all_of_what_it_made():
    """Attention by sigma, kappa, tau and beta alone: each model explains its own, no other."""
    random = np.random.default_rng(0)
    count = 40
    planes = random.normal(size=(count, count, 3))
    offset = (np.arange(count)[:, None] - np.arange(count)).clip(0)
    first = np.arange(count) == 0
    kappa, tau = 2 * random.normal(size=(2, count))
    sink = 2.0 * first * np.ones((count, 1))
    position = sink + kappa[offset] + first * tau[offset]
    content = planes @ [1.5, -1.0, 0.5]
    made = {
        "sink": (sink, {"content": False, "offsets": False}),
        "position": (position, {"content": False, "offsets": True}),
        "content": (sink + content, {"content": True, "offsets": False}),
        "both": (position + content, {"content": True, "offsets": True}),
    }
    for name, (scores, own) in made.items():
        rows = rows_of(scores, planes=planes)
        total = information(rows)
        for other, (_, model) in made.items():
            explained = gain(rows, ridge=1e-9, **model) / total
            contains = all(model[part] >= own[part] for part in own)
            if contains:
                assert explained == pytest.approx(1, abs=1e-3), (name, other)
            else:
                assert explained < 0.9, (name, other)


def test_of_rows_that_see_as_much_position_explains_the_mean():
    """Windows all full and no sink: the best kernel is the mean attention by offset."""
    random = np.random.default_rng(1)
    count, window = 60, 7
    whole = rows_of(
        2 * random.normal(size=(count, count)),
        planes=np.zeros((count, count, 1)),
        window=window,
    )
    full = HeadRows(*(x[window:] for x in vars(whole).values()))
    by_offset = np.zeros(window)
    np.add.at(by_offset, full.offset[full.seen], full.attention[full.seen] / len(full.seen))
    expected = (by_offset * np.log2(by_offset * window)).sum()
    assert gain(full, content=False, offsets=True, ridge=1e-9) == pytest.approx(expected)
    assert 0.02 < expected < information(full)


def test_on_other_rows_a_model_gains_what_it_says_of_them():
    """sigma of one row, by hand: half on the sink; on a row with a quarter there."""
    planes = np.zeros((2, 2, 1))
    fitted, other = (rows_of(np.array([[0, 0], [s, 0.0]]), planes=planes) for s in (2.0, -1.0))
    given = {"content": False, "offsets": False, "ridge": 1e-9}
    a, b = (rows.attention[0] for rows in (fitted, other))
    assert gain(fitted, **given) == pytest.approx(float(a @ np.log2(2 * a)))
    assert gain(fitted, on=other, **given) == pytest.approx(float(b @ np.log2(2 * a)))


def test_bins_of_offsets_are_eight_an_octave():
    bins = bin_of_offset(1000)
    assert bins[:64].tolist() == list(range(64))
    for place in range(64, bins[-1]):
        own = np.flatnonzero(bins == place)
        assert len(own) == 8 * 2 ** ((place - 64) // 8)
    assert (np.diff(bins) >= 0).all()


# heads built by hand


def test_a_head_that_looks_for_its_own_token_finds_itself_at_offset_0():
    """What offsets explain by themselves is counted as content where tokens explain it too."""
    model, tokens, expected = handmade(0, 64)
    head = [truth.description for truth in expected].index("equal tokens")
    call = attention_calls(model, tokens[0])[0][0]
    turning = rotations(model, name="llama_gqa")[0]
    rows = head_rows(call, turning, head=head, sinks=np.arange(CONTEXT) == 0)
    given = {"ridge": 0.03}
    sink, position, content, both = (
        gain(rows, content=c, offsets=o, **given)
        for c, o in ((False, False), (False, True), (True, False), (True, True))
    )
    rest = information(rows) - sink
    assert position - sink > rest / 4
    assert both - content < rest / 10
    assert content - sink > 2 * rest / 3
