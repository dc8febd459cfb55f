"""Sets of tokens by text, class or previous token, and the attention that they receive."""

import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from ropelens.arguments import public
from ropelens.attention.block import Block
from ropelens.attention.sampled_call import SampledCall
from ropelens.attention.sums import LayerMeans
from ropelens.errors import BadArgument
from ropelens.schema.rows import Statistic
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
    if not mark_tokens(tokens, ids, after=after).any():
        hint = 'any that contains it, "*\'*", or another text to measure on'
        if tokenizer is None:
            hint = "tokenizer=, which names tokens"
        raise BadArgument(
            f"There is no token {what!r} in this text.",
            means="a token must be that text, but for spaces around it",
            hint=hint,
        )
    texts = [what] if isinstance(what, str) else list(what)
    name = "_or_".join(_spelled(text) for text in texts)
    return shares_of(tokens, ids, name, " or ".join(texts), after=after)


def shares_of(
    tokens: Ids,
    ids: Int[Tensor, " id"] | None,
    name: str,
    words: str,
    *,
    after: bool = False,
) -> tuple[Statistic, Statistic]:
    """The two statistics of `attention_on`, of tokens by their `ids`; None: repeated ones."""
    token_set = TokenSet(tokens, ids, after=after)
    on_set = Share(
        name=f"attention_on_{name}",
        dims=("layer", "head"),
        units="1",
        long_name=f"attention on tokens {words}, where one is seen",
        column="score",
        values=token_set.share,
    )
    on_controls = Share(
        name=f"control_on_{name}",
        dims=("layer", "head"),
        units="1",
        long_name=f"others as frequent and far as tokens {words}",
        values=token_set.share_of_controls,
    )
    return on_set, on_controls


@dataclass(frozen=True)
class MarkedTokens:
    """The tokens of a batch (-1: hidden), those in a set, and the weights of their controls."""

    tokens: Ids
    in_set: TokenMask
    control_weight: Float[Tensor, "sequence position"]


class TokenSet:
    """The tokens with some `ids` (None: repeated tokens), or the tokens `after` them."""

    def __init__(
        self, tokens: Ids, ids: Int[Tensor, " id"] | None, *, after: bool
    ) -> None:
        self.vocabulary, self.counts = tokens.unique(return_counts=True)
        self.ids = ids
        self.after = after
        self.last: MarkedTokens | None = None  # in the batch that all layers read now

    def share(self, block: Block) -> Float[Tensor, "batch kv_head group row 4"]:
        """Attention on the set and in total, both without sinks, and the numbers of tokens."""
        return self._share(block, of_controls=False)

    def share_of_controls(
        self, block: Block
    ) -> Float[Tensor, "batch kv_head group row 4"]:
        """The same for the controls of the set, on the same rows."""
        return self._share(block, of_controls=True)

    def _share(
        self, block: Block, *, of_controls: bool
    ) -> Float[Tensor, "batch kv_head group row 4"]:
        marked = self.mark(block.sampled)
        no_sink = block.q.new_ones(*block.q.shape[:3], 1, len(block.keys))
        no_sink[..., block.sinks] = (block.sink_kind == 0).to(no_sink)
        seen = block.device_visibility.sees()[:, None, None]
        in_set = _by_head(marked.in_set, block) * no_sink
        count = (in_set * seen).sum(-1)
        reference = in_set
        number = count
        if of_controls:
            reference = _by_head(marked.control_weight, block) * no_sink
            number = (reference * seen).sum(-1)
        part = (block.attention * reference).sum(-1)
        whole = (block.attention * no_sink).sum(-1)
        sums = torch.stack([part, whole, count, number], dim=-1)
        return sums * (count > 0)[..., None]

    def mark(self, sampled: SampledCall) -> MarkedTokens:
        """Mark the tokens of a batch that are not hidden; the layers of a batch share it."""
        tokens = sampled.tokens.contiguous()
        hidden = sampled.rows.hidden
        if hidden is not None:
            hidden_keys = hidden[:, sampled.key_position.cpu()]
            tokens = tokens.masked_fill(hidden_keys.to(tokens.device), -1)
        if self.last is None or not torch.equal(self.last.tokens, tokens):
            in_set = mark_tokens(tokens, self.ids, after=self.after) & (tokens >= 0)
            weight = controls(in_set, self.log_count(tokens))
            self.last = MarkedTokens(tokens, in_set, weight)
        return self.last

    def log_count(self, tokens: Ids) -> Float[Tensor, "sequence position"]:
        """log2 of the number of occurrences in the text; infinite for hidden tokens."""
        index = torch.searchsorted(self.vocabulary.to(tokens.device), tokens)
        index = index.clamp(max=len(self.vocabulary) - 1)
        counts = self.counts.to(tokens.device)[index]
        return counts.float().log2().masked_fill(tokens < 0, torch.inf)


