"""Which sequences are drawn together when text is drawn again: documents, or stretches of one.

Sequences of one document are alike, so that intervals which draw sequences one by one are far
too narrow for any other text.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from ropelens.errors import BadArgument
from ropelens.statistics.intervals import ENOUGH_DOCUMENTS

Documents = Int[Tensor, " _"] | Int[np.ndarray, " _"] | Sequence[int]
"""The number of the document that each sequence was cut from."""

GROUPS = 64
"""Groups at most: of more documents, neighbours share one."""

BLOCKS = 16
"""Stretches of neighbouring sequences that a text of few documents is dealt to, at most."""


def deal(documents: Documents | None, sequences: int) -> Int[Tensor, " sequence"]:
    """The group of each sequence, from the document that it was cut from.

    Groups are documents where there are 8 or more, else stretches of neighbouring sequences.
    """
    shape = (sequences,) if documents is None else torch.as_tensor(documents).shape
    if shape != (sequences,):
        raise BadArgument(
            "documents says, for every sequence, which document it was cut from.",
            seen=f"{tuple(shape)} numbers for {sequences} sequences",
        )
    if count_documents(documents) >= ENOUGH_DOCUMENTS:
        _, rank = torch.unique(torch.as_tensor(documents).cpu(), return_inverse=True)
        count = int(rank.max()) + 1
        return rank * min(count, GROUPS) // count
    blocks = min(sequences, BLOCKS)
    return torch.arange(sequences) * blocks // sequences


def count_documents(documents: Documents | None) -> int:
    """Number of different documents; 0 where it is not known."""
    return 0 if documents is None else len(torch.as_tensor(documents).unique())
