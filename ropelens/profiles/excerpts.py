"""Excerpts of a profile: the attention, queries and keys of all heads on short sequences."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ropelens.attention.call import AttentionCall, attention_map
from ropelens.attention.sums import by_layer
from ropelens.checkpoints.not_finite import in_dtype, remedy
from ropelens.errors import UnsupportedModel
from ropelens.model.live_model import LiveModel
from ropelens.profiles.excerpt_choice import (
    CANDIDATES,
    LENGTH,
    check_excerpts,
    chosen_excerpts,
)
from ropelens.profiles.gradients import Number, differentiate
from ropelens.profiles.measurement import Measurement
from ropelens.rope.planes import Planes, unrotate
from ropelens.schema.excerpts import EXCERPTS
from ropelens.schema.rows import labelled, stack
from ropelens.text.prompts import TokenNames, token_names
from ropelens.text.text import Text

SHORT = 1_500_000  # queries and keys of all heads, in numbers, that a page has room for
# Most numbers of queries in a profile; 24 heads of 64 coordinates take 2.5 MB.
QUERY_NUMBERS = 180_000
NUMBERS_A_HEAD = 700

Excerpts = Sequence[Int[Tensor, " _"]]  # lengths may differ


@dataclass(frozen=True)
class LayerExcerpts:
    """Attention, and vectors without rotation, of the heads of a layer on some excerpts."""

    attention: Float[Tensor, "batch head row key"]
    query_still: Float[Tensor, "batch head row coordinate"]
    key_still: Float[Tensor, "batch kv_head row coordinate"]
    scale: float


def read_excerpts(
    measurement: Measurement,
    given: Sequence[Int[Tensor, " _"]],
    planes: Sequence[Planes],
    tokenizer: TokenNames | None,
) -> dict[str, np.ndarray]:
    """The excerpt variables of `EXCERPTS`, on the `given` or on chosen sequences."""
    live = measurement.live
    excerpts = check_excerpts(live.config, given) or chosen_excerpts(measurement)
    batches = batches_of(excerpts)
    calls = read_calls(live, batches, planes)
    attention = by_excerpt(calls, live.layers, lambda layer: layer.attention)
    query = by_excerpt(calls, live.layers, lambda layer: layer.query_still)
    key = by_excerpt(calls, live.layers, lambda layer: layer.key_still)
    scale = np.full(live.layers, np.nan)
    for layer, layer_excerpts in calls[-1].items():
        scale[layer] = layer_excerpts.scale
    for length in {len(tokens) for tokens in excerpts}:
        if not have_frequencies(measurement.rotation.planes(length), of=planes):
            query[:] = np.nan
    for layer, slower in enumerate(slower_heads(planes)):
        query[:, layer, : len(slower)][:, slower] = np.nan
    arrays = next_tokens(live, batches, tokenizer)
    arrays["attention"] = attention.astype(np.float32)
    arrays["query_still"] = rounded(query)
    arrays["key_still"] = rounded(key)
    arrays["scale"] = scale
    arrays["token"] = names_of(excerpts, tokenizer)
    arrays["length"] = np.array([len(tokens) for tokens in excerpts])
    arrays["planes"] = np.array([layer.rotary_dim // 2 for layer in planes])
    return arrays


def batches_of(excerpts: Excerpts) -> list[Int[Tensor, "_ _"]]:
    """The excerpts in batches; neighbours of the same length run together."""
    batches: list[Tensor] = []
    for length, alike in groupby(excerpts, key=len):
        size = max(1, CANDIDATES * LENGTH // length)
        batches += torch.stack(list(alike)).split(size)
    return batches


def read_calls(
    live: LiveModel, batches: Sequence[Int[Tensor, "_ _"]], planes: Sequence[Planes]
) -> list[dict[int, LayerExcerpts]]:
    """The excerpts of each batch, by layer. Tensors are on the CPU."""

    def read(call: AttentionCall) -> LayerExcerpts:
        attention = attention_map(call).float().cpu()
        if not attention.isfinite().all():
            dtype = call.query.dtype
            raise UnsupportedModel(
                f"{live.class_name} attends with numbers that are not finite.",
                seen=f"layer {call.layer}: NaN or infinity {in_dtype(dtype)}",
                hint=remedy(dtype, "another checkpoint, or float32"),
            )
        return LayerExcerpts(
            attention,
            query_still=still_parts(call.query, planes[call.layer]),
            key_still=still_parts(call.key, planes[call.layer]),
            scale=float(call.scale),
        )

    return [live.record_calls(batch, read) for batch in batches]


def still_parts(
    x: Float[Tensor, "batch head position coordinate"], planes: Planes
) -> Float[Tensor, "batch head position coordinate"]:
    """Queries or keys at positions 0, 1, 2, ... without their rotation, on the host.

    The coordinates are all real parts, all imaginary parts, and then the coordinates outside of
    planes. Planes that rotate clockwise are mirrored, so that every plane turns by |inv_freq|.
    """
    planes = planes.of_keys(x.shape[1])  # with a row for each head of `x`
    still = unrotate(x.float(), torch.arange(x.shape[2], device="cpu"), planes).cpu()
    is_clockwise = (planes.inv_freq < 0)[..., None, :].cpu()
    real = still[..., planes.first]
    imaginary = still[..., planes.second]
    imaginary = torch.where(is_clockwise, -imaginary, imaginary)
    before = still[..., : planes.offset]
    after = still[..., planes.offset + planes.rotary_dim :]
    return torch.cat([real, imaginary, before, after], dim=-1)


def by_excerpt(
    batches: Sequence[Mapping[int, LayerExcerpts]],
    layers: int,
    part: Callable[[LayerExcerpts], Tensor],
) -> Float[np.ndarray, "excerpt layer ..."]:
    """A part of all layers, excerpt by excerpt; NaN for missing layers and at the end."""
    excerpts: list[Tensor] = []
    for batch in batches:
        part_by_layer = {layer: part(read) for layer, read in batch.items()}
        excerpts += by_layer(part_by_layer, layers).unbind(1)
    return stack(excerpts)


def have_frequencies(planes: Sequence[Planes], of: Sequence[Planes]) -> bool:
    """Whether the layers rotate with the same frequencies as the layers `of` a text."""
    pairs = zip(planes, of, strict=True)
    return all(torch.equal(layer.inv_freq, other.inv_freq) for layer, other in pairs)


def slower_heads(planes: Sequence[Planes]) -> list[Bool[np.ndarray, " head"]]:
    """Heads of each layer that rotate slower than another head; one entry if all are alike."""
    slower = []
    for layer in planes:
        speed = torch.atleast_2d(layer.inv_freq.nan_to_num().abs())
        slower.append((speed < speed.amax(0)).any(-1).numpy())
    return slower


def names_of(excerpts: Excerpts, tokenizer: TokenNames | None) -> np.ndarray:
    """Texts of the tokens [excerpt, position]; "" beyond the end of an excerpt."""
    longest = max(len(tokens) for tokens in excerpts)
    names = np.full((len(excerpts), longest), "", dtype=object)
    for index, tokens in enumerate(excerpts):
        names[index, : len(tokens)] = token_names(tokens, tokenizer)
    return names


def rounded(x: Float[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]:
    """Round to the 11 bits of half precision, in single precision: such numbers pack well."""
    mantissa, exponent = np.frexp(x.astype(np.float32))
    return np.ldexp((mantissa * 2048).round() / 2048, exponent)


class Leads:
    """The two likeliest next tokens of sequences, and the lead of the first in logits."""

    def __init__(self, tokenizer: TokenNames | None) -> None:
        self.tokenizer = tokenizer
        self.names: list[list[str]] = []
        self.numbers: list[float] = []

    def add(self, logits: Float[Tensor, "position token"]) -> Float[Tensor, ""]:
        top = logits[-1].topk(2)
        lead = top.values[0] - top.values[1]
        self.names.append(token_names(top.indices, self.tokenizer))
        self.numbers.append(float(lead.detach()))
        return lead


def next_tokens(
    live: LiveModel, batches: Sequence[Int[Tensor, "_ _"]], tokenizer: TokenNames | None
) -> dict[str, np.ndarray]:
    """The two likeliest next tokens of each excerpt, the lead of the first, and its gradient.

    Nothing, if the weights are not in memory or a kernel has no backward pass.
    """
    if any(weight.is_meta for weight in live.model.parameters()):
        return {}
    heads = live.attending_heads
    names: list[list[str]] = []
    leads: list[float] = []
    gradients: list[Tensor] = []
    for batch in batches:
        added = Leads(tokenizer)
        lead = Number(added.add, last=1)
        try:
            derivative = differentiate(live, Text(batch), lead, heads)
        except RuntimeError:  # a kernel without a backward pass
            return {}
        slopes = {}
        for layer, gradient in derivative.layers.items():
            layer_heads = torch.arange(gradient.of_output.shape[2], device="cpu")
            slopes[layer] = gradient.of_scores(layer_heads).slope
        gradients += by_layer(slopes, live.layers).unbind(1)
        names += added.names[-len(batch) :]  # a pass may have run twice
        leads += added.numbers[-len(batch) :]
    return {
        "score_gradient": rounded(stack(gradients)),
        "answer": np.array(names, dtype=object),
        "lead": np.array(leads),
    }


def excerpt_variables(
    excerpts: dict[str, np.ndarray], sharp: Float[np.ndarray, "layer head"]
) -> dict[str, xr.Variable]:
    """Variables of excerpts. Queries are kept for the sharpest heads, as many as fit."""
    query = excerpts["query_still"]
    numbers = query.size + excerpts["key_still"].size
    if numbers > SHORT:
        numbers_of_head = query[:, 0, 0].size
        room = max(QUERY_NUMBERS, NUMBERS_A_HEAD * sharp.size)
        kept = max(room // numbers_of_head, 1)
        sharpness = np.nan_to_num(sharp, nan=-np.inf)
        order = np.argsort(-sharpness, axis=None, kind="stable")
        layer, head = np.unravel_index(order[kept:], sharp.shape)
        query[:, layer, head] = np.nan
    return labelled({f"excerpt_{name}": x for name, x in excerpts.items()}, EXCERPTS)
