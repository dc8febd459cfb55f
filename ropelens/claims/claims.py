"""The ledger: which published claims about RoPE hold in a model, each beside its null.

A claim is a number of the model and the same number where only chance and geometry speak. It is
made of arrays of a profile (claim_arrays.py), or of other runs of the model (tried_claims.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
import xarray as xr
from jaxtyping import Float
from scipy import stats

from ropelens.budget.labels import Thresholds
from ropelens.claims import arrays as nulls
from ropelens.claims.arrays import Null, claim_arrays
from ropelens.claims.verdict import TAIL, correlations, judge, rank_correlation
from ropelens.intervals import jackknife_half
from ropelens.profiles.heads import claim_numbers

VERDICTS = ("holds", "contradicted", "unresolved", "not testable")
SAME = 1e-9  # numbers closer than this are equal but for rounding
EVEN = 0.1  # sd over mean of the planes' lengths below which they are alike
MOST = 0.5  # less is not most: of heads, or of a curve
FIXED = 0.95  # coherence of a plane that carries a fixed vector (TriAttention)
TRIFLING = 0.2  # a rank correlation below this is none
NOTHING = 0.01  # nats/token: planes that cost less are worth nothing; as much of all copies
INDUCTION = 0.3  # attention on the token after the earlier occurrence, of an induction head
FAINT = 0.05  # of a head's attention: less on a set of tokens is none
BEYOND = "beyond what chance and geometry give"

# A number with its 95 % interval, those of draws of its null, and a verdict known already.
Tested = tuple[tuple[float, float, float], np.ndarray, tuple[str, str] | None]


@dataclass(frozen=True)
class Claim:
    """A published claim: a row of the ledger.

    `number` makes one of the `arrays` (names of `claim_arrays`), those of the model and
    those that `null` draws. The claim says that it is large, or small where `sign` is -1; less
    than `floor` counts as none.
    `test` takes the place of both where a number comes with its null. `absent` is what it
    means if there is no number, `takes` what a model needs in which most draws are alike.
    """

    name: str
    statement: str
    source: str
    what: str
    call: str
    null: Null
    arrays: tuple[str, ...] = ()
    number: Callable[..., float] | None = None
    sign: int = 1
    floor: float = -math.inf
    test: Callable[[xr.Dataset], Tested] | None = None
    why_untestable: str = "there is nothing of the kind to measure"
    min_size: str = ""


# ---- numbers


def _shares(length: Float[np.ndarray, "layer frequency"]) -> Float[np.ndarray, "layer _"]:
    return length / length.sum(-1, keepdims=True)


def _uneven(length: Float[np.ndarray, "layer frequency"]) -> bool:
    share = _shares(length).mean(0)
    return bool(share.std() >= EVEN * share.mean())


def slow_half(length: Float[np.ndarray, "layer frequency"], *, even: bool = False) -> float:
    """Share of the slower half of the planes, mean over layers; NaN if planes are alike."""
    planes = length.shape[-1]
    slow = _shares(length)[:, np.arange(planes) >= planes / 2].sum(-1)
    return float(slow.mean()) if even or _uneven(length) else math.nan


def slow_half_of_all(count: Float[np.ndarray, "layer frequency"]) -> float:
    """Share of the slower half of the planes in what all layers have together."""
    return slow_half(count.sum(0, keepdims=True), even=True)


def fast_at_the_ends(length: Float[np.ndarray, "layer frequency"]) -> float:
    fast = _shares(length)[:, : max(1, length.shape[-1] // 4)].sum(1)
    return float(fast[[0, -1]].mean() - fast[1:-1].mean()) if len(fast) > 2 else math.nan


def distance_to_band(
    length: Float[np.ndarray, "layer frequency"], band: Float[np.ndarray, " layer"]
) -> float:
    return float(np.abs(length.argmax(-1) - band).mean()) if _uneven(length) else math.nan


def push_of_long_planes(
    push: Float[np.ndarray, "layer frequency"], slow: Float[np.ndarray, "layer frequency"]
) -> float:
    return float((push * slow).sum() / push.sum()) if 0 < slow.mean() < 1 else math.nan


def rank_with_depth(by_layer: Float[np.ndarray, " layer"]) -> float:
    return rank_correlation(np.arange(len(by_layer), dtype=float), by_layer)


def fixed_in_longest(
    coherence: Float[np.ndarray, "layer head frequency"],
    length: Float[np.ndarray, "layer head frequency"],
) -> float:
    """Share of the heads whose longest plane has a coherence above 0.95.

    The mean vector is part of the length, so the longest plane of random weights is the more
    coherent one too: of a few heads, by chance, which say nothing of most.
    """
    longest = np.nan_to_num(length).argmax(-1)[..., None]
    of_longest = np.take_along_axis(coherence, longest, -1)
    return float((of_longest > FIXED).sum() / np.isfinite(of_longest).sum())


def predicted_share(agreement: Float[np.ndarray, "layer head of_head"]) -> float:
    own = np.diagonal(agreement, axis1=1, axis2=2)
    return float(np.nanmean(own)) if np.isfinite(own).any() else math.nan


def more_than_values(*by_layer: Float[np.ndarray, " layer"]) -> float:
    """Mean of queries and keys less that of values; 0 where it is trifling."""
    queries, keys, values = by_layer
    more = float(((queries + keys) / 2 - values).mean())
    return 0.0 if abs(more) < EVEN else more


def largest_at(place: int) -> Callable[[Float[np.ndarray, "layer head _"]], float]:
    return lambda of_heads: float(np.fmax.reduce(of_heads[..., place], axis=None))


def mean_beyond(trifling: float) -> Callable[[Float[np.ndarray, " unit"]], float]:
    """Mean over layers, or draws; 0 where it is trifling."""
    return lambda by_unit: float(by_unit.mean() * (abs(by_unit.mean()) >= trifling))


def cost(
    loss: Float[np.ndarray, "document set"], tokens: Float[np.ndarray, " document"]
) -> float:
    """Change of loss under the first set of planes, nats/token; NaN if none is worth any."""
    change = loss.sum(0) / tokens.sum()
    return float(change[0]) if abs(change).max() >= NOTHING else math.nan


def wavelengths_of_labels(profile: xr.Dataset) -> Tested:
    """What `heads.attrs["claim"]` says, beside surrogates that the profile has."""
    numbers = claim_numbers(profile)
    claim, rho = judge(*numbers), correlations(*numbers)
    known, words = rho[1:][np.isfinite(rho[1:])], (claim["verdict"], claim["why"])
    return (rho[0], claim["low"], claim["high"]), known, words


# ---- the table

BARBERO, TRI = "Barbero et al. 2024, arXiv 2410.06205", "TriAttention 2026, arXiv 2604.04921"
JIN = "Jin et al. 2025, arXiv 2502.01563"
NORMS, KERNEL = "rl.plot_norms(profile)", "rl.plot_kernel(profile, layer=0, head=0)"
SELECTIVITY = "rl.plot_selectivity(profile, layer=0, head=0)"
NO_VALUES = "values have another size than keys, or do not differ from them in this"
ALIKE = "queries and keys are about as long in every plane"
CHEAP = f"no such set of planes is worth {NOTHING} nats/token"
NO_INDUCTION = f"no head has an induction score of {INDUCTION}, or stops change less than 1 %"
DIFFER = "longest planes differ, or 50 planes"
# fmt: off
CLAIMS: tuple[Claim, ...] = (
    Claim("slow_norms", "Slow planes have the longest queries and keys",
        f"{BARBERO}, Figs 3, 4", "share of |q||k| in the slower half of the planes", NORMS,
        nulls.PLANES, ("length",), slow_half, why_untestable=ALIKE),
    Claim("fast_at_the_ends", "The first and last layers use fast planes more than the others",
        f"{BARBERO}, Figs 3, 4",
        "share of |q||k| in the fastest quarter: first and last layer minus the others", NORMS,
        nulls.PAIRS, ("length",), fast_at_the_ends),
    Claim("flat_values", "Values are spread over the planes more evenly than queries and keys",
        f"{BARBERO}, Figs 10, 13", "sd over mean of the planes' lengths: q and k minus v",
        NORMS, nulls.ROLES, ("q_uneven", "k_uneven", "v_uneven"), more_than_values,
        why_untestable=NO_VALUES),
    Claim("band", "Queries and keys are longest in the band at plane (D/2) log_b(L / 3.657)",
        "Oka et al. 2026, ICLR", "planes between a layer's longest plane and the predicted one",
        NORMS, nulls.PLANES, ("length", "band"), distance_to_band, sign=-1,
        why_untestable=ALIKE,
        min_size=f"10 planes and layers whose {DIFFER}"),
    Claim("massive_slow", "Massive values of queries and keys are in slow planes", JIN,
        "share of planes 3.5 times as long as a head's mean one that are in the slower half",
        NORMS, nulls.PLANES, ("massive",), slow_half_of_all,
        why_untestable="no plane is 3.5 times as long as the mean",
        min_size="6 such planes or more"),
    Claim("massive_not_in_values", "Queries and keys have massive values, and values have none",
        JIN, "planes of a head 3.5 times as long as its mean one: q and k minus v", NORMS,
        nulls.ROLES, ("q_count", "k_count", "v_count"), more_than_values,
        why_untestable=NO_VALUES,
        min_size="4 layers with them in q and k, or 10 in one of the two"),
    Claim("sinks_slow", "Sinks are held by planes that do not turn once in the context",
        "Jonasson 2025, arXiv 2503.01832", "share of slow planes in the push toward sinks",
        SELECTIVITY, nulls.PLANES, ("sink_push", "slow"), push_of_long_planes,
        why_untestable="sinks explain less than 5 % of the bits, or all planes turn, or none",
        min_size="2 of 10 planes that do not turn once, or 1 of 50"),
    Claim("positional_fast", "Positional heads use short wavelengths, semantic heads long ones",
        f"{BARBERO}, sections 5, 6",
        "rank correlation of what the offset explains with the mean log wavelength",
        'rl.plot_claim(profile), heads.attrs["claim"]', nulls.FREQUENCIES, sign=-1,
        test=wavelengths_of_labels),
    Claim("positional_early", "Early layers are positional, late ones are not",
        "Urrutia et al. 2025, arXiv 2511.11579",
        "rank correlation of a layer's median positional share with its number",
        "rl.plot_head_map(profile)", nulls.LAYERS, ("positional",), rank_with_depth, sign=-1,
        why_untestable=f"layers do not differ; it takes {nulls.LAYERS.takes} or more"),
    Claim("fixed_vectors", "The longest planes of most heads carry a fixed vector", TRI,
        "share of heads whose queries' longest plane has a coherence above 0.95", SELECTIVITY,
        nulls.PLANES, ("q_coherence", "q_norm"), fixed_in_longest, floor=MOST,
        why_untestable="coherence is above 0.95 in no plane, or in all",
        min_size=f"10 planes and heads whose {DIFFER}"),
    Claim("mean_vectors_predict", "Mean queries and keys predict most of how heads look back",
        TRI, "share that the predicted kernel explains of the log of the fitted one", KERNEL,
        nulls.PARTNERS, ("agreement",), predicted_share, floor=MOST,
        why_untestable="every head is diffuse"),
    Claim("decay", "Scores decay with distance", "Su et al. 2021, arXiv 2104.09864",
        "rank correlation of the mean vectors' score with nearness", KERNEL, nulls.SIGNS,
        ("nearness",), mean_beyond(TRIFLING),
        why_untestable=f"curves rise and fall alike: rank correlations below {TRIFLING}"),
    Claim("previous_token", "Some head attends to the previous token", f"{BARBERO}, section 5",
        "largest weight of offset 1 in a head's kernel", 'heads.nlargest(3, "previous_token")',
        nulls.OFFSETS, ("kernel",), largest_at(1), floor=Thresholds.offset),
    Claim("diagonal", "Some head attends to its own token", f"{BARBERO}, section 5",
        "largest weight of offset 0 in a head's kernel", 'heads.nlargest(3, "self_mass")',
        nulls.OFFSETS, ("kernel",), largest_at(0), floor=Thresholds.offset),
    Claim("slow_stop", "Stopping the slowest quarter costs less than random planes",
        f"{BARBERO}, section 6.1", "change of loss with it stopped, nats/token",
        "rl.truncate(model, tokens, keep=[0.75])", nulls.QUARTERS, ("slow_loss", "tokens"),
        cost, sign=-1, why_untestable=CHEAP),
    Claim("fast_stop", "Stopping the fastest quarter costs more than random planes",
        f"{BARBERO}, section 6.1", "change of loss with it stopped, nats/token",
        "rl.truncate(model, tokens, keep=[0.75], ends=['fast'])", nulls.QUARTERS,
        ("fast_loss", "tokens"), cost, why_untestable=CHEAP),
    Claim("long_planes", "The longest planes matter more than as many others", JIN,
        "change of loss without the eighth of the planes with the largest |q||k|, nats/token",
        "rl.evaluate(model, tokens, edits={'without': rl.drop(rl.PlaneNumbers(planes))})",
        nulls.EIGHTHS, ("long_loss", "tokens"), cost, why_untestable=CHEAP),
    Claim("slow_induction", "Induction heads need the slowest quarter of their planes",
        "Chiang and Yogatama 2025, arXiv 2502.11276",
        "loss of induction of the induction heads with it stopped",
        "rl.evaluate(model, tokens, edits={'slow': rl.stop_slowest(0.25, heads=found)})",
        nulls.QUARTERS, ("induction_lost", "once"), cost, why_untestable=NO_INDUCTION),
    Claim("slow_reach", "Without slow planes' rotation, induction heads find more far copies",
        f"{BARBERO}, section 6",
        "share of copies found, 2/3 of the trained context back (at most 2,048 tokens): with "
        "the slowest quarter stopped minus as it is",
        "rl.reach(model, tokens, variants=['own', 'p-rope:0.75'])", nulls.DRAWS,
        ("more_found",), mean_beyond(NOTHING), min_size="6 draws that differ",
        why_untestable=NO_INDUCTION),
    Claim("apostrophes", "Some head attends to a class of tokens: apostrophes",
        f"{BARBERO}, section 6",
        "attention on them, where one is in sight, minus on others as frequent and as far",
        "rl.attention_on(tokens, \"*'*\", tokenizer)", nulls.TOKENS, ("token_lead",),
        largest_at(0), floor=FAINT,
        why_untestable="the text has fewer than 10 apostrophes, or there is no tokenizer"),
)
# fmt: on


def ledger(
    profile: xr.Dataset,
    *,
    draws: int = 1000,
    seed: int = 0,
    tried: Mapping[str, np.ndarray] | None = None,
) -> pd.DataFrame:
    """The table of claims on a profile, and of those that were `tried`: see `test_claims`."""
    arrays, rows = claim_arrays(profile) | dict(tried or {}), []
    for claim in CLAIMS:
        random = np.random.default_rng([seed % 2**64, *claim.name.encode()])
        if arrays.keys() >= {*claim.arrays}:
            rows.append(judged(claim, profile, arrays, random, draws))
    table = pd.DataFrame(rows)
    known = table["p_value"].notna()
    table.loc[known, "q_value"] = stats.false_discovery_control(table.loc[known, "p_value"])
    return table


def judged(
    claim: Claim,
    profile: xr.Dataset,
    arrays: Mapping[str, np.ndarray],
    random: np.random.Generator,
    draws: int,
) -> dict[str, object]:
    """The row of a claim, from its number and null."""
    tested = claim.test(profile) if claim.test else _tested(claim, arrays, random, draws)
    (number, low, high), null, known = tested
    null = null[np.isfinite(null)]
    ends = np.quantile(null, [TAIL, 0.5, 1 - TAIL]) if len(null) else np.full(3, np.nan)
    verdict, why, p_value = "not testable", claim.why_untestable, math.nan
    if math.isfinite(number) and len(null):
        verdict, why, p_value = _verdict(number, null, claim)
    verdict, why = known or (verdict, why)
    words = {name: getattr(claim, name) for name in ("statement", "source", "what")}
    bounds = dict(zip(("null_median", "null_low", "null_high"), ends[[1, 0, 2]], strict=True))
    return {"claim": claim.name, **words, "number": number, "low": low, "high": high} | {
        "over": claim.null.over if math.isfinite(low) else "",
        "null": claim.null.how,
        **bounds,
        "null_draws": len(null),
        "threshold": claim.sign * max(claim.sign * ends[1 + claim.sign], claim.floor),
        "side": claim.sign,
        "p_value": p_value if verdict != "not testable" else math.nan,
        "q_value": math.nan,
        "verdict": verdict,
        "why": why,
        "call": claim.call,
    }


def _tested(
    claim: Claim, arrays: Mapping[str, np.ndarray], random: np.random.Generator, draws: int
) -> Tested:
    assert claim.number is not None
    of = tuple(arrays[name] for name in claim.arrays)
    with np.errstate(invalid="ignore", divide="ignore"):
        number, possible = math.nan, 0
        why = "no plane of this model rotates"
        if len(of[0]):
            number, possible = claim.number(*of), claim.null.possible(of[0])
            why = f"{possible} draws are possible; it takes {claim.null.takes} or more"
        if possible < 1 / TAIL:
            return (number, math.nan, math.nan), np.empty(0), ("not testable", why)
        null = np.array([claim.number(*x) for x in claim.null.draw(of, random, draws)])
        units = range(len(of[0]) if claim.null.over and len(of[0]) >= 3 else 0)
        without = [claim.number(*(np.delete(x, unit, 0) for x in of)) for unit in units]
    half = float(jackknife_half(np.array(without))) if without else math.nan
    return (number, number - half, number + half), null, None


def _verdict(
    number: float, null: Float[np.ndarray, " draw"], claim: Claim
) -> tuple[str, str, float]:
    """The verdict, the reason, and the share of draws that are as far as the number."""
    value, drawn = (np.maximum(claim.sign * x, claim.floor) for x in (number, null))
    as_far = (drawn >= value - SAME).sum(), (drawn <= value + SAME).sum()
    p_value, other = ((1 + int(count)) / (1 + len(null)) for count in as_far)
    if np.ptp([*null, number]) < SAME:
        return "not testable", claim.why_untestable, math.nan
    if p_value <= TAIL:
        return "holds", BEYOND, p_value
    if other <= TAIL:
        return "contradicted", f"{BEYOND}, on the other side", p_value
    if value == claim.floor:
        return "unresolved", f"less than {claim.floor:g} counts as none", p_value
    rarest = max(1, (drawn >= drawn.max() - SAME).sum()) / (1 + len(null))
    if rarest > TAIL:
        why = f"{rarest:.1%} of the draws are as extreme as any can be"
        takes = claim.min_size or f"{claim.null.takes} or more"
        return "not testable", f"{why}; it takes {takes}", math.nan
    return "unresolved", "chance and geometry give as much", p_value
