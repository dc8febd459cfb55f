"""Short sequences of tokens that a profile looks into, given or cut from its text."""

from collections.abc import Iterable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedConfig

from ropelens.attention.call import AttentionCall, attention_map
from ropelens.errors import BadArgument
from ropelens.profiles.checked_text import check_ids
from ropelens.profiles.measurement import Measurement
from ropelens.text.rows import generator_of
from ropelens.text.text import Text

COUNT = 3  # excerpts that are chosen
LENGTH = 40  # tokens of a chosen excerpt
LONGEST_EXCERPT = 256
CANDIDATES = 16  # pieces of the text from which excerpts are chosen, in one batch
EXCERPTED = (CANDIDATES + COUNT) * LENGTH  # tokens that run to choose and to read them
EXCERPT_WEIGHTS = 2**24  # most attention weights of an excerpt in a profile


def check_excerpts(
    config: PreTrainedConfig, excerpts: Iterable[Tensor]
) -> list[Int[Tensor, " _"]]:
    """Return the sequences; raise `BadArgument` for unknown tokens and for long texts."""
    config = config.get_text_config()
    longest = longest_excerpt(config)
    checked = []
    for tokens in excerpts:
        if not 3 <= len(tokens) <= longest:
            raise BadArgument(
                f"A prompt to look into must have 3 to {longest} tokens.",
                seen=f"{len(tokens):,} tokens",
                means="a profile has the attention of every head",
                hint="another prompt, or ropelens.capture for some of the heads",
            )
        text = Text(tokens[None])
        check_ids(text.ids, vocabulary=config.vocab_size)
        checked.append(text.ids[0])
    return checked


def longest_excerpt(config: PreTrainedConfig) -> int:
    """Most tokens of an excerpt, so that the attention of all heads fits into a profile."""
    heads = config.num_hidden_layers * config.num_attention_heads
    return min(LONGEST_EXCERPT, int((EXCERPT_WEIGHTS / heads) ** 0.5))


def chosen_excerpts(measurement: Measurement) -> list[Int[Tensor, " position"]]:
    """The `COUNT` random pieces on which heads choose keys most sharply."""
    live = measurement.live
    candidates = draw_pieces(
        measurement.text,
        longest=min(LENGTH, longest_excerpt(live.config)),
        first_token=common_first_token(measurement.text.ids[:, 0], bos=live.bos),
        seed=measurement.seed,
    )
    bits = torch.zeros(len(candidates), dtype=torch.float64, device="cpu")
    for layer_bits in live.record_calls(candidates, divergence_from_even).values():
        bits = bits + layer_bits
    sharpest = bits.argsort(descending=True, stable=True)[:COUNT]
    return list(candidates[sharpest])


def common_first_token(
    first: Int[Tensor, " sequence"], *, bos: int | None
) -> int | None:
    """The token that all sequences begin with, if it is BOS or similar, or None.

    In a single sequence it may be any word.
    """
    alike = len(first) > 1 and bool((first == first[0]).all())
    if alike or int(first[0]) == bos:
        return int(first[0])
    return None


def draw_pieces(
    text: Text, *, longest: int, first_token: int | None, seed: int
) -> Int[Tensor, "piece position"]:
    """Up to `CANDIDATES` different random pieces of the text, of equal length."""
    real_tokens = text.real.sum(1)
    length = min(longest, int(real_tokens.max()))
    long = (real_tokens >= length).nonzero().flatten()
    generator = generator_of(seed, len(long))
    order = long[torch.randperm(len(long), generator=generator, device="cpu")].tolist()
    pieces = []
    for number in range(CANDIDATES):
        sequence = order[number % len(order)]  # few sequences give several pieces
        real = text.real[sequence].to(text.ids.device)
        ids = text.ids[sequence][real]
        starts = len(ids) - length + 1
        start = int(torch.randint(starts, (), generator=generator, device="cpu"))
        piece = ids[start : start + length].clone()
        if first_token is not None:
            piece[0] = first_token
        pieces.append(piece)
    return torch.stack(pieces).unique(dim=0)


def divergence_from_even(call: AttentionCall) -> Float[Tensor, " piece"]:
    """Divergence from even attention without the first key, over heads, mean of queries."""
    weights = attention_map(call)[..., 1:, 1:].double().cpu()
    keys = torch.arange(1, weights.shape[-1] + 1, device="cpu")[:, None].double()
    conditional = weights / weights.sum(-1, keepdim=True).clamp(min=1e-30)
    log_ratio = (conditional * keys).clamp(min=1e-30).log2()
    return (weights * log_ratio).sum(-1).mean(-1).sum(-1)
