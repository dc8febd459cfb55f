"""Documents become token ids, and token ids the sequences of a `Text`."""

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from jaxtyping import Int, Integer
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ropelens.arguments import IN_WORDS, Count, Positive, Several, public
from ropelens.errors import BadArgument, BadText, explained
from ropelens.text.batches import split_batch
from ropelens.text.documents import check_document, documents_sha256
from ropelens.text.rows import generator_of
from ropelens.text.strings import Strings, check_no_nul, list_documents
from ropelens.text.text import Text

Bos = Literal["tokenizer", "always", "never"]
"""How sequences begin: as the tokenizer begins a text, with its BOS, or with the text."""

PIECE = 1_000_000
"""Characters that are tokenized in one call; a tokenizer takes a hundred times their memory."""

IdArray = (
    Integer[Tensor, "sequence position"] | Integer[np.ndarray, "sequence position"]
)
EXAMPLES = ("a", "A", "0", ".", "\u4e00")
"""Texts of which a tokenizer knows at least one; the last is a Chinese numeral."""

TextInput = Text | str | IdArray | Mapping[str, Any]
"""Types that public functions accept as a text; see `read_text`."""
IN_WORDS[TextInput] = (
    "a Text, such as rl.tokenize(documents, tokenizer, context=512); token ids [sequence, "
    "position]; a BatchEncoding; or a string"
)


def read_text(
    text: TextInput, *, tokenizer: Any = None, config: Any = None, context: int = 2048
) -> Text:
    """Return `text` as a `Text`.

    `text` is a `Text`; token ids [sequence, position]; a BatchEncoding, whose rows are split
    into sequences (see `split_batch`, which reads the `config` of the model); or a string,
    which `tokenizer` cuts into sequences of up to `context` tokens.
    """
    if isinstance(text, Text):
        return text
    if isinstance(text, str):
        encoded = encode(text, tokenizer)
        tokens = len(encoded.begin) + len(encoded.ids)
        return tokenize(text, tokenizer, context=max(2, min(context, tokens)))
    if isinstance(text, Mapping):
        split = split_batch(text, None, config)
        return Text(
            split.ids,
            lengths=split.lengths,
            documents=split.documents,
            hidden=split.hidden,
            packed=split.packed,
        )
    return Text(text)  # type: ignore[arg-type]  # arrays become tensors there


@public
def tokenize(
    documents: Strings,
    tokenizer: Any,
    *,
    context: Several,
    sequences: Positive | None = None,
    seed: Count = 0,
    bos: Bos = "tokenizer",
) -> Text:
    """Cut documents, or one document, into sequences of `context` tokens.

    Each sequence begins as `tokenizer(text)` begins a text: with BOS or other special tokens,
    or with the text itself. With bos="always" it begins with the BOS of the tokenizer if there
    is one, and with bos="never" it begins with the text. It has no other special token: the
    name of a special token in a document, such as "<s>", is text. A document is tokenized as a
    whole and then cut. The last, shorter sequence is padded. A sequence of fewer than 2 tokens
    is dropped, because it has nothing to predict.

    `sequences=N` draws N sequences at random with `seed`, evenly from all documents, and keeps
    their order. If there are fewer, all are used, with a warning. Sequences that are shorter
    than an eighth of the first sequence of their document are drawn only if others are too few.

    `documents` is a string or any iterable of strings: a list, an iterator, a column of
    `datasets`, a Series of pandas, or strings of arrow.

    Raises `BadText` for a text of fewer than `context` tokens in total, for a text that is the
    name of a file, and for NUL characters. Raises `BadArgument` for a context without room for
    the text, for a missing tokenizer, and for a document that is not a string; it names the
    type and the index.
    """
    if isinstance(documents, str):
        check_document(documents)
        documents = [documents]
    texts = list_documents(documents)
    warn_of_rendered(texts, tokenizer)
    check_tokenizer(tokenizer)
    begin = first_tokens(tokenizer, bos)
    if context <= len(begin):
        raise BadArgument(
            f"A context of {context} tokens leaves no room for the text.",
            seen=f"each sequence {name_beginning(begin, tokenizer)}",
            hint=f'a context above {len(begin)}, or bos="never"',
        )
    by_document = []
    for number, text in enumerate(texts):
        ids = text_tokens(text, tokenizer)
        by_document.append(cut_document(ids, number, context=context, begin=begin))
    cut = list(chain.from_iterable(by_document))
    total = sum(len(sequence.tokens) for sequence in cut)
    if total < context:
        raise BadText(
            f"The text is shorter than one context of {context:,} tokens.",
            seen=f"{total:,} tokens (documents: {len(texts):,})",
            hint="pass more text, or a smaller context",
        )
    chosen = cut
    if sequences is not None:
        # Few tokens of a short tail have anything to look back at.
        long = [x for x in cut if 8 * len(x.tokens) >= x.first_length]
        candidates = long if len(long) >= sequences else cut
        chosen = sample_sequences(candidates, sequences, seed)
    characters = sum(len(text) for text in texts)
    rows = [torch.tensor(x.tokens, dtype=torch.long, device="cpu") for x in chosen]
    lengths = [len(x.tokens) for x in chosen]
    numbers = [x.document for x in chosen]
    return Text(
        pad_sequence(rows, batch_first=True),
        lengths=torch.tensor(lengths, dtype=torch.long, device="cpu"),
        documents=torch.tensor(numbers, dtype=torch.long, device="cpu"),
        documents_sha256=documents_sha256(texts),
        beginning=name_beginning(begin, tokenizer),
        source=f"{len(chosen):,} of {len(cut):,} sequences of up to {context:,} tokens "
        f"(documents: {len(texts):,}, characters: {characters:,})",
    )


