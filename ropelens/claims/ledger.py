"""The ledger: the number, null and verdict of every claim."""

from collections.abc import Mapping

import numpy as np
import pandas as pd
import xarray as xr
from scipy import stats

from ropelens.claims.arrays import claim_arrays
from ropelens.claims.claims import CLAIMS
from ropelens.claims.verdict import judge


def ledger(
    profile: xr.Dataset,
    *,
    draws: int = 1000,
    seed: int = 0,
    more: Mapping[str, np.ndarray] | None = None,
) -> pd.DataFrame:
    """The columns of `test_claims`: a row for each claim whose arrays are known.

    `more` holds arrays from further runs of the model.
    """
    arrays, rows = claim_arrays(profile) | dict(more or {}), []
    for claim in CLAIMS:
        random = np.random.default_rng([seed % 2**64, *claim.name.encode()])
        if arrays.keys() >= {*claim.arrays}:
            rows.append(judge(claim, arrays, random, draws))
    table = pd.DataFrame(rows)
    known = table["p_value"].notna()
    table.loc[known, "q_value"] = stats.false_discovery_control(table.loc[known, "p_value"])
    return table
