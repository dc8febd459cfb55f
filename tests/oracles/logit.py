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
PARTS = {"sink": (False, False), "position": (False, True), "content": (True, False)}
PARTS |= {"both": (True, True)}
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
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return HeadRows(*(np.concatenate(pair) for pair in pairs))


def head_rows(
    call: AttentionCall, rotation: LayerRotation, *, head: int, sinks: NDArray[np.bool_]
) -> HeadRows:
    """The rows of one sequence; `sinks` [position] marks the keys that are sinks."""
    group = len(call.query) // len(call.key)
    q = rotation.unrotate(call.query[head][None])[0].numpy()
    k = rotation.unrotate(call.key[head // group][None])[0].numpy()
    planes = [
        call.scale * q[:, part] @ k[:, part].T for part in rotation.parts() if len(part)
    ]
    position = np.arange(len(q))
    attention = call.attention[head].numpy()
    attention = attention / attention.sum(-1, keepdims=True)  # without a learned sink
    return HeadRows(
        attention=attention[1:],
        seen=call.visible.numpy()[1:],
        sink=np.broadcast_to(sinks.astype(float), attention[1:].shape),
        offset=(position[:, None] - position)[1:].clip(0),
        planes=np.stack(planes, axis=-1)[1:],
    )


def bin_of_offset(context: int) -> NDArray[np.int64]:
    """The bin of every offset below `context`; above 64 an octave has eight bins."""
    offset = np.arange(context)
    octave = np.log2(np.maximum(offset, 64) / 64).astype(int)
    far = 64 + 8 * octave + (offset - (64 << octave)) // (8 << octave)
    return np.where(offset < 64, offset, far)


def information(rows: HeadRows) -> float:
    """Mean over rows of KL(A_i || uniform), in bits."""
    safe = np.where(rows.attention > 0, rows.attention, 1)
    per_row = (rows.attention * np.log(safe)).sum(1) + np.log(rows.seen.sum(1))
    return float(per_row.mean() / NATS)


def gain(
    rows: HeadRows,
    *,
    content: bool,
    offsets: bool,
    ridge: float,
    on: HeadRows | None = None,
) -> float:
    """Gain in bits per row of a model that is fitted to `rows`, over uniform attention.

    The model has sigma, beta if `content`, and kappa and tau if `offsets`. The penalty is
    `ridge` / 2 times the squared weights plus `SMOOTH` times the squared steps of kappa. The
    gain may be `on` other rows, which do not see more keys than the fitted rows.
    """
    count, _, terms = rows.planes.shape
    context = int(rows.offset.max()) + 1
    bins = bin_of_offset(context)
    sizes = [1, terms * content, context * offsets, (int(bins.max()) + 1) * offsets]

    def log_likelihood(x: Tensor, rows: HeadRows) -> Tensor:
        sigma, beta, kappa, tau = x.split(sizes)
        seen, sink = torch.from_numpy(rows.seen), torch.tensor(rows.sink)
        scores = sigma * sink
        if content:
            scores = scores + torch.from_numpy(rows.planes) @ beta
        if offsets:
            of_bins = tau[torch.from_numpy(bins[rows.offset])]
            scores = scores + kappa[torch.from_numpy(rows.offset)] + of_bins * sink
        chances = (
            scores.masked_fill(~seen, -torch.inf).log_softmax(1).masked_fill(~seen, 0)
        )
        return (torch.from_numpy(rows.attention) * chances).sum(1).mean()

    def loss(values: Floats) -> tuple[float, Floats]:
        x = torch.from_numpy(values).requires_grad_()
        steps = x.split(sizes)[2].diff()
        penalty = (x @ x + SMOOTH * (steps @ steps)) / 2
        value = ridge / count * penalty - log_likelihood(x, rows)
        (slope,) = torch.autograd.grad(value, x)
        return value.item(), slope.numpy()

    options = {
        "maxiter": 5000,
        "maxfun": 10_000,
        "ftol": 1e-13,
        "gtol": 1e-8,
        "maxcor": 30,
    }
    best = minimize(
        loss, np.zeros(sum(sizes)), jac=True, method="L-BFGS-B", options=options
    )
    scored = rows if on is None else on
    uniform = -np.log(scored.seen.sum(1)).mean()
    return float((log_likelihood(torch.from_numpy(best.x), scored) - uniform) / NATS)
