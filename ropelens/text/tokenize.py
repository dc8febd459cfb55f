"""Documents become token ids, and token ids the sequences of a `Text`."""

import re
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from jaxtyping import Int, Integer
from torch import Tensor

from ropelens.arguments import IN_WORDS, Count, Positive, Several, public
from ropelens.errors import BadArgument, BadText, explained
from ropelens.text.batches import split_batch
from ropelens.text.documents import check_document, documents_sha256
from ropelens.text.rows import generator_of
from ropelens.text.text import Text

NumberedRow = tuple[
    list[int], int
]  # tokens of a sequence, and the number of its document
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
        bos, ids = encode(text, tokenizer)
        longest = max(2, min(context, len(bos) + len(ids)))
        return tokenize(text, tokenizer, context=longest)
    if isinstance(text, Mapping):
        return Text(**split_batch(text, None, config))
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
    cut = []
    for text in texts:
        first, ids = encode(text, tokenizer, bos)
        step = context - len(first)
        parts = [
            [*first, *ids[start : start + step]] for start in range(0, len(ids), step)
        ]
        cut.append([row for row in parts if len(row) >= 2])
    total = sum(len(row) for rows in cut for row in rows)
    if total < context:
        what = f"The text is shorter than one context of {context:,} tokens."
        seen = f"{total:,} tokens (documents: {len(texts):,})"
        raise BadText(what, seen=seen, hint="pass more text, or a smaller context")
    rows = [(row, number) for number, rows in enumerate(cut) for row in rows]
    if sequences is not None:
        # Few tokens of a short tail have anything to look back at.
        long = [
            (row, number) for row, number in rows if 8 * len(row) >= len(cut[number][0])
        ]
        rows = _sample(long if len(long) >= sequences else rows, sequences, seed)
    drawn = [torch.tensor(row) for row, _ in rows]
    return Text(
        torch.nn.utils.rnn.pad_sequence(drawn, batch_first=True),
        lengths=torch.tensor(list(map(len, drawn))),
        documents=torch.tensor([number for _, number in rows]),
        documents_sha256=documents_sha256(texts),
        source=f"{len(rows):,} of {sum(map(len, cut)):,} sequences of up to {context:,} tokens "
        f"(documents: {len(texts):,}, characters: {sum(map(len, texts)):,})",
    )


def _sample(rows: list[NumberedRow], sequences: int, seed: int) -> list[NumberedRow]:
    """Random rows, evenly from all documents, in their order; all if there are too few."""
    if sequences > len(rows):
        words = f"all {len(rows):,} sequences of the text are used: "
        words += f"{sequences:,} were asked for"
        warnings.warn(words, stacklevel=4)
    order = torch.randperm(len(rows), generator=generator_of(seed)).numpy()
    document = pd.Series([rows[index][1] for index in order])
    turn = document.groupby(
        document
    ).cumcount()  # the first rows of all documents come first
    drawn = order[turn.argsort(kind="stable")[:sequences]]
    return [rows[index] for index in sorted(drawn)]


def warn_beyond(context: int, maximum: int | None) -> None:
    """Warn about a context that is longer than the trained context of the model."""
    if maximum is not None and context > maximum:
        beyond = f"beyond the {maximum:,} tokens that the model was made for"
        warnings.warn(f"context {context:,} is {beyond}", stacklevel=2)


def encode(
    text: str, tokenizer: Any, begin: Bos = "always", *, prompt: bool = False
) -> tuple[list[int], list[int]]:
    """Return the token that a sequence begins with (or no token), and the tokens of `text`.

    The name of a special token, such as "<s>", is text in a document. In a `prompt` it is the
    special token, and a prompt that begins with a special token gets no BOS, as a chat template
    wrote the whole prompt.
    """
    if not callable(tokenizer) or not hasattr(tokenizer, "bos_token_id"):
        what, kind = (
            "A text needs the tokenizer of the model.",
            type(tokenizer).__name__,
        )
        hint = "tokenizer files in the folder of the model, tokenizer=, or token ids"
        raise BadArgument(what, seen=f"tokenizer: {kind}", hint=hint)
    what = "The text contains half of a character (a surrogate)."
    hint = 'text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")'
    with explained(what, hint, error=BadText):
        text.encode()
    # verbose=False: no warning about documents longer than the maximum of the model.
    options = {"verbose": False, "split_special_tokens": not prompt}
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    if begin == "tokenizer" and tokenizer("a", verbose=False)["input_ids"][:1] != bos:
        bos = []
    encoded = (
        tokenizer(part, add_special_tokens=False, **options) for part in pieces(text)
    )
    ids = [id for part in encoded for id in part["input_ids"]]
    if prompt:
        added = tokenizer.added_tokens_decoder.values()
        special = tuple(token.content for token in added if token.special)
        bos = [] if text.startswith(special) else bos
    return bos, ids


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
    bos, ids = encode(text, tokenizer, begin, prompt=True)
    return torch.tensor([*bos, *ids], dtype=torch.long)
