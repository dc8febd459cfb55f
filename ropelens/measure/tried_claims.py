"""The ledger of a model: claims of its profile, and those that take a change of the model.

For the latter some planes stop or drop out; the null is the same change of 40 random sets of
as many planes, in the same heads.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from ropelens.edit.rope import drop, stop
from ropelens.errors import Positive, Whole, public
from ropelens.measure.claim_arrays import Null
from ropelens.measure.claims import BARBERO, Claim, Tested, judged, ledger, untested
from ropelens.measure.evaluate import evaluate
from ropelens.measure.measurement import Lengths, Tokens
from ropelens.models.subject import Model
from ropelens.rope.select import PlaneNumbers
from ropelens.statistics.corpus import Documents
from ropelens.statistics.intervals import paired_interval

SETS = 40  # random sets of planes
NOTHING = 0.01  # nats/token: planes that cost less are worth nothing
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
    tried = []
    if model is not None:
        tried = tried_rows(profile, model, tokens, lengths, documents, seed=int(seed))
    return ledger(profile, draws=draws, seed=int(seed), tried=tried)


test_claims.__test__ = False  # type: ignore[attr-defined]  # pytest takes it for a test


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
    turns = np.flatnonzero(np.isfinite(profile["wavelength"].values).any(0)).tolist()
    quarter, eighth = len(turns) // 4, len(turns) // 8
    if min(math.comb(len(turns), quarter), math.comb(len(turns), max(eighth, 1))) < SETS + 2:
        why = f"{len(turns)} planes have too few sets; it takes 9 or more, for the last 16"
        return [judged(claim, untested(why)) for claim in (SLOW, FAST, LONG, INDUCE)]
    length = (profile["q_norm"].mean("head") * profile["k_norm"].mean("kv_head")).mean("layer")
    longest = sorted(sorted(turns, key=lambda plane: -length.values[plane])[:eighth])
    ends = {"slow": turns[-quarter:], "fast": turns[:quarter]}
    stopped = ends | _sets("random", turns, [*ends.values()], seed)
    dropped = {"long": longest} | _sets("without", turns, [longest], seed)
    text: dict[str, Any] = {"lengths": lengths, "documents": documents, "seed": seed}
    try_edits = partial(evaluate, model, tokens, **text)
    edits = {name: stop(PlaneNumbers(of)) for name, of in stopped.items()}
    edits |= {name: drop(PlaneNumbers(of)) for name, of in dropped.items()}
    lost = try_edits(edits=edits, measures=["loss"])
    beside = {"slow": (SLOW, "random"), "fast": (FAST, "random"), "long": (LONG, "without")}
    rows = [judged(of, _costs(lost, name, null)) for name, (of, null) in beside.items()]
    at = np.argwhere(profile["induction"].values >= INDUCTION)
    if not len(at):
        return [*rows, judged(INDUCE, untested(INDUCE.absent))]
    heads = ",".join(f"{layer}.{head}" for layer, head in at)
    edits = {
        name: stop(PlaneNumbers(of), heads=heads)
        for name, of in stopped.items()
        if name != "fast"
    }
    score = try_edits(edits=edits, measures=["induction"])["induction"]
    less = (score.values[0] - score.values)[:, *at.T].mean(-1)
    return [*rows, judged(INDUCE, Tested(float(less[1]), less[2:]))]


def _sets(
    name: str, planes: list[int], but: list[list[int]], seed: int
) -> dict[str, list[int]]:
    """Random sets of planes, as large as those in `but`, by their names."""
    random, sets = np.random.default_rng(seed), dict.fromkeys(map(tuple, but))
    while len(sets) < SETS + len(but):
        drawn = random.choice(planes, len(but[0]), replace=False)
        sets |= {tuple(sorted(drawn.tolist())): None}
    return {f"{name} {n}": [*one] for n, one in enumerate([*sets][len(but) :])}


def _costs(lost: xr.Dataset, name: str, null: str) -> Tested:
    """The change of loss under an edit with its interval, and under those of its null."""
    change = (lost["loss"] - lost["loss"].sel(edit="none")).values
    weight, group = lost["predicted_tokens"].values.astype(float), lost["group"].values
    names = lost["edit"].values.tolist()
    value, low, high = paired_interval(change[names.index(name)], weight, group)
    random = [n for n, edit in enumerate(names) if edit.startswith(f"{null} ")]
    costs = change[random] @ weight / weight.sum()
    if max(abs(value), *abs(costs)) < NOTHING:
        return untested(f"no such set of planes is worth {NOTHING} nats/token", value)
    return Tested(value, costs, (low, high), "documents")
