"""Tokens by their text or class, and how much attention heads give to them."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ropelens.errors import BadArgument, public
from ropelens.measure.capture import TokenNames, token_names
from ropelens.measure.measurement import Tokens
from ropelens.models.texts import LARGEST_ID, check_tokens
from ropelens.statistics.block import Block
from ropelens.statistics.corpus import seen_before
from ropelens.statistics.variables import Statistic

CLASSES = {"punctuation": "punctuation", "repeated": "repeated tokens"}
"""Sets of tokens that are no texts, and what sentences call them."""


@public
def attention_on(
    tokens: Tokens, what: str | Sequence[str], tokenizer: TokenNames | None = None
) -> tuple[Statistic, Statistic]:
    """Mean attention on tokens: a text ("'"), one of several, or a class.

    A token has a text where `tokenizer` decodes it so, without the spaces around it. Classes
    are "punctuation", tokens of nothing else (Unicode's categories P), and "repeated", tokens
    that their sequence had before, which needs no tokenizer. A list holds texts alone:
    ["punctuation"] is that word.

    To search for a head like the paper's apostrophe head (Barbero et al. 2024, arXiv
    2410.06205, section 6):

        apostrophes = rl.attention_on(tokens, "'", tokenizer)
        profile = rl.profile(model, tokens, statistics=apostrophes)
        rl.classify_heads(profile).nlargest(5, "attention_on_apostrophe")

    Returns two statistics of a profile: `attention_on_NAME` (layer, head), the mean over rows
    of the attention on such tokens, which heads.csv has too; and `even_on_NAME`, that of a
    head that attends evenly to all that it sees. Raises `BadArgument` without a tokenizer
    where one is needed, and where there is no such token.
    """
    tokens, _ = check_tokens(tokens, None, vocabulary=LARGEST_ID)
    chosen = find_tokens(tokens, what, tokenizer).to(tokens.device)
    if not chosen.any():
        raise BadArgument(
            f"There is no token {what!r} in this text.",
            means="a token must be that text, but for spaces around it",
            attempt='several texts, such as ["\'", "\'s"], or another text to measure on',
        )
    ids = None if what == "repeated" else tokens[chosen].unique()

    def here(block: Block) -> Bool[Tensor, "batch key"]:
        if ids is None:
            return seen_before(block.of_call.tokens)[:, block.keys.start : block.keys.stop]
        return torch.isin(block.tokens, ids.to(block.tokens.device))

    def attention(block: Block) -> Float[Tensor, "batch kv_head group row"]:
        return (block.attention * here(block)[:, None, None, None]).sum(-1)

    def even(block: Block) -> Float[Tensor, "batch kv_head group row"]:
        on = (here(block)[:, None] & block.seen).sum(-1) / block.seen.sum(-1)
        return on[:, None, None].expand(block.log_norm.shape).to(block.q.dtype)

    texts = [what] if isinstance(what, str) else list(what)
    name = "_or_".join(map(_spelled, texts))
    words = CLASSES.get(str(what), f"tokens {' or '.join(texts)}")
    dims = ("layer", "head")
    mean, chance = f"mean attention on {words}", f"the same, were attention even: {words}"
    return (
        Statistic(f"attention_on_{name}", dims, "1", mean, column="score", of=attention),
        Statistic(f"even_on_{name}", dims, "1", chance, of=even),
    )


def find_tokens(
    tokens: Int[Tensor, "sequence position"],
    what: str | Sequence[str],
    tokenizer: TokenNames | None = None,
) -> Bool[Tensor, "sequence position"]:
    """Which tokens are `what`; see `attention_on`. Padding is not known here."""
    if what == "repeated":
        return seen_before(tokens)
    if tokenizer is None or not what:
        raise BadArgument(
            f"Tokens {what!r} are found by their text, and there is no tokenizer or text.",
            attempt='tokenizer=, or "repeated"',
        )
    ids, places = tokens.cpu().unique(return_inverse=True)
    texts = {what} if isinstance(what, str) else set(what)
    names = token_names(ids, tokenizer)
    if what == "punctuation":
        kinds = [{unicodedata.category(letter)[0] for letter in name.strip()} for name in names]
        among = [kind == {"P"} for kind in kinds]
    else:
        among = [name in texts or name.strip() in texts for name in names]
    return torch.tensor(among, dtype=torch.bool)[places]


def _spelled(text: str) -> str:
    """A text as part of a name: letters and digits, other signs by what Unicode calls them."""
    spelled = ""
    for letter in text.strip() or text:
        plain = letter.isascii() and letter.isalnum()
        called = unicodedata.name(letter, f"u{ord(letter):04x}").lower().replace("-", " ")
        spelled += letter if plain else f" {called} "
    return "_".join(spelled.split())
