"""Arrays of claims for which the model runs again.

For most of these claims, planes stop or drop out. The null is the same change of 40 random sets
with the same number of planes, in the same heads.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd
import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedConfig

from ropelens.arguments import Positive, Whole, public
from ropelens.attention.block import Block
from ropelens.attention.distances import (
    distances_of,
    leads,
    mean_by_bin,
    reverses,
    waves,
)
from ropelens.attention.sums import LayerMeans
from ropelens.claims.arrays import parts_by_kind, rotating_in
from ropelens.claims.tables import ledger
from ropelens.config_facts import layer_types, stated_context
from ropelens.errors import BadArgument
from ropelens.interventions.edit import Edit, drop, stack_edits, stop
from ropelens.interventions.evaluate import evaluate
from ropelens.interventions.reach import COPIED, reach
from ropelens.profiles.heads import require_budget
from ropelens.profiles.measurement import Measured, Measurement
from ropelens.profiles.passes import collect
from ropelens.profiles.tasks import REPEATED_TOKENS, REPEATS
from ropelens.profiles.token_sets import shares_of
from ropelens.rope.select import ALL_HEADS, PlaneNumbers
from ropelens.runtime.progress import ProgressOption, ShowProgress, Stage, display_of
from ropelens.schema import Statistic
from ropelens.text.prompts import TokenNames, token_names
from ropelens.text.rows import rows_for
from ropelens.text.text import Text
from ropelens.text.tokenize import TextInput

SETS = 40  # random sets of planes or tokens
RUNS, FAR = 8, 2048  # draws of random tokens; largest distance of a copy in tokens
APOSTROPHE, MIN_TOKENS = "'", 10  # fewer apostrophes decide nothing
MAX_SEQUENCES = 4  # for evaluations in which planes stop or drop out
ROWS_READ = (
    64  # rows of each sequence, for attention on sets of tokens and for reversals
)
INDUCTION = (
    0.3  # attention of an induction head on the token after the earlier occurrence
)
MIN_TURN = (
    0.1  # rad: a stop of planes that turn less changes their scores by less than 10 %
)


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
    - `verdict` is "holds" if the number is beyond `threshold`: then `p_value` is at most 2.5 %.
      It is "contradicted" if at most 2.5 % are as far on the other side, "unresolved" if
      neither is true, and "not testable" if such a number is impossible, or if stopped planes
      cannot turn within the tested length. `why` gives the reason, and `call` shows the data.
    - `layers` is the kind of layers that are tested, or "all" if layers of one kind rotate.
    - `original` is the number of the paper (`doi`, `figure`), measured on `original_model`
      under `conditions`. `nearness` is "direct", "close" or "conceptual", and `deviation` says
      how the test differs. `floor` is what counts as none since the commit of `floor_day`, and
      `other` another reasonable statistic.

    With `model` and `text` (as for `profile`), the model also runs again for more claims: under
    80 edits on 4 sequences, on copies up to 2,048 tokens apart and, with `tokenizer`, to find a
    head that attends to apostrophes. docs/measures.md defines each number.
    """
    require_budget(profile)
    if (model is None) != (text is None):
        raise BadArgument(
            "Claims of runs need model and text.", hint="both, or neither"
        )
    runs, how = None, {"tokenizer": tokenizer, "progress": progress}
    if model is not None and text is not None:
        runs = claim_runs(profile, model, text, seed=int(seed), **how)
    return ledger(profile, draws=draws, seed=int(seed), runs=runs)


test_claims.__test__ = False  # type: ignore[attr-defined]  # or pytest collects it as a test


