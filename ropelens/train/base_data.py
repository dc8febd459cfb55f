"""Data of a recalibration: a folder that the runs of a study share.

It contains data.json, train.npy, valid.npy and valid_documents.npy, which has the number of the
document in which each validation sequence begins.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from filelock import FileLock
from jaxtyping import Int

from ropelens.errors import BadArgument, BadText
from ropelens.intervals import ENOUGH_DOCUMENTS
from ropelens.runtime.keys import Key
from ropelens.runtime.records import log_line, read_json, write_json
from ropelens.text.documents import documents_sha256
from ropelens.text.tokenize import check_tokenizer, first_tokens
from ropelens.train.base_model import Base
from ropelens.train.data import (
    DATA,
    Documents,
    cut_stream,
    held_out_sequences,
    require_own_folder,
    require_sequences,
    tokens_of,
    write_sequences,
)
from ropelens.train.held_out import Split, Tokens, hold_out
from ropelens.train.recalibration_settings import Recalibration
from ropelens.train.run_folder import LOCK, make_folder

MOST_HELD_OUT = 0.5
"""At most half of the text is held out as whole documents."""

DOCUMENTS = "valid_documents.npy"


def prepare_base_data(
    folder: Path, texts: Documents, base: Base, settings: Recalibration
) -> dict[str, Any]:
    """Tokenize `texts` into `folder` if needed; return the contents of data.json.

    Raises `BadArgument` for a folder of other data, and `BadText` if the text is too short, or
    if the held-out text has too few documents.
    """
    tokenizer: Any = base.opened.tokenizer
    check_tokenizer(tokenizer)
    begin = first_tokens(tokenizer)
    assert settings.context is not None
    if settings.context < len(begin) + 2:
        fault = f"A context of {settings.context} tokens leaves no room for the text."
        raise BadArgument(fault, hint=f"--context {len(begin) + 2} or more")
    validation = texts.validation
    key = {
        "base": base.fingerprint,
        "context": settings.context,
        "beginning": begin,
        "text_sha256": documents_sha256(texts.training),
        "valid_sha256": documents_sha256(validation) if validation else None,
    }
    path = folder / DATA
    require_own_folder(folder)
    make_folder(folder)
    with FileLock(folder / LOCK):
        if not path.exists():
            validated_on = _write_data(folder, texts, base, begin, settings)
            written = {"stages": ["train.npy"], "validation": validated_on}
            write_json(path, key | written)
    record = read_json(path)
    Key(key).require(record, what=f"the data in {folder}")
    return record


def _write_data(
    folder: Path,
    texts: Documents,
    base: Base,
    begin: Sequence[int],
    settings: Recalibration,
) -> str:
    """Write the arrays, and return words for the held-out text."""
    context = settings.context
    assert context is not None
    log_line("tokenizing the text")
    least = ENOUGH_DOCUMENTS * context
    split = _split(texts, base.opened.tokenizer, least=least)
    training = cut_stream(split.training, begin=begin, context=context)
    validation = cut_stream(split.validation, begin=begin, context=context)
    documents = documents_of_rows(split.validation, body=context - len(begin))
    require_sequences("valid.npy", validation, least=ENOUGH_DOCUMENTS)
    _require_documents(documents)
    _require_known(training, base)
    _require_known(validation, base)
    write_sequences(folder / "train.npy", training, least=settings.sequences)
    write_sequences(folder / "valid.npy", validation, least=ENOUGH_DOCUMENTS)
    np.save(folder / DOCUMENTS, documents)
    log_line(f"validation: {split.validated_on}")
    return split.validated_on


def _split(texts: Documents, tokenizer: Any, *, least: int) -> Split:
    """Tokens to train on, and held-out tokens."""
    training = tokens_of(texts.training, tokenizer)
    if not texts.validation:
        return hold_out(
            training,
            least=least,
            most=MOST_HELD_OUT,
            marked_ends=tokenizer.eos_token_id is not None,
        )
    validation = tokens_of(texts.validation, tokenizer)
    return Split(training, validation, validated_on="documents of --valid")


def documents_of_rows(
    documents: Sequence[Tokens], *, body: int
) -> Int[np.ndarray, " sequence"]:
    """Index of the document in which each sequence of `body` tokens of the stream begins."""
    ends = np.cumsum([len(document) for document in documents])
    total = int(ends[-1]) if len(ends) else 0
    starts = body * np.arange(total // body)
    return np.searchsorted(ends, starts, side="right")


def _require_documents(documents: Int[np.ndarray, " sequence"]) -> None:
    """Raise `BadText` if the sequences begin in too few documents for an interval."""
    found = len(np.unique(documents))
    if found < ENOUGH_DOCUMENTS:
        raise BadText(
            f"Intervals need {ENOUGH_DOCUMENTS} held-out documents or parts of documents.",
            seen=f"{found} in {len(documents):,} held-out sequences",
            hint="a file for each chapter, or more files",
        )


def _require_known(rows: Int[np.ndarray, "sequence position"], base: Base) -> None:
    """Raise `BadText` if the tokenizer gives tokens that the model does not have."""
    vocabulary = base.opened.config.get_text_config().vocab_size
    largest = int(rows.max(initial=0))
    if largest >= vocabulary:
        raise BadText(
            f"The tokenizer of {base.name} gives tokens that the model does not have.",
            seen=f"token {largest:,}, and a vocabulary of {vocabulary:,}",
            hint="the tokenizer with which the model was trained",
        )


@dataclass(frozen=True)
class HeldOut:
    """Held-out sequences [sequence, position], and their document numbers."""

    rows: np.ndarray
    documents: Int[np.ndarray, " sequence"]


def all_held_out(folder: Path) -> HeldOut:
    """All held-out sequences of the data in `folder`."""
    return HeldOut(held_out_sequences(folder), np.load(folder / DOCUMENTS))


def held_out(folder: Path, *, sequences: int) -> HeldOut:
    """At most `sequences` held-out sequences, evenly from all documents, in their order."""
    everything = all_held_out(folder)
    rows = everything.rows
    documents = everything.documents
    order = np.random.default_rng(0).permutation(len(rows))
    in_order = pd.Series(documents[order])
    # The first drawn sequences of all documents come first
    turn = in_order.groupby(in_order).cumcount()
    drawn = order[turn.argsort(kind="stable")[:sequences]]
    chosen = np.sort(drawn)
    return HeldOut(rows[chosen], documents[chosen])
