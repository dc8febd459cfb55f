"""How the gains of the models share out the bits of a head; for tensors and arrays alike."""

from __future__ import annotations

from typing import Any

from jaxtyping import Float


def split_bits(
    total: Float[Any, "*shape"],
    sink: Float[Any, "*shape"],
    position: Float[Any, "*shape"],
    still: Float[Any, "*shape"],
) -> tuple[Any, Any, Any]:
    """Sink, position and content bits, from the gains of the models: tensors or arrays.

    What the offset explains and the head would do just as well without its rotation
    (gain `still`) is not positional: the overlap of the two gains, which together exceed
    what there is, moves from position to content.
    """
    overlap = (position + still.clip(min=0) - (total - sink)).clip(min=0)
    position = position - overlap
    return sink, position, total - sink - position
