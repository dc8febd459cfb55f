"""Functions that make the number of a claim from arrays of the model or a null.

docs/measures.md defines each number in its section about the ledger of claims. The claims in
length_claims.py, head_claims.py and run_claims.py have these functions.
"""

import math

import numpy as np
import scipy
from jaxtyping import Bool, Float

from ropelens.budget.labels import Thresholds
from ropelens.intervals import NO_INTERVAL, Interval, jackknife_half

EVEN = 0.1  # planes are alike if the sd of their lengths is less than 0.1 of the mean
FIXED = 0.95  # coherence of a plane that carries a fixed vector (TriAttention)
NOTHING = 0.01  # nats/token: a set of planes that costs less is worth nothing
MIN_HEADS = 3  # in each half of `why_no_two_kinds`, for a verdict

ByPlane = Float[np.ndarray, "layer frequency"]
PairsOfHeads = Float[np.ndarray, "layer head of_head"]
ByHead = Float[np.ndarray, "layer head frequency"]
HeadDraws = Float[
    np.ndarray, "draw layer head"
]  # draw 0 is the model, others surrogates
HeadNumbers = Float[np.ndarray, "layer head number draw"]
RowCount = Float[np.ndarray, " 1"]
ByDocument = Float[np.ndarray, " document"]
Losses = Float[np.ndarray, "document set"]
Sets = Float[np.ndarray, "set frequency"]  # 1 for the planes of the set, 0 for others


def _shares(length: ByPlane) -> Float[np.ndarray, "layer _"]:
    return length / length.sum(-1, keepdims=True)


def _uneven(length: ByPlane) -> bool:
    share = _shares(length).mean(0)
    return bool(share.std() >= EVEN * share.mean())


def slow_half(length: ByPlane, *, even: bool = False) -> float:
    """Share of the slower half of the planes; NaN for even planes, unless `even` is set."""
    if not (even or _uneven(length)):
        return math.nan
    planes = length.shape[-1]
    is_slow = np.arange(planes) >= planes / 2
    slow = _shares(length)[:, is_slow].sum(-1)
    return float(slow.mean())


def slow_half_of_all(count: ByPlane, *, by_layer: bool = False) -> float:
    """Share of the slower half in the sum over layers, or its mean over layers with planes."""
    counts = count[count.any(-1)] if by_layer else count.sum(0, keepdims=True)
    if not len(counts):
        return math.nan
    return slow_half(counts, even=True)


def rank_of_lengths(length: ByPlane) -> float:
    """Rank correlation of a plane's share with its index; NaN for even planes."""
    if not _uneven(length):
        return math.nan
    return rank_with_depth(_shares(length).mean(0))


