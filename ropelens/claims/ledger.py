"""The ledger of claims: a row for each claim, and for each kind of layers if they differ."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import scipy
import xarray as xr

from ropelens.claims.arrays import ALL_LAYERS, claim_arrays, parts_by_kind
from ropelens.claims.claim import Claim
from ropelens.claims.claims import CLAIMS
from ropelens.claims.run_arrays import RunArrays, join_runs
from ropelens.claims.verdict import judge


def ledger(
    profile: xr.Dataset,
    *,
    draws: int = 1000,
    seed: int = 0,
    runs: Mapping[str, RunArrays] | None = None,
    claims: Sequence[Claim] = CLAIMS,
) -> pd.DataFrame:
    """`test_claims` for the arrays of a profile and further `runs`, by kind of layers."""
    parts = parts_by_kind(profile)
    tested = {}
    for kind, part in {ALL_LAYERS: profile, **parts}.items():
        of_profile = RunArrays(arrays=claim_arrays(part))
        of_runs = RunArrays() if runs is None else runs.get(kind, RunArrays())
        tested[kind] = join_runs(of_profile, of_runs)
    model = str(profile.attrs.get("model", "")).lower()
    rows = []
    for claim in claims:
        for kind in parts if claim.within_kind else [ALL_LAYERS]:
            arrays = tested[kind].arrays
            if not {*claim.arrays} <= arrays.keys():
                continue
            objection = tested[kind].objections.get(claim.name, "")
            random = _random_of(claim, kind, seed)
            row = judge(claim, arrays, random, draws, objection)
            row["layers"] = kind
            row["nearness"] = _nearness(claim, model)
            rows.append(row)
    table = pd.DataFrame(rows)
    p_values = table["p_value"].dropna()
    table.loc[p_values.index, "q_value"] = scipy.stats.false_discovery_control(p_values)
    return table


def _random_of(claim: Claim, kind: str, seed: int) -> np.random.Generator:
    """Random numbers of a row, which do not depend on the other rows."""
    name = claim.name if kind == ALL_LAYERS else f"{claim.name}{kind}"
    return np.random.default_rng([seed % 2**64, *name.encode()])


def _nearness(claim: Claim, model: str) -> str:
    of_family = any(family in model for family in claim.families)
    return "direct" if claim.nearness == "close" and of_family else claim.nearness


def compare_settings(every: pd.DataFrame) -> pd.DataFrame:
    """The table of the first `setting`, and the share of settings with the same verdict.

    `differ` names the others. A claim is `reversed` if it is contradicted in most settings.
    """
    keys = ["claim", "layers"]
    is_main = every["setting"] == every["setting"].iloc[0]
    table = every[is_main].drop(columns="setting")
    main_verdict = table[[*keys, "verdict"]]
    every = every.merge(main_verdict, on=keys, suffixes=("", "_main"))
    every["same"] = every["verdict"] == every["verdict_main"]
    every["reversed"] = every["verdict"] == "contradicted"
    other_verdict = every["setting"] + ": " + every["verdict"]
    every["differ"] = other_verdict.where(~every["same"])
    grouped = every.groupby(keys)
    added = grouped.agg(robust=("same", "mean"), settings=("same", "size"))
    added["differ"] = grouped["differ"].agg(_join_known)
    added["reversed"] = grouped["reversed"].mean() > 0.5
    return table.join(added, on=keys)


def _join_known(words: pd.Series) -> str:
    return "; ".join(words.dropna())
