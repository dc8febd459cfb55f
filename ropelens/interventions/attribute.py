"""Attribution of an answer to the planes of heads, by the gradient of their scores.

A score is a sum of contributions c_f of planes f. The attribution of a plane is c_f times the
gradient of an answer with respect to the score, which sums to 0 over the keys of a row.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import scipy
import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor

from ropelens.arguments import Count, Positive, public
from ropelens.interventions.edit import drop, stack_edits
from ropelens.interventions.patch import Source, plan_patch
from ropelens.interventions.patch_each import answer_to, patched_answers
from ropelens.model.as_live_model import Model, as_live_model
from ropelens.profiles import gradients
from ropelens.profiles.capture import one_sequence
from ropelens.profiles.measurement import Measurement
from ropelens.rope.planes import Planes
from ropelens.rope.select import ALL_HEADS, HeadMask, PlaneNumbers, heads_by_layer
from ropelens.schema import ATTRIBUTION, labelled, stack
from ropelens.text.prompts import Prompt

Attributions = Float[np.ndarray, "layer head frequency"]
Indices = Int[np.ndarray, " _"]


@public
def attribute_planes(
    model: Model,
    text_or_tokens: Prompt,
    answer: gradients.AnswerDefinition,
    *,
    heads: str = ALL_HEADS,
    pairs: str = "",
    steps: Positive = 1,
    check: Count = 0,
    source: Source | None = None,
    tokenizer: Any = None,
) -> xr.Dataset:
    """Measure the contribution of each plane of each head to an answer.

    `answer` is a token, whose logit at the last position is the answer; two tokens, whose
    difference in logits is the answer; or a function of the logits [position, token] that
    returns one number. Tokens are ids or texts of one token. `text_or_tokens` is as for
    `capture`. The model runs under the edits, silences and patches that are open. Returns:

    - `attribution` (layer, head, frequency), in units of the answer: gradient of the answer
      times the contribution of the plane to the scores, summed over all pairs of tokens. To
      first order, it is the decrease of the answer when the plane is dropped. The last
      frequency is the part that RoPE does not rotate. NaN for heads outside `heads`.
    - `pair_attribution` (pair_head, frequency, query, key): the same for each pair of tokens of
      the heads in the list `pairs`. NaN if the query does not see the key.
    - `dropped` (layer, head, frequency), with `check=N`: change of the answer when only this
      plane is dropped (`drop`). The N planes with the largest attribution and N random other
      planes are checked; the rest is NaN. Over the N largest, `attrs["rank_correlation"]`
      compares `attribution` with -`dropped`, and `attrs["wrong_signs"]` counts the planes with
      opposite signs. `attrs["random_rank_correlation"]` is about the random planes, most of
      which are near 0. `attrs["worst"]` is the largest difference over all checked planes.
    - `patched`, with `check` and another prompt as `source`: change of the answer when only
      this plane takes its queries and keys from `source` (see `patch_planes`). The same planes
      are checked. `attrs["source_answer"]` is the answer to `source`.
    - coordinates `inv_freq` (rad/token) and `wavelength` (tokens), both (layer, frequency).
    - `attrs["answer"]`, and with more than one step `attrs["answer_without"]`.

    With `steps`, the gradient is integrated while the scores of `heads` grow from 0 to their
    values (integrated gradients: Sundararajan et al. 2017, arXiv 1703.01365). Attributions then
    sum to `answer` - `answer_without`, the answer if these heads attend evenly. A single step
    uses the gradient of the unmodified model and misses saturated contributions.

    The backward pass needs the memory of one layer and the vectors of all layers. Raises
    `BadArgument` for unknown heads or tokens and for an answer that is not one number, and the
    errors of `capture`.
    """
    live = as_live_model(model, tokenizer)
    tokenizer = tokenizer or live.tokenizer
    measurement = one_sequence(live, text_or_tokens, tokenizer)
    text, rotation = measurement.text, measurement.rotation
    chosen = heads_by_layer(heads, live.attending_heads, rotation.kind_names)
    able, named = live.attending_heads, rotation.kind_names
    pair_heads = heads_by_layer(pairs, able, named).nonzero().tolist() if pairs else []
    number = gradients.answer_number(answer, tokenizer, live.vocabulary)
    planes = rotation.planes(text.context)
    total, by_pair = _integrate(measurement, number, chosen, pair_heads, steps)
    answer_now = partial(answer_to, live, text, number)
    facts: dict[str, Any] = {"steps": steps, "answer": answer_now()}
    values: dict[str, Any] = {
        "attribution": stack(total),
        "inv_freq": stack(torch.atleast_2d(layer.term_inv_freq)[0] for layer in planes),
        "wavelength": stack(torch.atleast_2d(layer.wavelength)[0] for layer in planes),
    }
    if pairs:
        values["pair_attribution"] = stack(by_pair)
        values["pair_head"] = np.array(
            [f"{layer}.{head}" for layer, head in pair_heads]
        )
    if steps > 1:
        with live.patch(gradients.scale_queries(chosen, torch.zeros(()))):
            facts["answer_without"] = answer_now()
    if check:
        attribution = values["attribution"]
        largest, others = _checked_planes(planes, attribution, check)
        places = np.unravel_index(np.concatenate([largest, others]), attribution.shape)
        names = ["dropped"] if source is None else ["dropped", "patched"]
        values |= {name: np.full(attribution.shape, np.nan) for name in names}
        for place in zip(*places, strict=True):
            edit = drop(PlaneNumbers((int(place[2]),)), heads=f"{place[0]}.{place[1]}")
            with live.edit(stack_edits(rotation, [edit])):
                values["dropped"][place] = answer_now() - facts["answer"]
        facts |= _compare_effects(attribution, -values["dropped"], largest, others)
        if source is not None:
            source_text = one_sequence(live, source, tokenizer).text
            whole, patches = plan_patch(rotation, source_text, heads=heads), []
            for place in zip(*places, strict=True):
                of_head = torch.zeros_like(chosen)
                of_head[place[:2]] = True
                select = PlaneNumbers((int(place[2]),))
                patches.append(replace(whole, chosen=of_head, select=select))
            answers = np.array(patched_answers(live, text, number, patches))
            values["patched"][places] = answers - facts["answer"]
            facts["source_answer"] = answer_to(live, source_text, number)
    indices = {"layer": range(live.layers), "head": range(live.heads)}
    dataset = xr.Dataset(labelled(values, ATTRIBUTION), coords=indices)
    dataset.attrs = {"kind": "attribution"} | measurement.attributes | facts
    return dataset.set_coords(["inv_freq", "wavelength"])


def _integrate(
    measurement: Measurement,
    number: gradients.Number,
    chosen: HeadMask,
    pair_heads: Sequence[Sequence[int]],
    steps: int,
) -> tuple[Float[Tensor, "layer head term"], list[Float[Tensor, "term query key"]]]:
    """Attributions of all heads, and by pair of tokens for the `pair_heads`; NaN if missing."""
    live, text = measurement.live, measurement.text
    planes = measurement.rotation.planes(text.context)
    terms = max(layer.terms for layer in planes)
    total = torch.full((*chosen.shape, terms), torch.nan, dtype=torch.float64)
    by_pair: list[Any] = [0.0] * len(pair_heads)
    for size in (
        [1.0] if steps == 1 else [(step + 0.5) / steps for step in range(steps)]
    ):
        layers = gradients.differentiate(live, text, number, chosen, size=size).layers
        for layer, head in chosen.nonzero().tolist():
            of_head = layers[layer].of_scores(torch.tensor([head]))
            slope = of_head.slope[0, 0]
            q = of_head.query[0, 0]
            k = of_head.key[0, 0]
            by_plane = planes[layer].sum_coordinates((q * (slope @ k)).sum(0)) / size
            before = total[layer, head, : len(by_plane)].nan_to_num()
            total[layer, head, : len(by_plane)] = before + by_plane.cpu() / steps
        for index, (layer, head) in enumerate(pair_heads):
            of_head = layers[layer].of_scores(torch.tensor([head]))
            slope = of_head.slope[0, 0]
            q = of_head.query[0, 0]
            k = of_head.key[0, 0]
            parts = planes[layer].sum_coordinates(q[:, None] * k)
            visible = layers[layer].call.visibility.sees()[0].to(slope.device)
            slope = slope.masked_fill(~visible, torch.nan)
            scale = size if chosen[layer, head] else 1.0
            by_pair[index] += (slope[..., None] * parts).movedim(-1, 0) / scale / steps
    return total, by_pair


def _compare_effects(
    attribution: Attributions, effects: Attributions, largest: Indices, others: Indices
) -> dict[str, float]:
    """The attributes that compare attributions with the effects of dropping the planes."""
    first, second = attribution.ravel(), effects.ravel()
    facts = {"worst": float(np.nanmax(np.abs(first - second)))}
    facts["wrong_signs"] = int((first[largest] * second[largest] < 0).sum())
    for name, planes in (
        ("rank_correlation", largest),
        ("random_rank_correlation", others),
    ):
        if len(planes) > 2:
            facts[name] = float(
                scipy.stats.spearmanr(first[planes], second[planes]).statistic
            )
    return facts


def _checked_planes(
    planes: Sequence[Planes], attribution: Attributions, check: int
) -> tuple[Indices, Indices]:
    """Flat indices of the planes with the largest attribution, and of random other planes."""
    counts = np.array([layer.inv_freq.shape[-1] for layer in planes])[:, None, None]
    rotates = np.arange(attribution.shape[-1]) < counts
    indices = np.flatnonzero(np.isfinite(attribution) & rotates)
    order = indices[np.argsort(-np.abs(attribution.flat[indices]), kind="stable")]
    return order[:check], np.random.default_rng(0).permutation(order[check:])[:check]
