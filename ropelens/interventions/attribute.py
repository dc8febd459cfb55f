"""Attribution of an answer to the planes of heads, by the gradient of their scores.

A score is a sum of contributions c_f of planes f. The attribution of a plane is c_f times the
gradient of an answer with respect to the score, which sums to 0 over the keys of a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import scipy
import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor

from ropelens.arguments import Count, Positive, public
from ropelens.interventions.edit import drop
from ropelens.interventions.patch import Source, plan_patch
from ropelens.interventions.patch_each import answer_to, patched_answers
from ropelens.interventions.rotation_edit import place_edits
from ropelens.model.as_live_model import Model, as_live_model
from ropelens.profiles import gradients
from ropelens.profiles.finite import warn_unless_finite
from ropelens.profiles.measurement import Measurement, one_sequence
from ropelens.rope.planes import Planes
from ropelens.rope.select import ALL_HEADS, HeadMask, PlaneNumbers, heads_by_layer
from ropelens.schema.attribution import ATTRIBUTION
from ropelens.schema.rows import labelled, stack
from ropelens.text.prompts import Prompt
from ropelens.text.text import Text

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
    errors of `capture`. Warns if an attribution is not finite.
    """
    live = as_live_model(model, tokenizer)
    tokenizer = tokenizer or live.tokenizer
    measurement = one_sequence(live, text_or_tokens, tokenizer)
    chosen = _heads(measurement, heads)
    pair_heads = _heads(measurement, pairs).nonzero().tolist() if pairs else []
    number = gradients.answer_number(answer, tokenizer, live.vocabulary)
    attribution = Attribution(measurement, number, chosen, pair_heads, steps)
    for step in range(steps):
        attribution.add_step(step)
    values = attribution.values()
    attrs: dict[str, Any] = {
        "steps": steps,
        "answer": answer_to(live, measurement.text, number),
    }
    if steps > 1:
        no_query = torch.zeros((), dtype=torch.float32, device="cpu")
        with live.intervene(gradients.ScaledQueries(chosen, no_query)):
            attrs["answer_without"] = answer_to(live, measurement.text, number)
    if check:
        checks = PlaneChecks(measurement, number, attrs["answer"], check)
        checked = checks.choose(values["attribution"])
        values["dropped"] = checks.effects_of_dropping(checked)
        attrs.update(
            _compare_effects(values["attribution"], -values["dropped"], checked)
        )
        if source is not None:
            other = one_sequence(live, source, tokenizer).text
            values["patched"] = checks.effects_of_patching(checked, other, heads)
            attrs["source_answer"] = answer_to(live, other, number)
    results = {"attribution": attribution.computed(), "answer": attrs["answer"]}
    warn_unless_finite(measurement.runs(), live.model, results)
    dataset = xr.Dataset(
        labelled(values, ATTRIBUTION),
        coords={"layer": range(live.layers), "head": range(live.heads)},
        attrs={"kind": "attribution"} | measurement.result_attributes() | attrs,
    )
    return dataset.set_coords(["inv_freq", "wavelength"])


def _heads(measurement: Measurement, heads: str) -> HeadMask:
    """The heads in a list such as "3.5,4.*"."""
    able = measurement.live.attending_heads
    return heads_by_layer(heads, able, measurement.rotation.kind_names)


class Attribution:
    """The attributions of an answer, summed over the steps of the integral.

    `total` [layer, head, term] is NaN for heads that were not `chosen`. `by_pair` has an array
    [term, query, key] for each of the `pair_heads` (layer, head).
    """

    def __init__(
        self,
        measurement: Measurement,
        number: gradients.Number,
        chosen: HeadMask,
        pair_heads: Sequence[Sequence[int]],
        steps: int,
    ) -> None:
        self.measurement = measurement
        self.number = number
        self.chosen = chosen
        self.pair_heads = pair_heads
        self.steps = steps
        self.planes = measurement.rotation.planes(measurement.text.context)
        terms = max(layer.terms for layer in self.planes)
        self.total = torch.full(
            (*chosen.shape, terms), torch.nan, dtype=torch.float64, device="cpu"
        )
        for layer, head in chosen.nonzero().tolist():
            self.total[layer, head, : self.planes[layer].terms] = 0.0
        self.by_pair: list[Any] = [0.0] * len(pair_heads)

    def add_step(self, step: int) -> None:
        """Add the gradient at one size of the scores, from 0 to 1."""
        size = 1.0 if self.steps == 1 else (step + 0.5) / self.steps
        layers = gradients.differentiate(
            self.measurement.live,
            self.measurement.text,
            self.number,
            self.chosen,
            size=size,
        ).layers
        for layer, head in self.chosen.nonzero().tolist():
            self._add_head(layers[layer], layer, head, size)
        for index, (layer, head) in enumerate(self.pair_heads):
            scale = size if self.chosen[layer, head] else 1.0
            pairs = self._of_pairs(layers[layer], layer, head)
            self.by_pair[index] += pairs / scale / self.steps

    def _add_head(
        self, gradient: gradients.LayerGradient, layer: int, head: int, size: float
    ) -> None:
        number = torch.tensor([head], dtype=torch.long, device="cpu")
        of_head = gradient.of_scores(number)
        q = of_head.query[0, 0]
        k = of_head.key[0, 0]
        by_coordinate = (q * (of_head.slope[0, 0] @ k)).sum(0)
        by_plane = self.planes[layer].sum_coordinates(by_coordinate) / size
        self.total[layer, head, : len(by_plane)] += by_plane.cpu() / self.steps

    def computed(self) -> Float[Tensor, " plane"]:
        """The attributions of all planes of the chosen heads."""
        of_heads = []
        for layer, head in self.chosen.nonzero().tolist():
            of_heads.append(self.total[layer, head, : self.planes[layer].terms])
        return torch.cat(of_heads)

    def _of_pairs(
        self, gradient: gradients.LayerGradient, layer: int, head: int
    ) -> Float[Tensor, "term query key"]:
        """Attribution of each pair of tokens; NaN if the query does not see the key."""
        number = torch.tensor([head], dtype=torch.long, device="cpu")
        of_head = gradient.of_scores(number)
        products = of_head.query[0, 0][:, None] * of_head.key[0, 0]
        contributions = self.planes[layer].sum_coordinates(products)
        slope = of_head.slope[0, 0]
        visible = gradient.call.visibility.sees()[0].to(slope.device)
        slope = slope.masked_fill(~visible, torch.nan)
        return (slope[..., None] * contributions).movedim(-1, 0)

    def values(self) -> dict[str, Any]:
        """The variables of the result, by name."""
        planes = self.planes
        values: dict[str, Any] = {
            "attribution": stack(self.total),
            "inv_freq": stack(_first_head(layer.term_inv_freq) for layer in planes),
            "wavelength": stack(_first_head(layer.wavelength) for layer in planes),
        }
        if self.pair_heads:
            values["pair_attribution"] = stack(self.by_pair)
            names = [f"{layer}.{head}" for layer, head in self.pair_heads]
            values["pair_head"] = np.array(names)
        return values