def claim_runs(
    profile: xr.Dataset,
    model: Measured,
    text: TextInput,
    *,
    tokenizer: Any,
    seed: int,
    progress: ProgressOption,
) -> dict[str, dict[str, Any]]:
    """The argument `runs` of `ledger`, from further runs of the model."""
    measurement = Measurement.of(
        model, text, tokenizer=tokenizer, rows=ROWS_READ, seed=seed
    )
    few = measurement.text[
        :: -(-len(measurement.text) // MAX_SEQUENCES)
    ]  # evenly spread
    part = replace(measurement, text=few, rows=rows_for("auto", few.context))
    parts = parts_by_kind(profile).items()
    kinds = {
        x: _LayersOfKind(layers, x == "all", measurement.seed) for x, layers in parts
    }
    how = (part, progress)
    runs = {
        x: _losses(kind, *how) | _inductions(kind, *how) for x, kind in kinds.items()
    }
    reversals, token_lead = _read_attention(
        measurement, tokenizer, display_of(progress)
    )
    for kind, layers in parts:
        numbers = layers["layer"].values[rotating_in(layers)[0]]
        runs[kind]["reversal"] = np.array([reversals[layer] for layer in numbers])
    return runs | {"all": runs.get("all", {}) | token_lead}


def count_run_tokens(text: Text, config: PreTrainedConfig) -> int:
    """Number of tokens that pass the model in `claim_runs`."""
    edits = 4 + 2 * SETS  # none, slow, fast and longest planes, and the random sets
    edited = edits * int(text[:: -(-len(text) // MAX_SEQUENCES)].real.sum())
    induction = (3 + 2 * SETS) * REPEATS * (2 * REPEATED_TOKENS + 1)
    far = min(FAR, 2 * (stated_context(config) or text.context) // 3)
    kinds = len({*layer_types(config)})
    return int(text.real.sum()) + kinds * (
        edited + induction + 2 * RUNS * (far + COPIED + 1)
    )


def why_no_effect(wavelength: Float[np.ndarray, "layer _"], length: int) -> str:
    """Why a stop of these planes cannot act on texts of `length` tokens; "" if it can."""
    shortest = float(wavelength[np.isfinite(wavelength)].min(initial=np.inf))
    needs = 0 if math.isinf(shortest) else math.ceil(MIN_TURN / (2 * np.pi) * shortest)
    why = f"the stopped planes have wavelengths of {shortest:,.0f} tokens or more, and turn by "
    why += f"less than {MIN_TURN} rad within the tested {length:,} tokens; a verdict needs "
    return f"{why}{needs:,} tokens" if length < needs else ""


@dataclass(frozen=True)
class _LayersOfKind:
    """The layers of one kind in a profile (`every` layer if there is one kind), and planes."""

    profile: xr.Dataset
    every: bool
    seed: int

    @cached_property
    def rotating(self) -> Int[np.ndarray, " plane"]:
        return np.flatnonzero(np.isfinite(self.profile["wavelength"].values).any(0))

    @cached_property
    def quarters(self) -> list[Any]:
        """The slowest, the fastest and 40 random quarters of the planes."""
        planes, quarter = self.rotating, len(self.rotating) // 4
        ends = [planes[len(planes) - quarter :], planes[:quarter]]
        return [*ends, *planes_at_random(planes, ends, self.seed)]

    @cached_property
    def inside(self) -> str:
        layers = self.profile["layer"].values
        return ALL_HEADS if self.every else ",".join(f"{layer}.*" for layer in layers)

    def why_still(self, wavelength: Float[np.ndarray, "layer _"], length: int) -> str:
        """`why_no_effect`, on texts no longer than the reach of the layers."""
        reach = length if self.every else int(self.profile.attrs["trained_context"])
        return why_no_effect(wavelength, min(length, reach))


def _losses(
    kind: _LayersOfKind, measurement: Measurement, progress: ProgressOption
) -> dict[str, Any]:
    """Arrays [document, set of planes] of the change of loss; set 0 is the set of the claim.

    Quarters of the planes stop, or eighths drop out. The entry "why NAME" states why a claim is
    not testable, or is "".
    """
    norms = kind.profile["q_norm"].mean("head") * kind.profile["k_norm"].mean("kv_head")
    by_length = np.argsort(-norms.mean("layer").values[kind.rotating], kind="stable")
    longest = np.sort(kind.rotating[by_length][: len(kind.rotating) // 8])
    stops = _edits(stop, kind.quarters, kind.inside)
    eighths = [longest, *planes_at_random(kind.rotating, [longest], kind.seed)]
    edits = stops | _edits(drop, eighths, kind.inside)
    measure = partial(evaluate, measurement, measurement.text, progress=progress)
    losses = measure(edits=edits, measures=["loss"])
    weight = losses["predicted_tokens"].values[None].astype(float)
    change = (losses["loss"].values[1:] - losses["loss"].values[0]) * weight
    sums = (
        pd.DataFrame(np.vstack([weight, change]).T)
        .groupby(losses["group"].values)
        .sum()
    )
    tokens, stopped, dropped = np.split(sums.values, [1, 1 + len(stops)], axis=1)
    _, in_all = rotating_in(kind.profile)
    sets = np.array([np.isin(in_all, planes) for planes in kind.quarters])
    arrays: dict[str, Any] = {"tokens": tokens[:, 0], "long_loss": dropped}
    arrays |= {"slow_loss": np.delete(stopped, 1, axis=1), "fast_loss": stopped[:, 1:]}
    arrays |= {"stopped_sets": sets.astype(float), "stop_loss": stopped}
    for name, planes in zip(("slow_stop", "fast_stop"), kind.quarters[:2], strict=True):
        wavelength = kind.profile["wavelength"].values[:, planes]
        arrays[f"why {name}"] = kind.why_still(wavelength, measurement.text.context)
    return arrays


def _inductions(
    kind: _LayersOfKind, measurement: Measurement, progress: ProgressOption
) -> dict[str, Any]:
    """Losses of induction, and copies that are found, if planes of induction heads stop."""
    context, scores = measurement.live.context, kind.profile["induction"].values
    induction, layers = np.argwhere(scores >= INDUCTION), kind.profile["layer"].values
    unknown = np.full((1, 1 + SETS), np.nan)
    if not len(induction):
        known = scores[np.isfinite(scores)]
        why = f"no head has an induction score of {INDUCTION}"
        why += f"; the largest is {known.max():.2f}" if len(known) else ""
        arrays: dict[str, Any] = dict.fromkeys(
            ("induction_lost", "retrieval_lost"), unknown
        )
        arrays |= {"more_found": unknown[0, :RUNS], "once": np.ones(1)}
        tested = ("slow_induction", "retrieval_planes", "slow_reach")
        return arrays | {f"why {claim}": why for claim in tested}
    names = [f"{layers[layer]}.{head}" for layer, head in induction]
    slow, _, *random = kind.quarters
    wavelength = kind.profile["wavelength"].values
    push = (
        kind.profile["selectivity_keys"].transpose("layer", "head", "frequency").values
    )
    by_push = np.argsort(-push[*induction.T][:, kind.rotating], kind="stable")
    own = np.sort(kind.rotating[by_push[:, : len(slow)]])  # [head, plane]
    sets = [
        [planes, *planes_at_random(kind.rotating, [planes], kind.seed + n)]
        for n, planes in enumerate(own)
    ]
    by_head = [_edits(stop, x, name) for x, name in zip(sets, names, strict=True)]
    stops: dict[str, Any] = _edits(stop, [slow, *random], ",".join(names))
    stops |= {f"own {n}": [head[n] for head in by_head] for n in by_head[0]}
    measure = partial(evaluate, measurement, measurement.text, progress=progress)
    found = measure(edits=stops, measures=["induction"])["induction"].values
    score = found[:, layers[induction[:, 0]], induction[:, 1]].mean(-1)
    lost = np.split(score[:1] - score[None, 1:], [1 + len(random)], axis=1)
    repeated = 2 * max(2, min(REPEATED_TOKENS, (context - 1) // 2)) + 1
    turned = np.take_along_axis(wavelength[induction[:, 0]], own, 1)
    far, more = _more_copies(kind, measurement, ",".join(names), progress)
    return {
        **{"induction_lost": lost[0], "retrieval_lost": lost[1], "once": np.ones(1)},
        "more_found": more,
        "why slow_induction": kind.why_still(wavelength[:, slow], repeated),
        "why retrieval_planes": kind.why_still(turned, repeated),
        "why slow_reach": kind.why_still(wavelength[:, slow], far),
    }


def _more_copies(
    kind: _LayersOfKind, measurement: Measurement, heads: str, progress: ProgressOption
) -> tuple[int, Float[np.ndarray, " draw"]]:
    """Distance of copies, and the change of the share found if the slow quarter stops."""
    live, text = measurement.live, measurement.text
    trained = live.context if kind.every else kind.profile.attrs["trained_context"]
    far = min(FAR, 2 * int(min(live.context, trained)) // 3)
    options: dict[str, Any] = {"copies": [far], "draws": RUNS, "progress": progress}
    options |= {"copied": min(COPIED, far), "distances": (), "heads": heads}
    copies = partial(reach, measurement, text, **options)
    unedited = copies()["found_by_draw"]
    slowest = _edits(stop, kind.quarters[:1], kind.inside)
    with live.edit(stack_edits(measurement.rotation, [*slowest.values()])):
        more = (copies()["found_by_draw"] - unedited).mean(unedited.dims[:-1]).values
    return far, more


def planes_at_random(
    planes: Int[np.ndarray, " plane"],
    excluded: Sequence[Int[np.ndarray, " _"]],
    seed: int,
) -> list[tuple[int, ...]]:
    """Up to 40 random sets of planes, as large as the `excluded` sets and other than them."""
    random, size = np.random.default_rng(seed), len(excluded[0])
    sets = {tuple(numbers.tolist()): None for numbers in excluded}
    count = min(SETS + len(sets), math.comb(len(planes), size))
    while len(sets) < count:
        sets[tuple(np.sort(random.choice(planes, size, replace=False)).tolist())] = None
    return [*sets][len(excluded) :]


def _edits(
    change: Callable[..., Edit], sets: Sequence[Any], heads: str
) -> dict[str, Edit]:
    """The same change of each set of planes, by names such as "stop 0"."""
    return {
        f"{change.__name__} {index}": change(
            PlaneNumbers([*map(int, planes)]), heads=heads
        )
        for index, planes in enumerate(sets)
    }


def _read_attention(
    measurement: Measurement, tokenizer: TokenNames | None, progress: ShowProgress
) -> tuple[dict[int, Float[np.ndarray, "head order"]], dict[str, Any]]:
    """Reversals by order of the planes in each layer, and the lead of apostrophes."""
    ids, seed = measurement.text.ids, measurement.seed
    chosen, why = _token_sets(measurement.text, seed, tokenizer)
    pairs = [shares_of(ids, tokens, str(n), "") for n, tokens in enumerate(chosen)]
    dims, by_order = ("layer", "head", "order"), partial(_reversal_by_order, seed=seed)
    reversal = Statistic("reversals", dims, "1", "", pool="ratio", values=by_order)
    statistics = [reversal, *chain(*pairs)]
    planes = measurement.rotation.planes(measurement.text.context, alike=True)
    with progress(Stage("reading attention", int(measurement.text.real.sum()))) as step:
        sums = collect(measurement, planes, statistics=statistics, progress=step)
    means = {
        n: LayerMeans(x, sums, planes[n], statistics) for n, x in sums.layers.items()
    }
    lead = np.full((1, 1, 1 + SETS), np.nan)
    if pairs:
        leads = [[x.value(m) - y.value(m) for x, y in pairs] for m in means.values()]
        lead = np.moveaxis(np.array(leads), 1, -1)
    reversals = {n: reversal.value(x).numpy() for n, x in means.items()}
    return reversals, {"token_lead": lead, "why apostrophes": why}


def _reversal_by_order(block: Block, *, seed: int) -> Tensor:
    """Mean of `uniform_reversal` over distances, with the planes in their and 40 other orders.

    Keys that are drawn by attention score high at their own distance, because attention uses
    the planes in their order. So they would reverse more in this order, also in random models.
    """
    (lead, counts), (_, far, _) = leads(block, evenly=True), distances_of(block)
    moved, random = waves(block, far), np.random.default_rng(seed)
    turning = block.planes.term_inv_freq.nonzero()[:, -1]
    means = []
    for n in range(1 + SETS):
        order = torch.arange(len(moved))
        order[turning] = turning[random.permutation(len(turning)) if n else slice(None)]
        means.append(mean_by_bin(block, reverses(lead, moved[order]), counts, len(far)))
    return torch.cat(means, dim=-1)


def _token_sets(
    text: Text, seed: int, tokenizer: TokenNames | None
) -> tuple[list[Int[Tensor, " token"]], str]:
    """The tokens with an apostrophe (set 0), and random sets of words that are as frequent.

    Each set of words has, for each apostrophe token, a word of half to twice its frequency.
    Without sets, the second result is the reason.
    """
    random = np.random.default_rng(seed)
    ids, counts = text.ids[text.real].unique(return_counts=True)
    names = token_names(ids, tokenizer)
    apostrophes = torch.tensor([APOSTROPHE in name for name in names])
    words = torch.tensor([name.strip().isalpha() for name in names])
    found, why = int(counts[apostrophes].sum()), "there is no tokenizer"
    if tokenizer is None or found < MIN_TOKENS:
        if tokenizer is not None:
            why = f"{found} tokens have an apostrophe; a verdict needs {MIN_TOKENS}"
        return [], why
    log_ratio = (counts[apostrophes].log2()[:, None] - counts.log2()).abs()
    similar = (log_ratio <= 1) & words  # [apostrophe, id]
    sets: dict[tuple[int, ...], None] = {}
    for _ in range(10 * SETS if similar.any(1).all() else 0):
        sets[tuple(sorted({int(random.choice(ids[row])) for row in similar}))] = None
    return [ids[apostrophes], *map(torch.tensor, [*sets][:SETS])], ""
