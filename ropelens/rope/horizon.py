"""How far a key can be moved and still win: where a sum of cosines falls below a level.

A key d tokens back scores Re sum_f c_f exp(i v_f d), with c_f = s q~_f conj(k~_f) and v_f the
frequency of plane f (Barbero et al. 2024, arXiv 2410.06205).
"""

from __future__ import annotations

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor

BLOCK_ELEMENTS = 2**21  # scores of a block
BISECTIONS = 60  # of a token: more than float64 resolves


def moved_scores(
    product: Complex[Tensor, "*curve term"],
    inv_freq: Float[Tensor, " term"],
    distance: Float[Tensor, " distance"],
) -> Float[Tensor, "*curve distance"]:
    """Re sum_f product_f exp(i inv_freq_f d), in the units of `product`, for every distance d.

    `inv_freq` is in rad/token, `distance` in tokens; angles are float64 products.
    """
    angle = inv_freq.double()[:, None] * distance.double()
    waves = torch.cat([angle.cos(), -angle.sin()]).to(product.real.dtype)
    return torch.cat([product.real, product.imag], dim=-1) @ waves


def lowest_scores(
    product: Complex[Tensor, "*curve term"], inv_freq: Float[Tensor, " term"]
) -> Float[Tensor, "*curve"]:
    """A lower bound at all distances: the still terms less the lengths of the rest.

    It is sharp where the frequencies are independent over the rationals (Kronecker's theorem).
    """
    still = inv_freq == 0
    return (product.real * still).sum(-1) - (product.abs() * ~still).sum(-1)


def horizons(
    product: Complex[Tensor, "curve term"],
    inv_freq: Float[Tensor, " term"],
    level: Float[Tensor, " curve"],
    *,
    within: int,
    farthest: int,
) -> Float[Tensor, " curve"]:
    """The distance in tokens at which each moved score first falls to `level`.

    Every whole distance from 0 to `farthest` is tried. In the token before the first one that
    is not above the level, after one that is, the root is found by bisection. The horizon is 0
    where the score is above the level nowhere below `within`, infinite where it never falls.
    """
    result = torch.where(lowest_scores(product, inv_freq) > level, torch.inf, 0.0).double()
    curve = (result == 0).nonzero().flatten()  # those that may still cross
    above = torch.zeros(len(curve), dtype=torch.bool)
    begin = 0
    while len(curve) and begin <= farthest:
        size = max(64, min(BLOCK_ELEMENTS // len(curve), begin))  # most cross early
        end = min(begin + size, farthest + 1, within if begin < within else farthest + 1)
        distance = torch.arange(begin, end, dtype=torch.float64)
        higher = moved_scores(product[curve], inv_freq, distance) > level[curve, None]
        falls = torch.cat([above[:, None], higher[:, :-1]], dim=1) & ~higher
        crossed, at = falls.any(1), begin + falls.byte().argmax(1)
        done = curve[crossed]
        result[done] = _bisect(product[done], inv_freq, level[done], at[crossed])
        going_on = ~crossed & (higher[:, -1] | (end < within))
        curve, above, begin = curve[going_on], higher[going_on, -1], end
    result[curve[above]] = torch.inf
    return result


def _bisect(
    product: Complex[Tensor, "curve term"],
    inv_freq: Float[Tensor, " term"],
    level: Float[Tensor, " curve"],
    end: Int[Tensor, " curve"],
) -> Float[Tensor, " curve"]:
    """A root of each curve less its level in the token that ends at the whole number `end`."""
    low, high = end.double() - 1, end.double()
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        angle = middle[:, None] * inv_freq.double()
        score = (product.real * angle.cos() - product.imag * angle.sin()).sum(-1)
        low, high = middle.where(score > level, low), high.where(score > level, middle)
    return high
