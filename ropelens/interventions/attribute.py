"""How much each plane of each head does for an answer, by the gradient of its scores.

A score is a sum of contributions c_f, a plane each; an attribution is c_f times the gradient of
an answer by the score. Softmax ignores what all keys of a row share, and so does the gradient:
its sum over the keys of a row is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Float, Int
from scipy.stats import spearmanr
from torch import Tensor

from ropelens.attention.variables import labelled, stack, table
from ropelens.errors import Count, Positive, public
from ropelens.interventions.edit import drop, stack_edits
from ropelens.interventions.patch import Patch, Source, places_of, take
from ropelens.model.as_live_model import Model, as_live_model
from ropelens.model.live_model import LiveModel
from ropelens.profiles.capture import Prompt, Token, one_sequence, token_id
from ropelens.profiles.gradients import (
    Number,
    OfLogits,
    differentiate,
    scale_queries,
    score_gradient,
    value_of,
)
from ropelens.rope.planes import Planes
from ropelens.rope.select import ALL_HEADS, PlaneNumbers
from ropelens.rotation.probe import RotationProbe
from ropelens.text.text import Text

ATTRIBUTION = table("""
attribution (layer, head, frequency) 1: gradient of the answer times the plane's contributions
pair_attribution (pair_head, frequency, query, key) 1: the same, for each pair of tokens
dropped (layer, head, frequency) 1: change of the answer when the plane alone is dropped
patched (layer, head, frequency) 1: change of the answer when the plane alone takes its queries
    and keys from another prompt
