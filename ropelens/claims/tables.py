"""Tables of heads and claims: labels, confidences, numbers and verdicts."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import scipy
import xarray as xr

from ropelens.arguments import Count, Whole, public
from ropelens.claims.arrays import claim_arrays, parts_by_kind, wavelength_arrays
from ropelens.claims.claim import Claim
from ropelens.claims.claims import CLAIMS
from ropelens.claims.head_claims import POSITIONAL_FAST
from ropelens.claims.numbers import known_heads
from ropelens.claims.verdict import judge
from ropelens.profiles.head_table import head_table


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
    heads = head_table(profile, resamples=resamples, seed=int(seed))
    heads.attrs["claim"] = judge_wavelengths(wavelength_arrays(profile))
    return heads


def judge_wavelengths(arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """`heads.attrs["claim"]`: the claim `positional_fast` of the ledger, and its heads."""
    row = judge(POSITIONAL_FAST, arrays, np.random.default_rng(0), draws=0)
    names = (
        "null_median",
        "null_low",
        "null_high",
        "null_draws",
        "p_value",
        "verdict",
        "why",
    )
    heads = int(known_heads(arrays["head_numbers"]).sum())
    ends = {"low": row["low"], "high": row["high"], "heads": heads}
    return (
        {"rank_correlation": row["number"]} | ends | {name: row[name] for name in names}
    )


def ledger(
    profile: xr.Dataset,
    *,
    draws: int = 1000,
    seed: int = 0,
    runs: Mapping[str, Mapping[str, Any]] | None = None,
    claims: Sequence[Claim] = CLAIMS,
) -> pd.DataFrame:
    """`test_claims` for the arrays of a profile and further `runs`, by kind of layers."""
    parts, rows = parts_by_kind(profile), list[dict[str, object]]()
    arrays = {
        kind: claim_arrays(part) for kind, part in {"all": profile, **parts}.items()
    }
    arrays = {kind: x | dict((runs or {}).get(kind, {})) for kind, x in arrays.items()}
    model = str(profile.attrs.get("model", "")).lower()
    for claim in claims:
        for kind in parts if claim.within_kind else ["all"]:
            if not {*claim.arrays} <= arrays[kind].keys():
                continue
            name = claim.name.encode() + kind.removeprefix("all").encode()
            random = np.random.default_rng([seed % 2**64, *name])
            objection = str(arrays[kind].get(f"why {claim.name}", ""))
            row = judge(claim, arrays[kind], random, draws, objection)
            row["layers"] = kind
            if row["nearness"] == "close" and any(
                name in model for name in claim.families
            ):
                row["nearness"] = "direct"
            rows.append(row)
    table = pd.DataFrame(rows)
    p_values = table["p_value"].dropna()
    table.loc[p_values.index, "q_value"] = scipy.stats.false_discovery_control(p_values)
    return table


def compare_settings(every: pd.DataFrame) -> pd.DataFrame:
    """The table of the first `setting`, and the share of settings with the same verdict.

    `differ` names the others. A claim is `reversed` if it is contradicted in most settings.
    """
    keys = ["claim", "layers"]
    table = every[every["setting"] == every["setting"].iloc[0]].drop(columns="setting")
    every = every.merge(table[[*keys, "verdict"]], on=keys, suffixes=("", "_main"))
    every["same"] = every["verdict"] == every["verdict_main"]
    every["reversed"] = every["verdict"] == "contradicted"
    every["differ"] = (every["setting"] + ": " + every["verdict"]).where(~every["same"])
    grouped = every.groupby(keys)
    added = grouped.agg(robust=("same", "mean"), settings=("same", "size"))
    added["differ"] = grouped["differ"].agg(lambda words: "; ".join(words.dropna()))
    added["reversed"] = grouped["reversed"].mean() > 0.5
    return table.join(added, on=keys)