def _by_head(
    values: Bool[Tensor, "sequence position"] | Float[Tensor, "sequence position"],
    block: Block,
) -> Float[Tensor, "sequence 1 1 1 key"]:
    """Values of the keys of a block, with axes for heads and rows."""
    return values[:, block.columns].to(block.q)[:, None, None, None]


def mark_tokens(
    tokens: Ids, ids: Int[Tensor, " id"] | None, *, after: bool
) -> TokenMask:
    """Mark the tokens in `ids` (None: repeated tokens), or the tokens `after` them."""
    marked = (
        seen_before(tokens)
        if ids is None
        else torch.isin(tokens, ids.to(tokens.device))
    )
    if after:
        return pad(marked, (1, -1))
    return marked


def controls(
    in_set: TokenMask, log_count: Float[Tensor, "sequence position"]
) -> Float[Tensor, "sequence position"]:
    """Weight of each token as a control: 1/2 for every token of the set that it matches.

    The match among the `NEAR` tokens on either side has the smallest |log2 of the ratio of
    counts| + distance / `NEAR`. The first token of a sequence is never a control.
    """
    weight = torch.zeros_like(log_count)
    position = torch.arange(in_set.shape[1], device=in_set.device)
    last = len(position) - 1
    for side in (-1, 1):
        costs = []
        for distance in range(1, NEAR + 1):
            other = position + side * distance
            inside = other.clamp(0, last)
            difference = (log_count - log_count[:, inside]).abs()
            never = in_set[:, inside] | (other != inside) | (inside == 0)
            cost = difference + distance / NEAR
            costs.append(cost.masked_fill(never, torch.inf))
        least, best = torch.stack(costs).min(0)
        match = (position + side * (best + 1)).clamp(0, last)
        matched = (in_set & least.isfinite()).to(weight)
        weight.scatter_add_(1, match, 0.5 * matched)
    return weight


def ids_of(
    tokens: Ids, what: str | Sequence[str], tokenizer: TokenNames | None
) -> Int[Tensor, " id"]:
    """Ids among `tokens` that have one of the texts, or are in the class `what`."""
    ids = tokens.cpu().unique()
    names = token_names(ids, tokenizer)
    if isinstance(what, str) and what in CLASSES:
        is_in_class = CLASSES[what]
        chosen = [is_in_class(name) for name in names]
    elif isinstance(what, str) and is_wildcard(what):
        inner = what[1:-1]
        chosen = [inner in name for name in names]
    else:
        texts = {what} if isinstance(what, str) else set(what)
        chosen = [name in texts or name.strip() in texts for name in names]
    return ids[torch.tensor(chosen, dtype=torch.bool, device="cpu")]


def is_wildcard(text: str) -> bool:
    """Whether a text such as "*'*" means any token that contains the inner text."""
    return len(text) > 2 and text[0] == text[-1] == "*"


def _spelled(text: str) -> str:
    """A text as part of a name: letters and digits, other signs by what Unicode calls them."""
    if text.startswith(AFTER):
        return f"after_{_spelled(text.removeprefix(AFTER))}"
    if is_wildcard(text):
        return f"any_{_spelled(text[1:-1])}"
    spelled = ""
    for letter in text.strip() or text:
        if letter.isascii() and letter.isalnum():
            spelled += letter
        else:
            name = unicodedata.name(letter, f"u{ord(letter):04x}")
            spelled += f" {name.lower().replace('-', ' ')} "
    return "_".join(spelled.split())
