"""Text files become documents, and documents the sequences to measure on."""

from __future__ import annotations

import hashlib
import json
import os
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Int
from numpy.typing import ArrayLike
from torch import Tensor
from transformers import PreTrainedModel

from ropelens.errors import BadArgument, BadText, Count, Positive, Several, explained, public
from ropelens.text.batches import split_batch
from ropelens.text.rows import generator_of

Row = tuple[list[int], int]
"""The tokens of a sequence, and the number of its document."""

Bos = Literal["always", "tokenizer"]
"""Whether sequences begin with BOS: where there is one, or as the tokenizer itself adds it."""

TEXT_SUFFIXES = (".txt", ".md", ".jsonl")

LARGEST_ID = 2**31

PIECE = 1_000_000
"""Characters tokenized at once; a tokenizer takes a hundred times their memory."""


@dataclass(frozen=True)
class Sequences:
    """Tokens to measure on, a sequence a row.

    `tokens` is padded on the right to the longest sequence; the first `lengths[row]` of each
    row count. `fingerprint` is the sha256 of the text (`fingerprint_of`), `source` a sentence
    about how it was cut. `documents` numbers the document that each sequence was cut from;
    None where that is not known. `hidden` marks tokens inside a sequence that a mask hides.
    """

    tokens: Int[Tensor, "sequence position"]
    lengths: Int[Tensor, " sequence"]
    fingerprint: str
    source: str
    documents: Int[Tensor, " sequence"] | None = None
    hidden: Bool[Tensor, "sequence position"] | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """The sequences as arguments of `profile`."""
        common = {"documents": self.documents}
        if self.hidden is None:
            return {"tokens": self.tokens, "lengths": self.lengths, **common}
        mask = (torch.arange(self.tokens.shape[1]) < self.lengths[:, None]) & ~self.hidden
        return {"tokens": {"input_ids": self.tokens, "attention_mask": mask}, **common}


@public
def read_documents(paths: str | Path | Iterable[str | Path]) -> list[str]:
    """The documents in files and folders, in the order given.

    A file is a document; a `.jsonl` file has one a line, under "text". A folder stands for
    its *.txt, *.md and *.jsonl files, at any depth, in order of their paths. Text is UTF-8;
    a byte-order mark is dropped, line ends become "\\n", and the line ends at the end of a
    file are dropped. Empty documents in folders and `.jsonl` files are skipped.

    Raises BadText for a file that cannot be read, is empty or is not UTF-8, and for a
    malformed line (with its number).
    """
    documents: list[str] = []
    for path in map(Path, [paths] if isinstance(paths, str | Path) else paths):
        files = [path]
        if path.is_dir():
            files = sorted(p for p in path.rglob("*") if p.suffix in TEXT_SUFFIXES)
        texts = [text for file in files for text in _read(file) if text.strip()]
        if not texts:
            raise BadText(f"There is no text in {path}.")
        documents += texts
    return documents


def _read(path: Path) -> list[str]:
    with explained(
        f"{path} cannot be read as text in UTF-8.",
        "iconv -f LATIN1 -t UTF-8 for an older text, or a folder of *.txt, *.md and *.jsonl",
        error=BadText,
    ):
        text = path.read_text("utf-8-sig")
    if path.suffix != ".jsonl":
        return [text.rstrip("\n")]
    documents = []
    for number, line in enumerate(text.split("\n"), start=1):
        with explained(
            f"Line {number} of {path} holds no text: {line[:40]!r}.",
            'each line of a .jsonl file is an object such as {"text": "Once"}',
            error=BadText,
        ):
            if line.strip():
                documents.append(json.loads(line)["text"])
                documents[-1].encode()
    return documents


def check_document(text: str) -> None:
    """Raise BadText for a text that is the name of a file, or looks like one."""
    looks_so = text.endswith(TEXT_SUFFIXES) and len(text.split()) == 1
    if looks_so or os.path.exists(text):  # noqa: PTH110 (False for a text of any length)
        raise BadText(
            f"{text!r} is a text that looks like a file.",
            hint=f"Path({text!r}) for ropelens.analyze, else ropelens.read_documents",
        )


