"""The error that says what did not fit into memory, and what helps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ropelens.errors import BadArgument, words_of


@contextmanager
def explain_full_memory(what: str, *, seen: str, attempt: str) -> Iterator[None]:
    """Turn torch's errors over full memory in the block into one that says what helps.

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
