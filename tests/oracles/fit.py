"""The kernel of the attention budget, fitted by scipy instead of a multiplicative update.

Rows share a log-likelihood sum_b mass_b log w_b + sink log w_0 - log Z_i, Z_i = sum over the
offsets that row i can see of their bin's weight, + w_0 where it sees position 0. Concave in
the log weights, so L-BFGS with its exact gradient finds the one maximum.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Rows:
    """The kinds of rows of one layer: rows that see the same offsets are one kind.

    - offsets [kind, offset]: 1 where such a row sees that offset, at a key other than 0
    - sink [kind]: 1 where it sees position 0
    - share [kind]: share of all rows that are of this kind
    """

    offsets: Floats
    sink: Floats
    share: Floats

    def binned(self, bins: NDArray[np.int64]) -> Floats:
        """[kind, bin]: how many offsets of each bin [start, stop) a row of the kind sees."""
        return np.stack([self.offsets[:, a:b].sum(1) for a, b in bins], axis=1)


@dataclass(frozen=True)
class Fit:
    """`weight` [bin] of one offset and `sink`, up to one common factor; `gain` over uniform
    in bits; `residual`: largest difference of modelled and observed mass (0 at the optimum)."""

    weight: Floats
    sink: float
    gain: float
    residual: float


def fit(mass: Floats, sink_mass: float, *, rows: Rows, bins: NDArray[np.int64]) -> Fit:
    """The best P_i(j) ~ weight[bin of i - j], position 0 apart, for the mean attention
    `mass` [bin] on keys other than 0 and `sink_mass` on position 0 (together 1)."""
    counts = np.concatenate([rows.binned(bins), rows.sink[:, None]], axis=1)
    target = np.append(mass, sink_mass)
    seen = (rows.share[:, None] * counts).sum(0) > 0
    assert not target[~seen].any(), "attention on what no row can see"
    counts, target = counts[:, seen], target[seen]

    def loss(log_weight: Floats) -> tuple[float, Floats]:
        log_weight = log_weight - log_weight.max()  # one common factor changes nothing
        each = counts * np.exp(log_weight)
        total = each.sum(1)
        modelled = (rows.share[:, None] * each / total[:, None]).sum(0)
        value = rows.share @ np.log(total) - target @ log_weight
        return float(value), modelled - target

    start = np.log(np.maximum(target, 1e-12) / (rows.share @ counts))
    options = {"maxiter": 20_000, "maxfun": 40_000, "ftol": 0.0, "gtol": 1e-11, "maxcor": 50}
    best = minimize(loss, start, jac=True, method="L-BFGS-B", options=options)
    value, gradient = loss(best.x)
    weight = np.zeros(len(seen))
    weight[seen] = np.exp(best.x - best.x.max())
    uniform = float(rows.share @ np.log(counts.sum(1)))
    return Fit(
        weight=weight[:-1],
        sink=float(weight[-1]),
        gain=(uniform - value) / np.log(2),
        residual=float(np.abs(gradient).max()),
    )
