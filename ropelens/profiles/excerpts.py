"""Excerpts of a profile: the attention, queries and keys of all heads on short sequences."""

from collections.abc import Iterable, Sequence
from itertools import groupby

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedConfig

from ropelens.attention.call import AttentionCall, attention_map
from ropelens.attention.sums import by_layer
from ropelens.errors import BadArgument, UnsupportedModel
from ropelens.model.live_model import LiveModel
from ropelens.profiles.gradients import Number, differentiate, score_gradient
from ropelens.profiles.measurement import Measurement, check_ids
from ropelens.rope.planes import Planes, unrotate
from ropelens.schema import AXES, labelled, stack
from ropelens.text.prompts import TokenNames, token_names
from ropelens.text.rows import generator_of
from ropelens.text.text import Text

COUNT, LENGTH = 3, 40  # default number of excerpts, and of tokens of an excerpt
LONGEST_EXCERPT = 256
CANDIDATES = 16  # pieces of the text from which excerpts are chosen, in one batch
EXCERPTED = (CANDIDATES + COUNT) * LENGTH  # tokens that run to choose and to read them

SHORT = 1_500_000  # queries and keys of all heads, in numbers, that a page has room for
# Most attention weights and query numbers in a profile; 24 heads of 64 coordinates: 2.5 MB
EXCERPT_WEIGHTS, EXCERPT_NUMBERS, NUMBERS_A_HEAD = 2**24, 180_000, 700


