"""The oracles themselves, held to laws and to what they were built to do."""

from __future__ import annotations

import numpy as np
import pytest
from oracles.dense import dense
from oracles.logit import HeadRows, bin_of_offset, gain, information
from oracles.tiny import TEN, random_tokens, rotations, tiny

LENGTHS = (30, 17, 24)


def measured(name: str) -> dict[str, np.ndarray]:
    model = tiny(name)
    tokens = random_tokens(sequences=len(LENGTHS), length=max(LENGTHS))
    return dense(model, tokens, LENGTHS, rotations=rotations(model, name=name))


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
