"""The check that a model knows how sequences begin: with BOS, or with the text."""

import warnings

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ropelens.intervals import paired_interval
from ropelens.model.live_model import LiveModel
from ropelens.text.text import Text
from ropelens.text.tokenize import Bos, first_tokens, name_beginning

SEQUENCES = 4
SKIPPED = 8  # tokens after the beginning, of which any model knows little
LONGEST = 16  # the compared tokens are at least this part of the context
FEWEST = 32  # compared tokens of a sequence
CLEAR = 0.1  # nats/token


def warn_of_beginning(live: LiveModel, text: Text, *, bos: Bos) -> None:
    """Warn if the model predicts the text better when its sequences begin otherwise.

    The losses of `SEQUENCES` sequences are compared, on the same tokens. The mean must differ
    by more than `CLEAR`, and its 95 % interval must not contain 0. The comparison costs less
    than a hundredth of a profile of 32 sequences.
    """
    tokenizer = live.tokenizer
    if tokenizer is None:
        return
    begin = first_tokens(tokenizer, bos)
    words = name_beginning(begin, tokenizer)
    if text.beginning != words:
        return  # the tokens were given, and began in their own way
    other: Bos = "never" if begin else "always"
    other_begin = first_tokens(tokenizer, other)
    rows = _compared_rows(text, begin=len(begin))
    if begin == other_begin or not rows.numel():
        return
    if max(*begin, *other_begin, int(text.ids.max())) >= live.vocabulary:
        return  # unknown tokens, which are refused later if they are in the text
    losses = _losses(live, rows, begin)
    other_losses = _losses(live, rows, other_begin)
    gain, low, _ = paired_interval(losses - other_losses)
    if gain > CLEAR and low > 0:
        warnings.warn(
            f"each sequence {words}, and the model predicts the text better if it "
            f"{name_beginning(other_begin, tokenizer)}: {other_losses.mean():.2f} instead "
            f"of {losses.mean():.2f} nats/token on {len(rows)} short sequences "
            f"(--bos {other})",
            stacklevel=2,
        )


def _compared_rows(text: Text, *, begin: int) -> Int[Tensor, "sequence position"]:
    """The first tokens of some long sequences, without their beginning."""
    length = SKIPPED + max(FEWEST, text.context // LONGEST)
    length = min(length, text.context - begin - 1)
    if length <= SKIPPED:
        return text.ids[:0]
    is_long = text.lengths >= begin + length
    return text.ids[is_long][:SEQUENCES, begin : begin + length]


def _losses(
    live: LiveModel, rows: Int[Tensor, "sequence position"], begin: list[int]
) -> Float[np.ndarray, " token"]:
    """Losses of the compared tokens in nats, if sequences begin with these tokens."""
    special = torch.tensor(begin, dtype=torch.long, device="cpu")
    tokens = torch.cat([special.expand(len(rows), -1), rows], dim=1)
    lengths = torch.full((len(rows),), tokens.shape[1], dtype=torch.long, device="cpu")
    with live.without_hooks():
        losses = live.losses(tokens, lengths)
    return losses[:, len(begin) + SKIPPED :].flatten().numpy()
