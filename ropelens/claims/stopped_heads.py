"""Losses of induction, and copies that are found, if planes of induction heads stop.

The null is the same stop of 40 random sets with the same number of planes, in the same heads.
"""

from dataclasses import dataclass

import numpy as np
import xarray as xr
from jaxtyping import Float, Int

from ropelens.claims.far_copies import far_induction
from ropelens.claims.layers_of_kind import (
    LayersOfKind,
    PlaneSet,
    edits_of,
    planes_at_random,
    tokens_to_turn,
)
from ropelens.claims.run_arrays import SETS, RunArrays
from ropelens.interventions.edit import stop
from ropelens.interventions.entries import Edits
from ropelens.interventions.evaluate import evaluate
from ropelens.interventions.plane_edits import Edit
from ropelens.interventions.reach import COPIED, reach
from ropelens.interventions.rotation_edit import place_edits
from ropelens.profiles.measurement import Measurement
from ropelens.profiles.tasks import REPEATED_TOKENS
from ropelens.runtime.progress import ProgressOption

RUNS = 8  # draws of random tokens
FAR = 2048  # largest distance of a copy in tokens
# Attention of an induction head on the token after the earlier occurrence
INDUCTION = 0.3
TESTED = ("slow_induction", "retrieval_planes", "slow_reach")  # claims


@dataclass(frozen=True)
class InductionHeads:
    """The induction heads among the layers of one kind.

    `index` has the index of the layer in the profile of these layers, and `layer` has its
    number in the model.
    """

    index: Int[np.ndarray, " of_head"]
    layer: Int[np.ndarray, " of_head"]
    head: Int[np.ndarray, " of_head"]

    @classmethod
    def of(cls, profile: xr.Dataset) -> "InductionHeads":
        index, head = np.nonzero(profile["induction"].values >= INDUCTION)
        return cls(index=index, layer=profile["layer"].values[index], head=head)

    @property
    def names(self) -> list[str]:
        pairs = zip(self.layer, self.head, strict=True)
        return [f"{layer}.{head}" for layer, head in pairs]


def induction_arrays(
    kind: LayersOfKind, measurement: Measurement, progress: ProgressOption
) -> RunArrays:
    """Losses of induction [1, set of planes], and copies found [draw], under stops.

    Set 0 is the set of the claim.
    """
    heads = InductionHeads.of(kind.profile)
    if not len(heads.head):
        return _without_induction(kind.profile)
    slow = _slow_stop(kind, measurement, heads, progress)
    own = _own_stop(kind, measurement, heads, progress)
    distance = _distance(kind, measurement)
    more_found = _more_copies(kind, measurement, heads, progress)
    slow_wavelength = kind.wavelength[:, kind.quarters.slowest]
    return RunArrays(
        arrays={
            "induction_lost": slow.lost,
            "retrieval_lost": own.lost,
            "more_found": more_found,
            "once": np.ones(1),
        },
        objections={
            "slow_induction": slow.objection,
            "retrieval_planes": own.objection,
            "slow_reach": kind.why_no_effect(slow_wavelength, distance),
        },
    )


@dataclass(frozen=True)
class StopOfHeads:
    """Induction that the heads lose under each set of planes, and why this cannot be tested."""

    lost: Float[np.ndarray, "1 set"]
    objection: str


def _slow_stop(
    kind: LayersOfKind,
    measurement: Measurement,
    heads: InductionHeads,
    progress: ProgressOption,
) -> StopOfHeads:
    """The stop of the slowest quarter, and of random quarters.

    If the slow planes hardly turn within the repeated tokens, the copies are farther apart.
    """
    slowest = kind.quarters.slowest
    wavelength = kind.wavelength[:, slowest]
    sets: list[PlaneSet] = [slowest, *kind.quarters.random]
    stops = edits_of(stop, sets, ",".join(heads.names))
    repeated = repeated_tokens(measurement.live.context)
    far = _far_distance(kind, measurement)
    if far > repeated:
        scores = far_induction(measurement, stops, far, progress)
    else:
        scores = _induction(measurement, stops, progress)
    length = max(far, repeated)
    return StopOfHeads(_lost(scores, heads), kind.why_no_effect(wavelength, length))


def _own_stop(
    kind: LayersOfKind,
    measurement: Measurement,
    heads: InductionHeads,
    progress: ProgressOption,
) -> StopOfHeads:
    """The stop of the planes that select most in each head, and of its random planes."""
    planes = _planes_that_select(kind, heads)
    stops = _stops_in_each_head(kind, heads, planes)
    scores = _induction(measurement, stops, progress)
    wavelength = np.take_along_axis(kind.wavelength[heads.index], planes, 1)
    repeated = repeated_tokens(measurement.live.context)
    return StopOfHeads(_lost(scores, heads), kind.why_no_effect(wavelength, repeated))


