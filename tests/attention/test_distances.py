"""Order and place if keys move away, compared with keys that transformers rotates anew."""

import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from measured import assert_alike, normal
from oracles.recording import attention_calls
from oracles.tiny import random_tokens, rotations, tiny
from torch import Tensor

import ropelens as rl
from ropelens.attention import distances
from ropelens.attention.block import blocks_of
from ropelens.attention.call import AttentionCall
from ropelens.attention.exchange import exchange_order
from ropelens.attention.sampled_call import SampledCall
from ropelens.attention.sums import sum_attention
from ropelens.attention.visibility import Visibility
from ropelens.errors import BadArgument
from ropelens.model import live_model
from ropelens.profiles.measurement import Measurement
from ropelens.profiles.measures import REQUESTED
from ropelens.profiles.passes import collect
from ropelens.rope.planes import Planes, unrotate
from ropelens.text.rows import all_rows

NAMES = [*REQUESTED]
TOKENS = random_tokens(sequences=3, length=40)
OPTIONS = {"statistics": NAMES, "budget": False}


def random_numbers(count: int) -> Tensor:
    return exchange_order(torch.tensor([count]), width=count, seed=0, numbers=[0])


def rotated_scores(model: Any, q: Tensor, k: Tensor, layer: int) -> Tensor:
    """q . k [head, row, key, distance]; functions of the model rotate each key anew."""
    count, module = q.shape[1], sys.modules[type(model).__module__]
    kinds = [model.config.layer_types[layer]] if "gemma3" in module.__name__ else []
    cos, sin = model.base_model.rotary_emb(q, torch.arange(count)[None], *kinds)

    def rotate(x: Tensor, at: int) -> Tensor:
        turning, rest = x[None, ..., : cos.shape[-1]], x[..., cos.shape[-1] :]
        waves = cos[:, at, None], sin[:, at, None]
        return torch.cat(
            [module.apply_rotary_pos_emb(turning, turning, *waves)[0][0], rest], -1
        )

    keys = [rotate(k, count - 1 - distance) for distance in range(count)]
    return torch.stack([rotate(q, count - 1) @ key.mT for key in keys], dim=-1)


def draw(weight: np.ndarray, numbers: np.ndarray) -> list[int]:
    """Two keys other than position 0; the second is drawn without the first."""
    drawn = [0]
    for number in numbers:
        left = np.where(np.isin(np.arange(len(weight)), drawn), 0, weight)
        if left.sum() > 0:
            drawn.append(int(np.searchsorted(left.cumsum(), number * left.sum(), "right")))
    return drawn[1:]


