"""Changes of the loss if planes of all heads stop or drop out.

The null is the same change of 40 random sets with the same number of planes.
"""

import numpy as np
import pandas as pd
import xarray as xr
from jaxtyping import Float

from ropelens.claims.arrays import rotating_in
from ropelens.claims.layers_of_kind import (
    LayersOfKind,
    Planes,
    PlaneSet,
    edits_of,
    planes_at_random,
)
from ropelens.claims.run_arrays import RunArrays
from ropelens.interventions.edit import drop, stop
from ropelens.interventions.evaluate import evaluate
from ropelens.profiles.measurement import Measurement
from ropelens.runtime.progress import ProgressOption


def loss_arrays(
    kind: LayersOfKind, measurement: Measurement, progress: ProgressOption
) -> RunArrays:
    """Arrays [document, set of planes] of the change of loss; set 0 is the set of the claim.

    Quarters of the planes stop, or eighths drop out.
    """
    quarters = kind.quarters
    longest = _longest_planes(kind)
    random = planes_at_random(kind.rotating, [longest], kind.seed)
    eighths: list[PlaneSet] = [longest, *random]
    stops = edits_of(stop, quarters.all, kind.heads)
    drops = edits_of(drop, eighths, kind.heads)
    losses = evaluate(
        measurement,
        measurement.text,
        edits=stops | drops,
        measures=["loss"],
        progress=progress,
    )
    sums = _sum_by_document(losses)
    stopped = sums[:, 1 : 1 + len(stops)]
    in_all_layers = rotating_in(kind.profile).planes
    sets = np.array([np.isin(in_all_layers, planes) for planes in quarters.all])
    context = measurement.text.context
    return RunArrays(
        arrays={
            "tokens": sums[:, 0],
            "slow_loss": np.delete(stopped, 1, axis=1),
            "fast_loss": stopped[:, 1:],
            "long_loss": sums[:, 1 + len(stops) :],
            "stopped_sets": sets.astype(float),
            "stop_loss": stopped,
        },
        objections={
            "slow_stop": kind.why_no_effect(
                kind.wavelength[:, quarters.slowest], context
            ),
            "fast_stop": kind.why_no_effect(
                kind.wavelength[:, quarters.fastest], context
            ),
        },
    )


def _longest_planes(kind: LayersOfKind) -> Planes:
    """The eighth of the planes with the largest |q||k|."""
    norms = kind.profile["q_norm"].mean("head") * kind.profile["k_norm"].mean("kv_head")
    length = norms.mean("layer").values[kind.rotating]
    order = np.argsort(-length, kind="stable")
    count = len(kind.rotating) // 8
    return np.sort(kind.rotating[order][:count])


def _sum_by_document(losses: xr.Dataset) -> Float[np.ndarray, "document number"]:
    """Tokens, and change of the loss by each edit (nats), summed over each document."""
    tokens = losses["predicted_tokens"].values.astype(float)
    loss = losses["loss"].values  # [edit, sequence]; edit 0 is none
    change = (loss[1:] - loss[0]) * tokens
    by_sequence = pd.DataFrame(np.vstack([tokens[None], change]).T)
    return by_sequence.groupby(losses["group"].values).sum().values
