"""Chosen planes of chosen heads take queries and keys from another prompt while a block runs.

with rl.patch_planes(model, other_tokens, heads="2.3", of="key", planes=rl.Slowest(0.25)):
    model(tokens)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int, Integer
from torch import Tensor
from torch.nn.functional import pad

from ropelens.errors import BadArgument, public
from ropelens.interventions.edit import placed, stop
from ropelens.model.as_live_model import Model, as_live_model
from ropelens.model.attention_hooks import AttentionInput
from ropelens.profiles.model_text import model_text
from ropelens.rope.planes import Planes
from ropelens.rope.select import ALL_HEADS, PlaneNumbers, Selection
from ropelens.rope.turn import positions_by_plane, rotate_by
from ropelens.rotation.probe import RotationProbe
from ropelens.text.text import Text
from ropelens.text.tokenize import prompt_tokens

Of = Literal["query", "key", "both", "value", "output"]
WHOLE = ("value", "output")  # which do not rotate
Source = Text | str | Integer[Tensor, "*sequence position"] | Mapping[str, Any]


@public
@contextmanager
def patch_planes(
    model: Model,
    source: Source,
    *,
    planes: Selection | None = None,
    heads: str = ALL_HEADS,
    positions: Sequence[int] | Mapping[int, int] | None = None,
    of: Of = "both",
    tokenizer: Any = None,
) -> Iterator[None]:
    """Parts of `heads` are those of the prompt `source` while the block runs.

    Activation patching (Vig et al. 2020, arXiv 2004.12265), plane by plane. `source` is a text,
    tokens [position], or a BatchEncoding of one text; it runs once when the block opens, with
    the edits, silences and patches that are open then, and is patched into every sequence of a
    batch.

    `of` says what is taken: "query", "key", "both", "value", or the "output" of a head before
    the output projection. `planes` chooses planes of queries and keys, such as
    `Slowest(0.25)`; by default their whole vectors are taken, with coordinates that RoPE leaves
    alone. Vectors are turned from where they stood to where they stand now. `heads` is a list
    such as "2.3,4.*" (with grouped keys, query heads: the others keep their keys and values).

    `positions` are places in the sequence, counted from 0, that are patched from the same
    places of `source`, or a mapping {place: place in source}. By default all that both have.

    Blocks nest: edits turn what was patched, and of two patches of one vector the inner counts.
    The model may generate. A patch from the same tokens changes no bit. Restored on exit, on
    errors too.

    Raises `BadArgument` for heads, planes or positions that do not exist, planes of values
    and outputs, several sources, and padding on the left that a call shows; `UnsupportedModel`
    for a model that hides its attention, and on a bridge where heads that share a key differ.
    """
    live = as_live_model(model, tokenizer)
    rotation = RotationProbe(live)
    if of not in WHOLE:
        _, chosen = placed(rotation, stop(planes or PlaneNumbers(()), heads=heads))
    elif planes is not None:
        raise BadArgument(f"A head's {of} does not rotate: it is patched whole.")
    else:
        chosen = live.heads_of(heads)
    if isinstance(source, str):
        source = prompt_tokens(source, live.tokenizer)
    source = torch.atleast_2d(source) if isinstance(source, Tensor) else source
    text = model_text(live, source)
    if len(text) > 1 or text.hidden is not None:
        raise BadArgument(
            "A patch comes from one sequence without hidden tokens.",
            seen=f"{len(text)} sequences" if len(text) > 1 else "a mask with a gap",
        )
    taken = take(rotation, text, chosen, of)
    patch = Patch(rotation, chosen, planes, of, places_of(positions, taken.length), taken)
    with live.silence(patch.outputs), live.patch(patch):
        yield


@dataclass(frozen=True)
class Taken:
    """What chosen layers were given in the source, and what their heads put out.

    `vectors` are [1, head, place, coordinate], outputs among them, by layer and what they are;
    `turned` is the angle of each plane [_, place, frequency] in rad, by layer.
    """

    length: int
    vectors: dict[tuple[int, str], Tensor]
    turned: dict[int, Tensor]


def take(
    rotation: RotationProbe, text: Text, chosen: Bool[Tensor, "layer head"], of: Of
) -> Taken:
    """What chosen heads have in the source: one pass, in which nothing changes."""
    taken = Taken(text.context, {}, {})

    def note(
        layer: int, side: AttentionInput, x: Tensor, places: range, positions: Tensor
    ) -> Tensor:
        if chosen[layer].any():
            taken.vectors[layer, side] = x.detach()
            if side == "query" and of not in WHOLE:
                now = rotation.planes_now(layer, continued=False)
                taken.turned[layer] = _angles(positions, now)
        return x

    live = rotation.live
    with live.patch(note):
        outputs = live.record_calls(text.ids, lambda call: call.output, hidden=text.hidden)
    for layer in chosen.any(1).nonzero().flatten().tolist():
        taken.vectors[layer, "output"] = outputs[layer].transpose(1, 2)
    return taken


def _angles(
    positions: Int[Tensor, "_ place *axis"], planes: Planes
) -> Float[Tensor, "_ place frequency"]:
    """How far each plane has turned."""
    inv_freq = planes.inv_freq.to(positions.device, torch.float32).nan_to_num()
    return positions_by_plane(positions, planes).float() * inv_freq


def places_of(
    positions: Sequence[int] | Mapping[int, int] | None, length: int
) -> tuple[Int[Tensor, " pair"], Int[Tensor, " pair"]]:
    """Places that are patched, and the place in the source for each."""
    if positions is None:
        positions = range(length)
    pairs = dict(positions) if isinstance(positions, Mapping) else {at: at for at in positions}
    if not pairs or min(*pairs, *pairs.values()) < 0 or max(pairs.values()) >= length:
        raise BadArgument(
            "Positions to patch are places in both sequences, counted from 0.",
            seen=f"{pairs}; the source has {length} tokens"[:200],
        )
    return torch.tensor([*pairs]), torch.tensor([*pairs.values()])


@dataclass(frozen=True)
class Patch:
    """What was `taken` of the source, put where `pairs` say; see `InputPatch`."""

    rotation: RotationProbe
    chosen: Bool[Tensor, "layer head"]
    select: Selection | None
    of: Of
    pairs: tuple[Int[Tensor, " pair"], Int[Tensor, " pair"]]
    taken: Taken

    def __call__(
        self, layer: int, side: AttentionInput, x: Tensor, places: range, positions: Tensor
    ) -> Tensor:
        wanted = ("query", "key") if self.of == "both" else (self.of,)
        heads = self.chosen[layer]
        if self.of not in WHOLE:  # queries are refused where keys in a cache turned otherwise
            planes = self.rotation.planes_now(layer, continued=places.start > 0)
        if side == "key":
            _check_first(positions[:, 0] >= 0)
        if side not in wanted or not heads.any():
            return x
        by_key = heads.unflatten(0, (x.shape[1], -1))
        if not by_key[by_key.any(1)].all():  # heads of a group differ: one for each
            x = x.repeat_interleave(by_key.shape[1], dim=1)
            by_key = heads[:, None]
        mine = by_key.any(1).nonzero()
        rows, source = self._within(places)
        new = self._vectors(layer, side, heads=x.shape[1])[:, mine, source]
        if side != "value":
            angle = _angles(positions, planes)[:, rows] - self.taken.turned[layer][:, source]
            new = rotate_by(new.expand(len(angle), -1, -1, -1), angle[:, None], planes)
            if self.select is not None:
                coordinates = pad(self.select(planes), (0, 1))[planes.term_of].to(x.device)
                new = torch.where(coordinates, new, x[:, mine, rows])
        x = x.clone()
        x[:, mine, rows] = new
        return x

    def outputs(
        self, layer: int, output: Tensor, real: Tensor, *, past: int
    ) -> tuple[Tensor, Tensor] | None:
        """What stands in for the outputs of the chosen heads; see `HeadSilence`."""
        heads = self.chosen[layer]
        if past == 0:
            _check_first(real[:, 0])
        if self.of != "output" or not heads.any():
            return None
        rows, source = self._within(range(past, past + output.shape[1]))
        taken = self._vectors(layer, "output", heads=len(heads))
        output = output.clone()
        output[:, rows] = taken[:, :, source].transpose(1, 2)
        return heads, output

    def _within(self, places: range) -> tuple[Tensor, Tensor]:
        """Of the pairs among these places, the index there and the place in the source."""
        at, source = self.pairs
        within = (at >= places.start) & (at < places.stop)
        return at[within] - places.start, source[within]

    def _vectors(self, layer: int, side: str, *, heads: int) -> Tensor:
        """What was taken of a layer, [1, head, place, coordinate]."""
        vectors = self.taken.vectors[layer, side]
        return vectors.repeat_interleave(heads // vectors.shape[1], dim=1)


def _check_first(real: Bool[Tensor, "*each"]) -> None:
    if not real.all():
        raise BadArgument(
            "A patch counts places from the first token, which here is padding.",
            hint="prompts of one length, or one at a time",
        )
