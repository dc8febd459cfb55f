"""The ledger of a model: claims of its profile, and those that take a change of the model.

For the latter some planes stop or drop out; the null is the same change of 40 random sets of
as many planes, in the same heads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from scipy import stats

from ropelens.edit.rope import Edit, drop, stop
from ropelens.errors import Positive, Whole, public
from ropelens.measure.claims import (
    BARBERO,
    CLAIMS,
    Claim,
    Null,
    Tested,
    claim_arrays,
    judged,
    measured,
)
from ropelens.measure.evaluate import evaluate
from ropelens.measure.measurement import Lengths, Tokens
from ropelens.models.subject import Model
from ropelens.rope.select import PlaneNumbers
from ropelens.statistics.corpus import Documents
from ropelens.statistics.intervals import paired_interval

SETS = 40  # random sets of planes
INDUCTION = 0.3  # attention on the token after the earlier occurrence, of an induction head
RANDOM = Null("40 random sets of as many planes, the same in all layers", "9 planes",
    lambda arrays, random, draws: iter(()), len)  # fmt: skip
# fmt: off
SLOW = Claim("slow_stop", "Stopping the slowest quarter costs less than random planes",
    f"{BARBERO}, section 6.1", "change of loss with the slowest quarter stopped, nats/token",
    "rl.truncate(model, tokens, keep=[0.75])", RANDOM, sign=-1)
FAST = Claim("fast_stop", "Stopping the fastest quarter costs more than random planes",
    f"{BARBERO}, section 6.1", "change of loss with the fastest quarter stopped, nats/token",
    "rl.truncate(model, tokens, keep=[0.75], ends=['fast'])", RANDOM)
LONG = Claim("long_planes", "The longest planes matter more than as many others",
    "Jin et al. 2025, arXiv 2502.01563",
    "change of loss without the eighth of the planes with the largest |q||k|, nats/token",
    "rl.evaluate(model, tokens, edits={'without': rl.drop(planes)})", RANDOM)
INDUCE = Claim("slow_induction", "Induction heads need the slowest quarter of their planes",
    "Chiang and Yogatama 2025, arXiv 2502.11276",
    "loss of induction of the induction heads with it stopped, beside random planes",
    "rl.needed_planes(model, tokens, heads)", RANDOM,
    absent=f"no head has an induction score of {INDUCTION}")
# fmt: on


@public
def test_claims(
    profile: xr.Dataset,
    *,
    model: Any = None,  # noqa: PT028
    tokens: Any = None,  # noqa: PT028
    lengths: Any = None,  # noqa: PT028
    documents: Any = None,  # noqa: PT028
    draws: Positive = 1000,  # noqa: PT028  # no test, but for its name
    seed: Whole = 0,  # noqa: PT028
) -> pd.DataFrame:
    """Which published claims about RoPE hold in the model of a profile; a row a claim.

    `number` is what the claim speaks of (`what`), `low` to `high` its 95 % interval by the
    jackknife (`over` layers or documents; NaN where there are too few). `null` says how the
    same number is drawn where only chance and geometry speak; `null_low` to `null_high` holds
    95 % of the `null_draws`. At most `draws` are made, with `seed`. `p_value` is the share of
    the number and its draws that are as far on the claimed side, `q_value` the false discovery
    rate at which the claim would count among all that are tested (Benjamini and Hochberg 1995).

    With `model` and `tokens` (as for `profile`) there are also claims for which planes of the
    model stop or drop out: 80 edits, so a few sequences do.

    `verdict` is "holds" where at most 2.5 % are as far, "contradicted" where at most 2.5 % are
    as far on the other side, "unresolved" between, and "not testable" where no number could be
    so rare; `why` says it in words. `call` shows what the number is made of. docs/measures.md
    defines each number.
    """
    arrays, rows = claim_arrays(profile), []
    for claim in CLAIMS:
        random = np.random.default_rng([int(seed) % 2**64, *claim.name.encode()])
        rows.append(judged(claim, measured(claim, profile, arrays, random, draws)))
    if model is not None:
        rows += tried_rows(profile, model, tokens, lengths, documents, seed=int(seed))
    return ledger(rows)


test_claims.__test__ = False  # type: ignore[attr-defined]  # pytest takes it for a test


def ledger(rows: Sequence[dict[str, object]]) -> pd.DataFrame:
    """The table of claims, with the false discovery rate of each."""
    table = pd.DataFrame(rows)
    known = table["verdict"] != "not testable"
    table.loc[known, "q_value"] = stats.false_discovery_control(table.loc[known, "p_value"])
    return table


def tried_rows(
    profile: xr.Dataset,
    model: Model,
    tokens: Tokens,
    lengths: Lengths | None,
    documents: Documents | None,
    *,
    seed: int,
) -> list[dict[str, object]]:
    """The rows of the four claims; `tokens` are those that losses are measured on."""
    turns = np.flatnonzero(np.isfinite(profile["wavelength"].values).any(0))
    quarter, eighth, random = len(turns) // 4, len(turns) // 8, np.random.default_rng(seed)
    length = (profile["q_norm"].mean("head") * profile["k_norm"].mean("kv_head")).mean("layer")
    longest = turns[np.argsort(-length.values[turns])][:eighth]
    slow, fast = turns[-quarter:], turns[:quarter]
    if min(math.comb(len(turns), quarter), math.comb(len(turns), max(eighth, 1))) < SETS + 2:
        why = f"{len(turns)} planes have too few sets; it takes 9 or more, for the last 16"
        return [judged(claim, why) for claim in (SLOW, FAST, LONG, INDUCE)]
    others = _sets(turns, quarter, random, {tuple(slow), tuple(fast)})
    edits: dict[str, Edit] = {"slow": _stop(slow), "fast": _stop(fast)}
    edits |= {f"random {n}": _stop(planes) for n, planes in enumerate(others)}
    edits |= {"long": drop(PlaneNumbers(longest.tolist()))}
    for n, planes in enumerate(_sets(turns, eighth, random, {tuple(sorted(longest))})):
        edits[f"without {n}"] = drop(PlaneNumbers(list(planes)))
    text: dict[str, Any] = {"lengths": lengths, "documents": documents, "seed": seed}
    lost = evaluate(model, tokens, edits=edits, measures=["loss"], **text)
    beside = {"slow": (SLOW, "random"), "fast": (FAST, "random"), "long": (LONG, "without")}
    rows = [judged(of, _costs(lost, name, null)) for name, (of, null) in beside.items()]
    at = np.argwhere(profile["induction"].values >= INDUCTION)
    if not len(at):
        return [*rows, judged(INDUCE, INDUCE.absent)]
    heads = ",".join(f"{layer}.{head}" for layer, head in at)
    edits = {"slow": _stop(slow, heads)}
    edits |= {f"random {n}": _stop(planes, heads) for n, planes in enumerate(others)}
    score = evaluate(model, tokens, edits=edits, measures=["induction"], **text)["induction"]
    less = (score.values[0] - score.values)[:, *at.T].mean(-1)
    return [*rows, judged(INDUCE, Tested(float(less[1]), less[2:]))]


def _stop(planes: np.ndarray | tuple[int, ...], heads: str = "*.*") -> Edit:
    return stop(PlaneNumbers([int(plane) for plane in planes]), heads=heads)


def _sets(
    planes: np.ndarray, size: int, random: np.random.Generator, but: set[tuple]
) -> list[tuple[int, ...]]:
    """Distinct random sets of planes."""
    drawn: dict[tuple[int, ...], None] = {}
    while len(drawn) < SETS:
        one = tuple(sorted(random.choice(planes, size, replace=False).tolist()))
        drawn |= {} if one in but else {one: None}
    return list(drawn)


def _costs(lost: xr.Dataset, name: str, null: str) -> Tested:
    """The change of loss under an edit with its interval, and under those of its null."""
    change = (lost["loss"] - lost["loss"].sel(edit="none")).values
    weight, group = lost["predicted_tokens"].values.astype(float), lost["group"].values
    names = lost["edit"].values.tolist()
    value, low, high = paired_interval(change[names.index(name)], weight, group)
    random = [n for n, edit in enumerate(names) if edit.startswith(f"{null} ")]
    return Tested(value, change[random] @ weight / weight.sum(), (low, high), "documents")
