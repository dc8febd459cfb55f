"""Planes that hold their mean: what they say of a token goes."""

from __future__ import annotations

import torch

from ropelens.edit.rope import Change, Edit, Layer
from ropelens.errors import public
from ropelens.measure.measurement import Lengths, Measurement, Tokens
from ropelens.measure.passes import collect
from ropelens.models.subject import Model
from ropelens.rope.select import ALL_HEADS, EVERY, Selection
from ropelens.statistics.sums import LayerMeans
from ropelens.statistics.variables import named


@public
def mean_ablate(
    model: Model,
    tokens: Tokens,
    *,
    lengths: Lengths | None = None,
    select: Selection = EVERY,
    heads: str = ALL_HEADS,
) -> Edit:
    """The planes hold, for every token, their mean query and key over `tokens`.

    The mean is taken without rotation, and rotated to each token's position: what a plane
    says of the token goes, what it says of the distance stays. `tokens` are padded on the
    right; of sequence s the first `lengths[s]` count. The length of the mean over the mean
    length is the coherence of a profile.

    Raises what `profile` raises.
    """
    measurement = Measurement.of(model, tokens, lengths)
    planes = measurement.subject.planes(measurement.text.context, alike=True)
    measurement.check_looking()
    still = named("q_still", "k_still")
    sums = collect(measurement, planes, statistics=still)
    means: dict[str, dict[int, torch.Tensor]] = {row.name: {} for row in still}
    for layer, of in sums.layers.items():
        turning = planes[layer]
        of_layer = LayerMeans(of, sums, turning, still)
        for name, of_side in means.items():
            parts = [of_layer[name][:, part] for part in (turning.first, turning.second)]
            of_side[layer] = torch.stack(parts, dim=-1).float()

    def hold(layer: Layer) -> tuple[Change, Change]:
        query, key = means["q_still"][layer.index], means["k_still"][layer.index]
        group = len(query) // len(key)
        return {"mean": query}, {"mean": key.repeat_interleave(group, dim=0)}

    return Edit(select, hold, heads)
