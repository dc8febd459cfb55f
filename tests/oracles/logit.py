"""The conditional logit of a head's budget, fitted densely in float64 by scipy.

All row x key x plane features of one head are in memory. No code is shared with the code under
test: A comes from transformers' eager attention (see `recording.py`).
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from torch import Tensor

from .recording import AttentionCall, Floats, LayerRotation

NATS = np.log(2)  # nats per bit
SMOOTH = 3.0  # as in ropelens/budget/solver.py
PARTS = {
    "sink": (False, False),
    "position": (False, True),
    "content": (True, False),
    "both": (True, True),
}
"""Models of the budget: whether they have `content` and `offsets`."""


@dataclass(frozen=True)
class HeadRows:
    """Rows of one head from position 1 on: attention, and the features of each key.

    - attention, seen, sink [row, key]; sink is 1 if a key is a sink
    - offset [row, key]: number of tokens from the key to the row
    - planes [row, key, term]: scores without rotation in nats, before any soft-cap
    """

    attention: Floats
    seen: NDArray[np.bool_]
    sink: Floats
    offset: NDArray[np.int64]
    planes: Floats

    def joined(self, other: "HeadRows") -> "HeadRows":
        return HeadRows(
            attention=np.concatenate([self.attention, other.attention]),
            seen=np.concatenate([self.seen, other.seen]),
            sink=np.concatenate([self.sink, other.sink]),
            offset=np.concatenate([self.offset, other.offset]),
            planes=np.concatenate([self.planes, other.planes]),
        )


def head_rows(
    call: AttentionCall, rotation: LayerRotation, *, head: int, sinks: NDArray[np.bool_]
) -> HeadRows:
    """The rows of one sequence; `sinks` [position] marks the keys that are sinks."""
    group = len(call.query) // len(call.key)
    query = rotation.unrotate(call.query[[head]])
    key = rotation.unrotate(call.key[[head // group]])
    q = query[0].numpy()
    k = key[0].numpy()
    planes = []
    for part in rotation.parts():
        if len(part):
            planes.append(call.scale * q[:, part] @ k[:, part].T)
    position = np.arange(len(q))
    attention = call.attention[head].numpy()
    attention = attention / attention.sum(-1, keepdims=True)  # without a learned sink
    offset = position[:, None] - position
    return HeadRows(
        attention=attention[1:],
        seen=call.visible.numpy()[1:],
        sink=np.broadcast_to(sinks.astype(float), attention[1:].shape),
        offset=offset[1:].clip(0),
        planes=np.stack(planes, axis=-1)[1:],
    )


def bin_of_offset(context: int) -> NDArray[np.int64]:
    """The bin of every offset below `context`; above 64 an octave has eight bins."""
    offset = np.arange(context)
    octave = np.log2(np.maximum(offset, 64) / 64).astype(int)
    start = 64 << octave
    width = 8 << octave
    far = 64 + 8 * octave + (offset - start) // width
    return np.where(offset < 64, offset, far)


def information(rows: HeadRows) -> float:
    """Mean over rows of KL(A_i || uniform), in bits."""
    safe = np.where(rows.attention > 0, rows.attention, 1)
    negative_entropy = (rows.attention * np.log(safe)).sum(1)
    per_row = negative_entropy + np.log(rows.seen.sum(1))
    return float(per_row.mean() / NATS)


@dataclass(frozen=True)
class Logit:
    """A model of attention with sigma, beta if `content`, and kappa and tau if `offsets`.

    Its weights are one vector: sigma, beta [term], kappa [offset] and tau [bin].
    """

    terms: int
    bins: NDArray[np.int64]  # of each offset
    content: bool
    offsets: bool

    @property
    def sizes(self) -> list[int]:
        """Number of weights of sigma, beta, kappa and tau."""
        sizes = [1, 0, 0, 0]
        if self.content:
            sizes[1] = self.terms
        if self.offsets:
            sizes[2] = len(self.bins)
            sizes[3] = int(self.bins.max()) + 1
        return sizes

    def log_likelihood(self, weights: Tensor, rows: HeadRows) -> Tensor:
        """Mean over rows, in nats."""
        sigma, beta, kappa, tau = weights.split(self.sizes)
        seen = torch.from_numpy(rows.seen)
        sink = torch.tensor(rows.sink)
        scores = sigma * sink
        if self.content:
            scores = scores + torch.from_numpy(rows.planes) @ beta
        if self.offsets:
            of_offsets = kappa[torch.from_numpy(rows.offset)]
            of_bins = tau[torch.from_numpy(self.bins[rows.offset])]
            scores = scores + of_offsets + of_bins * sink
        seen_scores = scores.masked_fill(~seen, -torch.inf)
        log_chances = seen_scores.log_softmax(1).masked_fill(~seen, 0)
        per_row = (torch.from_numpy(rows.attention) * log_chances).sum(1)
        return per_row.mean()

    def penalty(self, weights: Tensor) -> Tensor:
        """Half the squared weights plus `SMOOTH` times the squared steps of kappa."""
        steps = weights.split(self.sizes)[2].diff()
        return (weights @ weights + SMOOTH * (steps @ steps)) / 2

    def fit(self, rows: HeadRows, *, ridge: float) -> Tensor:
        def loss(values: Floats) -> tuple[float, Floats]:
            weights = torch.from_numpy(values).requires_grad_()
            penalty = ridge / len(rows.planes) * self.penalty(weights)
            value = penalty - self.log_likelihood(weights, rows)
            (slope,) = torch.autograd.grad(value, weights)
            return value.item(), slope.numpy()

        start = np.zeros(sum(self.sizes))
        limits = {
            "maxiter": 5000,
            "maxfun": 10_000,
            "ftol": 1e-13,
            "gtol": 1e-8,
            "maxcor": 30,
        }
        best = minimize(loss, start, jac=True, method="L-BFGS-B", options=limits)
        return torch.from_numpy(best.x)


def gain(
    rows: HeadRows,
    *,
    content: bool,
    offsets: bool,
    ridge: float,
    on: HeadRows | None = None,
) -> float:
    """Gain in bits per row of a model that is fitted to `rows`, over uniform attention.

    The penalty of the fit is `ridge` times `Logit.penalty`, divided by the number of rows. The
    gain may be `on` other rows, which do not see more keys than the fitted rows.
    """
    terms = rows.planes.shape[2]
    bins = bin_of_offset(int(rows.offset.max()) + 1)
    logit = Logit(terms, bins, content=content, offsets=offsets)
    weights = logit.fit(rows, ridge=ridge)
    scored = rows if on is None else on
    fitted = logit.log_likelihood(weights, scored)
    uniform = -np.log(scored.seen.sum(1)).mean()
    return float((fitted - uniform) / NATS)