def true_measures(model: Any, tokens: Tensor, name: str) -> dict[str, np.ndarray]:
    """Means over rows [layer, head, bin]; `position_sensitivity` is the same in all bins."""
    calls, count, bins = attention_calls(model, tokens)[0], len(tokens), 2 ** np.arange(6)
    found = {x: np.full((len(calls), 4, count, len(bins)), np.nan) for x in NAMES}
    near, far, start = distances.sampled_distances(len(bins))
    numbers = random_numbers(count)[0].numpy()
    for layer, turning in enumerate(rotations(model, name=name)):
        call = calls[layer]
        q, k = turning.unrotate(call.query), turning.unrotate(call.key)
        k = k.repeat_interleave(len(q) // len(k), dim=0)
        scores = (call.scale * rotated_scores(model, q, k, layer)).numpy()
        norms = ([x[..., pair].norm(dim=-1) for pair in turning.pairs] for x in (q, k))
        parts = [x[..., None] * y[:, None] for x, y in zip(*norms, strict=True)]
        parts.append(q[..., turning.rest] @ k[..., turning.rest].mT)
        lengths = call.scale * torch.stack(parts).norm(dim=0).numpy()
        for head, i in ((head, i) for head in range(4) for i in range(1, count)):
            seen, weight = call.visible[i].numpy(), call.attention[head, i].numpy()
            pair, even = draw(weight * seen, numbers[:2, i]), draw(1.0 * seen, numbers[2:, i])
            sees, score, row = far <= i - seen.argmax(), scores[head, i], {}
            n, f = near * sees, far * sees
            if pair:
                row["locality"] = score[pair[0], n] > score[pair[0], f]
                steps = abs(score[pair[0], f] - score[pair[0], f - 1])
                mean = np.average(steps, weights=start * sees) / lengths[head, i, pair[0]]
                row["position_sensitivity"] = np.full(len(far), mean)
            for of, keys in (("reversal", pair), ("uniform_reversal", even)):
                lead = score[keys[0]] - score[keys[-1]] if keys else np.zeros(count)
                if abs(lead).max() > 1e-6:  # two keys with different contents
                    row[of] = lead[f] * lead[0] < 0
            for of, x in row.items():
                for n, begin in enumerate(bins[: far[sees].max().bit_length()]):
                    found[of][layer, head, i, n] = x[sees & (start == begin)].mean()
    with np.errstate(invalid="ignore"):
        return {of: np.nansum(x, 2) / np.isfinite(x).sum(2) for of, x in found.items()}


@pytest.mark.parametrize(
    "name", ["llama_mha", "llama_gqa", "gpt_neox", "phi", "cohere", "gemma2", "gemma3"]
)
def test_keys_are_read_as_if_they_were_rotated_anew(name: str):
    model = tiny(name).double()
    profile = rl.profile(model, TOKENS[:1], **OPTIONS)
    assert profile["distance_stop"].values.tolist() == [2, 4, 8, 16, 32, 64]
    for of, true in true_measures(model, TOKENS[0], name).items():
        true = true if profile[of].ndim == 3 else true[..., 0]
        np.testing.assert_allclose(profile[of], true, atol=1e-6, err_msg=of)


def handmade(inv_freq: Tensor, q: Tensor, k: Tensor) -> SampledCall:
    """A call with these unrotated queries and keys [head, position, coordinate]."""
    count, planes = q.shape[1], Planes(inv_freq, q.shape[2], "half")
    q, k = (unrotate(x[None], torch.arange(count), planes, sign=1) for x in (q, k))
    options = {"scale": 1.0, "softcap": None, "sink_logits": None}
    seen = Visibility.causal(range(count))
    call = AttentionCall(0, q, k, k, q.transpose(1, 2), visibility=seen, **options)
    rows = replace(all_rows(torch.tensor([count])), order=random_numbers(count))
    return SampledCall(call, rows, planes)


def measured(sampled: SampledCall) -> dict[str, Tensor]:
    sums = sum_attention(sampled, [*REQUESTED.values()])
    return {name: x[0, :, ::2] / x[0, :, 1::2] for name, x in sums.items()}


def test_one_plane_of_many_turns_is_chance_and_a_falling_score_is_local(monkeypatch):
    q, k = (normal(8, 256, 2, seed=seed) for seed in (1, 2))
    fast = measured(handmade(torch.tensor([2.4]), q, k))
    for name in NAMES[:3]:
        assert fast[name][:, 5:].mean() == pytest.approx(0.5, abs=0.02), name
    falls = measured(handmade(torch.tensor([0.01]), torch.ones_like(q), torch.ones_like(k)))
    assert (falls["locality"] == 1).all()
    assert falls["reversal"].isnan().all()  # two keys with the same contents have no order
    drawn = distances.drawn_keys
    monkeypatch.setattr(distances, "drawn_keys", lambda *x, **how: drawn(*x, **how)[::-1])
    exchanged = measured(handmade(torch.tensor([2.4]), q, k))
    assert (exchanged["reversal"] == fast["reversal"]).all()


def test_many_planes_agree_with_the_normal_approximation():
    """With mean m and deviation s of D over W distances, Phi(-m / s) of the signs differ."""
    q, k = (normal(8, 512, 128, seed=seed) for seed in (1, 2))
    sampled, expected = handmade(1e4 ** -(torch.arange(64) / 64), q, k), []
    for block in blocks_of(sampled):
        (c, _), (d, two) = distances.drawn_keys(block, evenly=True)
        lead = ((c - d)[two] @ distances.waves(block, torch.arange(512)).to(c)).real
        expected.append(torch.special.ndtr(-lead[:, 0].sign() * lead.mean(-1) / lead.std(-1)))
    found = measured(sampled)["uniform_reversal"].mean(0).numpy()
    mean = float(torch.cat(expected).mean())
    assert np.average(found, weights=2.0 ** np.arange(9)) == pytest.approx(mean, abs=0.02)


def test_a_head_that_does_not_rotate_keeps_every_order():
    model, others = tiny("llama_gqa").double(), [0, 2, 3]
    plain = rl.profile(model, TOKENS, **OPTIONS)
    with rl.edit_rope(model, rl.stop(rl.PlaneNumbers(range(8)), heads="0.1")):
        edited = rl.profile(model, TOKENS, **OPTIONS)
    for name in NAMES:
        np.testing.assert_allclose(edited[name][0, others], plain[name][0, others])
        assert (edited[name][0, 1] == (0.5 if name == "locality" else 0)).all()


@pytest.mark.parametrize("rows", ["all", 9])
def test_batches_and_chunks_do_not_change_the_numbers(rows, monkeypatch: pytest.MonkeyPatch):
    model, text = tiny("gemma2").double(), rl.Text(TOKENS, lengths=(40, 23, 40))
    expected = rl.profile(model, text, batch_size=3, rows=rows, **OPTIONS)
    assert_alike(rl.profile(model, text, batch_size=1, rows=rows, **OPTIONS), expected)
    monkeypatch.setattr(live_model, "ONE_PASS", 23)
    assert_alike(rl.profile(model, text, batch_size=3, rows=rows, **OPTIONS), expected)


def test_parts_of_a_text_merge_by_maximum_and_by_sum():
    measurement = Measurement.of(tiny("llama_gqa").double(), TOKENS)
    planes, chosen = measurement.rotation.planes(40), (range(3), (0, 1), (2,))
    whole, *parts = (collect(measurement, planes, chosen=x) for x in chosen)
    for n, layer in (parts[0] + parts[1]).layers.items():
        torch.testing.assert_close(layer.maxima, whole.layers[n].maxima)
        torch.testing.assert_close(layer.sums, whole.layers[n].sums)


def test_names_of_statistics_reach_the_table_of_heads():
    options = rl.Options(statistics=("locality",), surrogates=0)
    analysis = rl.analyze(tiny("llama_gqa"), TOKENS[:, :30], options)
    names = ["max_score", *(f"locality_{2**n}" for n in range(5))]
    assert analysis.heads.columns[-6:].tolist() == names
    locality = analysis.profile["locality"][..., 2].values.ravel()
    np.testing.assert_array_equal(analysis.heads["locality_4"], locality)
    for wrong in ("max", ["locality", "max"]):
        with pytest.raises(BadArgument, match=r"statistic 'max'(?s:.)*reversal, uniform_rev"):
            rl.profile(analysis.model, TOKENS, statistics=wrong)