@public
def tokenize(
    documents: str | Iterable[str],
    tokenizer: Any,
    *,
    context: Several,
    sequences: Positive | None = None,
    seed: Count = 0,
    bos: Bos = "always",
) -> Sequences:
    """Cut documents, or one, into sequences of `context` tokens.

    Each starts with the tokenizer's BOS where it has one (one of the `context` tokens; with
    bos="tokenizer" only where the tokenizer itself begins a text with it) and holds no other
    special token. A document is tokenized as a whole and then cut. Its last, shorter sequence
    is padded; one of fewer than 2 tokens is dropped, since it has nothing to predict.

    `sequences=N` draws N of them at random by `seed`, as many from each document as it can, and
    leaves them in order; all, with a warning, where there are fewer. Sequences shorter than an
    eighth of their document's first are drawn only where there are too few others.

    Raises BadText for a text of fewer than `context` tokens in total and for a text that is
    the name of a file, BadArgument for a context below 2 and without a tokenizer.
    """
    if isinstance(documents, str):
        check_document(documents)
        documents = [documents]
    texts = list(documents)
    cut = [_cut(*encode(text, tokenizer, bos), context) for text in texts]
    total = sum(len(row) for rows in cut for row in rows)
    if total < context:
        raise BadText(
            f"The text is shorter than one context of {context:,} tokens.",
            seen=f"{total:,} tokens (documents: {len(texts):,})",
            hint="pass more text, or a smaller context",
        )
    rows = [(row, number) for number, rows in enumerate(cut) for row in rows]
    if sequences is not None:
        # Few tokens of a short tail have anything to look back at.
        long = [(row, number) for row, number in rows if 8 * len(row) >= len(cut[number][0])]
        rows = _sample(long if len(long) >= sequences else rows, sequences, seed)
    taken = [torch.tensor(row) for row, _ in rows]
    return Sequences(
        torch.nn.utils.rnn.pad_sequence(taken, batch_first=True),
        lengths=torch.tensor([len(row) for row in taken]),
        fingerprint=fingerprint_of(texts),
        source=f"{len(rows):,} of {sum(map(len, cut)):,} sequences of up to {context:,} tokens "
        f"(documents: {len(texts):,}, characters: {sum(map(len, texts)):,})",
        documents=torch.tensor([number for _, number in rows]),
    )


def _cut(bos: list[int], ids: list[int], context: int) -> list[list[int]]:
    step = context - len(bos)
    rows = [[*bos, *ids[start : start + step]] for start in range(0, len(ids), step)]
    return [row for row in rows if len(row) >= 2]


def _sample(rows: list[Row], sequences: int, seed: int) -> list[Row]:
    """So many rows at random, evenly from all documents, in their order.

    All, with a warning, where there are fewer.
    """
    if sequences > len(rows):
        warnings.warn(
            f"all {len(rows):,} sequences of the text are used: {sequences:,} were asked for",
            stacklevel=4,
        )
    order = torch.randperm(len(rows), generator=generator_of(seed)).numpy()
    document = pd.Series([rows[index][1] for index in order])
    turn = document.groupby(document).cumcount()  # all first ones come before the second ones
    taken = order[turn.argsort(kind="stable")[:sequences]]
    return [rows[index] for index in sorted(taken)]


def fingerprint_of(documents: Iterable[str]) -> str:
    """sha256, in hex, of the documents' UTF-8 with a zero byte between them."""
    return hashlib.sha256("\0".join(documents).encode()).hexdigest()


def warn_beyond(context: int, maximum: int | None) -> None:
    """Warn of a context beyond the model's maximum."""
    if maximum is not None and context > maximum:
        warnings.warn(
            f"context {context:,} is beyond the {maximum:,} tokens that the model was made for",
            stacklevel=2,
        )


def encode(text: str, tokenizer: Any, begin: Bos = "always") -> tuple[list[int], list[int]]:
    """The token that a sequence begins with, where there is one, and the tokens of `text`.

    Raises BadArgument where there is no tokenizer.
    """
    if tokenizer is None:
        raise BadArgument(
            "A text needs the tokenizer of the model.",
            hint="its files in the model's folder, tokenizer=, or tokens instead of text",
        )
    # verbose=False: no warning of documents that are longer than the model's maximum.
    # split_special_tokens: a "<s>" in the text is text, not a beginning.
    options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    if begin == "tokenizer" and tokenizer("a", verbose=False)["input_ids"][:1] != bos:
        bos = []
    ids = [id for piece in pieces(text) for id in tokenizer(piece, **options)["input_ids"]]
    return bos, ids


