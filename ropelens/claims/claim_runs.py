"""The ledger of a model: claims of its profile, and those that take another run of the model.

For most of the latter some planes stop or drop out; the null is the same change of 40 random
sets of as many planes, in the same heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
import xarray as xr
from jaxtyping import Float, Int

from ropelens.attention.sums import LayerMeans
from ropelens.claims.claims import INDUCTION
from ropelens.claims.ledger import ledger
from ropelens.errors import Positive, Whole, public
from ropelens.interventions.edit import Edit, drop, stack_edits, stop
from ropelens.interventions.evaluate import evaluate_edits
from ropelens.interventions.reach import find_copies
from ropelens.profiles.capture import TokenNames, token_names
from ropelens.profiles.heads import require_budget
from ropelens.profiles.measurement import Measurement
from ropelens.profiles.passes import collect
from ropelens.profiles.token_sets import shares_of
from ropelens.rope.select import ALL_HEADS, PlaneNumbers
from ropelens.runtime.progress import ShowProgress
from ropelens.text.rows import rows_for

SETS = 40  # random sets, of planes or of tokens
RUNS, FAR = 8, 2048  # draws of random tokens; tokens back, at most
APOSTROPHE, FEW = "'", 10  # fewer tokens of a set decide nothing
TRIED_ON = 4  # sequences, at most, on which planes stop or drop out
ROWS = 64  # of a sequence, for attention on sets of tokens


@public
def test_claims(
    profile: xr.Dataset,
    *,
    model: Any = None,  # noqa: PT028
    text: Any = None,  # noqa: PT028
    tokenizer: Any = None,  # noqa: PT028
    draws: Positive = 1000,  # noqa: PT028  # no test, but for its name
    seed: Whole = 0,  # noqa: PT028
    progress: ShowProgress | None = None,  # noqa: PT028
) -> pd.DataFrame:
    """Which published claims about RoPE hold in the model of a profile; a row per claim.

    `number` is what the claim speaks of (`what`), `low` to `high` its 95 % interval by the
    jackknife (`over` layers or documents; NaN where there are too few). `null` says how the
    same number is drawn where only chance and geometry speak; `null_low` to `null_high` holds
    95 % of the `null_draws`. At most `draws` are made, with `seed`. `p_value` is the share of
    the number and its draws that are as far on the claimed side, `q_value` the false discovery
    rate at which the claim would count among all that are tested (Benjamini and Hochberg 1995).

    With `model` and `text` (as for `profile`) there are also claims for which the model runs
    again: under 80 edits on 4 sequences, on copies up to 2,048 tokens apart, and, with
    `tokenizer`, in search of a head that attends to apostrophes.

    `verdict` is "holds" where at most 2.5 % are as far, "contradicted" where at most 2.5 % are
    as far on the other side, "unresolved" between, and "not testable" where no number could be
    so rare; `why` says it in words. `call` shows what the number is made of. docs/measures.md
    defines each number.
    """
    require_budget(profile)
    if model is None:
        return ledger(profile, draws=draws, seed=int(seed))
    measurement = Measurement.of(model, text, tokenizer=tokenizer, rows=ROWS, seed=int(seed))
    tried = _of_planes(profile, subsample(measurement), progress)
    tried["token_lead"] = _token_lead(measurement, tokenizer)
    return ledger(profile, draws=draws, seed=int(seed), more=tried)


test_claims.__test__ = False  # type: ignore[attr-defined]  # pytest takes it for a test


def subsample(measurement: Measurement) -> Measurement:
    """The measurement of 4 sequences, evenly spread, on which many edits are evaluated."""
    text = measurement.text[:: -(-len(measurement.text) // TRIED_ON)]
    return replace(measurement, text=text, rows=rows_for("auto", text.context))


def _of_planes(
    profile: xr.Dataset,
    measurement: Measurement,
    progress: ShowProgress | None,
) -> dict[str, np.ndarray]:
    """The arrays of the claims for which planes stop or drop out.

    Losses are by document and set of planes, the first one that of the claim.
    """
    turns = np.flatnonzero(np.isfinite(profile["wavelength"].values).any(0))
    norms = profile["q_norm"].mean("head") * profile["k_norm"].mean("kv_head")
    by_length = turns[np.argsort(-norms.mean("layer").values[turns], kind="stable")]
    fast, _, slow = np.split(turns, [len(turns) // 4, len(turns) - len(turns) // 4])
    quarters = planes_at_random(turns, [slow, fast], measurement.seed)
    longest = np.sort(by_length[: len(turns) // 8])
    stops = _edits(stop, [slow, fast, *quarters])
    drops = _edits(drop, [longest, *planes_at_random(turns, [longest], measurement.seed)])
    live = measurement.live
    read = partial(evaluate_edits, measurement, progress=progress)
    lost = read(edits=stops | drops, measures=["loss"])
    weight = lost["predicted_tokens"].values[None].astype(float)
    change = (lost["loss"].values[1:] - lost["loss"].values[0]) * weight
    sums = pd.DataFrame(np.vstack([weight, change]).T).groupby(lost["group"].values).sum()
    of_tokens, stopped, dropped = np.split(sums.values, [1, 1 + len(stops)], axis=1)
    arrays = {"tokens": of_tokens[:, 0], "long_loss": dropped, "once": np.ones(1)}
    arrays |= {"slow_loss": np.delete(stopped, 1, axis=1), "fast_loss": stopped[:, 1:]}
    at = np.argwhere(profile["induction"].values >= INDUCTION)
    if not len(at):
        none = np.full((1, 1 + SETS), np.nan)
        return arrays | {"induction_lost": none, "more_found": none[0, :RUNS]}
    heads = ",".join(f"{layer}.{head}" for layer, head in at)
    stops = _edits(stop, [slow, *quarters], heads)
    score = read(edits=stops, measures=["induction"])["induction"].values[:, *at.T].mean(-1)
    far = min(FAR, 2 * live.context // 3)
    options: dict[str, Any] = {"copies": [far], "draws": RUNS, "progress": progress}
    copies = partial(find_copies, measurement, heads=heads, **options)
    own = copies()["found_by_draw"]
    slowest = stack_edits(measurement.rotation, [_edits(stop, [slow])["stop 0"]])
    with live.edit(slowest):
        more = (copies()["found_by_draw"] - own).mean(own.dims[:-1]).values
    return arrays | {"induction_lost": score[:1] - score[None, 1:], "more_found": more}


def planes_at_random(
    planes: Int[np.ndarray, " plane"], but: Sequence[Int[np.ndarray, " _"]], seed: int
) -> list[tuple[int, ...]]:
    """40 random sets of planes, as large as those in `but`; fewer where there are no more."""
    random, size = np.random.default_rng(seed), len(but[0])
    sets = {tuple(of.tolist()): None for of in but}
    most = min(SETS + len(sets), math.comb(len(planes), size))
    while len(sets) < most:
        sets[tuple(np.sort(random.choice(planes, size, replace=False)).tolist())] = None
    return [*sets][len(but) :]


def _edits(
    change: Callable[..., Edit], sets: Sequence[Any], heads: str = ALL_HEADS
) -> dict[str, Edit]:
    chosen = [PlaneNumbers([*map(int, planes)]) for planes in sets]
    return {f"{change.__name__} {n}": change(of, heads=heads) for n, of in enumerate(chosen)}


def _token_lead(
    measurement: Measurement, tokenizer: TokenNames | None
) -> Float[np.ndarray, "layer head set"]:
    """Attention on apostrophes less that on their controls; the same of 40 sets of tokens.

    A set has a random word, at most twice or half as frequent, for each token with an "'".
    """
    text, random = measurement.text, np.random.default_rng(measurement.seed)
    ids, counts = text.ids[text.real].unique(return_counts=True)
    names = token_names(ids, tokenizer)
    chosen = torch.tensor([APOSTROPHE in name for name in names])
    words = torch.tensor([name.strip().isalpha() for name in names])
    if counts[chosen].sum() < FEW:
        return np.full((1, 1, 1 + SETS), np.nan)
    like = ((counts[chosen].log2()[:, None] - counts.log2()).abs() <= 1) & words
    tries = range(10 * SETS if like.any(1).all() else 0)
    others = {tuple(sorted({int(random.choice(ids[of])) for of in like})): None for _ in tries}
    sets = [ids[chosen], *map(torch.tensor, [*others][:SETS])]
    pairs = [shares_of(text.ids, of, str(number), "") for number, of in enumerate(sets)]
    statistics = [one for pair in pairs for one in pair]
    planes = measurement.rotation.planes(text.context, alike=True)
    sums = collect(measurement, planes, statistics=statistics)
    lead = []
    for layer, of in sums.layers.items():
        means = LayerMeans(of, sums, planes[layer], statistics)
        lead.append([on.value(means) - control.value(means) for on, control in pairs])
    return np.moveaxis(np.array(lead), 1, -1)
