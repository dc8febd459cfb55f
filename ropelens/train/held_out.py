"""Documents, or parts of all documents, that are held out for validation."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ropelens.intervals import ENOUGH_DOCUMENTS

SHARE = 0.02
"""Share of the tokens that is held out."""

LEAST_SHARE = 0.01  # held-out documents have this share of the tokens
MOST_SHARE = 0.1  # unless another share is given

Tokens = np.ndarray  # unsigned integers, of one document


@dataclass(frozen=True)
class Split:
    """Documents, or parts of documents, to train on and to validate on."""

    training: list[Tokens]
    validation: list[Tokens]
    validated_on: str


def hold_out(
    documents: Sequence[Tokens],
    *,
    least: int,
    most: float = MOST_SHARE,
    marked_ends: bool = True,
) -> Split:
    """Hold out about 2 % of the tokens of all documents, and at least `least` tokens.

    These are whole documents at even distances if there are enough documents: 8 or more are
    held out, and they have 1 % of all tokens or more. Neither their number nor their tokens
    exceed the share `most`. Otherwise it is the end of each document. With `marked_ends`, the
    last token of each document is an end of text, which the rest of the document then also has.
    """
    numbers = _whole_documents(documents, least=least, most=most)
    if numbers:
        return _split_off(documents, numbers)
    return _split_ends(documents, least=least, marked_ends=marked_ends)


def _whole_documents(
    documents: Sequence[Tokens], *, least: int, most: float
) -> list[int]:
    """Numbers of the documents to hold out, or [] if their number or length does not fit."""
    count = max(ENOUGH_DOCUMENTS, round(SHARE * len(documents)))
    if count > most * len(documents):
        return []
    places = np.linspace(0, len(documents) - 1, count)
    numbers = places.round().astype(int).tolist()
    total = sum(map(len, documents))
    held = sum(len(documents[number]) for number in numbers)
    fits = max(least, LEAST_SHARE * total) <= held <= most * total
    return numbers if fits else []


def _split_off(documents: Sequence[Tokens], numbers: list[int]) -> Split:
    """Hold out the documents with these numbers."""
    held = set(numbers)
    training = []
    validation = []
    for number, document in enumerate(documents):
        if number in held:
            validation.append(document)
        else:
            training.append(document)
    return Split(
        training,
        validation,
        validated_on=f"{len(validation):,} whole documents of {len(documents):,}",
    )


def _split_ends(documents: Sequence[Tokens], *, least: int, marked_ends: bool) -> Split:
    """Hold out the end of each document."""
    total = sum(map(len, documents))
    share = min(1.0, max(SHARE, least / max(1, total)))
    training = []
    validation = []
    for document in documents:
        held = math.ceil(share * len(document))
        start = len(document) - held
        rest = document[:start]
        if marked_ends:
            rest = np.concatenate([rest, document[-1:]])
        training.append(rest)
        validation.append(document[start:])
    which = (
        "the document"
        if len(documents) == 1
        else f"each of {len(documents):,} documents"
    )
    return Split(
        training,
        validation,
        validated_on=f"the last {share:.1%} of {which}",
    )