def fast_at_the_ends(length: ByPlane, *, part: int = 4) -> float:
    """Share of the fastest `1 / part`: the first and last layer minus the others."""
    planes = max(1, length.shape[-1] // part)
    fast = _shares(length)[:, :planes].sum(1)
    if len(fast) < 3:
        return math.nan
    return float(fast[[0, -1]].mean() - fast[1:-1].mean())


def distance_to_band(
    length: ByPlane, band: Float[np.ndarray, " layer"], *, power: int = 1
) -> float:
    """Number of planes between a layer's longest plane and the band, power mean over layers."""
    if not _uneven(length):
        return math.nan
    distance = np.abs(length.argmax(-1) - band) ** power
    return float(distance.mean() ** (1 / power))


def push_of_long_planes(
    push: ByPlane, slow: ByPlane, *, by_layer: bool = False
) -> float:
    """Share of the slow planes in the push of all layers, or the mean of shares by layer."""
    if not 0 < slow.mean() < 1:
        return math.nan
    axis = -1 if by_layer else None
    share = (push * slow).sum(axis) / push.sum(axis)
    layers = np.isfinite(share).sum()
    if not layers:
        return math.nan
    return float(np.nansum(share) / layers)


def why_no_sinks(push: ByPlane, slow: ByPlane) -> str:
    """Why the push toward sinks has no share of slow planes; "" if it has one."""
    if np.isnan(push).all():
        return "sinks explain less than 5 % of the bits"
    share = slow.mean()
    if share == 0:
        return "every plane turns once in the context"
    if share == 1:
        return "no plane turns once in it"
    return ""


def rank_with_depth(
    by_layer: Float[np.ndarray, " layer"], *, kendall: bool = False
) -> float:
    """Rank correlation of a layer's value with its index."""
    index = np.arange(len(by_layer), dtype=float)
    return rank_correlation(index, by_layer, kendall=kendall)


def fixed_in_longest(
    coherence: ByHead, length: ByHead, *, above: float = FIXED
) -> float:
    """Share of the heads whose longest plane has a coherence above `above`."""
    longest = np.nan_to_num(length).argmax(-1)[..., None]
    of_longest = np.take_along_axis(coherence, longest, -1)
    return float((of_longest > above).sum() / np.isfinite(of_longest).sum())


def predicted_share(agreement: PairsOfHeads, *, median: bool = False) -> float:
    """Mean or median over heads of the agreement with the head's own mean vectors."""
    own = np.diagonal(agreement, axis1=1, axis2=2)
    return _over_heads(own, median=median)


def in_own_order(by_order: ByHead, *, median: bool = False) -> float:
    """Mean or median over heads of the entries at index 0: the planes in their own order."""
    return _over_heads(by_order[..., 0], median=median)


def _over_heads(by_head: Float[np.ndarray, "layer head"], *, median: bool) -> float:
    numbers = by_head[np.isfinite(by_head)]
    if not len(numbers):
        return math.nan
    return float(np.median(numbers)) if median else float(np.mean(numbers))


def more_than_values(
    *by_layer: Float[np.ndarray, " layer"], smaller: bool = False
) -> float:
    """Mean of queries and keys, or the `smaller` number of them, minus the mean of values."""
    queries, keys, values = by_layer
    both = np.minimum(queries, keys) if smaller else (queries + keys) / 2
    return float((both - values).mean())


def largest_at(
    by_head: Float[np.ndarray, "layer head _"], *, index: int, heads: int = 1
) -> float:
    """Mean over the `heads` heads with the largest entries at `index` of the last axis."""
    entries = by_head[..., index]
    in_order = np.sort(entries[np.isfinite(entries)])
    if not len(in_order):
        return math.nan
    return float(in_order[-heads:].mean())


def average(by_unit: Float[np.ndarray, " unit"], *, fisher: bool = False) -> float:
    """Mean over layers or draws; with `fisher`, the mean of correlations as Fisher's z."""
    if fisher:
        return float(np.tanh(np.arctanh(by_unit.clip(-0.999, 0.999)).mean()))
    return float(by_unit.mean())


def cost(loss: Losses, tokens: ByDocument, *, by_document: bool = False) -> float:
    """Mean over tokens (nats), or median `by_document`, of the change of loss under set 0."""
    if by_document:
        change = np.median(loss / tokens[:, None], axis=0)
    else:
        change = loss.sum(0) / tokens.sum()
    if not abs(change).max() >= NOTHING:  # also for NaN
        return math.nan
    return float(change[0])


def cost_of_length(
    length: ByPlane,
    sets: Sets,
    loss: Losses,
    tokens: ByDocument,
    *,
    kendall: bool = False,
) -> float:
    """Rank correlation of the share of |q||k| in a set with the change of loss if it stops."""
    if math.isnan(cost(loss, tokens)):
        return math.nan
    share_of_set = sets @ _shares(length).mean(0)
    return rank_correlation(share_of_set, loss.sum(0), kendall=kendall)


def rank_correlation(
    x: Float[np.ndarray, "*head"],
    y: Float[np.ndarray, "*head"],
    *,
    kendall: bool = False,
) -> float:
    """Rank correlation of known heads; NaN for fewer than 4, and if all numbers are equal."""
    have_both = np.isfinite(x) & np.isfinite(y)
    x = x[have_both]
    y = y[have_both]
    if len(x) < 4 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return math.nan
    if kendall:
        return float(scipy.stats.kendalltau(x, y).statistic)
    ranks = scipy.stats.rankdata([x, y], axis=-1)  # one call takes half as long
    return float(np.corrcoef(ranks)[0, 1])


def correlations(x: HeadDraws, y: HeadDraws) -> Float[np.ndarray, " draw"]:
    """Rank correlation of two numbers of the heads, in each draw."""
    pairs = zip(x, y, strict=True)
    return np.array([rank_correlation(x_drawn, y_drawn) for x_drawn, y_drawn in pairs])


def rank_over_heads(
    numbers: HeadNumbers, rows: RowCount, *, kendall: bool = False
) -> float:
    """Rank correlation of the two numbers of a head, in draw 0."""
    return rank_correlation(numbers[:, :, 0, 0], numbers[:, :, 1, 0], kendall=kendall)


def known_heads(numbers: HeadNumbers) -> Bool[np.ndarray, "layer head"]:
    """True for each head that has both numbers in draw 0."""
    return np.isfinite(numbers[..., 0]).all(2)


def correlation_interval(numbers: HeadNumbers, rows: RowCount) -> Interval:
    """95 % interval of `rank_over_heads`; NaN if only one layer has heads.

    The jackknife leaves out one layer at a time, because heads of a layer are not independent.
    The interval is Student's t around Fisher's z. A perfect correlation has an infinite z, and
    counts as half a swap of two neighbours away.
    """
    known = known_heads(numbers)
    layers = np.flatnonzero(known.any(1))
    if len(layers) < 2:
        return NO_INTERVAL
    rho = rank_over_heads(numbers, rows)
    without = [rank_over_heads(np.delete(numbers, layer, 0), rows) for layer in layers]
    heads = known.sum()
    largest = 1 - 6 / (heads * (heads**2 - 1))
    z, *z_without = np.arctanh(np.clip([rho, *without], -largest, largest))
    half = jackknife_half(np.array(z_without))
    low, high = np.tanh([z - half, z + half])
    return Interval(float(min(low, rho)), float(max(high, rho)))


def why_no_two_kinds(numbers: HeadNumbers, rows: RowCount) -> str:
    """Why these heads cannot show a difference between two kinds of heads; "" if they can."""
    if rows[0] < Thresholds.rows:
        return f"labels need {Thresholds.rows} scored rows, and this text has fewer"
    fraction = numbers[:, :, 0, 0][known_heads(numbers)]
    if not len(fraction):
        return "no head picks keys through planes that rotate"
    more = int((fraction > 0.5).sum())
    less = len(fraction) - more
    if min(more, less) >= MIN_HEADS:
        return ""
    return (
        f"the offset explains more than half of the choice of {more} heads, and less of "
        f"{less} heads; a verdict needs {MIN_HEADS} of each"
    )