def _first_head(by_term: Tensor) -> Float[Tensor, " term"]:
    """Values of the first head; under some edits each head has its own."""
    return torch.atleast_2d(by_term)[0]


@dataclass(frozen=True)
class CheckedPlanes:
    """Flat indices of planes: the `largest` attributions, and random `others`."""

    largest: Indices
    others: Indices
    shape: tuple[int, ...]

    @property
    def indices(self) -> tuple[Indices, ...]:
        """Layer, head and plane of all of them."""
        return np.unravel_index(np.concatenate([self.largest, self.others]), self.shape)


@dataclass(frozen=True)
class PlaneChecks:
    """Runs of the model in which single planes are dropped or patched."""

    measurement: Measurement
    number: gradients.Number
    answer: float
    count: int

    def choose(self, attribution: Attributions) -> CheckedPlanes:
        """The planes with the largest attribution, and as many random other planes."""
        planes = self.measurement.rotation.planes(self.measurement.text.context)
        rotating = _rotating(planes, attribution.shape[-1])
        indices = np.flatnonzero(np.isfinite(attribution) & rotating)
        size = np.abs(attribution.flat[indices])
        order = indices[np.argsort(-size, kind="stable")]
        others = np.random.default_rng(0).permutation(order[self.count :])
        return CheckedPlanes(
            order[: self.count], others[: self.count], attribution.shape
        )

    def effects_of_dropping(self, checked: CheckedPlanes) -> Attributions:
        """Change of the answer when only this plane is dropped; NaN for other planes."""
        live = self.measurement.live
        effects = np.full(checked.shape, np.nan)
        for layer, head, plane in zip(*checked.indices, strict=True):
            edit = drop(PlaneNumbers((int(plane),)), heads=f"{layer}.{head}")
            with live.intervene(place_edits(self.measurement.rotation, [edit])):
                answer = answer_to(live, self.measurement.text, self.number)
            effects[layer, head, plane] = answer - self.answer
        return effects

    def effects_of_patching(
        self, checked: CheckedPlanes, source: Text, heads: str
    ) -> Attributions:
        """Change of the answer when only this plane takes its queries and keys elsewhere."""
        measurement = self.measurement
        all_planes = plan_patch(measurement.rotation, source, heads=heads)
        patches = []
        for layer, head, plane in zip(*checked.indices, strict=True):
            of_head = torch.zeros_like(all_planes.chosen)
            of_head[layer, head] = True
            select = PlaneNumbers((int(plane),))
            patches.append(replace(all_planes, chosen=of_head, select=select))
        answers = patched_answers(
            measurement.live, measurement.text, self.number, patches
        )
        effects = np.full(checked.shape, np.nan)
        effects[checked.indices] = np.array(answers) - self.answer
        return effects


def _rotating(planes: Sequence[Planes], frequencies: int) -> np.ndarray:
    """Whether RoPE rotates each plane [layer, 1, frequency]; the others are no planes."""
    counts = np.array([layer.inv_freq.shape[-1] for layer in planes])
    return np.arange(frequencies) < counts[:, None, None]


def _compare_effects(
    attribution: Attributions, effects: Attributions, checked: CheckedPlanes
) -> dict[str, float]:
    """The attributes that compare attributions with the effects of dropping the planes."""
    predicted = attribution.ravel()
    measured = effects.ravel()
    opposite = predicted[checked.largest] * measured[checked.largest] < 0
    attrs = {
        "worst": float(np.nanmax(np.abs(predicted - measured))),
        "wrong_signs": int(opposite.sum()),
    }
    for name, planes in (
        ("rank_correlation", checked.largest),
        ("random_rank_correlation", checked.others),
    ):
        if len(planes) > 2:
            ranks = scipy.stats.spearmanr(predicted[planes], measured[planes])
            attrs[name] = float(ranks.statistic)
    return attrs
