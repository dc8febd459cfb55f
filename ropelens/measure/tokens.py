"""Tokens as users give them become a `Corpus`, or an error that says what is wrong."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral

from numpy.typing import ArrayLike
from transformers import PreTrainedModel

from ropelens.errors import BadArgument, check_count
from ropelens.models.tokens import check_tokens, integers
from ropelens.statistics.corpus import Corpus
from ropelens.statistics.groups import Documents
from ropelens.statistics.rows import HowMany


def as_corpus(
    model: PreTrainedModel,
    tokens: ArrayLike,
    lengths: ArrayLike | None,
    *,
    documents: Documents | None = None,
    sinks: Iterable[int] = (),
    rows: HowMany = "auto",
    batch_size: int | None = None,
) -> Corpus:
    """The sequences that `model` is to run; `sinks` are ids of tokens that are sinks.

    Raises `BadArgument` for what is out of range, saying which.
    """
    vocabulary = model.config.get_text_config().vocab_size
    tokens, lengths = check_tokens(tokens, lengths, vocabulary=vocabulary)
    named = integers(list(sinks) if isinstance(sinks, Iterable) else sinks, "sinks")
    if named.ndim != 1 or ((named < 0) | (named >= vocabulary)).any():
        raise BadArgument(
            "sinks are ids of tokens.", seen=repr(sinks), means=f"0 to {vocabulary - 1}"
        )
    if documents is not None:
        documents = integers(documents, "documents")
    check_rows(rows, batch_size)
    bos = model.config.get_text_config().bos_token_id
    return Corpus.of(tokens, lengths, bos=bos, documents=documents, named=named.tolist())


def check_rows(rows: HowMany, batch_size: int | None) -> None:
    """Raise `BadArgument` for a number of rows, or of sequences in a batch, out of range."""
    if rows not in ("auto", "all") and (not isinstance(rows, Integral) or rows < 1):
        raise BadArgument('rows must be "auto", "all" or a number, 1 or more.', seen=repr(rows))
    if batch_size is not None:
        check_count("batch_size", batch_size, least=1)
