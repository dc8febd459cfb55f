"""The variables of evaluations and truncation sweeps."""

from dataclasses import replace

from ropelens.profiles.measures import MEASURES
from ropelens.schema.evaluation import EVALUATION

OF_EACH_EDIT = [
    row
    for row in MEASURES
    if row.column == "budget"
    or row.name in ("induction", "trial_induction", "duplicate_token")
]
"""Measures of a profile that an evaluation has for each edit."""

EVALUATED = (
    *EVALUATION,
    *(replace(row, dims=("edit", *row.dims)) for row in OF_EACH_EDIT),
)
"""The variables of an evaluation. The planes of the unmodified model come in addition."""


OWN_ROTATION = "own"  # the variant of a reach that keeps the rotation of the model
