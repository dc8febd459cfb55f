"""Gaps of recalibrated variants to the control, and the training that repairs them.

docs/measures.md (Recalibration) has the definitions. A `change` is the loss of a variant minus
the loss of the control with the same seed, on the same held-out sequence, in nats per token.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from ropelens.intervals import LEVEL

LEAST_DAMAGE = 0.02
"""Lower bound of the gap before training above which `recovered` is defined, nats/token."""

HALF = 0.5
MOST = 0.9
RESAMPLES = 2000
NOT_REACHED = np.inf
"""Training tokens to a share that the running maximum of `recovered` does not reach."""


@dataclass(frozen=True)
class Estimate:
    """A number for each step (or one number), and the ends of its 95 % interval."""

    value: np.ndarray
    low: np.ndarray
    high: np.ndarray


@dataclass(frozen=True)
class Recovery:
    """Numbers of one variant. NaN is "not defined", and infinity is "not reached"."""

    gap: Estimate  # nats/token, by step
    recovered: Estimate  # by step
    tokens_to_half: Estimate
    tokens_to_90: Estimate


def measure_recovery(
    change: Float[np.ndarray, "seed step sequence"],
    documents: Int[np.ndarray, " sequence"],
    tokens: Int[np.ndarray, " step"],
    *,
    resamples: int = RESAMPLES,
) -> Recovery:
    """Numbers of a variant. The first step is 0, and `tokens` are the tokens seen by training.

    The mean over seeds of each document is resampled, so that intervals are over documents. The
    gaps of all steps are resampled together.
    """
    means = change.mean(0)
    gap = means.mean(-1)
    drawn_gap = resampled_means(means, documents, resamples=resamples)
    of_gap = _with_interval(gap, drawn_gap)
    defined = bool(of_gap.low[0] > LEAST_DAMAGE)
    share = recovered_share(gap, defined=defined)
    drawn_share = recovered_share(drawn_gap, defined=defined)
    return Recovery(
        gap=of_gap,
        recovered=_with_interval(share, drawn_share),
        tokens_to_half=_tokens_to(HALF, share, drawn_share, tokens),
        tokens_to_90=_tokens_to(MOST, share, drawn_share, tokens),
    )


def mean_change(
    change: Float[np.ndarray, "seed sequence"],
    documents: Int[np.ndarray, " sequence"],
    *,
    resamples: int = RESAMPLES,
) -> Estimate:
    """Mean of a difference of losses, and its interval over documents."""
    means = change.mean(0)
    drawn = resampled_means(means[None], documents, resamples=resamples)
    return _with_interval(means.mean(), drawn[:, 0])


def resampled_means(
    values: Float[np.ndarray, "step sequence"],
    documents: Int[np.ndarray, " sequence"],
    *,
    resamples: int,
) -> Float[np.ndarray, "resample step"]:
    """Mean over the sequences of documents that are drawn with replacement.

    All steps have the same draws, and so have all calls with the same number of documents.
    Sequences have equal numbers of tokens, so a document has the weight of its tokens.
    """
    _, index = np.unique(documents, return_inverse=True)
    count = int(index.max()) + 1
    sequences = np.bincount(index, minlength=count)
    sums = np.zeros((count, len(values)))
    np.add.at(sums, index, values.T)
    random = np.random.default_rng(0)
    draws = random.multinomial(count, np.full(count, 1 / count), size=resamples)
    return draws @ sums / (draws @ sequences)[:, None]


def recovered_share(
    gap: Float[np.ndarray, "*resample step"], *, defined: bool
) -> Float[np.ndarray, "*resample step"]:
    """Share of the gap before training (step 0) that training has repaired; 1 is everything."""
    if not defined:
        return np.full_like(gap, np.nan)
    with np.errstate(divide="ignore", invalid="ignore"):
        return 1 - gap / gap[..., :1]


def tokens_to_reach(
    share: float,
    recovered: Float[np.ndarray, "resample step"],
    tokens: Int[np.ndarray, " step"],
) -> Float[np.ndarray, " resample"]:
    """Training tokens at which the running maximum of `recovered` first reaches `share`.

    The running maximum is interpolated linearly between evaluated steps. `NOT_REACHED` if it
    stays below `share`, and NaN if `recovered` is not defined.
    """
    highest = np.maximum.accumulate(recovered, axis=-1)
    reached = highest >= share
    after = reached.argmax(-1)
    before = np.maximum(after - 1, 0)
    rows = np.arange(len(highest))
    low = highest[rows, before]
    rise = highest[rows, after] - low
    part = np.divide(share - low, rise, out=np.zeros_like(rise), where=rise > 0)
    place = tokens[before] + part * (tokens[after] - tokens[before])
    place = np.where(reached.any(-1), place, NOT_REACHED)
    return np.where(_undefined(recovered), np.nan, place)


def _undefined(
    recovered: Float[np.ndarray, "resample step"],
) -> Bool[np.ndarray, " resample"]:
    return np.isnan(recovered).any(-1)


def _tokens_to(
    share: float,
    recovered: Float[np.ndarray, " step"],
    drawn: Float[np.ndarray, "resample step"],
    tokens: Int[np.ndarray, " step"],
) -> Estimate:
    value = tokens_to_reach(share, recovered[None], tokens)[0]
    return _with_interval(value, tokens_to_reach(share, drawn, tokens))


def _with_interval(value: np.ndarray, drawn: np.ndarray) -> Estimate:
    """The value, and the quantiles of the resamples that a resample has.

    Quantiles are not interpolated, because a resample may be infinite ("not reached").
    """
    ends = ((1 - LEVEL) / 2, (1 + LEVEL) / 2)
    low, high = np.quantile(drawn, ends, axis=0, method="inverted_cdf")
    return Estimate(np.asarray(value), np.asarray(low), np.asarray(high))
