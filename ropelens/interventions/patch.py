"""Patches: chosen planes of chosen heads take queries and keys from another prompt."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int, Integer
from torch import Tensor
from torch.nn.functional import pad

from ropelens.arguments import public
from ropelens.errors import BadArgument
from ropelens.interventions.edit import place_edit, stop
from ropelens.measured_rotation.probe import RotationProbe
from ropelens.model.as_live_model import Model, as_live_model
from ropelens.model.attention_hooks import AttentionInput
from ropelens.profiles.checked_text import model_text
from ropelens.rope.planes import Planes
from ropelens.rope.select import (
    ALL_HEADS,
    HeadMask,
    PlaneNumbers,
    Selection,
    heads_by_layer,
)
from ropelens.rope.turn import positions_by_plane, rotate_by
from ropelens.text.text import Text
from ropelens.text.tokenize import prompt_tokens

PatchedPart = Literal["query", "key", "both", "value", "output"]
UNROTATED = ("value", "output")
Source = Text | str | Integer[Tensor, "*source place"] | Mapping[str, Any]


@public
@contextmanager
def patch_planes(
    model: Model,
    source: Source,
    *,
    planes: Selection | None = None,
    heads: str = ALL_HEADS,
    positions: Sequence[int] | Mapping[int, int] | None = None,
    of: PatchedPart = "both",
    tokenizer: Any = None,
) -> Iterator[None]:
    """Replace parts of `heads` by the same parts from the prompt `source` while the block runs.

    Activation patching (Vig et al. 2020, arXiv 2004.12265), plane by plane. `source` is a text,
    tokens [position], or a BatchEncoding of one text. Special tokens in a text are read as
    special tokens. The source runs once when the block opens, under the blocks that are open
    then, and is patched into every sequence of a batch.

    `of` selects the part: "query", "key", "both", "value", or the "output" of a head before the
    output projection. `planes` selects planes of queries and keys, such as `Slowest(0.25)`. By
    default whole vectors are patched, with the coordinates that RoPE does not rotate. Vectors
    are turned from their position in `source` to their new position. `heads` is a list such as
    "2.3,4.*" (with grouped keys, query heads: unlisted heads keep their keys and values).

    `positions` lists the patched positions, counted from 0 in each sequence (also in a packed
    row), or maps each to a position in `source`; by default all that both sequences have. Edits
    rotate the patched vectors. If two blocks patch the same vector, the inner block takes
    effect. A patch from the same tokens changes no bit. The model is restored on exit, also
    after an error, and may generate.

    Raises `BadArgument` for heads, planes or positions that do not exist, for planes of values
    or outputs, for several sources, and for padding on the left. Raises `UnsupportedModel` for
    a model that hides its attention, and on a bridge if heads that share a key differ.
    """
    live = as_live_model(model, tokenizer)
    if isinstance(source, str):
        source = prompt_tokens(source, live.tokenizer)
    source = torch.atleast_2d(source) if isinstance(source, Tensor) else source
    text = model_text(live, source)
    if len(text) > 1 or text.hidden is not None:
        seen = f"{len(text)} sequences" if len(text) > 1 else "a mask with a gap"
        what = "The source of a patch must be one sequence without hidden tokens."
        raise BadArgument(what, seen=seen)
    patch = plan_patch(RotationProbe(live), text, planes=planes, heads=heads, of=of)
    patch = replace(patch, pairs=position_pairs(positions, text.context))
    with live.silence(patch.outputs), live.patch(patch):
        yield


def plan_patch(
    rotation: RotationProbe,
    text: Text,
    *,
    heads: str,
    planes: Selection | None = None,
    of: PatchedPart = "both",
) -> "PlanePatch":
    """A patch from the source `text`, which runs, at all positions; checks its arguments."""
    if of not in UNROTATED:
        _, chosen = place_edit(rotation, stop(planes or PlaneNumbers(()), heads=heads))
    elif planes is not None:
        what = f"The {of} of a head has no planes, because it does not rotate."
        raise BadArgument(what, hint="no planes=")
    else:
        chosen = heads_by_layer(
            heads, rotation.live.attending_heads, rotation.kind_names
        )
    pairs, vectors = (
        position_pairs(None, text.context),
        read_source(rotation, text, chosen, of),
    )
    return PlanePatch(rotation, chosen, planes, of, pairs, vectors)


# By layer: "query", "key", "value" and "output" [1, head, position, coordinate] of a source,
# and "angle" (rad), the rotation of each plane [_, position, frequency]
SourceVectors = dict[tuple[int, str], Tensor]


def read_source(
    rotation: RotationProbe, text: Text, chosen: HeadMask, part: PatchedPart
) -> SourceVectors:
    """Read the vectors of the layers with chosen heads in one pass, which changes nothing."""
    source: SourceVectors = {}

    def record(
        layer: int, side: AttentionInput, x: Tensor, tokens: Tensor, positions: Tensor
    ) -> Tensor:
        if chosen[layer].any():
            source[layer, side] = x.detach()
            if side == "query" and part not in UNROTATED:
                planes = rotation.planes_now(layer, continued=False)
                source[layer, "angle"] = _angles(positions, planes)
        return x

    live = rotation.live
    with live.patch(record):
        outputs = live.record_calls(
            text.ids, lambda call: call.output, hidden=text.hidden
        )
    for layer in chosen.any(1).nonzero().flatten().tolist():
        source[layer, "output"] = outputs[layer].transpose(1, 2)
    return source


def _angles(
    positions: Int[Tensor, "_ place *axis"], planes: Planes
) -> Float[Tensor, "_ place frequency"]:
    inv_freq = planes.inv_freq.to(positions.device, torch.float32).nan_to_num()
    return positions_by_plane(positions, planes).float() * inv_freq


def position_pairs(
    positions: Sequence[int] | Mapping[int, int] | None, length: int
) -> tuple[Int[Tensor, " pair"], Int[Tensor, " pair"]]:
    """The patched positions, and the position in a source of `length` tokens for each."""
    positions = range(length) if positions is None else positions
    pairs = (
        dict(positions) if isinstance(positions, Mapping) else {p: p for p in positions}
    )
    if not pairs or min(*pairs, *pairs.values()) < 0 or max(pairs.values()) >= length:
        what = "Positions to patch must exist in both sequences, counted from 0."
        raise BadArgument(what, seen=f"{pairs}; the source has {length} tokens"[:200])
    return torch.tensor([*pairs]), torch.tensor([*pairs.values()])


@dataclass(frozen=True)
class PlanePatch:
    """A hook (see `InputPatch`) that puts vectors of the source at `pairs`."""

    rotation: RotationProbe
    chosen: HeadMask
    select: Selection | None
    part: PatchedPart
    pairs: tuple[Int[Tensor, " pair"], Int[Tensor, " pair"]]
    source: SourceVectors

    def __call__(
        self,
        layer: int,
        side: AttentionInput,
        x: Tensor,
        tokens: Tensor,
        positions: Tensor,
    ) -> Tensor:
        sides = ("query", "key") if self.part == "both" else (self.part,)
        live, count = self.rotation.live, tokens.shape[1]
        heads = self.chosen[layer][live.attending_heads[layer]]
        if (
            self.part not in UNROTATED
        ):  # raises an error if cached keys rotated differently
            continued = bool(tokens[:, 0].any())
            planes = self.rotation.planes_now(layer, continued=continued)
        if side == "key":
            _check_first_token(positions[:, 0] >= 0)
        if side not in sides or not heads.any():
            return x
        by_key = heads.unflatten(0, (x.shape[1], -1))
        if not by_key[
            by_key.any(1)
        ].all():  # heads of a group differ: a vector for each head
            x = x.repeat_interleave(by_key.shape[1], dim=1)
            by_key = heads[:, None]
        patched_heads = by_key.any(1).nonzero().flatten()
        patched, in_source = self._in_source(tokens.to(x.device))
        (vectors,) = self.source[layer, side]
        vectors = vectors.repeat_interleave(x.shape[1] // len(vectors), dim=0)[
            patched_heads
        ]
        new, old = vectors[:, in_source].transpose(0, 1), x[:, patched_heads, :count]
        if side != "value":
            angle = _angles(positions[:, :count], planes)
            angle = angle - self.source[layer, "angle"][0, in_source]
            new = rotate_by(new.expand(len(angle), -1, -1, -1), angle[:, None], planes)
            if self.select is not None:
                coordinates = pad(self.select(planes), (0, 1))[planes.term_of].to(
                    x.device
                )
                new = torch.where(coordinates, new, old)
        x = x.clone()
        x[:, patched_heads, :count] = torch.where(patched[:, None, :, None], new, old)
        return x

    def outputs(
        self, layer: int, output: Tensor, real: Tensor, tokens: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """The hook that replaces the outputs of the chosen heads; see `HeadSilence`."""
        heads, tokens = self.chosen[layer][: output.shape[2]], tokens.to(output.device)
        _check_first_token(real[:, 0].to(tokens.device) | (tokens[:, 0] > 0))
        if self.part != "output" or not heads.any():
            return None
        patched, in_source = self._in_source(tokens)
        new = self.source[layer, "output"][0][:, in_source].permute(1, 2, 0, 3)
        return heads, torch.where(patched[..., None, None], new, output)

    def _in_source(
        self, tokens: Int[Tensor, "_ token"]
    ) -> tuple[Bool[Tensor, "_ token"], Int[Tensor, "_ token"]]:
        """Whether each token is patched, and its position in the source."""
        patched, in_source = self.pairs
        table = torch.full((int(patched.max()) + 2,), -1).index_copy(
            0, patched, in_source
        )
        index = table.to(tokens.device)[tokens.clamp(max=len(table) - 1)]
        return index >= 0, index.clamp(min=0)


def _check_first_token(real: Bool[Tensor, "*axis"]) -> None:
    if not real.all():
        what = "Patches count positions from the first token, which here is padding."
        raise BadArgument(what, hint="prompts of one length, or one prompt at a time")
