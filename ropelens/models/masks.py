"""What an attention call says of its rows: the keys that each sees, positions, padding."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ropelens.errors import UnsupportedModel
from ropelens.statistics.call import sees


def own_keys(rows: int, keys: int, mask: Tensor | None, implementation: str) -> range:
    """Which of the keys are those of the rows themselves.

    A cache holds the past too, a static one also places that are still empty: the last row
    sees its own key last.
    """
    last = keys - 1
    if rows < keys and mask is None and rows > 1 and implementation == "sdpa":
        last = rows - 1  # it leaves the mask out where the cache was empty
    elif rows < keys and mask is not None and mask.ndim == 4:
        last = int(_visible(mask[:, 0, -1, :keys]).any(0).nonzero().max())
    return range(last + 1 - rows, last + 1)


def positions(
    own: range, keys: int, position_ids: Tensor | None, device: torch.device
) -> tuple[Int[Tensor, "_ row"], Int[Tensor, "_ key"]]:
    """Positions of queries and keys, up to a shift that a sequence has in common.

    Models that keep `position_ids` to themselves count from 0.
    """
    index = torch.arange(keys, device=device)[None]
    if position_ids is None or position_ids.ndim != 2:
        return index[:, own.start : own.stop], index
    position_ids = position_ids[:, -len(own) :]  # of all tokens, of which some rows are asked
    if len(own) == keys:
        return position_ids, position_ids
    return position_ids, index + (position_ids[:, -1:] - own[-1])


def real_rows(own: range, mask: Tensor | None) -> Bool[Tensor, "_ row"]:
    """Which rows are tokens, not padding, as far as the mask says: a token sees itself."""
    if mask is None:
        return torch.ones(1, len(own), dtype=torch.bool)
    if mask.ndim == 2:  # of keys alone, as flash attention takes it
        return mask[:, own.start : own.stop].bool()
    return _visible(mask[:, 0, :, own.start : own.stop]).diagonal(dim1=1, dim2=2)


def visible_keys(
    own: range, mask: Tensor | None, window: int | None
) -> tuple[Int[Tensor, "*sequence position"] | None, Bool[Tensor, "batch row key"] | None]:
    """First key that each row sees; which keys instead, where they are not all up to its own.

    Read from the mask that the model was about to use. There is one row of first keys for all
    sequences, or one each where padding on the left tells them apart.
    """
    if mask is None:
        window = window or own.stop
        return (torch.arange(own.start, own.stop) - window + 1).clamp_min(0), None
    if not isinstance(mask, Tensor) or mask.ndim != 4:
        raise hidden_mask(type(mask).__name__)
    return between(_visible(mask[:, 0, : len(own), : own.stop]).expand(-1, len(own), -1), own)


def between(
    visible: Bool[Tensor, "batch row key"], own: range
) -> tuple[Int[Tensor, "*sequence position"] | None, Bool[Tensor, "batch row key"] | None]:
    """First key of each row; `visible` instead where a row does not see all up to its own.

    One row of first keys for all sequences where they are alike.
    """
    start = visible.byte().argmax(dim=-1).cpu()
    row, key = torch.arange(own.start, own.stop), torch.arange(own.stop)
    interval = sees(start, row.expand_as(start), key).to(visible.device)
    of_padding = ~visible.any(-1, keepdim=True)
    if not bool(((visible == interval) | of_padding).all()):
        return None, visible
    return start[0] if bool((start == start[0]).all()) else start, None


def hidden_mask(seen: str) -> UnsupportedModel:
    """The error over an attention implementation whose mask cannot be read."""
    return UnsupportedModel(
        "This attention implementation hides its mask.",
        seen=seen,
        attempt='load the model with attn_implementation="sdpa" or "eager"',
    )


def _visible(mask: Tensor) -> Bool[Tensor, ...]:
    """Where a mask lets a row see a key, whether it is added or says so."""
    return mask if mask.dtype == torch.bool else mask > -1
