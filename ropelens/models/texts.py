"""Text files become documents, documents become sequences of tokens to measure on."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from os import PathLike
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Int
from torch import Tensor

from ropelens.errors import BadArgument, BadCheckpoint, BadText
from ropelens.models.paths import TEXT_SUFFIXES, check_document, check_text_path
from ropelens.statistics.generator import generator_of

LONGEST_FILE = 8_000_000_000
"""Bytes of a file of text; it is read at once."""

PIECE = 1_000_000
"""Characters that are tokenized at once: a tokenizer takes a hundred times their room."""

PADDING = 0  # any id of any vocabulary: padded positions are never counted


@runtime_checkable
class TextTokenizer(Protocol):
    """What `tokenize` needs of a tokenizer, as transformers' have it."""

    bos_token_id: int | None

    def __call__(self, text: str, **options: Any) -> Any: ...


@dataclass(frozen=True)
class Sequences:
    """Tokens to measure on, a sequence a row.

    `tokens` is padded on the right to the longest sequence, `lengths` says how much of
    each row counts. `fingerprint` is the sha256 of the text (see `fingerprint_of`),
    `source` says in words what was cut how. `documents` numbers the document that each
    sequence was cut from; None where it is not known.
    """

    tokens: Int[Tensor, "sequence position"]
    lengths: Int[Tensor, " sequence"]
    fingerprint: str
    source: str
    documents: Int[Tensor, " sequence"] | None = None


def read_documents(paths: str | Path | Iterable[str | Path]) -> list[str]:
    """The documents in files and folders, or in one of them, in the order given.

    A file is a document; a `.jsonl` file holds one a line, under "text". A folder stands
    for its *.txt, *.md and *.jsonl files, at any depth, in order of their paths. Text is
    UTF-8; a byte-order mark is dropped, line ends become "\\n", as Python's open() has
    them, and those at the end of a file go: they end its last line, not the document.
    Empty documents in folders and `.jsonl` files are passed over.

    Raises BadText for a path that is not there, a file that cannot be read, is empty or
    not UTF-8 (with the offset of the byte), and a malformed line (with its number);
    BadArgument for what is no path.
    """
    listed: list[Any] = [paths]
    if isinstance(paths, Iterable) and not isinstance(paths, str):
        listed = list(paths)
    wrong = [path for path in listed if not isinstance(path, str | PathLike) or path == ""]
    if wrong:
        raise BadArgument("Documents are read from paths.", seen=repr(wrong[0])[:80])
    documents: list[str] = []
    for path in map(Path, listed):
        check_text_path(path)
        if path.is_dir():
            found = [text for file in _files(path) for text in _read(file)]
        else:
            found = _read(path)
        found = [text for text in found if text.strip()]
        if not found:
            raise BadText(f"{path} is empty.", means="it holds no text to measure on")
        documents += found
    return documents


def tokenize(
    documents: str | Sequence[str],
    tokenizer: TextTokenizer | None,
    *,
    context: int,
    sequences: int | None = None,
    seed: int = 0,
) -> Sequences:
    """Cut documents, or one, into sequences of `context` tokens.

    Each starts with the tokenizer's BOS where it has one (which then is one of the
    `context` tokens) and holds no other special token. A document is tokenized as a whole
    (one of more than a million characters in pieces that end before a space) and then cut; its
    shorter tail is kept and padded, unless it has fewer than 2 tokens and so nothing to
    predict.

    `sequences=N` keeps a random N of them, drawn without replacement by `seed`, in their
    order, and among these no tail of less than an eighth of `context`, while there are enough
    others; if there are no more than N, all of them, with a warning if fewer.

    Raises BadText for a text of fewer than `context` tokens in total, or one that is the name
    of a file, BadArgument for what is no text, a context below 2 or fewer than 1 sequence,
    BadCheckpoint without a tokenizer.
    """
    check_context(context)
    check_sequences(sequences)
    if isinstance(documents, str):
        check_document(documents)
        documents = [documents]
    texts = list(documents) if isinstance(documents, Iterable) else [documents]
    if not all(isinstance(text, str) for text in texts):
        raise BadArgument(
            "Documents are a text or a list of texts.", seen=repr(documents)[:100]
        )
    if tokenizer is None:
        raise BadCheckpoint(
            "The checkpoint has no tokenizer, so text cannot be used.",
            attempt="--tokenizer NAME_OR_FOLDER for that of another checkpoint, --ids FILE for "
            "token ids in place of text; in Python tokenizer=, or token ids",
        )
    check_tokenizer(tokenizer)
    cut = [_cut(text, tokenizer, context) for text in texts]
    total = sum(len(row) for own in cut for row in own)
    if total < context:
        raise BadText(
            f"The text is shorter than one context of {context:,} tokens.",
            seen=f"{total:,} tokens (documents: {len(texts):,})",
            attempt="pass more text, or a smaller context",
        )
    tokens, lengths, document = cut_and_sample(cut, sequences, seed)
    source = (
        f"{len(tokens):,} of {sum(map(len, cut)):,} sequences of up to {context:,} tokens "
        f"(documents: {len(texts):,}, characters: {sum(map(len, texts)):,})"
    )
    return Sequences(tokens, lengths, fingerprint_of(texts), source, document)