def pieces(text: str, *, longest: int = PIECE) -> list[str]:
    """`text` in pieces of up to `longest` characters, which end before a space where they can.

    In most tokenizers words begin with their space, and several spaces are one token, so that
    the tokens are those of the whole.
    """
    upto = rf".{{1,{longest}}}"
    return re.findall(rf"(?s){upto}(?:(?<!\s)(?= )|\Z)|{upto}", text)


def prompt_tokens(text: str, tokenizer: Any, begin: Bos = "always") -> Int[Tensor, " position"]:
    """A short text as tokens, behind the token that sequences begin with."""
    bos, ids = encode(text, tokenizer, begin)
    return torch.tensor([*bos, *ids], dtype=torch.long)


# token ids


def padding_ids(model: PreTrainedModel) -> dict[int, int]:
    """The ids that pad batches, each with how many of it a text does not begin with.

    Where no other id pads, an end of text does, and one may begin a text.
    """
    ids = []
    text = model.config.get_text_config()
    for facts in (text.to_dict(), (model.generation_config or text).to_dict()):
        end = facts.get("eos_token_id")
        ids += [facts.get("pad_token_id"), *(end if isinstance(end, list) else [end])]
    return {id: 1 if id == ids[0] else 2 for id in ids if id is not None}


def check_tokens(
    tokens: ArrayLike | Mapping[str, Any],
    lengths: ArrayLike | None,
    *,
    vocabulary: int,
    padding: Mapping[int, int] | None = None,
) -> tuple[Int[Tensor, "sequence position"], Int[Tensor, " sequence"]]:
    """`tokens` and `lengths` as tensors (lengths on the CPU); without `lengths` all count.

    `vocabulary` is the number of ids that the model knows, `padding` see `padding_ids`. Raises
    `BadArgument` for tokens or lengths out of range, and for lengths that count padding.
    """
    if isinstance(tokens, Mapping):
        tokens, lengths, hidden, *_ = split_batch(tokens)
        if hidden is not None:
            raise BadArgument("Here attention_mask may hide no token inside a sequence.")
    tokens = () if tokens is None else tokens
    tokens = tokens if isinstance(tokens, Tensor) else torch.tensor(np.asarray(tokens))
    if tokens.is_floating_point() or tokens.ndim != 2 or not len(tokens) or len(tokens[0]) < 3:
        raise BadArgument(
            "tokens must be whole numbers [sequence, position], of at least 3 tokens.",
            seen=f"{tokens.dtype} of shape {tuple(tokens.shape)}",
        )
    if int(tokens.min()) < 0 or int(tokens.max()) >= vocabulary:
        raise BadArgument(
            "Some tokens are not in the model's vocabulary.",
            seen=f"ids {int(tokens.min())} to {int(tokens.max())}, vocabulary {vocabulary}",
        )
    if lengths is None:
        return tokens.long(), torch.full(tokens.shape[:1], tokens.shape[1])
    lengths = torch.as_tensor(lengths).long().cpu()
    fit = lengths.shape == tokens.shape[:1]
    if not fit or int(lengths.min()) < 2 or int(lengths.max()) > tokens.shape[1]:
        raise BadArgument(
            "lengths must say, for every sequence, how many of its tokens count (2 or more).",
            seen=f"lengths {lengths.tolist()} for tokens of shape {tuple(tokens.shape)}"[:200],
        )
    ids, beyond = tokens.cpu(), torch.arange(tokens.shape[1]) >= lengths[:, None]
    for id, run in (padding or {}).items():
        real = ids != id
        wrong = ~real[:, :run].any(1) & (beyond & real).any(1) | ~(real & ~beyond).any(1)
        if wrong.any():
            raise BadArgument(
                "tokens must be padded on the right: lengths count from the left.",
                seen=f"sequence {int(wrong.nonzero()[0])} begins with padding (id {id})",
                hint="a BatchEncoding with its attention_mask, or documents[s, i] below 0",
            )
    return tokens.long(), lengths
