"""What is said where memory runs out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ropelens.errors import BadArgument, words_of


@contextmanager
def explain_full_memory(what: str, *, seen: str, attempt: str) -> Iterator[None]:
    """Turn what torch raises when memory runs out in the block into what helps.

    Raises:
        BadArgument: `what` does not fit.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        known = isinstance(error, (MemoryError, torch.OutOfMemoryError))
        if not known and "can't allocate memory" not in str(error):
            raise
        raise BadArgument(
            f"{what} does not fit into memory.",
            seen=f"{seen}; {words_of(error)}",
            attempt=attempt,
        ) from error
