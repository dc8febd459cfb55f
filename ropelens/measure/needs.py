"""Planes by themselves: which of them one head needs, and what they hold on average."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch

from ropelens.edit.rope import Change, Edit, Layer, drop, stop
from ropelens.errors import BadArgument, Whole, public
from ropelens.measure.evaluate import evaluate
from ropelens.measure.measurement import Lengths, Measurement, Tokens
from ropelens.measure.passes import collect
from ropelens.models.subject import Model
from ropelens.rope.select import ALL_HEADS, EVERY, PlaneNumbers, Selection
from ropelens.statistics.corpus import Documents
from ropelens.statistics.intervals import paired_interval
from ropelens.statistics.rows import HowMany
from ropelens.statistics.sums import LayerMeans
from ropelens.statistics.variables import named


@public
def needed_planes(
    model: Model,
    tokens: Tokens,
    head: str,
    *,
    how: Literal["stop", "drop"] = "stop",
    lengths: Lengths | None = None,
    documents: Documents | None = None,
    rows: HowMany = "auto",
    seed: Whole = 0,
) -> pd.DataFrame:
    """What changes when one plane of one head stands still ("stop") or drops out ("drop").

    `head` is one head, "2.3" (layer.head; with grouped keys a query head, whose neighbours
    stay as they are). The other options are those of `evaluate`. Edits that are open stay:
    planes and wavelengths are those of the head as it rotates then.

    Returns a row a plane, the fastest first: `plane`, `wavelength` (tokens),
    `attention_change` (bits: the mean over rows of KL(attention as it is || without the
    plane)), and `loss_change` (nats/token, the mean over predicted tokens) with the ends of its
    95 % interval over documents, `loss_change_low` and `loss_change_high`. Planes that do not
    turn cannot stop and are left out of "stop".

    Raises `BadArgument` for more than one head, for "stop" where no plane of the head turns,
    for "drop" where its layer has none, and what `evaluate` raises.
    """
    common: dict[str, Any] = {"documents": documents, "rows": rows, "seed": seed}
    measurement = Measurement.of(model, tokens, lengths, **common)
    subject = measurement.subject
    (layer, number), *others = subject.heads_of(head).nonzero().tolist()
    if others:
        raise BadArgument("Planes are asked for of one head at a time.", seen=repr(head))
    planes = subject.planes(measurement.text.context)[layer]
    if planes.inv_freq.ndim == 2:  # under an open edit that makes heads differ
        planes = replace(planes, inv_freq=planes.inv_freq[number])
    wavelength = planes.wavelength[: len(planes.inv_freq)].tolist()
    tried = [n for n, length in enumerate(wavelength) if how == "drop" or np.isfinite(length)]
    if not tried:
        raise BadArgument(
            f"No plane of head {layer}.{number} turns: there is none to {how}.",
            attempt="a head of a layer that turns; ropelens.measure_rope(model) says which do",
        )
    action = stop if how == "stop" else drop
    edits = {str(plane): action(PlaneNumbers((plane,)), heads=head) for plane in tried}
    measures = ["loss", "change"]
    results = evaluate(
        subject, tokens, lengths=lengths, edits=edits, measures=measures, **common
    )
    weight = results["predicted_tokens"].values.astype(float)
    group = results["group"].values
    changes = results["loss"].values[1:] - results["loss"].values[0]
    table = pd.DataFrame({"plane": tried, "wavelength": [wavelength[n] for n in tried]})
    table["attention_change"] = results["attention_change"].values[1:, layer, number]
    ends = ("loss_change", "loss_change_low", "loss_change_high")
    table[[*ends]] = [paired_interval(change, weight, group) for change in changes]
    return table


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
