"""What runs learn from: a tokenizer trained once, and text tokenized once, in one folder.

Runs of a study share the folder; a run on its own has it inside.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from ropelens.errors import BadArgument, BadText, words_of
from ropelens.files.folder import make_folder
from ropelens.models.texts import fingerprint_of, read_documents
from ropelens.train.machine import say
from ropelens.train.record import differences, read_json, write_json
from ropelens.train.tokens import (
    AGAIN,
    documents_of,
    open_sequences,
    train_tokenizer,
    write_sequences,
)

VALID_SHARE = 0.02  # of the sequences, where no text of its own is given
LEAST_VALID = 2  # sequences; an interval needs two
DATA = "data.json"
"""The file of the folder that says what it was filled with."""

TOKENIZER_DOCUMENTS = 100_000  # that it is trained on at most
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True)
class Source:
    """Text and how it becomes tokens; `valid` is held out of training.

    `text` and `valid` are files or folders. In place of `text`, `dataset` is a name that
    `datasets.load_dataset` knows (or "name:config"), whose "train" split is streamed until it
    has given `sequences` sequences. In place of both, `tokens` is a folder that is filled
    already: data.json, a tokenizer, valid.npy, and the stages that data.json names.
    """

    text: tuple[Path, ...]
    valid: tuple[Path, ...]
    vocabulary: int
    context: int
    dataset: str | None = None
    sequences: int | None = None
    tokens: Path | None = None


Texts = tuple[list[str], list[str]]
"""Documents to learn from, and those held out."""


def read_texts(source: Source) -> Texts:
    """Read the files of `source`; warn where some text is both learnt from and held out.

    Raises:
        BadText: no such text, not UTF-8, or all that is held out is also learnt from.
    """
    if source.tokens is not None:
        return [], []
    documents, held_out = read_documents(source.text), read_documents(source.valid)
    learnt = set(documents)
    shared = sum(document in learnt for document in held_out)
    if held_out and shared == len(held_out):
        raise BadText(
            "All of the validation text is also text to learn from.",
            means="its loss would not say how the model does on what it has not seen",
            attempt="other --valid text, or none: 2% of the sequences are then held out",
        )
    if shared:
        warnings.warn(
            f"{shared:,} of {len(held_out):,} documents of the validation text are also "
            "learnt from",
            stacklevel=2,
        )
    return documents, held_out


def prepare_data(folder: Path, source: Source, texts: Texts, *, batch: int) -> dict[str, Any]:
    """Fill `folder` from `source`, or see that it is filled from it; what data.json says.

    `texts`: what `read_texts` found of it. Of processes that want the same folder one fills it,
    and the others wait. `batch`: sequences that training needs at least.

    Raises:
        BadText: too little text.
        BadArgument: the folder cannot be made, or holds other text, or a tokenizer that is
            not the one it was filled with.
    """
    if source.tokens is not None:
        return _filled_before(folder, source)
    documents, held_out = texts
    wanted = {
        "vocabulary": source.vocabulary,
        "context": source.context,
        "text_sha256": fingerprint_of(documents),
        "valid_sha256": fingerprint_of(held_out) if held_out else None,
        "dataset": source.dataset,
    }
    make_folder(folder)
    begun = any((folder / name).exists() for name in (DATA, ".lock"))
    if not begun and any(folder.iterdir()):
        raise BadArgument(
            f"{folder} holds files that are not of a run; the tokens would mix with them.",
            attempt="another --out",
        )
    with FileLock(folder / ".lock"):
        path = folder / DATA
        if not path.exists():
            learnt = StreamedText(source.dataset) if source.dataset else documents
            _fill(folder, source, learnt, held_out, batch=batch)
            write_json(path, wanted | {"tokenizer_sha256": _tokenizer_sha256(folder)})
    record = read_json(path)
    wanted["tokenizer_sha256"] = _tokenizer_sha256(folder)
    require_same(record, wanted, what=str(folder))
    return record


def _filled_before(folder: Path, source: Source) -> dict[str, Any]:
    """What data.json says of the tokens in `folder`, which somebody else made."""
    if not (folder / DATA).is_file():
        raise BadArgument(
            f"There are no tokens in {folder}.",
            seen=f"it has no {DATA}",
            attempt="a folder with data.json, a tokenizer and arrays of tokens",
        )
    record = read_json(folder / DATA)
    wanted = {
        "vocabulary": source.vocabulary,
        "context": source.context,
        "tokenizer_sha256": _tokenizer_sha256(folder),
    }
    require_same(
        record, wanted, what=f"the tokens in {folder}", attempt="the settings that they have"
    )
    return record


def require_same(
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    *,
    what: str,
    attempt: str = "the same command as before to resume it, or another folder",
) -> None:
    """Refuse to go on where `now` differs from what was recorded `before`.

    Raises:
        BadArgument: with the values that differ.
    """
    changed = differences(before, now, now, between=", now ")
    if changed:
        raise BadArgument(
            f"{what} was made with other settings.",
            seen=changed,
            attempt=attempt,
        )


def _tokenizer_sha256(folder: Path) -> str:
    for name in TOKENIZER:
        try:
            json.loads((folder / name).read_bytes())
        except (OSError, ValueError) as error:
            raise BadArgument(
                f"{folder / name} is damaged.",
                seen=words_of(error),
                attempt=AGAIN.format(folder),
            ) from error
    return hashlib.sha256((folder / TOKENIZER[0]).read_bytes()).hexdigest()


def _fill(
    folder: Path,
    source: Source,
    documents: Iterable[str],
    held_out: Iterable[str],
    *,
    batch: int,
) -> None:
    """Train the tokenizer, write the token arrays, and see that they are enough."""
    for left in ("train.npy", "valid.npy"):  # by a call that did not come to its end
        (folder / left).unlink(missing_ok=True)
    say("training a tokenizer")
    tokenizer = train_tokenizer(
        itertools.islice(documents, TOKENIZER_DOCUMENTS),
        vocabulary=source.vocabulary,
        context=source.context,
    )
    tokenizer.save_pretrained(folder)
    say("tokenizing the text")

    def write(texts: Iterable[str], name: str) -> int:
        return write_sequences(
            texts, tokenizer, folder / name, context=source.context, most=source.sequences
        )

    count = write(documents, "train.npy")
    # Where no text is given for it, validation takes some of the sequences.
    apart = 0 if held_out else _share_of_validation(count)
    why = "one batch, and validation's share"
    _require("text is too short to train on", count, batch + apart, why, source.context)
    say(
        f"train: {count - apart:,} sequences of {source.context} tokens"
        + (f", and {apart:,} held out for validation" if apart else "")
    )
    if held_out:
        count, why = write(held_out, "valid.npy"), "an interval needs two"
        _require("validation text is too short", count, LEAST_VALID, why, source.context)
        say(f"valid: {count:,} sequences of {source.context} tokens")


def _require(what: str, count: int, least: int, why: str, context: int) -> None:
    """Raise BadText where there are fewer than `least` sequences."""
    if count < least:
        raise BadText(
            f"The {what} at a context of {context:,} tokens.",
            seen=f"{count:,} sequences of {context:,} tokens",
            means=f"at least {least:,} are needed: {why}",
            attempt="pass more text, or a smaller context",
        )


def _share_of_validation(count: int) -> int:
    """How many of `count` sequences are held out where no text is given for it."""
    return max(LEAST_VALID, round(count * VALID_SHARE))


@dataclass(frozen=True)
class StreamedText:
    """The documents of a dataset's "train" split, one at a time, as often as asked for.

    Raises:
        BadText: no such dataset, or none with text, in `datasets`' own words.
    """

    name: str

    def __iter__(self) -> Iterator[str]:
        import datasets  # takes a second, and most runs read files

        name, _, config = self.name.partition(":")
        try:
            rows = datasets.load_dataset(name, config or None, split="train", streaming=True)
            for row in rows:
                if row["text"] is not None:  # an empty cell of a table
                    yield row["text"]
        except (OSError, ValueError, KeyError) as error:
            raise BadText(
                f"The dataset {self.name} cannot be streamed.",
                seen=words_of(error),
                attempt='a name or name:config of `datasets`, with a column "text"',
            ) from error


def copy_tokenizer(data: Path, folder: Path) -> None:
    """Put the tokenizer beside a model, so that the folder loads alone."""
    for name in TOKENIZER:
        shutil.copyfile(data / name, folder / name)


def spread(rows: np.ndarray, count: int) -> np.ndarray:
    """`count` of the rows, or all of fewer, evenly from the first to the last.

    Documents, which follow one another, differ in how hard they are.
    """
    at = np.linspace(0, len(rows) - 1, min(count, len(rows))).round().astype(int)
    return rows[at]


def training_stages(data: Path, *, batch: int, context: int) -> list[np.ndarray]:
    """The sequences to learn from, uint16 [sequence, position], a stage after another.

    Text is one stage, of sequences of `context` tokens. Tokens that were made before may be
    several, some of shorter sequences, `context` a multiple of their length. Each is cut to
    whole steps of `batch` x `context` tokens, so that every step sees as many.

    Raises:
        BadArgument: one of the arrays is missing or damaged, or fills no step.
    """
    record = read_json(data / DATA)
    stages = [open_sequences(data / name) for name in record.get("stages", ["train.npy"])]
    if record["valid_sha256"] is None:
        stages = [rows[: -_share_of_validation(len(rows))] for rows in stages]
    whole = []
    for rows in stages:
        in_step = batch * context // rows.shape[1]
        if context % rows.shape[1] or len(rows) < in_step:
            raise BadArgument(
                f"{data} has a stage that steps of {batch} x {context:,} tokens cannot read.",
                seen=f"{len(rows):,} sequences of {rows.shape[1]:,} tokens",
            )
        whole.append(rows[: len(rows) // in_step * in_step])
    return whole


def validation_sequences(data: Path) -> np.ndarray:
    """The sequences that are held out, uint16 [sequence, context].

    Raises:
        BadArgument: the array is missing or damaged.
    """
    if read_json(data / DATA)["valid_sha256"] is not None:
        return open_sequences(data / "valid.npy")
    rows = open_sequences(data / "train.npy")
    return rows[-_share_of_validation(len(rows)) :]


def held_out_text(data: Path) -> tuple[np.ndarray, np.ndarray]:
    """The validation sequences, uint16 [sequence, context], and the document each begins in.

    Documents are told apart by the token that ends each. Raises as `validation_sequences`.
    """
    held_out = validation_sequences(data)
    return held_out, documents_of(held_out, data / TOKENIZER[0])
