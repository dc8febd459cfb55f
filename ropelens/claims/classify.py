"""The public `classify_heads`: the table of heads with the verdict on their wavelengths."""

from collections.abc import Mapping

import numpy as np
import pandas as pd
import xarray as xr

from ropelens.arguments import Count, Whole, public
from ropelens.claims.arrays import wavelength_arrays
from ropelens.claims.head_claims import POSITIONAL_FAST
from ropelens.claims.numbers import known_heads
from ropelens.claims.verdict import judge
from ropelens.profiles.head_table import head_table
from ropelens.profiles.measures import complete_profile


@public
def classify_heads(
    profile: xr.Dataset, *, resamples: Count = 1000, seed: Whole = 0
) -> pd.DataFrame:
    """Label every head of a profile: a row for each head, with the columns of heads.csv.

    - `confidence` estimates how often other sequences of the same text give the same label: the
      share of bootstrap `resamples` of the groups of sequences (documents, if there are 8 or
      more) with this label, whose difference from the whole text is multiplied by the square
      root of 2. NaN for fewer than two groups or "untested" heads (see `Thresholds`).
    - The three fractions are shares of the bits that sinks do not explain; NaN without any. In
      them, shared bits count for position or content, as exchanged keys decide.
      `fraction_low` to `fraction_high` is the 95% interval of the larger one of
      `positional_fraction` and `content_fraction`, from the same resamples (not multiplied).
      `uncertain` marks positional, semantic and mixed heads whose interval contains 2/3.
    - `follow_score` is near 1 if attention stays at the same positions when keys exchange their
      contents, and near -1 if it moves with the contents. `opposed` marks positional heads with
      a negative score and semantic heads with a positive score.
    - `offset` is the peak of the fitted kernel of a positional head, if it has 0.3 or more
      of the kernel. `offset_low` to `offset_high` holds the middle half of the kernel.
    - `top_wavelength` (tokens; infinite without rotation) belongs to the plane with the most
      selectivity on keys other than sinks, and `top_share` is its share. `planes_to_half`
      planes have half of the selectivity. `mean_wavelength` (tokens) is the geometric mean
      over the planes that rotate, with the same weights.

    `attrs["thresholds"]` holds the thresholds. `attrs["claim"]` holds the verdict on a claim:
    do positional and semantic heads differ in wavelength more than in surrogates, whose
    frequencies are in a random order? docs/measures.md defines its numbers.
    """
    profile = complete_profile(profile)
    heads = head_table(profile, resamples=resamples, seed=int(seed))
    heads.attrs["claim"] = judge_wavelengths(wavelength_arrays(profile))
    return heads


def judge_wavelengths(arrays: Mapping[str, np.ndarray]) -> dict[str, object]:
    """`heads.attrs["claim"]`: the claim `positional_fast` of the ledger, and its heads."""
    row = judge(POSITIONAL_FAST, arrays, np.random.default_rng(0), draws=0)
    return {
        "rank_correlation": row["number"],
        "low": row["low"],
        "high": row["high"],
        "heads": int(known_heads(arrays["head_numbers"]).sum()),
        "null_median": row["null_median"],
        "null_low": row["null_low"],
        "null_high": row["null_high"],
        "null_draws": row["null_draws"],
        "p_value": row["p_value"],
        "verdict": row["verdict"],
        "why": row["why"],
    }
