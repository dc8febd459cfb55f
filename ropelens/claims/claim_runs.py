"""Arrays of claims for which the model runs again.

For most of these claims, planes stop or drop out. The null is the same change of 40 random sets
with the same number of planes, in the same heads.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd
import torch
import xarray as xr
from jaxtyping import Float, Int

from ropelens.attention.sums import LayerMeans
from ropelens.claims.claims import INDUCTION
from ropelens.claims.tables import ledger
from ropelens.errors import BadArgument, Positive, Whole, public
from ropelens.interventions.edit import Edit, drop, stack_edits, stop
from ropelens.interventions.evaluate import evaluate
from ropelens.interventions.reach import reach
from ropelens.profiles.capture import TokenNames, token_names
from ropelens.profiles.heads import require_budget
from ropelens.profiles.measurement import Measured, Measurement
from ropelens.profiles.passes import collect
from ropelens.profiles.token_sets import shares_of
from ropelens.rope.select import ALL_HEADS, PlaneNumbers
from ropelens.runtime.progress import ProgressOption
from ropelens.text.rows import rows_for
from ropelens.text.tokenize import TextInput

SETS = 40  # random sets of planes or tokens
RUNS, FAR = 8, 2048  # draws of random tokens; largest distance of a copy in tokens
APOSTROPHE, MIN_TOKENS = "'", 10  # fewer apostrophes decide nothing
MAX_SEQUENCES = 4  # for evaluations in which planes stop or drop out
ROWS_READ = 64  # rows of each sequence, for attention on sets of tokens


@public
def test_claims(
    profile: xr.Dataset,
    *,
    model: Measured | None = None,  # noqa: PT028
    text: TextInput | None = None,  # noqa: PT028
    tokenizer: Any = None,  # noqa: PT028
    draws: Positive = 1000,  # noqa: PT028
    seed: Whole = 0,  # noqa: PT028
    progress: ProgressOption = None,  # noqa: PT028
) -> pd.DataFrame:
    """Test published claims about RoPE on the model of a profile: one row for each claim.

    - `number` is the number that the claim is about, and `what` names it. `low` to `high` is
      the 95 % interval by the jackknife over layers or documents (`over`); NaN for too few.
    - `null` describes how the number is drawn again if only chance and geometry matter.
      `null_low` to `null_high` holds 95 % of the `null_draws` (at most `draws`, with `seed`).
    - `p_value` is the share of the number and its draws that are as far on the claimed side.
      `q_value` is the false discovery rate at which the claim would count among all tested
      claims (Benjamini and Hochberg 1995).
    - `verdict` is "holds" if `p_value` is at most 2.5 %, "contradicted" if at most 2.5 % are as
      far on the other side, "unresolved" if neither is true, and "not testable" if such a
      number is impossible. `why` gives the reason, and `call` shows the data of the number.

    With `model` and `text` (as for `profile`), the table also has claims for which the model
    runs again: under 80 edits on 4 sequences, on copies up to 2,048 tokens apart and, with
    `tokenizer`, in search of a head that attends to apostrophes. docs/measures.md defines each
    number.
    """
    require_budget(profile)
    seed, arrays = int(seed), dict[str, np.ndarray]()
    if (model is None) != (text is None):
        raise BadArgument("Claims of runs need model and text.", hint="both, or neither")
    if model is not None and text is not None:
        measurement = Measurement.of(
            model, text, tokenizer=tokenizer, rows=ROWS_READ, seed=seed
        )
        few = measurement.text[:: -(-len(measurement.text) // MAX_SEQUENCES)]  # evenly spread
        part = replace(measurement, text=few, rows=rows_for("auto", few.context))
        arrays = _change_planes(profile, part, progress)
        arrays["token_lead"] = _token_lead(measurement, tokenizer)
    return ledger(profile, draws=draws, seed=seed, **arrays)


test_claims.__test__ = False  # type: ignore[attr-defined]  # or pytest collects it as a test


def _change_planes(
    profile: xr.Dataset, measurement: Measurement, progress: ProgressOption
) -> dict[str, np.ndarray]:
    """Arrays [document, set of planes] of claims about edits; set 0 is the set of the claim."""
    rotating = np.flatnonzero(np.isfinite(profile["wavelength"].values).any(0))
    norms = profile["q_norm"].mean("head") * profile["k_norm"].mean("kv_head")
    lengths = norms.mean("layer").values[rotating]
    by_length = rotating[np.argsort(-lengths, kind="stable")]
    fast, _, slow = np.split(rotating, [len(rotating) // 4, len(rotating) - len(rotating) // 4])
    quarters = planes_at_random(rotating, [slow, fast], measurement.seed)
    longest = np.sort(by_length[: len(rotating) // 8])
    stops = _edits(stop, [slow, fast, *quarters])
    drops = _edits(drop, [longest, *planes_at_random(rotating, [longest], measurement.seed)])
    text = measurement.text
    measure = partial(evaluate, measurement, text, progress=progress)
    losses = measure(edits=stops | drops, measures=["loss"])
    weight = losses["predicted_tokens"].values[None].astype(float)
    change = (losses["loss"].values[1:] - losses["loss"].values[0]) * weight
    sums = pd.DataFrame(np.vstack([weight, change]).T).groupby(losses["group"].values).sum()
    tokens, stopped, dropped = np.split(sums.values, [1, 1 + len(stops)], axis=1)
    arrays = {"tokens": tokens[:, 0], "long_loss": dropped, "once": np.ones(1)}
    arrays |= {"slow_loss": np.delete(stopped, 1, axis=1), "fast_loss": stopped[:, 1:]}
    induction = np.argwhere(profile["induction"].values >= INDUCTION)
    if not len(induction):
        unknown = np.full((1, 1 + SETS), np.nan)
        return arrays | {"induction_lost": unknown, "more_found": unknown[0, :RUNS]}
    heads = ",".join(f"{layer}.{head}" for layer, head in induction)
    stops = _edits(stop, [slow, *quarters], heads)
    scores = measure(edits=stops, measures=["induction"])["induction"]
    score = scores.values[:, *induction.T].mean(-1)
    far = min(FAR, 2 * measurement.live.context // 3)
    options: dict[str, Any] = {"copies": [far], "draws": RUNS, "progress": progress}
    copies = partial(reach, measurement, text, distances=(), heads=heads, **options)
    unedited = copies()["found_by_draw"]
    slowest = stack_edits(measurement.rotation, [*_edits(stop, [slow]).values()])
    with measurement.live.edit(slowest):
        more = (copies()["found_by_draw"] - unedited).mean(unedited.dims[:-1]).values
    return arrays | {"induction_lost": score[:1] - score[None, 1:], "more_found": more}


def planes_at_random(
    planes: Int[np.ndarray, " plane"], excluded: Sequence[Int[np.ndarray, " _"]], seed: int
) -> list[tuple[int, ...]]:
    """Up to 40 random sets of planes, as large as the `excluded` sets and other than them."""
    random, size = np.random.default_rng(seed), len(excluded[0])
    sets = {tuple(numbers.tolist()): None for numbers in excluded}
    count = min(SETS + len(sets), math.comb(len(planes), size))
    while len(sets) < count:
        sets[tuple(np.sort(random.choice(planes, size, replace=False)).tolist())] = None
    return [*sets][len(excluded) :]


def _edits(
    change: Callable[..., Edit], sets: Sequence[Any], heads: str = ALL_HEADS
) -> dict[str, Edit]:
    """The same change of each set of planes, by names such as "stop 0"."""
    return {
        f"{change.__name__} {index}": change(PlaneNumbers([*map(int, planes)]), heads=heads)
        for index, planes in enumerate(sets)
    }


def _token_lead(
    measurement: Measurement, tokenizer: TokenNames | None
) -> Float[np.ndarray, "layer head set"]:
    """Attention minus attention on controls, for apostrophes (set 0) and for random words.

    Each set of words has, for each apostrophe token, a word of half to twice its frequency.
    """
    text, random = measurement.text, np.random.default_rng(measurement.seed)
    ids, counts = text.ids[text.real].unique(return_counts=True)
    names = token_names(ids, tokenizer)
    apostrophes = torch.tensor([APOSTROPHE in name for name in names])
    words = torch.tensor([name.strip().isalpha() for name in names])
    if counts[apostrophes].sum() < MIN_TOKENS:
        return np.full((1, 1, 1 + SETS), np.nan)
    log_ratio = (counts[apostrophes].log2()[:, None] - counts.log2()).abs()
    similar = (log_ratio <= 1) & words  # [apostrophe, id]
    sets: dict[tuple[int, ...], None] = {}
    for _ in range(10 * SETS if similar.any(1).all() else 0):
        sets[tuple(sorted({int(random.choice(ids[row])) for row in similar}))] = None
    chosen = [ids[apostrophes], *map(torch.tensor, [*sets][:SETS])]
    pairs = [shares_of(text.ids, tokens, str(n), "") for n, tokens in enumerate(chosen)]
    statistics = [*chain(*pairs)]
    planes = measurement.rotation.planes(text.context, alike=True)
    sums = collect(measurement, planes, statistics=statistics)
    lead = []
    for layer, layer_sums in sums.layers.items():
        means = LayerMeans(layer_sums, sums, planes[layer], statistics)
        lead.append([on.value(means) - control.value(means) for on, control in pairs])
    return np.moveaxis(np.array(lead), 1, -1)
