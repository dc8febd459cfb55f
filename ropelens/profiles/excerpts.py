"""A profile's excerpts: what all heads compute on short sequences, and what comes of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedConfig

from ropelens.attention.call import AttentionCall, attention_map
from ropelens.attention.sums import by_layer
from ropelens.attention.variables import labelled, stack
from ropelens.errors import BadArgument, UnsupportedModel
from ropelens.model.live_model import LiveModel
from ropelens.profiles.capture import TokenNames, token_names
from ropelens.profiles.gradients import Number, differentiate, score_gradient
from ropelens.profiles.measurement import Measurement
from ropelens.profiles.measures import AXES
from ropelens.profiles.model_text import check_ids
from ropelens.rope.planes import Planes, unrotate
from ropelens.text.rows import generator_of
from ropelens.text.text import Text

COUNT, LENGTH = 3, 40  # excerpts of a profile, and their tokens, where none are given

LONGEST_EXCERPT = 256
CANDIDATES = 16  # pieces of the text that excerpts are chosen from
EXCERPTED = (CANDIDATES + COUNT) * LENGTH  # tokens that run to choose excerpts and to read them

EXCERPT_WEIGHTS, EXCERPT_NUMBERS, NUMBERS_A_HEAD = 2**24, 180_000, 700
"""Most attention weights, and numbers of queries, that a profile holds; of many heads more
numbers. The page of 270 heads of 64 coordinates has 2.5 MB with 24 of them."""


def read_excerpts(
    measurement: Measurement,
    given: Sequence[Int[Tensor, " _"]],
    planes: Sequence[Planes],
    tokenizer: TokenNames | None,
) -> dict[str, np.ndarray]:
    """What the heads compute on sequences, or on chosen ones: arrays [excerpt, layer, ...].

    `attention` and, without their rotation, queries and keys: the real parts of the `planes`,
    then the imaginary ones, then the coordinates that do not rotate; NaN at the end. Queries
    are NaN where RoPE changes with the length, and the pieces turn otherwise than the whole
    text, as `planes`, or where an edit makes a head turn otherwise than its layer.
    """
    live = measurement.live
    pieces = check_excerpts(live.config, given) or chosen_excerpts(measurement)

    def see(call: AttentionCall) -> tuple[Tensor, Tensor, Tensor]:
        attention, turning = attention_map(call)[0].float().cpu(), planes[call.layer]
        if not attention.isfinite().all():
            raise UnsupportedModel(
                f"{live.class_name} attends with numbers that are not finite.",
                seen=f"layer {call.layer}: NaN or infinity in its scores",
                hint="dtype=torch.float32, or another checkpoint",
            )
        scale[call.layer] = float(call.scale)
        return attention, _still(call.query[0], turning), _still(call.key[0], turning)

    scale = np.full(live.layers, np.nan)
    of_pieces = [live.record_calls(piece[None], see) for piece in pieces]
    attention, query, key = (
        stack(by_layer({n: x[part] for n, x in of.items()}, live.layers) for of in of_pieces)
        for part in range(3)
    )
    for length in {len(piece) for piece in pieces}:
        short = zip(measurement.rotation.planes(length), planes, strict=True)
        if not all(torch.equal(one.inv_freq, whole.inv_freq) for one, whole in short):
            query[:] = np.nan
    speeds = [p.inv_freq.nan_to_num().abs().expand(live.heads, -1) for p in planes]
    as_layer = np.stack([(speed == speed.amax(0)).all(-1).numpy() for speed in speeds])
    query[:, ~as_layer] = np.nan
    names = np.full((len(pieces), query.shape[3]), "", dtype=object)
    for row, piece in zip(names, pieces, strict=True):
        row[: len(piece)] = token_names(piece, tokenizer)
    return _next_tokens(live, pieces, tokenizer) | {
        "attention": attention.astype(np.float32),
        "query_still": _rounded(query),
        "key_still": _rounded(key),
        "scale": scale,
        "token": names,
        "length": np.array([len(piece) for piece in pieces]),
        "planes": np.array([layer.rotary_dim // 2 for layer in planes]),
    }


def _rounded(x: Float[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]:
    """In single precision, but to the 11 bits of a half, which pack well."""
    mantissa, exponent = np.frexp(x.astype(np.float32))
    return np.ldexp((mantissa * 2048).round() / 2048, exponent)


def _next_tokens(
    live: LiveModel, pieces: Sequence[Int[Tensor, " _"]], tokenizer: TokenNames | None
) -> dict[str, np.ndarray]:
    """The two tokens that each piece makes likeliest, and the `lead` of the first, in nats.

    `score_gradient` is how much every score adds to the lead. Nothing for a model that a
    backward pass cannot go through: kernels without one, weights that are not on a device.
    """
    if any(weight.is_meta for weight in live.model.parameters()):
        return {}
    answers, leads, gradients = [], [], []
    every = torch.ones(live.layers, live.heads, dtype=torch.bool)

    def lead(logits: Float[Tensor, "position token"]) -> Float[Tensor, ""]:
        (first, second), tokens = logits[-1].topk(2)
        answers.append(token_names(tokens, tokenizer))
        return first - second

    for piece in pieces:
        text = Text(piece[None])
        try:
            value, calls = differentiate(live, text, Number(lead, last=1), every)
        except RuntimeError:
            return {}
        leads.append(value)
        slopes = {
            layer: torch.stack([score_gradient(*of, head)[0] for head in range(live.heads)])
            for layer, of in calls.items()
        }
        gradients.append(by_layer(slopes, live.layers))
    names, gradient = np.array(answers, dtype=object), _rounded(stack(gradients))
    return {"score_gradient": gradient, "answer": names, "lead": np.array(leads)}


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


def chosen_excerpts(measurement: Measurement) -> list[Int[Tensor, " position"]]:
    """Pieces of the text on which heads choose their keys most sharply, the sharpest first.

    Of `CANDIDATES` pieces, drawn with the seed and each behind the token that all sequences
    begin with, those of the most bits: attention against even attention, the first key
    apart, summed over all heads and averaged over queries.
    """
    config, text = measurement.live.config, measurement.text
    first = text.ids[:, 0]
    # Such as BOS, without which models are lost; of one sequence it may be any word.
    alike = len(first) > 1 and bool((first == first[0]).all())
    begins = alike or int(first[0]) == measurement.live.bos
    count = text.real.sum(1)
    length = min(LENGTH, _longest(config), int(count.max()))
    long = (count >= length).nonzero().flatten()
    generator = generator_of(measurement.seed, len(long))
    order = long[torch.randperm(len(long), generator=generator)].tolist()
    pieces = []
    for sequence in (order * CANDIDATES)[:CANDIDATES]:  # of few sequences several pieces each
        of_sequence = text.ids[sequence][text.real[sequence].to(text.ids.device)]
        start = int(torch.randint(len(of_sequence) - length + 1, (), generator=generator))
        piece = of_sequence[start : start + length].clone()
        if begins:
            piece[0] = first[0]
        pieces.append(piece)
    candidates = torch.stack(pieces).unique(dim=0)

    def bits(call: AttentionCall) -> Float[Tensor, " piece"]:
        weights = attention_map(call)[..., 1:, 1:].double().cpu()
        keys = torch.arange(1, weights.shape[-1] + 1).double()[:, None]
        of_rest = weights / weights.sum(-1, keepdim=True).clamp(min=1e-30)
        return (weights * (of_rest * keys).clamp(min=1e-30).log2()).sum(-1).mean(-1).sum(-1)

    of_layers = measurement.live.record_calls(candidates, bits).values()
    total = sum(of_layers, torch.zeros(len(candidates)).double())
    return list(candidates[total.argsort(descending=True, stable=True)[:COUNT]])


def check_excerpts(
    config: PreTrainedConfig, excerpts: Iterable[Tensor]
) -> list[Int[Tensor, " position"]]:
    """Sequences to look into; refused where they are too long or not of the vocabulary."""
    config = config.get_text_config()
    checked = []
    for tokens in excerpts:
        if not 3 <= len(tokens) <= _longest(config):
            raise BadArgument(
                f"A prompt to look into has 3 to {_longest(config)} tokens in this model.",
                seen=f"{len(tokens):,} tokens",
                means="a profile holds every head's attention",
                hint="another prompt, or ropelens.capture for some of the heads",
            )
        text = Text(tokens[None])
        check_ids(text, vocabulary=config.vocab_size)
        checked.append(text.ids[0])
    return checked


def _longest(config: PreTrainedConfig) -> int:
    heads = config.num_hidden_layers * config.num_attention_heads
    return min(LONGEST_EXCERPT, int((EXCERPT_WEIGHTS / heads) ** 0.5))


def excerpt_variables(
    excerpts: dict[str, np.ndarray], sharp: Float[np.ndarray, "layer head"]
) -> dict[str, xr.Variable]:
    """The variables of excerpts; queries are of the most `sharp` heads, as many as fit."""
    query = excerpts["query_still"]
    order = np.argsort(-np.nan_to_num(sharp, nan=-np.inf), axis=None, kind="stable")
    room = max(EXCERPT_NUMBERS, NUMBERS_A_HEAD * sharp.size)
    others = order[max(room // query[:, 0, 0].size, 1) :]
    layer, head = np.unravel_index(others, sharp.shape)
    query[:, layer, head] = np.nan
    return labelled({f"excerpt_{name}": of for name, of in excerpts.items()}, AXES)
