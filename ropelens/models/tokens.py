"""Token ids to run a model on: checked, or read from a file."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import ArrayLike
from torch import Tensor

from ropelens.errors import BadArgument, BadText, words_of
from ropelens.models.paths import check_ids_file
from ropelens.models.texts import Sequences, pad_sample

LARGEST_ID = 2**31


def check_tokens(
    tokens: ArrayLike,
    lengths: ArrayLike | None,
    *,
    vocabulary: int,
) -> tuple[Int[Tensor, "sequence position"], Int[Tensor, " sequence"]]:
    """`tokens` and `lengths` as tensors (lengths on the CPU); without `lengths` all count.

    `vocabulary` is the number of ids that the model knows.

    Raises `BadArgument` for tokens or lengths out of range.
    """
    tokens = integers(tokens, "tokens")
    if tokens.ndim != 2 or tokens.shape[0] < 1 or tokens.shape[1] < 3:
        raise BadArgument(
            "tokens must be a table of sequences of at least 3 tokens.",
            seen=f"shape {tuple(tokens.shape)}",
            attempt="tokens[sequence, position], for one sequence tokens[None]",
        )
    if int(tokens.min()) < 0 or int(tokens.max()) >= vocabulary:
        raise BadArgument(
            "Some tokens are not in the model's vocabulary.",
            seen=f"ids {int(tokens.min())} to {int(tokens.max())}, vocabulary {vocabulary}",
            attempt="the tokenizer that belongs to the model",
        )
    if lengths is None:
        return tokens, torch.full(tokens.shape[:1], tokens.shape[1])
    lengths = integers(lengths, "lengths").cpu()
    fit = lengths.shape == tokens.shape[:1]
    if not fit or int(lengths.min()) < 2 or int(lengths.max()) > tokens.shape[1]:
        raise BadArgument(
            "lengths must say, for every sequence, how many of its tokens count (2 or more).",
            seen=f"lengths {lengths.tolist()} for tokens of shape {tuple(tokens.shape)}"[:200],
        )
    return tokens, lengths


def integers(values: ArrayLike, what: str) -> Int[Tensor, "*shape"]:
    """`values` as whole numbers, or `BadArgument`."""
    try:
        given = values if isinstance(values, Tensor) else np.asarray(values, order="C")
        tensor = torch.as_tensor(given)
        whole = not tensor.is_floating_point() or not tensor.numel()
    except (TypeError, ValueError, RuntimeError):  # texts, rows of different lengths
        whole = False
    if not whole:
        raise BadArgument(f"{what} must be whole numbers.", seen=repr(values)[:80])
    return tensor.long()


def read_ids(
    path: str | Path, *, context: int, sequences: int | None = None, seed: int = 0
) -> Sequences:
    """The token ids in a `.npy` file, cut into sequences of up to `context` tokens.

    It holds whole numbers [sequence, position], or one sequence. No BOS is added, nothing is
    unpickled, and sequences of fewer than 2 tokens are dropped. `sequences=N` draws N, as
    `tokenize` does.

    Raises BadText for a file that does not exist, or holds no ids.
    """
    path = Path(path)
    check_ids_file(path, None)
    try:
        array = np.load(path, allow_pickle=False)
        if array.dtype.kind not in "iu" or array.ndim not in (1, 2):
            raise ValueError(f"{array.dtype} of shape {array.shape}")
    except (ValueError, OSError, EOFError) as error:
        raise BadText(
            f"{path} holds no token ids.",
            seen=words_of(error),
            attempt="an array of whole numbers [sequence, position]; text goes to --text",
        ) from error
    rows = torch.from_numpy(np.atleast_2d(array).astype(np.int64))
    cut = [[part for part in row.split(context) if len(part) >= 2] for row in rows]
    if not any(cut):
        raise BadText(f"{path} holds no sequence of 2 tokens or more.")
    tokens, lengths, _ = pad_sample(cut, sequences, seed)
    total = sum(map(len, cut))
    source = f"{len(tokens):,} of {total:,} sequences of token ids, up to {context:,} each"
    return Sequences(tokens, lengths, hashlib.sha256(path.read_bytes()).hexdigest(), source)
