"""Documents become token ids, and token ids the sequences of a `Text`."""

import re
import warnings
from collections.abc import Iterable, Mapping
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
from ropelens.text.text import Text

Bos = Literal["always", "tokenizer"]
"""Whether sequences begin with BOS: if the tokenizer has one, or only if it adds one itself."""

PIECE = 1_000_000
"""Characters that are tokenized in one call; a tokenizer takes a hundred times their memory."""

IdArray = (
    Integer[Tensor, "sequence position"] | Integer[np.ndarray, "sequence position"]
)
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
    documents: str | Iterable[str],
    tokenizer: Any,
    *,
    context: Several,
    sequences: Positive | None = None,
    seed: Count = 0,
    bos: Bos = "always",
) -> Text:
    """Cut documents, or one document, into sequences of `context` tokens.

    Each sequence starts with the BOS of the tokenizer if there is one, and has no other special
    token: the name of a special token in a document, such as "<s>", is text. (With
    bos="tokenizer", it starts with BOS only if the tokenizer itself begins a text with BOS.) A
    document is tokenized as a whole and then cut. The last, shorter sequence is padded. A
    sequence of fewer than 2 tokens is dropped, because it has nothing to predict.

    `sequences=N` draws N sequences at random with `seed`, evenly from all documents, and keeps
    their order. If there are fewer, all are used, with a warning. Sequences that are shorter
    than an eighth of the first sequence of their document are drawn only if others are too few.

    Raises `BadText` for a text of fewer than `context` tokens in total and for a text that is
    the name of a file. Raises `BadArgument` for a context below 2 or a missing tokenizer.
    """
    if isinstance(documents, str):
        check_document(documents)
        documents = [documents]
    texts = list(documents)
    by_document = [
        cut_document(text, number, tokenizer, context=context, bos=bos)
        for number, text in enumerate(texts)
    ]
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
    text: str, number: int, tokenizer: Any, *, context: int, bos: Bos
) -> list[CutSequence]:
    """The sequences of 2 tokens or more into which a document is cut, each with BOS first."""
    encoded = encode(text, tokenizer, bos)
    step = context - len(encoded.begin)
    rows = []
    for start in range(0, len(encoded.ids), step):
        rows.append([*encoded.begin, *encoded.ids[start : start + step]])
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
    """The token that a sequence begins with, or no token, and the tokens of a text."""

    begin: list[int]
    ids: list[int]


def encode(
    text: str, tokenizer: Any, begin: Bos = "always", *, prompt: bool = False
) -> Encoded:
    """Return the tokens of `text`, and the token that its sequences begin with.

    The name of a special token, such as "<s>", is text in a document. In a `prompt` it is the
    special token, and a prompt that begins with a special token gets no BOS, as a chat template
    wrote the whole prompt.
    """
    check_tokenizer(tokenizer)
    with explained(
        "The text contains half of a character (a surrogate).",
        'text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")',
        error=BadText,
    ):
        text.encode()
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    if begin == "tokenizer" and tokenizer("a", verbose=False)["input_ids"][:1] != bos:
        bos = []
    ids: list[int] = []
    for part in pieces(text):
        encoding = tokenizer(
            part,
            add_special_tokens=False,
            split_special_tokens=not prompt,
            verbose=False,  # no warning about texts beyond the maximum of the model
        )
        ids += encoding["input_ids"]
    if prompt:
        added = tokenizer.added_tokens_decoder.values()
        special = tuple(token.content for token in added if token.special)
        if text.startswith(special):
            bos = []
    return Encoded(bos, ids)


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
    text: str, tokenizer: Any, begin: Bos = "always"
) -> Int[Tensor, " position"]:
    """Token ids of a prompt, which may contain special tokens; see `encode`."""
    encoded = encode(text, tokenizer, begin, prompt=True)
    return torch.tensor([*encoded.begin, *encoded.ids], dtype=torch.long, device="cpu")
