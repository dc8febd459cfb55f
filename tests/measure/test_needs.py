"""Which planes a head needs: against one edit at a time, and heads that need none."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracles.tiny import random_tokens, tiny

import ropelens as rl
from ropelens.errors import BadArgument

TOKENS = torch.from_numpy(random_tokens(sequences=4, length=24))


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


@pytest.mark.parametrize("head", ["*", "1.*", "0.1,1.1", "9.0"])
def test_one_head_at_a_time(head: str) -> None:
    with pytest.raises(BadArgument):
        rl.needed_planes(tiny("llama_gqa"), TOKENS, head)


def test_planes_that_stand_still_cannot_stop() -> None:
    model = tiny("llama_proportional")
    stopped = rl.needed_planes(model, TOKENS, "0.0")
    dropped = rl.needed_planes(model, TOKENS, "0.0", how="drop")
    assert len(stopped) < len(dropped) == 8
    assert np.isfinite(stopped["wavelength"]).all()
