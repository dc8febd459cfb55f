"""Sets of tokens by text, class or previous token, and the attention that they receive."""

import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from ropelens.arguments import public
from ropelens.attention.block import Block
from ropelens.attention.sampled_call import SampledCall
from ropelens.attention.sums import LayerMeans
from ropelens.errors import BadArgument
from ropelens.schema import Statistic
from ropelens.text.prompts import TokenNames, token_names
from ropelens.text.rows import Ids, TokenMask
from ropelens.text.text import seen_before
from ropelens.text.tokenize import TextInput, read_text

CLASSES: dict[str, Callable[[str], bool]] = {
    "punctuation": lambda text: (
        {unicodedata.category(x)[0] for x in text.strip()} == {"P"}
    ),
    "newline": lambda text: "\n" in text,
    "digits": lambda text: text.strip().isdigit(),
    "capital": lambda text: text.strip()[:1].isupper(),
}
"""Classes of tokens by their text. The class "repeated" depends on the sequence instead."""

AFTER = "after:"
NEAR = 8  # tokens on either side among which a token of similar frequency is searched


@dataclass(frozen=True)
class Share(Statistic):
    """Attention on a set of tokens: mass share times target count / reference count."""

    def value(self, layer: LayerMeans) -> Tensor:
        target, total, count, reference = layer[self.name].unbind(-1)
        return target / total * count / reference


@public
def attention_on(
    text: TextInput, what: str | Sequence[str], tokenizer: TokenNames | None = None
) -> tuple[Statistic, Statistic]:
    """Two statistics: attention on a set of tokens, and on matched control tokens.

    Parameters
    ----------
    text
        The text that will be measured; it decides the frequencies of tokens.
    what
        A token by its text ("'"), a list of texts, or a class. A token has the text to which
        `tokenizer` decodes it, apart from spaces around it. "*'*" means any token that contains
        the text. Classes are "punctuation" (the categories P of Unicode), "newline", "digits",
        "capital" (an upper-case letter first) and "repeated" (tokens that occurred earlier in
        their sequence; needs no tokenizer). "after:" in front means the tokens that follow, as
        in "after:*'*". In a list every item is a text: ["punctuation"] is that word.
    tokenizer
        Names the tokens.

    Returns
    -------
    Two statistics of a profile, over the rows that see a token of the set that is not a sink.
    `attention_on_NAME` (layer, head), also a column of heads.csv, is the share of the attention
    outside of sinks that goes to the set. `control_on_NAME` is the share of an equal number of
    control tokens: within 8 tokens on either side, those most similar in frequency and place.

    Raises `BadArgument` if a tokenizer is missing, or if the text has no such token.

    Examples
    --------
    A search for the apostrophe head of Barbero et al. 2024 (arXiv 2410.06205, section 6):

        apostrophes = rl.attention_on(text, "*'*", tokenizer)
        profile = rl.profile(model, text, statistics=apostrophes)
        rl.classify_heads(profile).nlargest(5, "attention_on_any_apostrophe")
    """
    tokens = read_text(text, tokenizer=tokenizer).ids
    after = isinstance(what, str) and what.startswith(AFTER)
    word = what.removeprefix(AFTER) if isinstance(what, str) else what
    ids = None if word == "repeated" else ids_of(tokens, word, tokenizer)
    if not places_of(tokens, ids, after=after).any():
        means = "a token must be that text, but for spaces around it"
        hint = 'any that contains it, "*\'*", or another text to measure on'
        hint = "tokenizer=, which names tokens" if tokenizer is None else hint
        raise BadArgument(
            f"There is no token {what!r} in this text.", means=means, hint=hint
        )
    texts = [what] if isinstance(what, str) else list(what)
    name, words = "_or_".join(map(_spelled, texts)), " or ".join(texts)
    return shares_of(tokens, ids, name, words, after=after)


def shares_of(
    tokens: Ids,
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
            given = given.masked_fill(
                hidden[:, of.key_position.cpu()].to(given.device), -1
            )
        if not read or not torch.equal(read[0][0], given):
            on = places_of(given, ids, after=after) & (given >= 0)
            at = torch.searchsorted(kinds.to(given.device), given).clamp(
                max=len(kinds) - 1
            )
            frequent = (
                counts.to(given.device)[at].log2().masked_fill(given < 0, torch.inf)
            )
            read[:] = [(given, on, controls(on, frequent))]
        return read[0][1], read[0][2]

    def share(
        block: Block, *, control: bool
    ) -> Float[Tensor, "batch kv_head group row 4"]:
        on, beside = (x[:, block.columns].to(block.q) for x in places(block.sampled))
        apart = block.q.new_ones(*block.q.shape[:3], 1, on.shape[1])
        apart[..., block.sinks] = (block.sink_kind == 0).to(apart)
        seen = block.device_visibility.sees()[:, None, None]
        on, beside = (x[:, None, None, None] * apart for x in (on, beside))
        count, others = ((x * seen).sum(-1) for x in (on, beside))
        one, number = (beside, others) if control else (on, count)
        part, whole = ((block.attention * weight).sum(-1) for weight in (one, apart))
        return (
            torch.stack([part, whole, count, number], dim=-1) * (count > 0)[..., None]
        )

    words, dims = f"tokens {words}", ("layer", "head")
    return (
        Share(f"attention_on_{name}", dims, "1", f"attention on {words}, where one is seen",
            column="score", values=lambda block: share(block, control=False)),
        Share(f"control_on_{name}", dims, "1", f"others as frequent and far as {words}",
            values=lambda block: share(block, control=True)),
    )  # fmt: skip


def places_of(tokens: Ids, ids: Int[Tensor, " id"] | None, *, after: bool) -> TokenMask:
    """Mark the tokens in `ids` (None: repeated tokens), or the tokens `after` them."""
    on = (
        seen_before(tokens)
        if ids is None
        else torch.isin(tokens, ids.to(tokens.device))
    )
    return pad(on, (1, -1)) if after else on


def controls(
    on: TokenMask, log_count: Float[Tensor, "sequence position"]
) -> Float[Tensor, "sequence position"]:
    """Weight of each token as a control: 1/2 for every token in `on` that it is matched with.

    The match among the `NEAR` tokens on either side has the smallest |log2 of the ratio of
    counts| + distance / `NEAR`. The first token of a sequence is never a control.
    """
    weight, at = (
        torch.zeros_like(log_count),
        torch.arange(on.shape[1], device=on.device),
    )
    for side in (-1, 1):
        costs = []
        for distance in range(1, NEAR + 1):
            there = (at + side * distance).clamp(0, len(at) - 1)
            cost = (log_count - log_count[:, there]).abs() + distance / NEAR
            outside = there != at + side * distance
            costs.append(
                cost.masked_fill(on[:, there] | outside | (there == 0), torch.inf)
            )
        least, best = torch.stack(costs).min(0)
        there = (at + side * (best + 1)).clamp(0, len(at) - 1)
        weight.scatter_add_(1, there, (0.5 * (on & least.isfinite())).to(weight))
    return weight


def ids_of(
    tokens: Ids, what: str | Sequence[str], tokenizer: TokenNames | None
) -> Int[Tensor, " id"]:
    """Ids among `tokens` that have one of the texts, or are in the class `what`."""
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
        name = unicodedata.name(letter, f"u{ord(letter):04x}").lower().replace("-", " ")
        spelled += letter if letter.isascii() and letter.isalnum() else f" {name} "
    return "_".join(spelled.split())