def _induction(
    measurement: Measurement, edits: Edits, progress: ProgressOption
) -> Float[np.ndarray, "entry layer head"]:
    """Scores on repeated random tokens, without an edit and under each of `edits`."""
    evaluated = evaluate(
        measurement,
        measurement.text,
        edits=edits,
        measures=["induction"],
        progress=progress,
    )
    return evaluated["induction"].values


def _without_induction(profile: xr.Dataset) -> RunArrays:
    by_head = profile["induction"].values
    scores = by_head[np.isfinite(by_head)]
    why = f"no head has an induction score of {INDUCTION}"
    if len(scores):
        why = f"{why}; the largest is {scores.max():.2f}"
    return RunArrays(
        arrays={
            "induction_lost": np.full((1, 1 + SETS), np.nan),
            "retrieval_lost": np.full((1, 1 + SETS), np.nan),
            "more_found": np.full(RUNS, np.nan),
            "once": np.ones(1),
        },
        objections=dict.fromkeys(TESTED, why),
    )


def _planes_that_select(
    kind: LayersOfKind, heads: InductionHeads
) -> Int[np.ndarray, "of_head plane"]:
    """The quarter of the planes that selects most in each induction head."""
    selectivity = kind.profile["selectivity_keys"]
    by_head = selectivity.transpose("layer", "head", "frequency").values
    of_heads = by_head[heads.index, heads.head][:, kind.rotating]
    order = np.argsort(-of_heads, kind="stable")
    count = len(kind.quarters.slowest)
    return np.sort(kind.rotating[order[:, :count]])


def _stops_in_each_head(
    kind: LayersOfKind,
    heads: InductionHeads,
    own_planes: Int[np.ndarray, "of_head plane"],
) -> dict[str, list[Edit]]:
    """Stops of the `own_planes` of each head, and of random planes of each head."""
    by_head = []
    for number, name in enumerate(heads.names):
        planes = own_planes[number]
        random = planes_at_random(kind.rotating, [planes], kind.seed + number)
        by_head.append(edits_of(stop, [planes, *random], name))
    return {f"own {name}": [edits[name] for edits in by_head] for name in by_head[0]}


def repeated_tokens(context: int) -> int:
    """Length of the sequences in which tokens are repeated, with the first token."""
    return 2 * max(2, min(REPEATED_TOKENS, (context - 1) // 2)) + 1


def _lost(
    scores: Float[np.ndarray, "entry layer head"], heads: InductionHeads
) -> Float[np.ndarray, "1 edit"]:
    """Induction that the heads lose under each edit, as a mean over the heads."""
    mean = scores[:, heads.layer, heads.head].mean(-1)
    return mean[:1] - mean[None, 1:]


def _far_distance(kind: LayersOfKind, measurement: Measurement) -> int:
    """Distance of copies at which the fastest of the slow planes turns by `MIN_TURN`.

    0 if these copies do not fit into the trained context, or the layers do not see so far.
    """
    context = measurement.live.context
    if not kind.every:
        context = min(context, int(kind.profile.attrs["trained_context"]))
    return far_distance(kind.wavelength[:, kind.quarters.slowest], context)


def far_distance(wavelength: Float[np.ndarray, "layer _"], context: int) -> int:
    """Distance at which the fastest of these planes turns; 0 if copies do not fit."""
    needed = tokens_to_turn(wavelength)
    if needed + COPIED + 1 > context:
        return 0
    return needed


def distance_of_copies(context: int) -> int:
    return min(FAR, 2 * context // 3)


def _distance(kind: LayersOfKind, measurement: Measurement) -> int:
    """The distance of copies within the context of the model and of the layers."""
    context = measurement.live.context
    if not kind.every:
        context = min(context, int(kind.profile.attrs["trained_context"]))
    return distance_of_copies(context)


def _more_copies(
    kind: LayersOfKind,
    measurement: Measurement,
    heads: InductionHeads,
    progress: ProgressOption,
) -> Float[np.ndarray, " draw"]:
    """Change of the share of copies found if the slowest quarter of all heads stops."""
    distance = _distance(kind, measurement)
    names = ",".join(heads.names)
    unedited = _copies_found(measurement, names, distance, progress)
    slow_stop = edits_of(stop, [kind.quarters.slowest], kind.heads)
    edit = place_edits(measurement.rotation, [*slow_stop.values()])
    with measurement.live.intervene(edit):
        edited = _copies_found(measurement, names, distance, progress)
    return (edited - unedited).mean(unedited.dims[:-1]).values


def _copies_found(
    measurement: Measurement, heads: str, distance: int, progress: ProgressOption
) -> xr.DataArray:
    found = reach(
        measurement,
        measurement.text,
        heads=heads,
        copied=min(COPIED, distance),
        copies=[distance],
        distances=(),
        draws=RUNS,
        progress=progress,
    )
    return found["found_by_draw"]
