"""Prompts: one short sequence, and the names of its tokens."""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Integer
from torch import Tensor

from ropelens.arguments import Whole
from ropelens.errors import BadArgument
from ropelens.text.text import Text
from ropelens.text.tokenize import encode

OneSequence = Integer[Tensor, " position"] | Integer[Tensor, "1 position"]
Prompt = Text | str | OneSequence | Mapping[str, Any]  # a mapping is a BatchEncoding
Token = str | Whole  # by its text, or by its id


@runtime_checkable
class TokenNames(Protocol):
    """The part of a tokenizer that names tokens."""

    def decode(self, token_ids: Any, **options: Any) -> Any: ...


def token_id(token: Token, tokenizer: TokenNames | None, vocabulary: int) -> int:
    """Id of a token. Raise `BadArgument` if the model does not have the token."""
    known = (
        [int(token)] if not isinstance(token, str) and 0 <= token < vocabulary else []
    )
    ids = encode(token, tokenizer, prompt=True)[1] if isinstance(token, str) else known
    if len(ids) != 1:
        seen = f"{len(ids)} tokens, of the {vocabulary} that it has"
        raise BadArgument(f"{token!r:.80} is not one token of the model.", seen=seen)
    return ids[0]


def token_names(
    tokens: Iterable[Tensor | int], tokenizer: TokenNames | None
) -> list[str]:
    """Text of each token inside a text, or its number without a tokenizer."""
    if tokenizer is None:
        return [f"#{int(token)}" for token in tokens]
    # Many tokenizers drop the space at the beginning of a single token.
    pairs = [
        (tokenizer.decode([t]), tokenizer.decode([t, t])) for t in map(int, tokens)
    ]
    return [str(twice)[len(once) :] or str(once) for once, twice in pairs]
