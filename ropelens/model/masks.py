"""Rows and keys that an attention mask hides."""

from typing import NoReturn

import torch
from jaxtyping import Bool
from torch import Tensor

from ropelens.attention.visibility import Visibility
from ropelens.errors import UnsupportedModel


def shown(mask: Tensor) -> Bool[Tensor, "..."]:
    """Keys that a mask shows; a mask is boolean or is added to the scores."""
    return mask if mask.dtype == torch.bool else mask > -1


def visible_keys(rows: range, mask: Tensor | None, window: int | None) -> Visibility:
    """The keys that each row sees, read from the mask of the model."""
    if mask is None:
        return Visibility.causal(rows, window=window)
    if not isinstance(mask, Tensor) or mask.ndim != 4:
        refuse_hidden_mask(type(mask).__name__)
    visible = shown(mask[:, 0, : len(rows), : rows.stop]).expand(-1, len(rows), -1)
    return Visibility.from_mask(visible, rows)


def real_rows(rows: range, mask: Tensor | None) -> Bool[Tensor, "_ row"]:
    """Whether each row is a token: it sees its own key, or any key of a sparse mask."""
    if mask is None:
        return torch.ones(1, len(rows), dtype=torch.bool, device="cpu")
    if mask.ndim == 2:  # one value for each key, as in flash attention
        return mask[:, rows.start : rows.stop].bool()
    visible = shown(mask[:, 0, : len(rows)])
    own_keys = visible[..., rows.start : rows.stop]
    sees_itself = own_keys.diagonal(dim1=1, dim2=2)
    if bool(sees_itself.all()):
        return sees_itself
    # A row of a sparse mask may see a key that the row before it does not see.
    newly_seen = ~own_keys[:, :-1] & own_keys[:, 1:]
    is_sparse = len(rows) == 1 or bool(newly_seen.tril().any())
    return visible.any(-1) if is_sparse else sees_itself


def only_hides_keys(mask: Tensor | None) -> bool:
    """Whether a mask is the same for all heads, and adds nothing to scores of visible keys."""
    if mask is None:
        return True
    is_alike = mask.shape[1] == 1 or bool((mask == mask[:, :1]).all())
    if not is_alike or mask.dtype == torch.bool:
        return is_alike
    return bool(((mask == 0) | (mask < -1e4)).all())


def refuse_hidden_mask(seen: str) -> NoReturn:
    raise UnsupportedModel(
        "This attention implementation hides its mask.",
        seen=seen,
        hint='load the model with attn_implementation="sdpa" or "eager"',
    )