@dataclass(frozen=True)
class CutSequence:
    """Tokens of a sequence, and the number and the first sequence's length of its document."""

    tokens: list[int]
    document: int
    first_length: int


def cut_document(
    ids: list[int], number: int, *, context: int, begin: list[int]
) -> list[CutSequence]:
    """The sequences of 2 tokens or more into which a document is cut; see `tokenize`."""
    step = context - len(begin)
    rows = []
    for start in range(0, len(ids), step):
        rows.append([*begin, *ids[start : start + step]])
    rows = [row for row in rows if len(row) >= 2]
    return [CutSequence(row, number, first_length=len(rows[0])) for row in rows]


def sample_sequences(
    cut: list[CutSequence], sequences: int, seed: int
) -> list[CutSequence]:
    """Random sequences, evenly from all documents, in their order; all if there are too few."""
    if sequences > len(cut):
        warnings.warn(
            f"all {len(cut):,} sequences of the text are used: {sequences:,} were asked for",
            stacklevel=4,
        )
    order = torch.randperm(len(cut), generator=generator_of(seed), device="cpu").numpy()
    documents = pd.Series([cut[index].document for index in order])
    # The first sequences of all documents come first.
    turn = documents.groupby(documents).cumcount()
    drawn = order[turn.argsort(kind="stable")[:sequences]]
    return [cut[index] for index in sorted(drawn)]


def warn_of_rendered(documents: list[str], tokenizer: Any) -> None:
    """Warn of documents that begin with the name of a special token, as chat templates do."""
    names = special_names(tokenizer)
    rendered = [text for text in documents if text.startswith(names)]
    if rendered:
        name = next(name for name in names if rendered[0].startswith(name))
        warnings.warn(
            f"{len(rendered):,} of {len(documents):,} documents begin with the name of a "
            f"special token, such as {name}, which is text in a document: pass the token "
            "ids of apply_chat_template(tokenize=True) to measure the tokens themselves",
            stacklevel=3,
        )


def warn_beyond(context: int, maximum: int | None) -> None:
    """Warn about a context that is longer than the trained context of the model."""
    if maximum is not None and context > maximum:
        warnings.warn(
            f"context {context:,} is beyond the {maximum:,} tokens that the model was "
            "made for",
            stacklevel=2,
        )


@dataclass(frozen=True)
class Encoded:
    """The special tokens that a sequence begins with, and the tokens of a text."""

    begin: list[int]
    ids: list[int]


