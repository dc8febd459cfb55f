"""Tokens by their text or class, and how much attention heads give to them."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import ArrayLike
from torch import Tensor

from ropelens.errors import BadArgument
from ropelens.measure.excerpt import TokenNames, name_token
from ropelens.models.tokens import LARGEST_ID, check_tokens
from ropelens.statistics.block import Block
from ropelens.statistics.corpus import seen_before
from ropelens.statistics.variables import Statistic

CLASSES = {"punctuation": "punctuation", "repeated": "repeated tokens"}
"""Sets of tokens that are no texts, and what sentences call them."""


def find_tokens(
    tokens: Int[Tensor, "sequence position"],
    what: str | Sequence[str],
    tokenizer: TokenNames | None = None,
) -> Bool[Tensor, "sequence position"]:
    """Which tokens are `what`: a text ("'"), one of several, or those of a class.

    A token has a text where that is what `tokenizer` makes of it, spaces around it left out.
    Classes are "punctuation", tokens of nothing else (Unicode's categories P), and "repeated",
    tokens that their sequence has had before, which needs no tokenizer. A list holds texts
    alone: ["punctuation"] is that word. `tokens` are as for `profile`; padding is not known
    here.

    Raises `BadArgument` without a tokenizer where one is needed, for no text, and for tokens
    that `profile` would not take.
    """
    return _find(*_checked(tokens, what), tokenizer)


def _find(
    tokens: Int[Tensor, "sequence position"],
    what: str | list[str],
    tokenizer: TokenNames | None,
) -> Bool[Tensor, "sequence position"]:
    """`find_tokens` of what was checked."""
    if what == "repeated":
        return seen_before(tokens)
    if tokenizer is None:
        raise BadArgument(
            f"Tokens {what!r} are found by their text, and there is no tokenizer.",
            attempt='tokenizer=, or "repeated"',
        )
    ids, places = tokens.cpu().unique(return_inverse=True)
    texts = {what} if isinstance(what, str) else set(what)
    names = [name_token(tokenizer, int(token)) for token in ids]
    if what == "punctuation":
        among = [bool(name.strip()) and all(map(_punctuates, name.strip())) for name in names]
    else:
        among = [name in texts or name.strip() in texts for name in names]
    return torch.tensor(among, dtype=torch.bool)[places]


def attention_on(
    tokens: Int[Tensor, "sequence position"],
    what: str | Sequence[str],
    tokenizer: TokenNames | None = None,
) -> tuple[Statistic, Statistic]:
    """Mean attention on the tokens that `find_tokens` finds, as statistics of a profile.

    To search for a head like the paper's apostrophe head (Barbero et al. 2024, arXiv
    2410.06205, section 6):

        found = rl.attention_on(tokens, "'", tokenizer)
        profile = rl.profile(model, tokens, statistics=found)
        rl.classify_heads(profile).nlargest(5, "attention_on_apostrophe")

    Returns two: `attention_on_NAME` (layer, head), the mean over rows of the attention on such
    tokens, which heads.csv has too; and `even_on_NAME`, what a head would give them that
    attends evenly to all that it sees. Raises as `find_tokens`, and where there is no such
    token.
    """
    tokens, what = _checked(tokens, what)
    found = _find(tokens, what, tokenizer).to(tokens.device)
    if not found.any():
        raise BadArgument(
            f"There is no token {what!r} in this text.",
            means="a token must be that text, but for spaces around it",
            attempt='several texts, such as ["\'", "\'s"], or another text to measure on',
        )
    ids = None if what == "repeated" else tokens[found].unique()

    def here(block: Block) -> Bool[Tensor, "batch key"]:
        if ids is None:
            return seen_before(block.sequence)[:, block.keys.start : block.keys.stop]
        return torch.isin(block.tokens, ids.to(block.tokens.device))

    def attention(block: Block) -> Float[Tensor, "batch kv_head group row"]:
        return (block.attention * here(block)[:, None, None, None]).sum(-1)

    def even(block: Block) -> Float[Tensor, "batch kv_head group row"]:
        on = (here(block)[:, None] & block.seen).sum(-1) / block.seen.sum(-1)
        return on[:, None, None].expand(block.log_norm.shape).to(block.q.dtype)

    texts = [what] if isinstance(what, str) else list(what)
    name = "_or_".join(map(_spelled, texts))
    said = CLASSES.get(str(what), f"tokens {' or '.join(texts)}")
    dims = ("layer", "head")
    mean, chance = f"mean attention on {said}", f"the same, were attention even: {said}"
    return (
        Statistic(f"attention_on_{name}", dims, "1", mean, column="score", of=attention),
        Statistic(f"even_on_{name}", dims, "1", chance, of=even),
    )


def _checked(tokens: ArrayLike, what: object) -> tuple[Tensor, str | list[str]]:
    """The tokens, and the text or texts to find; `BadArgument` for what is none."""
    found, _ = check_tokens(tokens, None, vocabulary=LARGEST_ID)
    texts: list[Any] = list(what) if isinstance(what, Iterable) else [what]
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise BadArgument(
            "No text of a token is given.",
            seen=repr(what)[:80],
            attempt='"\'", several in a list, or "punctuation"',
        )
    return found, what if isinstance(what, str) else texts


def _punctuates(letter: str) -> bool:
    return unicodedata.category(letter).startswith("P")


def _spelled(text: str) -> str:
    """A text as part of a name: letters and digits, other signs by what Unicode calls them."""
    words, word = [], ""
    for letter in text.strip() or text:
        if letter.isascii() and letter.isalnum():
            word += letter
            continue
        called = unicodedata.name(letter, f"u{ord(letter):04x}").lower()
        words += [word, *called.replace("-", " ").split()]
        word = ""
    return "_".join(part for part in [*words, word] if part)