def read_excerpts(
    measurement: Measurement,
    given: Sequence[Int[Tensor, " _"]],
    planes: Sequence[Planes],
    tokenizer: TokenNames | None,
) -> dict[str, np.ndarray]:
    """The excerpt variables of `AXES`, on the `given` or on chosen sequences."""
    live = measurement.live
    pieces = check_excerpts(live.config, given) or chosen_excerpts(measurement)

    def read_call(call: AttentionCall) -> tuple[Tensor, Tensor, Tensor]:
        attention, turning = attention_map(call).float().cpu(), planes[call.layer]
        if not attention.isfinite().all():
            what = f"{live.class_name} attends with numbers that are not finite."
            hint = "dtype=torch.float32, or another checkpoint"
            raise UnsupportedModel(
                what, seen=f"layer {call.layer}: NaN or infinity", hint=hint
            )
        scale[call.layer] = float(call.scale)
        return attention, _still(call.query, turning), _still(call.key, turning)

    scale = np.full(live.layers, np.nan)
    batches: list[Tensor] = []
    for length, alike in groupby(pieces, key=len):
        batches += torch.stack([*alike]).split(max(1, CANDIDATES * LENGTH // length))
    recorded = [live.record_calls(batch, read_call) for batch in batches]

    def of_pieces(part: int) -> np.ndarray:
        by_batch = ({n: x[part] for n, x in calls.items()} for calls in recorded)
        return stack(
            x for calls in by_batch for x in by_layer(calls, live.layers).unbind(1)
        )

    attention, query, key = map(of_pieces, range(3))
    for length in {len(piece) for piece in pieces}:
        pairs = zip(measurement.rotation.planes(length), planes, strict=True)
        if not all(
            torch.equal(short.inv_freq, whole.inv_freq) for short, whole in pairs
        ):
            query[:] = np.nan
    for layer, turning in enumerate(planes):
        speed = torch.atleast_2d(turning.inv_freq.nan_to_num().abs())
        slower = (speed < speed.amax(0)).any(-1).numpy()
        query[:, layer, : len(slower)][:, slower] = np.nan
    names = np.full((len(pieces), query.shape[3]), "", dtype=object)
    for row, piece in zip(names, pieces, strict=True):
        row[: len(piece)] = token_names(piece, tokenizer)
    return _next_tokens(live, batches, tokenizer) | {
        "attention": attention.astype(np.float32),
        "query_still": _rounded(query),
        "key_still": _rounded(key),
        "scale": scale,
        "token": names,
        "length": np.array([len(piece) for piece in pieces]),
        "planes": np.array([layer.rotary_dim // 2 for layer in planes]),
    }


def _rounded(x: Float[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]:
    """Round to the 11 bits of half precision, in single precision: such numbers pack well."""
    mantissa, exponent = np.frexp(x.astype(np.float32))
    return np.ldexp((mantissa * 2048).round() / 2048, exponent)


def _next_tokens(
    live: LiveModel, batches: Sequence[Int[Tensor, "_ _"]], tokenizer: TokenNames | None
) -> dict[str, np.ndarray]:
    """The two likeliest next tokens of each piece, the lead of the first, and its gradient."""
    if any(weight.is_meta for weight in live.model.parameters()):
        return {}
    answers, gradients, heads = [], list[Tensor](), live.attending_heads

    def lead(logits: Float[Tensor, "position token"]) -> Float[Tensor, ""]:
        (first, second), tokens = logits[-1].topk(2)
        answers.append(
            (token_names(tokens, tokenizer), float((first - second).detach()))
        )
        return first - second

    for batch in batches:
        try:
            _, calls = differentiate(live, Text(batch), Number(lead, last=1), heads)
        except RuntimeError:  # a kernel without a backward pass
            return {}
        del answers[len(gradients) : -len(batch)]  # of a pass that ran again
        slopes = {
            layer: score_gradient(call, x, torch.arange(x.shape[2]))[0]
            for layer, (call, x) in calls.items()
        }
        gradients += by_layer(slopes, live.layers).unbind(1)
    names, leads = zip(*answers, strict=True)
    gradient, answer = _rounded(stack(gradients)), np.array(names, dtype=object)
    return {"score_gradient": gradient, "answer": answer, "lead": np.array(leads)}


def _still(
    x: Float[Tensor, "batch head position coordinate"], planes: Planes
) -> Float[Tensor, "batch head position coordinate"]:
    """Queries or keys without their rotation; planes that rotate clockwise are mirrored."""
    planes = planes.of_keys(x.shape[1])
    still = unrotate(x.float(), torch.arange(x.shape[2]), planes).cpu()
    before, after = (
        still[..., : planes.offset],
        still[..., planes.offset + planes.rotary_dim :],
    )
    direction = torch.where(planes.inv_freq < 0, -1.0, 1.0)[..., None, :].cpu()
    mirrored = still[..., planes.second] * direction
    return torch.cat([still[..., planes.first], mirrored, before, after], dim=-1)


def chosen_excerpts(measurement: Measurement) -> list[Int[Tensor, " position"]]:
    """The `COUNT` random pieces on which heads choose keys most sharply."""
    config, text = measurement.live.config, measurement.text
    first = text.ids[:, 0]
    # The common token is BOS or similar. In a single sequence it may be any word.
    alike = len(first) > 1 and bool((first == first[0]).all())
    begins = alike or int(first[0]) == measurement.live.bos
    count = text.real.sum(1)
    length = min(LENGTH, _longest(config), int(count.max()))
    long = (count >= length).nonzero().flatten()
    generator = generator_of(measurement.seed, len(long))
    order = long[torch.randperm(len(long), generator=generator)].tolist()
    pieces = []
    for sequence in (order * CANDIDATES)[
        :CANDIDATES
    ]:  # few sequences give several pieces
        ids = text.ids[sequence][text.real[sequence].to(text.ids.device)]
        start = int(torch.randint(len(ids) - length + 1, (), generator=generator))
        piece = ids[start : start + length].clone()
        if begins:
            piece[0] = first[0]
        pieces.append(piece)
    candidates = torch.stack(pieces).unique(dim=0)

    def bits(call: AttentionCall) -> Float[Tensor, " piece"]:
        """Divergence from even attention without the first key, over heads, mean of queries."""
        weights = attention_map(call)[..., 1:, 1:].double().cpu()
        keys = torch.arange(1, weights.shape[-1] + 1).double()[:, None]
        conditional = weights / weights.sum(-1, keepdim=True).clamp(min=1e-30)
        return (
            (weights * (conditional * keys).clamp(min=1e-30).log2())
            .sum(-1)
            .mean(-1)
            .sum(-1)
        )

    by_layer_bits = measurement.live.record_calls(candidates, bits).values()
    total = sum(by_layer_bits, torch.zeros(len(candidates)).double())
    return list(candidates[total.argsort(descending=True, stable=True)[:COUNT]])


def check_excerpts(
    config: PreTrainedConfig, excerpts: Iterable[Tensor]
) -> list[Int[Tensor, " position"]]:
    """Return the sequences; raise `BadArgument` for unknown tokens and for long texts."""
    config, checked = config.get_text_config(), []
    for tokens in excerpts:
        if not 3 <= len(tokens) <= _longest(config):
            what = f"A prompt to look into must have 3 to {_longest(config)} tokens."
            means = "a profile has the attention of every head"
            hint = "another prompt, or ropelens.capture for some of the heads"
            raise BadArgument(
                what, seen=f"{len(tokens):,} tokens", means=means, hint=hint
            )
        text = Text(tokens[None])
        check_ids(text.ids, vocabulary=config.vocab_size)
        checked.append(text.ids[0])
    return checked


def _longest(config: PreTrainedConfig) -> int:
    heads = config.num_hidden_layers * config.num_attention_heads
    return min(LONGEST_EXCERPT, int((EXCERPT_WEIGHTS / heads) ** 0.5))


def excerpt_variables(
    excerpts: dict[str, np.ndarray], sharp: Float[np.ndarray, "layer head"]
) -> dict[str, xr.Variable]:
    """Variables of excerpts. Queries are kept for the sharpest heads, as many as fit."""
    query = excerpts["query_still"]
    order = np.argsort(-np.nan_to_num(sharp, nan=-np.inf), axis=None, kind="stable")
    short = query.size + excerpts["key_still"].size <= SHORT
    room = query.size if short else max(EXCERPT_NUMBERS, NUMBERS_A_HEAD * sharp.size)
    layer, head = np.unravel_index(
        order[max(room // query[:, 0, 0].size, 1) :], sharp.shape
    )
    query[:, layer, head] = np.nan
    return labelled({f"excerpt_{name}": x for name, x in excerpts.items()}, AXES)
