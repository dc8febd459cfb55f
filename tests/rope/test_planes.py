"""Coordinates of planes, and the positions by which they rotate."""

import torch

from ropelens.rope.planes import PAIRINGS, Planes
from ropelens.rope.turn import positions_by_plane


def test_planes_begin_at_the_first_coordinate_by_default():
    for pairing in PAIRINGS:
        planes = Planes(torch.ones(2), 6, pairing)
        assert planes.term_of.tolist()[4:] == [2, 2]
        assert sorted(planes.term_of.tolist()[:4]) == [0, 0, 1, 1]


def test_each_plane_rotates_with_the_position_on_its_axis():
    positions = torch.tensor([[[5, 6, 7], [8, 9, 10]]])  # [batch, position, axis]
    planes = Planes(torch.ones(4), 8, "half", axis=torch.tensor([0, 0, 2, 1]))
    assert positions_by_plane(positions, planes).tolist() == [[[5, 5, 7, 6], [8, 8, 10, 9]]]
