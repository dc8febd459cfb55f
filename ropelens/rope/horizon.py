"""How far a key can be moved and still win: where a sum of cosines falls below a level.

A key d tokens back scores Re sum_f c_f exp(i v_f d), with c_f = s q~_f conj(k~_f) and v_f the
frequency of plane f (Barbero et al. 2024, arXiv 2410.06205). Terms that stand still (v_f = 0)
add a constant.
"""

from __future__ import annotations

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor

BLOCK_ELEMENTS = 2**21
"""Scores of a block."""

BISECTIONS = 60
"""Halvings of a token, more than float64 resolves up to 2**53 tokens."""


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

    Every whole distance from 0 to `farthest` is tried, so that no dip is missed. The horizon
    is the root of the curve, by bisection, in the token before the first distance that is no
    longer above the level after one that is. It is 0 where the score is above the level at no
    distance below `within`, and infinite where it never falls to it up to `farthest`.
    """
    result = torch.zeros(len(product), dtype=torch.float64)
    certain = lowest_scores(product, inv_freq) > level
    result[certain] = torch.inf
    open_curves = (~certain).nonzero().flatten()
    above = torch.zeros(len(open_curves), dtype=torch.bool)
    begin = 0
    while len(open_curves) and begin <= farthest:
        room = max(64, BLOCK_ELEMENTS // len(open_curves))
        end = min(begin + min(room, max(64, begin)), farthest + 1)  # most cross early
        if begin < within:
            end = min(end, within)
        distance = torch.arange(begin, end, dtype=torch.float64)
        scores = moved_scores(product[open_curves], inv_freq, distance)
        higher = scores > level[open_curves, None]
        falls = torch.cat([above[:, None], higher[:, :-1]], dim=1) & ~higher
        crossed, at = falls.any(1), begin + falls.byte().argmax(1)
        done = open_curves[crossed]
        result[done] = _bisect(product[done], inv_freq, level[done], at[crossed])
        wins = ~crossed & higher[:, -1]
        result[open_curves[wins]] = torch.inf
        going_on = ~crossed if end < within else wins
        open_curves, above = open_curves[going_on], higher[going_on, -1]
        begin = end
    return result


def _bisect(
    product: Complex[Tensor, "curve term"],
    inv_freq: Float[Tensor, " term"],
    level: Float[Tensor, " curve"],
    end: Int[Tensor, " curve"],
) -> Float[Tensor, " curve"]:
    """A root of each curve less its level in the token that ends at the whole number `end`."""
    high = end.double()
    low = high - 1
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        angle = middle[:, None] * inv_freq.double()
        score = (product.real * angle.cos() - product.imag * angle.sin()).sum(-1)
        higher = score > level
        low, high = torch.where(higher, middle, low), torch.where(higher, high, middle)
    return high
