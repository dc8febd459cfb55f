"""The published claims, in the order of the ledger."""

from ropelens.claims import head_claims, length_claims, run_claims
from ropelens.claims.claim import with_other_statistic

CLAIMS = (
    length_claims.SLOW_NORMS,
    length_claims.FAST_AT_THE_ENDS,
    length_claims.FLAT_VALUES,
    length_claims.BAND,
    length_claims.MASSIVE_SLOW,
    length_claims.MASSIVE_NOT_IN_VALUES,
    head_claims.SINKS_SLOW,
    head_claims.SINKS_SHORTEN,
    head_claims.POSITIONAL_FAST,
    head_claims.POSITIONAL_EARLY,
    head_claims.FIXED_VECTORS,
    head_claims.MEAN_VECTORS_PREDICT,
    head_claims.DECAY,
    head_claims.PREVIOUS_TOKEN,
    head_claims.DIAGONAL,
    run_claims.SLOW_STOP,
    run_claims.FAST_STOP,
    run_claims.LONG_PLANES,
    run_claims.NORMS_NOT_WORTH,
    run_claims.RETRIEVAL_PLANES,
    run_claims.PREFERENCES_REVERSE,
    run_claims.SLOW_INDUCTION,
    run_claims.SLOW_REACH,
    run_claims.APOSTROPHES,
)
OTHERS = tuple(
    with_other_statistic(claim, claim.other)
    for claim in CLAIMS
    if claim.other is not None
)
"""The claims with their other statistics."""