pair_head (pair_head): layer.head
inv_freq (layer, frequency) rad/token: angular frequency; negative: clockwise
wavelength (layer, frequency) token: tokens per turn
""")
"""What `attribute_planes` gives; `attribution` and `dropped` are in units of the answer."""

Answer = Token | tuple[Token, Token] | OfLogits


@public
def attribute_planes(
    model: Model,
    text_or_tokens: Prompt,
    answer: Answer,
    *,
    heads: str = ALL_HEADS,
    pairs: str = "",
    steps: Positive = 1,
    check: Count = 0,
    source: Source | None = None,
    tokenizer: Any = None,
) -> xr.Dataset:
    """What each plane of each head adds to an answer, over (layer, head, frequency).

    `answer` is a token, whose logit at the last position counts; two, of which the second's
    logit is taken off; or a function of the logits [position, token] that gives one number.
    Tokens are ids, or texts of one token each. `text_or_tokens` is as `capture` takes it. The
    model runs as it is, under the edits, silences and patches that are open.

    - `attribution` (layer, head, frequency), in units of the answer: its gradient times the
      plane's contribution to the scores, summed over all pairs of tokens. To first order it is
      what the answer loses when the plane is dropped. The rest that RoPE leaves alone is the
      last frequency. NaN for heads that are not in `heads`.
    - `pair_attribution` (pair_head, frequency, query, key), with `pairs`, a list of heads: the
      same for each pair of tokens, NaN where the query does not see the key.
    - `dropped` (layer, head, frequency), with `check=N`: the change of the answer when that
      plane alone is dropped (`drop`), for the N planes of the largest attribution and N others,
      drawn at random; NaN elsewhere. `attrs["rank_correlation"]` is that of `attribution` with
      -`dropped` over the random ones, `attrs["worst"]` the largest difference of all.
    - `patched`, with `check` and another prompt as `source`: the change when that plane alone
      takes its queries and keys from there (`patch_planes`), for the same planes.
      `attrs["source_answer"]` is the answer to that prompt. A `check` of more planes than
      there are scans all of `heads`.
    - coordinates `inv_freq` (rad/token), `wavelength` (tokens), both (layer, frequency).
    - `attrs["answer"]`, and with more than one step `attrs["answer_without"]`.

    `steps` integrates the gradient while the scores of `heads` grow from 0 to what they are
    (integrated gradients: Sundararajan et al. 2017, arXiv 1703.01365). Attributions then sum to
    `answer` - `answer_without`, the answer with even attention in these heads. One step is the
    gradient where the model stands, which misses what is saturated.

    The backward pass runs layer by layer: memory is what one layer of it takes, queries, keys,
    values and outputs of all layers and the logits asked for. Raises `BadArgument` for heads or
    tokens that do not exist and an answer that is not one number, and what `capture` raises.
    """
    live = as_live_model(model, tokenizer)
    tokenizer = tokenizer or live.tokenizer
    measurement = one_sequence(live, text_or_tokens, tokenizer)
    text = measurement.text
    chosen = live.heads_of(heads)
    looked_at = live.heads_of(pairs).nonzero().tolist() if pairs else []
    number = _number_of(answer, tokenizer, live.vocabulary)
    rotation = measurement.rotation
    planes = rotation.planes(text.context)
    total, by_pair = _integrated(live, text, number, chosen, looked_at, planes, steps)
    answer_of = partial(_answer, live, text, number)
    facts: dict[str, Any] = {"steps": steps, "answer": answer_of()}
    values = {
        "attribution": stack(total),
        "inv_freq": stack(torch.atleast_2d(at.term_inv_freq)[0] for at in planes),
        "wavelength": stack(torch.atleast_2d(at.wavelength)[0] for at in planes),
    }
    if pairs:
        names = [f"{layer}.{head}" for layer, head in looked_at]
        values |= {"pair_attribution": stack(by_pair), "pair_head": np.array(names)}
    if steps > 1:
        with live.patch(scale_queries(chosen, torch.zeros(()))):
            facts["answer_without"] = answer_of()
    if check:
        attribution = values["attribution"]
        places, others = _checked(rotation.unedited_planes(), attribution, check)
        answers = partial(_answers, places, attribution.shape, answer_of)
        dropped = answers(_dropping(rotation))
        values["dropped"] = dropped = dropped - facts["answer"]
        facts["worst"] = float(np.nanmax(np.abs(attribution + dropped)))
        if len(others) > 2:
            ranks = spearmanr(attribution.flat[others], -dropped.flat[others])
            facts["rank_correlation"] = float(ranks.statistic)
        if source is not None:
            other = one_sequence(live, source, tokenizer).text
            values["patched"] = answers(_patching(rotation, other, chosen)) - facts["answer"]
            facts["source_answer"] = _answer(live, other, number)
    indices = {"layer": range(live.layers), "head": range(live.heads)}
    dataset = xr.Dataset(labelled(values, ATTRIBUTION), coords=indices)
    dataset.attrs = {"kind": "attribution"} | measurement.facts | facts
    return dataset.set_coords(["inv_freq", "wavelength"])


def _integrated(
    live: LiveModel,
    text: Text,
    number: Number,
    chosen: Bool[Tensor, "layer head"],
    looked_at: Sequence[Sequence[int]],
    planes: Sequence[Planes],
    steps: int,
) -> tuple[Float[Tensor, "layer head term"], list[Float[Tensor, "term query key"]]]:
    """Attributions, and of the heads `looked_at` by pair; NaN where there are none.

    Means over scores that grow from 0 to what they are; of one step those where the model is.
    """
    most = max(layer.terms for layer in planes)
    total = torch.full((*chosen.shape, most), torch.nan, dtype=torch.float64)
    by_pair: list[Any] = [0.0] * len(looked_at)
    for size in [1.0] if steps == 1 else [(step + 0.5) / steps for step in range(steps)]:
        _, of_layers = differentiate(live, text, number, chosen, size=size)
        for layer, head in chosen.nonzero().tolist():
            slope, q, k = score_gradient(*of_layers[layer], head)
            along = planes[layer].sum_coordinates((q * (slope @ k)).sum(0)) / size
            now = total[layer, head, : len(along)].nan_to_num()
            total[layer, head, : len(along)] = now + along.cpu() / steps
        for at, (layer, head) in enumerate(looked_at):
            slope, q, k = score_gradient(*of_layers[layer], head)
            parts = planes[layer].sum_coordinates(q[:, None] * k)
            seen = of_layers[layer][0].visibility.sees()[0].to(slope.device)
            slope = slope.masked_fill(~seen, torch.nan)
            shrunk = size if chosen[layer, head] else 1.0
            by_pair[at] += (slope[..., None] * parts).movedim(-1, 0) / shrunk / steps
    return total, by_pair


def _dropping(
    rotation: RotationProbe,
) -> Callable[[PlaneNumbers, str], AbstractContextManager[None]]:
    """Blocks in which one plane of some heads is dropped."""

    def dropping(plane: PlaneNumbers, heads: str) -> AbstractContextManager[None]:
        return rotation.live.edit(stack_edits(rotation, [drop(plane, heads=heads)]))

    return dropping


def _patching(
    rotation: RotationProbe, source: Text, chosen: Bool[Tensor, "layer head"]
) -> Callable[[PlaneNumbers, str], AbstractContextManager[None]]:
    """Blocks in which only one plane is patched from `source`, which runs once for all."""
    live = rotation.live
    taken = take(rotation, source, chosen, "both")
    places = places_of(None, taken.length)

    def patching(plane: PlaneNumbers, heads: str) -> AbstractContextManager[None]:
        of = live.heads_of(heads)
        return live.patch(Patch(rotation, of, plane, "both", places, taken))

    return patching


def _number_of(answer: Answer, tokenizer: Any, vocabulary: int) -> Number:
    if callable(answer):
        return Number(answer)
    pair = answer if isinstance(answer, tuple) else (answer,)
    first, *second = [token_id(token, tokenizer, vocabulary) for token in pair]
    return Number(lambda logits: logits[-1, first] - logits[-1, second].sum(), last=1)


@torch.no_grad()
def _answer(live: LiveModel, text: Text, number: Number) -> float:
    return float(value_of(live, text, number))


def _checked(
    planes: Sequence[Planes],
    attribution: Float[np.ndarray, "layer head frequency"],
    check: int,
) -> tuple[Int[np.ndarray, " place"], Int[np.ndarray, " other"]]:
    """Flat places of the planes of the largest attribution and of others; the others alone."""
    count = [len(layer.inv_freq) for layer in planes]
    rotates = np.arange(attribution.shape[-1]) < np.array(count)[:, None, None]
    places = np.flatnonzero(np.isfinite(attribution) & rotates)
    order = places[np.argsort(-np.abs(attribution.flat[places]), kind="stable")]
    others = np.random.default_rng(0).permutation(order[check:])[:check]
    return np.concatenate([order[:check], others]), others


def _answers(
    places: Int[np.ndarray, " place"],
    shape: tuple[int, ...],
    answer: Callable[[], float],
    block: Callable[[PlaneNumbers, str], AbstractContextManager[None]],
) -> Float[np.ndarray, "layer head frequency"]:
    """The answer with each of these planes changed alone; NaN elsewhere."""
    answers = np.full(shape, np.nan)
    for layer, head, plane in zip(*np.unravel_index(places, shape), strict=True):
        with block(PlaneNumbers((int(plane),)), f"{layer}.{head}"):
            answers[layer, head, plane] = answer()
    return answers