def cut_and_sample(
    cut: list[list[Int[Tensor, " position"]]], sequences: int | None, seed: int
) -> tuple[
    Int[Tensor, "sequence position"], Int[Tensor, " sequence"], Int[Tensor, " sequence"]
]:
    """The sequences cut from each document, all or a random sample, padded.

    With their lengths, and the number of the document that each is of. What is left of a
    document after its whole sequences, if it is shorter than an eighth of them, is drawn only
    where there are too few others: few of its tokens have anything to look back at.
    """
    rows = [row for own in cut for row in own]
    drawn_from: Sequence[int] = range(len(rows))
    if sequences is not None:
        longer = [8 * len(row) >= len(own[0]) for own in cut for row in own]
        some = [index for index, enough in enumerate(longer) if enough]
        drawn_from = some if len(some) >= sequences else drawn_from
    counts = torch.tensor([len(own) for own in cut], dtype=torch.long)
    document = torch.arange(len(cut)).repeat_interleave(counts)
    drawn = [drawn_from[index] for index in _sample(len(drawn_from), sequences, seed)]
    kept = [rows[index] for index in drawn]
    tokens = torch.nn.utils.rnn.pad_sequence(kept, batch_first=True, padding_value=PADDING)
    return tokens, torch.tensor([len(row) for row in kept]), document[drawn]


def fingerprint_of(documents: Iterable[str]) -> str:
    """sha256, in hex, of the documents' UTF-8 with a zero byte between them."""
    return hashlib.sha256("\0".join(documents).encode()).hexdigest()


def check_context(context: int, maximum: int | None = None) -> None:
    """Raise BadArgument for a context that is no whole number of at least 2 tokens; warn for
    one beyond the model's `maximum`."""
    if not isinstance(context, Integral):
        raise BadArgument(f"context is {context!r}; it is a whole number of tokens.")
    if context < 2:
        raise BadArgument(
            f"context is {context}; at least 2 tokens are needed.",
            means="a row needs an earlier token to attend to, and a next one to predict",
        )
    if maximum is not None and context > maximum:
        warnings.warn(
            f"context {context:,} is beyond the {maximum:,} tokens that the model was made for",
            stacklevel=2,
        )


def check_sequences(sequences: int | None) -> None:
    """Raise BadArgument for a number of sequences that is not one of at least 1."""
    if sequences is not None and not (isinstance(sequences, Integral) and sequences >= 1):
        raise BadArgument(f"sequences is {sequences!r}; at least 1 is needed.")


def check_vocabulary(sequences: Sequences, *, vocabulary: int) -> None:
    """Raise BadCheckpoint where a token id is not below `vocabulary`, the model's."""
    highest = int(sequences.tokens.max())
    if highest >= vocabulary:
        raise BadCheckpoint(
            "The tokenizer gives ids that the model does not have.",
            seen=f"token id {highest:,}; the model's ids end at {vocabulary - 1:,}",
            means="the tokenizer belongs to another model",
        )


def check_tokenizer(tokenizer: object) -> None:
    """Raise BadArgument where a text is to be tokenized by nothing."""
    if not isinstance(tokenizer, TextTokenizer):
        raise BadArgument(
            "A text needs the tokenizer of the model.",
            attempt="tokenizer= (--tokenizer), as ropelens.load gives it; or token ids",
        )


def encode(text: str, tokenizer: TextTokenizer) -> tuple[list[int], list[int]]:
    """The token that a sequence begins with, where there is one, and those of `text`."""
    # verbose=False: that a document is longer than the model's maximum is no news here.
    # split_special_tokens: a "<s>" that somebody wrote is text, not a beginning.
    options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    ids: list[int] = []
    for piece in pieces(text):
        _check_unicode(piece)
        ids += tokenizer(piece, **options)["input_ids"]
    return bos, ids


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadText(
            "A text holds what is no character.",
            seen=f"half of a surrogate pair at character {error.start:,} of {text[:20]!r}",
            means="bytes that are not UTF-8 become such on the command line",
        ) from error