def encode(
    text: str, tokenizer: Any, bos: Bos = "tokenizer", *, prompt: bool = False
) -> Encoded:
    """Return the tokens of `text`, and the special tokens that its sequences begin with.

    The name of a special token, such as "<s>", is text in a document. In a `prompt` it is the
    special token. Nothing is put before a prompt that begins with a special token, because a
    chat template wrote the whole prompt.
    """
    ids = text_tokens(text, tokenizer, prompt=prompt)
    begin = first_tokens(tokenizer, bos)
    if prompt and text.startswith(special_names(tokenizer)):
        begin = []
    return Encoded(begin, ids)


def text_tokens(text: str, tokenizer: Any, *, prompt: bool = False) -> list[int]:
    """The tokens of `text` without those that its sequences begin with; see `encode`."""
    check_tokenizer(tokenizer)
    check_no_nul(text)
    with explained(
        "The text contains half of a character (a surrogate).",
        'text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")',
        error=BadText,
    ):
        text.encode()
    ids: list[int] = []
    for part in pieces(text):
        encoding = tokenizer(
            part,
            add_special_tokens=False,
            split_special_tokens=not prompt,
            verbose=False,  # no warning about texts beyond the maximum of the model
        )
        ids += encoding["input_ids"]
    return ids


def special_names(tokenizer: Any) -> tuple[str, ...]:
    """Names of the special tokens of a tokenizer, such as "<s>"."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return tuple(token.content for token in added.values() if token.special)


def first_tokens(tokenizer: Any, bos: Bos = "tokenizer") -> list[int]:
    """The special tokens with which sequences begin."""
    if bos == "never":
        return []
    if bos == "always":
        return [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    for example in EXAMPLES:
        whole = tokenizer(example, verbose=False)["input_ids"]
        ids = tokenizer(example, add_special_tokens=False, verbose=False)["input_ids"]
        for start in range(len(whole) if ids else 0):
            if whole[start : start + len(ids)] == ids:
                return list(whole[:start])
    return []


def name_beginning(tokens: list[int], tokenizer: Any) -> str:
    """Words for the special tokens that sequences begin with, such as "begins with <s>"."""
    if not tokens:
        return "begins with the text"
    if not hasattr(tokenizer, "decode"):  # only calls are needed elsewhere
        return f"begins with token {', '.join(map(str, tokens))}"
    return f"begins with {tokenizer.decode(tokens)}"


def find_beginning(text: Text, tokenizer: Any) -> str:
    """How the sequences of a text begin, such as "begins with <s>"; "" if it is not known."""
    special = getattr(tokenizer, "all_special_ids", None)
    if text.beginning or special is None:
        return text.beginning
    first, *others = text.ids[:, 0].unique().tolist()
    is_special = not others and first in special
    return name_beginning([first] if is_special else [], tokenizer)


def check_tokenizer(tokenizer: Any) -> None:
    """Raise `BadArgument` for an object that is not a tokenizer."""
    if callable(tokenizer) and hasattr(tokenizer, "bos_token_id"):
        return
    raise BadArgument(
        "A text needs the tokenizer of the model.",
        seen=f"tokenizer: {type(tokenizer).__name__}",
        hint="tokenizer files in the folder of the model, tokenizer=, or token ids",
    )


def pieces(text: str, *, longest: int = PIECE) -> list[str]:
    """Split `text` into pieces of up to `longest` characters, before a space if possible.

    Words begin with their space in most tokenizers, so the pieces have the tokens of `text`.
    """
    upto = rf".{{1,{longest}}}"
    return re.findall(rf"(?s){upto}(?:(?<!\s)(?= )|\Z)|{upto}", text)


def prompt_tokens(
    text: str, tokenizer: Any, bos: Bos = "tokenizer"
) -> Int[Tensor, " position"]:
    """Token ids of a prompt, which may contain special tokens; see `encode`."""
    encoded = encode(text, tokenizer, bos, prompt=True)
    return torch.tensor([*encoded.begin, *encoded.ids], dtype=torch.long, device="cpu")
