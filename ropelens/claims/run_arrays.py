"""The arrays of claims for which the model runs again, as the runs return them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

SETS = 40  # random sets of planes or tokens, and random orders of planes, in a null


@dataclass(frozen=True, kw_only=True)
class RunArrays:
    """Arrays by the names in `Claim.arrays`, and reasons against tests by the name of a claim.

    A claim without a reason, or with the reason "", is tested.
    """

    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    objections: Mapping[str, str] = field(default_factory=dict)


def join_runs(*runs: RunArrays) -> RunArrays:
    arrays: dict[str, np.ndarray] = {}
    objections: dict[str, str] = {}
    for run in runs:
        arrays.update(run.arrays)
        objections.update(run.objections)
    return RunArrays(arrays=arrays, objections=objections)