def pieces(text: str, *, longest: int = PIECE) -> Iterator[str]:
    """`text` in pieces of up to `longest` characters, which end before a space where they can.

    Words begin with their space in most tokenizers, so that the tokens are those of the whole;
    where a piece has no space in its second half, it is cut anywhere.
    """
    start = 0
    while len(text) - start > longest:
        end = start + longest
        space = text.rfind(" ", start + longest // 2, end + 1)
        while space > 0 and text[space - 1].isspace():  # a run of them is one token
            space -= 1
        end = space if space > start + longest // 2 else end
        yield text[start:end]
        start = end
    yield text[start:]


def prompt_tokens(text: str, tokenizer: Any) -> Int[Tensor, " position"]:
    """A short text as tokens, behind the token that sequences begin with.

    Raises `BadArgument` without a tokenizer, and `BadText` for fewer than 3 tokens.
    """
    check_tokenizer(tokenizer)
    bos, ids = encode(text, tokenizer)
    count = len(bos) + len(ids)
    if count < 3:
        raise BadText(
            "The text is too short to look at.",
            seen=f"{text[:40]!r}: {count} token{'s' * (count != 1)}",
            means="3 are needed",
        )
    return torch.tensor([*bos, *ids])


def _cut(text: str, tokenizer: TextTokenizer, context: int) -> list[Int[Tensor, " position"]]:
    bos, ids = encode(text, tokenizer)
    step = context - len(bos)
    rows = [[*bos, *ids[start : start + step]] for start in range(0, len(ids), step)]
    return [torch.tensor(row) for row in rows if len(row) >= 2]


def _sample(rows: int, sequences: int | None, seed: int) -> list[int]:
    """The numbers of the rows that are kept, in their order."""
    if sequences is not None and sequences > rows:
        warnings.warn(
            f"all {rows:,} sequences of the text are used: {sequences:,} were asked for",
            stacklevel=4,
        )
    if sequences is None or sequences >= rows:
        return list(range(rows))
    drawn = torch.randperm(rows, generator=generator_of(seed))
    return sorted(drawn[:sequences].tolist())


def _files(folder: Path) -> list[Path]:
    files = sorted(p for p in folder.rglob("*") if p.suffix in TEXT_SUFFIXES and p.is_file())
    if not files:
        raise BadText(f"{folder} holds no *.txt, *.md or *.jsonl file.")
    return files


def _read(path: Path) -> list[str]:
    try:
        text = _bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadText(
            f"{path} is not UTF-8.",
            seen=f"byte {error.start:,} is 0x{error.object[error.start]:02x}: {error.reason}",
            attempt="convert it, as with: iconv -f LATIN1 -t UTF-8",
        ) from error
    except OSError as error:
        raise BadText(f"{path} cannot be read.", seen=str(error)) from error
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    return _read_lines(path, text) if path.suffix == ".jsonl" else [text.rstrip("\n")]


def _bytes(path: Path) -> bytes:
    """All of a file, in pieces: a buffer of the longest would be 8 GB, and in /proc a file's
    size says nothing."""
    content = bytearray()
    with path.open("rb") as file:
        while piece := file.read(2**24):
            content += piece
            if len(content) > LONGEST_FILE:
                raise BadText(
                    f"{path} is too long.",
                    seen=f"more than {LONGEST_FILE:,} bytes",
                    attempt="several files, or a part of it",
                )
    return bytes(content)


def _read_lines(path: Path, text: str) -> list[str]:
    documents = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise BadText(
                f"Line {number} of {path} is not JSON.",
                seen=f"{error}; it starts {line[:40]!r}",
            ) from error
        if not isinstance(record, dict) or not isinstance(record.get("text"), str):
            raise BadText(
                f'Line {number} of {path} has no "text".',
                seen=f"it starts {line[:40]!r}",
                attempt='each line of a .jsonl file is an object such as {"text": "Once"}',
            )
        try:
            record["text"].encode()
        except UnicodeEncodeError as error:
            raise BadText(
                f"Line {number} of {path} is no valid text.",
                seen=f"half of a surrogate pair at character {error.start:,}",
            ) from error
        documents.append(record["text"])
    return documents
