"""Which planes a head needs: against one edit at a time, and heads that need none."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from oracles.tiny import random_tokens, tiny

import ropelens as rl
from ropelens.errors import BadArgument

TOKENS = random_tokens(sequences=4, length=24)


@pytest.mark.parametrize("how", ["stop", "drop"])
def test_a_row_is_what_one_edit_does(how: str) -> None:
    model = tiny("llama_gqa")
    table = rl.needed_planes(model, TOKENS, "1.2", how=how)
    assert table["plane"].tolist() == list(range(8))
    assert (np.diff(table["wavelength"]) > 0).all()
    action = {"stop": rl.stop, "drop": rl.drop}[how]
    for plane in (0, 5):
        edit = action(rl.PlaneNumbers((plane,)), heads="1.2")
        found = rl.evaluate(model, TOKENS, edits={"one": edit}, measures=["loss", "change"])
        row = table.loc[plane]
        change = float(found["mean_loss"][1] - found["mean_loss"][0])
        assert row["loss_change"] == pytest.approx(change, abs=1e-7)
        assert row["attention_change"] == pytest.approx(
            float(found["attention_change"][1, 1, 2])
        )
        assert row["loss_change_low"] <= row["loss_change"] <= row["loss_change_high"]
    assert table["attention_change"].min() > 0


def test_a_head_that_asks_nothing_of_a_plane_does_not_need_it() -> None:
    """Queries without the coordinates of plane 3: nothing changes, bit for bit."""
    model = tiny("llama_gqa")
    size = model.config.hidden_size // model.config.num_attention_heads
    weight = model.model.layers[0].self_attn.q_proj.weight
    with torch.no_grad():
        for coordinate in (3, 3 + size // 2):
            weight[size + coordinate] = 0  # head 1
    table = rl.needed_planes(model, TOKENS, "0.1", how="drop").set_index("plane")
    assert table.loc[3, "loss_change"] == 0
    assert table.loc[3, "attention_change"] == pytest.approx(0, abs=1e-9)
    assert table.drop(3)["attention_change"].min() > 1e-6


@pytest.mark.parametrize("head", ["1.*", "0.1,1.1"])
def test_one_head_at_a_time(head: str) -> None:
    with pytest.raises(BadArgument):
        rl.needed_planes(tiny("llama_gqa"), TOKENS, head)


@pytest.mark.parametrize("head", ["0.1", "0.0"])
def test_under_an_open_edit_that_makes_heads_differ(head: str) -> None:
    """As two evaluations: inside the block, and of both edits together outside it."""
    model, around = tiny("llama_gqa"), rl.stop(rl.PlaneNumbers([1, 3]), heads="0.1")
    with rl.edit_rope(model, around):
        table = rl.needed_planes(model, TOKENS, head).set_index("plane")
        edits = {str(n): rl.stop(rl.PlaneNumbers([n]), heads=head) for n in table.index}
        inside = rl.evaluate(model, TOKENS, edits=edits, measures=["loss", "change"])
    own = rl.needed_planes(model, TOKENS, head).set_index("plane")
    still = [1, 3] if head == "0.1" else []
    assert table.index.tolist() == [n for n in range(8) if n not in still]
    pd.testing.assert_series_equal(table["wavelength"], own["wavelength"].drop(still))
    assert (table["loss_change"] - own["loss_change"]).abs().max() > 1e-5
    both = {"around": around} | {name: [around, edit] for name, edit in edits.items()}
    outside = rl.evaluate(model, TOKENS, edits=both, measures=["loss"])["mean_loss"].values[1:]
    layer, number = map(int, head.split("."))
    changes = (
        inside["mean_loss"].values[1:] - inside["mean_loss"].values[0],
        outside[1:] - outside[0],
    )
    for change in changes:
        np.testing.assert_allclose(table["loss_change"], change, rtol=0, atol=1e-6)
    moved = inside["attention_change"].values[1:, layer, number]
    np.testing.assert_allclose(table["attention_change"], moved, rtol=0, atol=1e-12)
    assert moved.min() > 0


def test_a_head_of_which_no_plane_turns() -> None:
    """Planes that are known can drop out, also where an edit has stopped them all."""
    model = tiny("llama_gqa")
    with rl.edit_rope(model, "nope"):
        with pytest.raises(BadArgument, match=r"No plane of head 0\.1 turns"):
            rl.needed_planes(model, TOKENS, "0.1")
        dropped = rl.needed_planes(model, TOKENS, "0.1", how="drop")
    assert np.isinf(dropped["wavelength"]).all()
    assert dropped["attention_change"].min() > 0


def test_a_layer_without_planes() -> None:
    with pytest.raises(BadArgument, match="there is none to drop"):
        rl.needed_planes(tiny("smollm3"), TOKENS, "3.0", how="drop")
