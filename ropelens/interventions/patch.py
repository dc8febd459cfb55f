"""Patches: chosen planes of chosen heads take queries and keys from another prompt."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Integer
from torch import Tensor

from ropelens.arguments import public
from ropelens.errors import BadArgument
from ropelens.interventions.plane_patch import (
    UNROTATED,
    PatchedPart,
    PlanePatch,
    PositionPairs,
    read_source,
)
from ropelens.interventions.rotation_edit import place_planes
from ropelens.measured_rotation.probe import RotationProbe
from ropelens.model.as_live_model import Model, as_live_model
from ropelens.profiles.checked_text import model_text
from ropelens.rope.select import ALL_HEADS, PlaneNumbers, Selection, heads_by_layer
from ropelens.text.text import Text
from ropelens.text.tokenize import prompt_tokens

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
    if isinstance(source, Tensor):
        source = torch.atleast_2d(source)
    text = model_text(live, source)
    if len(text) > 1 or text.hidden is not None:
        seen = f"{len(text)} sequences" if len(text) > 1 else "a mask with a gap"
        what = "The source of a patch must be one sequence without hidden tokens."
        raise BadArgument(what, seen=seen)
    patch = plan_patch(RotationProbe(live), text, planes=planes, heads=heads, of=of)
    pairs = PositionPairs.of(positions, text.context)
    with live.intervene(replace(patch, pairs=pairs)):
        yield


def plan_patch(
    rotation: RotationProbe,
    text: Text,
    *,
    heads: str,
    planes: Selection | None = None,
    of: PatchedPart = "both",
) -> PlanePatch:
    """A patch from the source `text`, which runs, at all positions; checks its arguments."""
    if of not in UNROTATED:
        chosen = place_planes(rotation, planes or PlaneNumbers(()), heads)
    elif planes is not None:
        what = f"The {of} of a head has no planes, because it does not rotate."
        raise BadArgument(what, hint="no planes=")
    else:
        attending = rotation.live.attending_heads
        chosen = heads_by_layer(heads, attending, rotation.kind_names)
    return PlanePatch(
        rotation,
        chosen,
        select=planes,
        part=of,
        pairs=PositionPairs.of(None, text.context),
        source=read_source(rotation, text, chosen, of),
    )
