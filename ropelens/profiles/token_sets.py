"""Tokens by their text, class or the token before, and the attention that they get."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ropelens.attention.block import Block, SampledCall
from ropelens.attention.sums import LayerMeans
from ropelens.attention.variables import Statistic
from ropelens.errors import BadArgument, public
from ropelens.profiles.capture import TokenNames, token_names
from ropelens.text.text import seen_before
from ropelens.text.tokenize import TextInput, read_text

CLASSES: dict[str, Callable[[str], bool]] = {
    "punctuation": lambda text: {unicodedata.category(x)[0] for x in text.strip()} == {"P"},
    "newline": lambda text: "\n" in text,
    "digits": lambda text: text.strip().isdigit(),
    "capital": lambda text: text.strip()[:1].isupper(),
}
"""Sets of tokens by what their text is; "repeated" is one by the sequence."""

AFTER = "after:"
NEAR = 8  # tokens to either side among which one of like frequency is looked for


@dataclass(frozen=True)
class Share(Statistic):
    """Of `of` [..., row, (part, whole, of, one)] summed over rows: part / whole of / one."""

    def value(self, layer: LayerMeans) -> Tensor:
        """The variable of one layer; NaN where no row counts."""
        part, whole, of, one = layer[self.name].unbind(-1)
        return part / whole * of / one


@public
def attention_on(
    text: TextInput, what: str | Sequence[str], tokenizer: TokenNames | None = None
) -> tuple[Statistic, Statistic]:
    """Attention on tokens where one of them is in sight: a text ("'"), several, or a class.

    A token has a text where `tokenizer` decodes it so, without the spaces around it; "*'*" is
    any that contains it. Classes are "punctuation" (Unicode's categories P alone), "newline",
    "digits", "capital" (an upper-case letter first) and "repeated" (tokens that their sequence
    had before, which needs no tokenizer). "after:" before one of these means tokens that follow
    one, as "after:*'*". A list holds texts alone: ["punctuation"] is that word.

    To search for a head like the paper's apostrophe head (Barbero et al. 2024, arXiv
    2410.06205, section 6):

        apostrophes = rl.attention_on(text, "*'*", tokenizer)
        profile = rl.profile(model, text, statistics=apostrophes)
        rl.classify_heads(profile).nlargest(5, "attention_on_any_apostrophe")

    Returns two statistics of a profile, over the rows that see such a token that is no sink:
    `attention_on_NAME` (layer, head), the share of the attention outside of sinks that goes to
    such tokens, which heads.csv has too; and `control_on_NAME`, what as many other tokens get
    that are as frequent and as far: beside each, the one on either side within 8 tokens that is
    nearest in frequency and place. Raises `BadArgument` without a tokenizer where one is
    needed, and where there is no such token.
    """
    tokens = read_text(text, tokenizer=tokenizer).ids
    after = isinstance(what, str) and what.startswith(AFTER)
    word = what.removeprefix(AFTER) if isinstance(what, str) else what
    ids = None if word == "repeated" else ids_of(tokens, word, tokenizer)
    if not places_of(tokens, ids, after=after).any():
        raise BadArgument(
            f"There is no token {what!r} in this text.",
            means="a token must be that text, but for spaces around it",
            hint='any that contains it, "*\'*", or another text to measure on'
            if tokenizer is not None
            else "tokenizer=, which names tokens",
        )
    texts = [what] if isinstance(what, str) else list(what)
    name, words = "_or_".join(map(_spelled, texts)), " or ".join(texts)
    return shares_of(tokens, ids, name, words, after=after)


def shares_of(
    tokens: Int[Tensor, "sequence position"],
    ids: Int[Tensor, " id"] | None,
    name: str,
    words: str,
    *,
    after: bool = False,
) -> tuple[Statistic, Statistic]:
    """The two statistics of `attention_on`, of tokens by their `ids`; None: repeated ones."""
    kinds, counts = tokens.unique(return_counts=True)
    read: list[tuple[Tensor, Tensor, Tensor]] = []

    def places(of: SampledCall) -> tuple[Tensor, Tensor]:
        """Which shown tokens of a batch are such, and the weight of each as a control."""
        given, hidden = of.tokens.contiguous(), of.rows.hidden
        if hidden is not None:
            given = given.masked_fill(hidden[:, of.places.cpu()].to(given.device), -1)
        if not read or not torch.equal(read[0][0], given):
            on = places_of(given, ids, after=after) & (given >= 0)
            at = torch.searchsorted(kinds.to(given.device), given).clamp(max=len(kinds) - 1)
            frequent = counts.to(given.device)[at].log2().masked_fill(given < 0, torch.inf)
            read[:] = [(given, on, controls(on, frequent))]
        return read[0][1], read[0][2]

    def share(block: Block, *, control: bool) -> Float[Tensor, "batch kv_head group row 4"]:
        here = slice(block.keys.start, block.keys.stop)
        on, beside = (x[:, here].to(block.q) for x in places(block.of_call))
        apart = block.q.new_ones(*block.q.shape[:3], 1, on.shape[1])
        apart[..., block.sinks] = (block.sink_kind == 0).to(apart)
        seen = block.seen[:, None, None]
        on, beside = (x[:, None, None, None] * apart for x in (on, beside))
        count, others = ((x * seen).sum(-1) for x in (on, beside))
        one, number = (beside, others) if control else (on, count)
        part, whole = ((block.attention * weight).sum(-1) for weight in (one, apart))
        return torch.stack([part, whole, count, number], dim=-1) * (count > 0)[..., None]

    words, dims = f"tokens {words}", ("layer", "head")
    return (
        Share(f"attention_on_{name}", dims, "1", f"attention on {words}, where one is seen",
            column="score", values=lambda block: share(block, control=False)),
        Share(f"control_on_{name}", dims, "1", f"others as frequent and far as {words}",
            values=lambda block: share(block, control=True)),
    )  # fmt: skip


def places_of(
    tokens: Int[Tensor, "sequence position"], ids: Int[Tensor, " id"] | None, *, after: bool
) -> Bool[Tensor, "sequence position"]:
    """Where tokens with one of the `ids` are (None: repeated ones), or those `after` them."""
    on = seen_before(tokens) if ids is None else torch.isin(tokens, ids.to(tokens.device))
    if after:
        on = on.roll(1, 1)
        on[:, 0] = False
    return on


def controls(
    on: Bool[Tensor, "sequence position"], log_count: Float[Tensor, "sequence position"]
) -> Float[Tensor, "sequence position"]:
    """How many of the tokens `on` each other token stands beside, half for either side.

    Of the `NEAR` tokens on a side it is the one with the least |log2 of the ratio of their
    counts| + (tokens between) / `NEAR`. The first token of a sequence is no control.
    """
    weight, at = torch.zeros_like(log_count), torch.arange(on.shape[1], device=on.device)
    for side in (-1, 1):
        costs = []
        for distance in range(1, NEAR + 1):
            there = (at + side * distance).clamp(0, len(at) - 1)
            cost = (log_count - log_count[:, there]).abs() + distance / NEAR
            outside = there != at + side * distance
            costs.append(cost.masked_fill(on[:, there] | outside | (there == 0), torch.inf))
        least, best = torch.stack(costs).min(0)
        there = (at + side * (best + 1)).clamp(0, len(at) - 1)
        weight.scatter_add_(1, there, (0.5 * (on & least.isfinite())).to(weight))
    return weight


def ids_of(
    tokens: Int[Tensor, "sequence position"],
    what: str | Sequence[str],
    tokenizer: TokenNames | None,
) -> Int[Tensor, " id"]:
    """The ids among `tokens` that are texts or of a class: see `attention_on`."""
    ids = tokens.cpu().unique()
    names = token_names(ids, tokenizer)
    if isinstance(what, str) and what in CLASSES:
        among = [CLASSES[what](name) for name in names]
    elif isinstance(what, str) and len(what) > 2 and what[0] == what[-1] == "*":
        among = [what[1:-1] in name for name in names]
    else:
        texts = {what} if isinstance(what, str) else set(what)
        among = [name in texts or name.strip() in texts for name in names]
    return ids[torch.tensor(among, dtype=torch.bool)]


def _spelled(text: str) -> str:
    """A text as part of a name: letters and digits, other signs by what Unicode calls them."""
    if text.startswith(AFTER):
        return f"after_{_spelled(text.removeprefix(AFTER))}"
    if len(text) > 2 and text[0] == text[-1] == "*":
        return f"any_{_spelled(text[1:-1])}"
    spelled = ""
    for letter in text.strip() or text:
        plain = letter.isascii() and letter.isalnum()
        called = unicodedata.name(letter, f"u{ord(letter):04x}").lower().replace("-", " ")
        spelled += letter if plain else f" {called} "
    return "_".join(spelled.split())
