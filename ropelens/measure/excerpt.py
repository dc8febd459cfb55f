"""Short sequences to look into: attention, queries and keys of every head, and which ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PretrainedConfig

from ropelens.errors import BadArgument, UnsupportedModel
from ropelens.models.subject import Subject
from ropelens.models.texts import check_tokens
from ropelens.rope.planes import Planes, unrotate
from ropelens.statistics.call import AttentionCall, attention_map
from ropelens.statistics.corpus import Corpus
from ropelens.statistics.rows import generator_of
from ropelens.statistics.variables import EXCERPTS, labelled, stack

COUNT, LENGTH = 3, 40
"""Excerpts of a profile, and their tokens, where none are given."""

LONGEST_EXCERPT = 256
CANDIDATES = 16
"""Pieces of the text that excerpts are chosen from."""

EXCERPT_WEIGHTS, EXCERPT_NUMBERS = 2**24, 2**20
"""Most attention weights, and numbers of queries, that a profile holds."""


@runtime_checkable
class TokenNames(Protocol):
    """A tokenizer, as far as it names tokens; transformers' do."""

    def decode(self, token_ids: Any, **options: Any) -> Any: ...


@dataclass(frozen=True)
class Excerpt:
    """What the heads of a model compute on one short sequence, a tensor a layer.

    `attention` is [head, query, key]; `query` and `key` are [head, position, coordinate]
    without their rotation: the real parts of the planes, then the imaginary ones, then the
    coordinates that do not rotate. `scale` multiplies their products; `planes` counts.
    """

    tokens: Int[Tensor, " position"]
    attention: list[Tensor]
    query: list[Tensor]
    key: list[Tensor]
    scale: list[float]
    planes: list[int]

    @classmethod
    def of(
        cls, subject: Subject, tokens: Int[Tensor, " position"], planes: Sequence[Planes]
    ) -> Excerpt:
        layers: dict[int, tuple[Tensor, Tensor, float]] = {}

        def see(call: AttentionCall) -> None:
            turning = planes[call.layer]
            query, key = _still(call.query[0], turning), _still(call.key[0], turning)
            layers[call.layer] = (query, key, float(call.scale))

        attention = attention_of(subject, tokens, see)
        query, key, scale = zip(*(layers[layer] for layer in sorted(layers)), strict=True)
        counts = [layer.rotary_dim // 2 for layer in planes]
        return cls(tokens, attention, list(query), list(key), list(scale), counts)


def _still(
    x: Float[Tensor, "head position coordinate"], planes: Planes
) -> Float[Tensor, "head position coordinate"]:
    """Queries or keys without their rotation; planes that turn clockwise are mirrored."""
    planes = planes.of_keys(len(x))
    still = unrotate(x.float(), torch.arange(x.shape[1]), planes).cpu()
    before, after = still[..., : planes.offset], still[..., planes.offset + planes.rotary_dim :]
    direction = torch.where(planes.inv_freq < 0, -1.0, 1.0)[..., None, :].cpu()
    mirrored = still[..., planes.second] * direction
    return torch.cat([still[..., planes.first], mirrored, before, after], dim=-1)


def chosen_excerpts(
    subject: Subject, text: Corpus, *, seed: int
) -> list[Int[Tensor, " position"]]:
    """Pieces of the text on which heads choose their keys most sharply, the sharpest first.

    Of `CANDIDATES` pieces, drawn with `seed` and each behind the token that all sequences
    begin with, those of the most bits: attention against even attention, the first key
    apart, summed over all heads and averaged over queries.
    """
    pieces = _candidates(subject.config, text, seed=seed)
    bits = torch.zeros(len(pieces), dtype=torch.float64)

    def see(call: AttentionCall) -> None:
        weights = attention_map(call)[..., 1:, 1:].double().cpu()
        keys = torch.arange(1, weights.shape[-1] + 1).double()[:, None]
        of_rest = weights / weights.sum(-1, keepdim=True).clamp(min=1e-30)
        bits.add_((weights * (of_rest * keys).clamp(min=1e-30).log2()).sum(-1).mean(-1).sum(-1))

    with torch.no_grad(), subject.observe(see):
        subject.forward(pieces)
    return list(pieces[bits.argsort(descending=True, stable=True)[:COUNT]])


def _candidates(
    config: PretrainedConfig, text: Corpus, *, seed: int
) -> Int[Tensor, "piece position"]:
    """Pieces of equal length, each of another sequence where there are enough."""
    first = text.tokens[:, 0]
    # Such as BOS, without which models are lost; of one sequence it may be any word.
    alike = len(first) > 1 and bool((first == first[0]).all())
    begins = alike or int(first[0]) == config.bos_token_id
    length = min(LENGTH, _longest(config), text.context)
    long = (text.lengths >= length).nonzero().flatten()
    generator = generator_of(seed, len(long))
    order = long[torch.randperm(len(long), generator=generator)].tolist()
    pieces = []
    for sequence in (order * CANDIDATES)[:CANDIDATES]:  # of few sequences several pieces each
        free = int(text.lengths[sequence]) - length
        start = int(torch.randint(free + 1, (), generator=generator))
        piece = text.tokens[sequence, start : start + length].clone()
        if begins:
            piece[0] = first[0]
        pieces.append(piece)
    return torch.stack(pieces).unique(dim=0)


def turn_alike(subject: Subject, planes: Sequence[Planes], lengths: Iterable[int]) -> bool:
    """Whether sequences of these lengths turn as `planes`, which are those of the whole text.

    RoPE that changes with the length (dynamic, LongRoPE) may not: then `planes` would take
    another rotation off queries and keys than they have.
    """
    return not subject.depends_on_length or all(
        torch.equal(short.inv_freq, whole.inv_freq)
        for length in set(lengths)
        for short, whole in zip(subject.planes(length), planes, strict=True)
    )


def check_excerpts(
    config: PretrainedConfig, excerpts: Iterable[Tensor]
) -> list[Int[Tensor, " position"]]:
    """Sequences to look into; refused where they are too long or not of the vocabulary."""
    config = config.get_text_config()
    checked = []
    for tokens in excerpts:
        (row,), _ = check_tokens(tokens[None], None, vocabulary=config.vocab_size)
        if len(row) > _longest(config):
            raise BadArgument(
                "A prompt is too long to look into.",
                seen=f"{len(row):,} tokens",
                means=f"a profile holds every head's attention: {_longest(config)} tokens at "
                "most in this model",
                attempt="a shorter one, or ropelens.capture for some of the heads",
            )
        checked.append(row)
    return checked


def _longest(config: PretrainedConfig) -> int:
    heads = config.num_hidden_layers * config.num_attention_heads
    return min(LONGEST_EXCERPT, int((EXCERPT_WEIGHTS / heads) ** 0.5))


def excerpt_variables(
    excerpts: Sequence[Excerpt],
    tokenizer: TokenNames | None,
    bits: Float[np.ndarray, "layer head"],
    *,
    alike: bool,
    planes: Sequence[Planes],
) -> dict[str, xr.Variable]:
    """The variables of excerpts; the shorter ones end in NaN.

    Queries are those of the heads with the most `bits`, as many as fit; of others NaN. NaN too
    where excerpts do not turn as the text does (see `turn_alike`), and where an edit makes
    a head turn otherwise than the `wavelength` of its layer.
    """
    lengths = [len(excerpt.tokens) for excerpt in excerpts]
    names = np.full((len(excerpts), max(lengths)), "", dtype=object)
    for row, excerpt in zip(names, excerpts, strict=True):
        row[: len(excerpt.tokens)] = [name_token(tokenizer, int(t)) for t in excerpt.tokens]
    query, key = (
        _stacked([getattr(e, side) for e in excerpts]).astype(np.float16).astype(np.float32)
        for side in ("query", "key")  # half precision's digits: they pack well
    )
    sharpest = _sharpest(bits, most=EXCERPT_NUMBERS // query[:, 0, 0].size)
    shown = sharpest & _as_layer(planes, bits.shape[1]) & alike
    query[:, ~shown] = np.nan
    values = {
        "token": names,
        "length": np.array(lengths),
        "attention": _stacked([excerpt.attention for excerpt in excerpts]),
        "query_still": query,
        "key_still": key,
        "scale": np.array(excerpts[0].scale),
        "planes": np.array(excerpts[0].planes),
    }
    return labelled({f"excerpt_{name}": of for name, of in values.items()}, EXCERPTS)


def _stacked(excerpts: list[list[Tensor]]) -> Float[np.ndarray, "excerpt layer *rest"]:
    """Of each excerpt a tensor a layer, as one array of float32."""
    return stack(torch.from_numpy(stack(layers)) for layers in excerpts).astype(np.float32)


def _as_layer(planes: Sequence[Planes], heads: int) -> Bool[np.ndarray, "layer head"]:
    """Which heads turn every plane as fast as the fastest of their layer."""
    speeds = [layer.inv_freq.nan_to_num().abs().expand(heads, -1) for layer in planes]
    return np.stack([(speed == speed.amax(0)).all(-1).numpy() for speed in speeds])


def _sharpest(
    bits: Float[np.ndarray, "layer head"], *, most: int
) -> Bool[np.ndarray, "layer head"]:
    """The heads with the most bits: `most` of them, one at least."""
    order = np.argsort(-np.nan_to_num(bits, nan=-np.inf), axis=None, kind="stable")
    chosen = np.zeros(bits.size, bool)
    chosen[order[: max(most, 1)]] = True
    return chosen.reshape(bits.shape)


def attention_of(
    subject: Subject,
    tokens: Int[Tensor, " position"],
    also: Callable[[AttentionCall], None] = lambda call: None,
) -> list[Float[Tensor, "head row key"]]:
    """The attention matrices of every layer on one short sequence; `also` sees the calls."""
    maps: dict[int, Tensor] = {}

    def observe(call: AttentionCall) -> None:
        maps[call.layer] = attention_map(call)[0].float().cpu()
        if not maps[call.layer].isfinite().all():
            raise UnsupportedModel(
                f"{subject.kind} attends with numbers that are not finite.",
                seen=f"layer {call.layer}: NaN or infinity in its scores",
                attempt="dtype=torch.float32, or another checkpoint",
            )
        also(call)

    with torch.no_grad(), subject.observe(observe):
        subject.forward(tokens[None], last=1)
    subject.check_layers(set(maps))
    return [maps[layer] for layer in sorted(maps)]


def name_token(tokenizer: TokenNames | None, token: int) -> str:
    """The text of one token as it stands inside a text, or its number without a tokenizer.

    Decoded behind itself: alone, many tokenizers drop the space that a token begins with.
    """
    if tokenizer is None:
        return f"#{token}"
    alone, twice = tokenizer.decode([token]), tokenizer.decode([token, token])
    return str(twice)[len(alone) :] or str(alone)
