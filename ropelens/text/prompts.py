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
    if isinstance(token, str):
        ids = encode(token, tokenizer, prompt=True).ids
    elif 0 <= token < vocabulary:
        ids = [int(token)]
    else:
        ids = []
    if len(ids) != 1:
        raise BadArgument(
            f"{token!r:.80} is not one token of the model.",
            seen=f"{len(ids)} tokens, of the {vocabulary} that it has",
        )
    return ids[0]


def token_names(
    tokens: Iterable[Tensor | int], tokenizer: TokenNames | None
) -> list[str]:
    """Text of each token inside a text, or its number without a tokenizer."""
    if tokenizer is None:
        return [f"#{int(token)}" for token in tokens]
    names = []
    for token in map(int, tokens):
        # Many tokenizers drop the space at the beginning of a single token.
        once = str(tokenizer.decode([token]))
        twice = str(tokenizer.decode([token, token]))
        names.append(twice[len(once) :] or once)
    return names
