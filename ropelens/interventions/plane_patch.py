"""A patch: vectors of chosen heads from a source, turned to the positions of another prompt."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from ropelens.errors import BadArgument
from ropelens.measured_rotation.probe import RotationProbe
from ropelens.model.intervention import (
    AttentionInput,
    HeadInputs,
    HeadOutputs,
    Intervention,
    ReplacedOutputs,
)
from ropelens.rope.planes import Planes
from ropelens.rope.select import HeadMask, Selection
from ropelens.rope.turn import positions_by_plane, rotate_by
from ropelens.text.text import Text

PatchedPart = Literal["query", "key", "both", "value", "output"]
UNROTATED = ("value", "output")


@dataclass(frozen=True)
class SourceLayer:
    """Vectors of one layer of a source, and the rotation of its planes in radians.

    `angle` is missing if only values or outputs are patched.
    """

    inputs: Mapping[AttentionInput, Float[Tensor, "_ position _"]]
    output: Float[Tensor, "head position feature"]
    angle: Float[Tensor, "position frequency"] | None

    def vectors(
        self,
        name: AttentionInput,
        position: Int[Tensor, "_ token"],
        *,
        heads: Int[Tensor, " head"],
        among: int,
    ) -> Float[Tensor, "_ head token coordinate"]:
        """Queries, keys or values at positions, of some heads `among` so many heads."""
        x = self.inputs[name]
        by_head = x.repeat_interleave(among // len(x), dim=0)
        return by_head[heads][:, position].transpose(0, 1)


def read_source(
    rotation: RotationProbe, text: Text, chosen: HeadMask, part: PatchedPart
) -> dict[int, SourceLayer]:
    """Read the layers with chosen heads from the one sequence of `text`, in one pass."""
    live = rotation.live
    reader = _SourceReader(rotation, chosen, reads_angles=part not in UNROTATED)
    with live.intervene(reader):
        outputs = live.record_calls(
            text.ids, lambda call: call.output, hidden=text.hidden
        )
    return {
        layer: SourceLayer(
            inputs=reader.inputs[layer],
            output=outputs[layer][0].transpose(0, 1),
            angle=reader.angles.get(layer),
        )
        for layer in chosen.any(1).nonzero().flatten().tolist()
    }


@dataclass(frozen=True)
class _SourceReader(Intervention):
    """Record the queries, keys and values of the layers with chosen heads; change nothing."""

    rotation: RotationProbe
    chosen: HeadMask
    reads_angles: bool
    inputs: dict[int, dict[AttentionInput, Tensor]] = field(default_factory=dict)
    angles: dict[int, Tensor] = field(default_factory=dict)

    def change_input(self, inputs: HeadInputs) -> Tensor:
        layer = inputs.layer
        if self.chosen[layer].any():
            of_layer = self.inputs.setdefault(layer, {})
            of_layer[inputs.name] = inputs.vectors[0].detach()
            if inputs.name == "query" and self.reads_angles:
                planes = self.rotation.planes_now(layer, continued=False)
                self.angles[layer] = _angles(inputs.positions, planes)[0]
        return inputs.vectors


def _angles(
    positions: Int[Tensor, "_ position *axis"], planes: Planes
) -> Float[Tensor, "_ position frequency"]:
    """The rotation of each plane in radians, as the model rotates it without edits."""
    inv_freq = planes.inv_freq.to(positions.device, torch.float32).nan_to_num()
    return positions_by_plane(positions, planes).float() * inv_freq


@dataclass(frozen=True)
class PositionPairs:
    """The patched positions, and for each of them its position in the source."""

    patched: Int[Tensor, " pair"]
    source: Int[Tensor, " pair"]

    @classmethod
    def of(
        cls, positions: Sequence[int] | Mapping[int, int] | None, length: int
    ) -> "PositionPairs":
        """Pairs from a list or a mapping; by default all positions of the source.

        Raises `BadArgument` for positions that a source of `length` tokens does not have.
        """
        if positions is None:
            positions = range(length)
        if isinstance(positions, Mapping):
            pairs = dict(positions)
        else:
            pairs = {position: position for position in positions}
        missing = not pairs or max(pairs.values()) >= length
        if missing or min(*pairs, *pairs.values()) < 0:
            raise BadArgument(
                "Positions to patch must exist in both sequences, counted from 0.",
                seen=f"{pairs}; the source has {length} tokens"[:200],
            )
        return cls(
            torch.tensor([*pairs], dtype=torch.long, device="cpu"),
            torch.tensor([*pairs.values()], dtype=torch.long, device="cpu"),
        )

    def in_source(self, tokens: Int[Tensor, "_ token"]) -> Int[Tensor, "_ token"]:
        """Position in the source for each token; -1 if the token is not patched."""
        size = int(self.patched.max()) + 2
        nowhere = torch.full((size,), -1, dtype=torch.long, device="cpu")
        table = nowhere.index_copy(0, self.patched, self.source)
        return table.to(tokens.device)[tokens.clamp(max=size - 1)]


@dataclass(frozen=True)
class PlanePatch(Intervention):
    """A patch of the heads in `chosen` with vectors of the `source`, by layer.

    `select` chooses planes of queries and keys; None patches whole vectors.
    """

    rotation: RotationProbe
    chosen: HeadMask
    select: Selection | None
    part: PatchedPart
    pairs: PositionPairs
    source: Mapping[int, SourceLayer]

    def change_input(self, inputs: HeadInputs) -> Float[Tensor, "batch _ slot _"]:
        """Queries, keys or values, of which the chosen heads come from the source.

        If heads of a group differ, there is a vector for each query head.
        """
        layer = inputs.layer
        if self.part not in UNROTATED:  # an error if cached keys rotated differently
            planes = self.rotation.planes_now(layer, continued=inputs.continued)
        if inputs.name == "key":
            _check_first_token(inputs.positions[:, 0] >= 0)
        heads = self.chosen[layer][self.rotation.live.attending_heads[layer]]
        if not self._patches(inputs.name) or not heads.any():
            return inputs.vectors
        x = _separate_heads(inputs.vectors, heads)
        patched = heads.unflatten(0, (x.shape[1], -1)).any(1).nonzero().flatten()
        in_source = self.pairs.in_source(inputs.tokens.to(x.device))
        position = in_source.clamp(min=0)
        count = in_source.shape[1]
        source = self.source[layer]
        old = x[:, patched, :count]
        new = source.vectors(inputs.name, position, heads=patched, among=x.shape[1])
        if source.angle is not None:
            angle = _angles(inputs.positions[:, :count], planes)
            new = self._turned(new, old, angle - source.angle[position], planes)
        is_patched = (in_source >= 0)[:, None, :, None]
        x = x.clone()
        x[:, patched, :count] = torch.where(is_patched, new, old)
        return x

    def _turned(
        self,
        new: Float[Tensor, "_ head token coordinate"],
        old: Float[Tensor, "batch head token coordinate"],
        angle: Float[Tensor, "_ token frequency"],
        planes: Planes,
    ) -> Float[Tensor, "_ head token coordinate"]:
        """Vectors of the source turned by `angle`; planes that are not selected stay `old`."""
        expanded = new.expand(len(angle), -1, -1, -1)
        turned = rotate_by(expanded, angle[:, None], planes)
        if self.select is None:
            return turned
        selected = pad(self.select(planes), (0, 1))[planes.term_of]
        return torch.where(selected.to(turned.device), turned, old)

    def _patches(self, name: AttentionInput) -> bool:
        if self.part == "both":
            return name in ("query", "key")
        return name == self.part

    def replace_output(self, outputs: HeadOutputs) -> ReplacedOutputs | None:
        """The outputs of the source at the patched positions, for the chosen heads."""
        output = outputs.output
        heads = self.chosen[outputs.layer][: output.shape[2]]
        tokens = outputs.tokens.to(output.device)
        real = outputs.real[:, 0].to(tokens.device)
        _check_first_token(real | (tokens[:, 0] > 0))
        if self.part != "output" or not heads.any():
            return None
        in_source = self.pairs.in_source(tokens)
        of_source = self.source[outputs.layer].output
        new = of_source[:, in_source.clamp(min=0)].permute(1, 2, 0, 3)
        is_patched = (in_source >= 0)[..., None, None]
        return ReplacedOutputs(heads, torch.where(is_patched, new, output))


def _separate_heads(
    x: Float[Tensor, "batch _ slot coordinate"], heads: Bool[Tensor, " head"]
) -> Float[Tensor, "batch _ slot coordinate"]:
    """`x` with a vector for each query head, if only some heads of a group are chosen."""
    by_group = heads.unflatten(0, (x.shape[1], -1))
    if by_group[by_group.any(1)].all():
        return x
    return x.repeat_interleave(by_group.shape[1], dim=1)


def _check_first_token(real: Bool[Tensor, "*axis"]) -> None:
    """Raise `BadArgument` unless the first token of each sequence is `real`."""
    if not real.all():
        what = "Patches count positions from the first token, which here is padding."
        raise BadArgument(what, hint="prompts of one length, or one prompt at a time")
