"""Planes: their coordinates and positions, the heads of a list, the planes of a fraction."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ropelens.errors import BadArgument
from ropelens.interventions.cuts import PlaneSweep, rotating_planes
from ropelens.rope.planes import PAIRINGS, Planes
from ropelens.rope.select import Fastest, Slowest, heads_by_layer
from ropelens.rope.turn import positions_by_plane
from ropelens.rope.variants import Shape, parse_variant
from ropelens.rotation.variant_config import frequencies


@pytest.mark.parametrize(
    ("heads", "named"),
    [
        ("1.2", {(1, 2)}),
        ("1.*", {(1, 0), (1, 1), (1, 2)}),
        ("1-2.0", {(1, 0), (2, 0)}),
        ("*.1-2, 0.0", {(0, 0), *((layer, head) for layer in range(4) for head in (1, 2))}),
        ("3-9.2", {(3, 2)}),
    ],
)
def test_a_list_names_heads(heads: str, named: set[tuple[int, int]]):
    chosen = heads_by_layer(heads, torch.ones(4, 3, dtype=torch.bool), doing="attend")
    assert {(layer, head) for layer, head in chosen.nonzero().tolist()} == named


@pytest.mark.parametrize(
    "heads", ["", "1", "4.0", "2-1.0", "-1.0", "1-.0", "1.x", "1.0,,", "²-3.0"]
)
def test_an_item_that_names_no_head_is_refused(heads: str):
    with pytest.raises(BadArgument, match=r"has no head(.|\n)*layers 0 to 3, heads 0 to 2\n"):
        heads_by_layer(heads, torch.ones(4, 3, dtype=torch.bool), doing="attend")


@pytest.mark.parametrize("head_dim", [2, 10, 16, 20, 64, 80, 100, 128, 256])
@pytest.mark.parametrize("p", [tenths / 10 for tenths in range(11)])
def test_the_number_of_planes_equals_transformers(head_dim: int, p: float):
    rope = {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": p}
    config = LlamaConfig(head_dim=head_dim, rope_parameters=rope)
    kept = ROPE_INIT_FUNCTIONS["proportional"](config, device="cpu")[0] != 0
    inv_freq = 1e4 ** (-torch.arange(0, head_dim, 2) / head_dim)
    planes = Planes(inv_freq, head_dim, "half")
    back = kept.flip(0)
    ends = (("slow", Slowest, "p-rope", kept), ("fast", Fastest, "p-rope-reversed", back))
    for end, select, name, turns in ends:
        assert torch.equal(select(1 - p)(planes), ~turns)
        still = tuple((~turns).nonzero().flatten().tolist())
        sweep = PlaneSweep(keep=[p], ends=[end], controls=0)
        cuts = sweep.plan([rotating_planes(planes)], seed=0)[1:]
        assert [cut.stopped for cut in cuts] == ([(still,)] if still else [])
        found, _ = frequencies(parse_variant(f"{name}:{p}"), Shape(head_dim, 10_000.0, 2048))
        torch.testing.assert_close(found, inv_freq * turns, rtol=1e-6, atol=0)


def test_planes_begin_at_the_first_coordinate_by_default():
    for pairing in PAIRINGS:
        planes = Planes(torch.ones(2), 6, pairing)
        assert planes.term_of.tolist()[4:] == [2, 2]
        assert sorted(planes.term_of.tolist()[:4]) == [0, 0, 1, 1]


def test_each_plane_rotates_with_the_position_on_its_axis():
    positions = torch.tensor([[[5, 6, 7], [8, 9, 10]]])  # [batch, position, axis]
    planes = Planes(torch.ones(4), 8, "half", axis=torch.tensor([0, 0, 2, 1]))
    assert positions_by_plane(positions, planes).tolist() == [[[5, 5, 7, 6], [8, 8, 10, 9]]]
