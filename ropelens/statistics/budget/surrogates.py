"""The numbers behind the paper's claim on wavelengths, of the model and of its surrogates.

Positional heads use short wavelengths, semantic ones long (Barbero et al. 2024, arXiv
2410.06205): the rank correlation of two numbers of a head, the share of its choice that the
offset explains by itself, and the mean log wavelength of the planes that it picks keys
through. It is negative by construction, for a plane much slower than the context cannot tell
offsets apart. A surrogate keeps every query and key as the model made them, gives the planes
of each key-value head the same frequencies in a random order, and rotates: a correlation
beyond those of surrogates is the model's choice.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ropelens.rope.planes import Planes
from ropelens.statistics.block import CallRows
from ropelens.statistics.budget.logit import RIDGE, averaged, sums, tolerance
from ropelens.statistics.budget.offsets import OffsetRows, fit_offsets
from ropelens.statistics.call import AttentionCall
from ropelens.statistics.labels import Thresholds
from ropelens.statistics.rows import Rows, generator_of

DRAWS = 40
"""Surrogates by default."""


@torch.no_grad()
def draw_surrogates(
    call: AttentionCall,
    rows: Rows,
    planes: Planes,
    sinks: Int[Tensor, "batch shared position"],
    *,
    draws: int = DRAWS,
    seed: int = 0,
    thresholds: Thresholds | None = None,
) -> dict[str, Float[Tensor, "draw head"]]:
    """Both numbers of every head on `rows`: the model's, then those of `draws` surrogates.

    By the names of their variables; NaN of heads that are diffuse or sinks, and of heads that
    push toward no key through planes that rotate. P is fitted to the rows that it is scored
    on, of the model as of its surrogates. `seed` and the layer decide the draws.
    """
    thresholds = thresholds or Thresholds()
    rows, count = averaged(rows)
    orders = _orders(planes, call.key.shape[1], draws, seed=seed, layer=call.layer)
    as_is, of_keys = CallRows(call, rows, planes), planes.of_keys(call.key.shape[1])
    inv_freq = of_keys.inv_freq.to(as_is.k.device)[..., None, :]
    angle = as_is.places.to(torch.float32)[:, None] * inv_freq
    cos, sin = angle.cos().to(as_is.k.dtype), angle.sin().to(as_is.k.dtype)
    drawn = []
    for order in orders.to(cos.device):
        size = (len(order), *angle.shape[-2:])
        at = order[:, None].expand(size)
        turn = cos.expand(size).gather(-1, at), sin.expand(size).gather(-1, at)
        drawn.append(_attend(CallRows(_turned(as_is, *turn), rows, planes, sinks=sinks)))
    # In float32: ranks of heads need no more, and 41 times a layer's heads are many.
    masses, total = (torch.cat([each[n] for each in drawn]).float() for n in (0, 1))
    heads = torch.arange(call.query.shape[1]).repeat(len(drawn))
    table = OffsetRows.of(rows, call.start, sinks).of_heads(heads)
    table = replace(table, weight=table.weight.float())
    fits = fit_offsets(masses, table, ridge=RIDGE / count, tolerance=4 * tolerance(total))
    uniform = -(table.seen.float().log() @ table.weight)
    points = [model.point for model in fits]
    # in nats over uniform attention, on the rows that are fitted to
    sink, position = ((masses * x).sum(-1) - table.expect(x)[0] - uniform for x in points)
    rest = (total - sink).clamp(min=torch.finfo(torch.float32).tiny)
    counts = (total >= thresholds.diffuse * math.log(2)) & (sink <= thresholds.sink * total)
    push = torch.stack([each[2] for each in drawn])[..., : orders.shape[-1]]
    numbers = {
        "surrogate_offset_fraction": ((position - sink) / rest).view(push.shape[:2]),
        "surrogate_log_wavelength": _mean_log_wavelength(push, of_keys, orders),
    }
    counts = counts.view(push.shape[:2])
    return {name: x.double().masked_fill(~counts, torch.nan) for name, x in numbers.items()}


def _orders(
    planes: Planes, kv_heads: int, draws: int, *, seed: int, layer: int
) -> Int[Tensor, "draw kv_head frequency"]:
    """Which frequency each plane has: its own first, then `draws` random orders."""
    size = (1 + draws, kv_heads, planes.rotary_dim // 2)
    orders = torch.rand(size, generator=generator_of(seed, layer)).argsort(-1)
    orders[0] = torch.arange(size[-1])
    return orders


def _turned(
    rows: CallRows,
    cos: Float[Tensor, "kv_head position frequency"],
    sin: Float[Tensor, "kv_head position frequency"],
) -> AttentionCall:
    """The call of these rows alone, turned by these angles; its queries carry the scale."""
    call, at = rows.call, rows.position.to(cos.device)
    here_cos, here_sin = (x[:, at].movedim(0, 1)[:, :, None] for x in (cos, sin))
    query = _rotate(rows.row_q_still * call.scale, here_cos, here_sin, rows.planes)
    query, key = query.flatten(1, 2), _rotate(rows.k_still, cos, sin, rows.planes)
    output = query.transpose(1, 2)  # nobody reads it
    return replace(call, query=query, key=key, output=output, at=at, scale=1.0)


def _attend(
    rows: CallRows,
) -> tuple[Float[Tensor, "head variable"], Float[Tensor, " head"], Float[Tensor, "head term"]]:
    """Means over the rows.

    The masses on sinks, by offset, and on sinks by bin; the information over uniform
    attention (nats); and selectivity_keys, the push toward the picked keys by plane.
    """
    means = []
    for block in rows.blocks(slice(0, rows.k.shape[1])):
        information = block.weigh(block.information)
        masses = sums(block, block.attention, content=False)
        is_key = block.sink_kind == 0
        even = block.seen[:, None, None].expand(-1, *is_key.shape[1:3], -1, -1)
        even = even.to(block.k.dtype).contiguous()
        even[..., block.sinks] *= is_key
        even /= even.sum(-1, keepdim=True).clamp(min=1)
        others = block.attention  # changed from here on
        others[..., block.sinks] *= is_key
        others -= others.sum(-1, keepdim=True) * even
        read = (others.flatten(2, 3) @ block.k).view_as(block.q)
        weighted = block.q * read * block.weight[:, None, None, :, None]
        push = weighted.sum((0, 3)).to("cpu", torch.float64)
        means.append((masses, information, rows.planes.sum_coordinates(push)))
    masses, information, push = (torch.stack(x).sum(0) for x in zip(*means, strict=True))
    return masses.flatten(0, 1), information.flatten(), push.flatten(0, 1)


def _rotate(
    x: Float[Tensor, "*batch position coordinate"],
    cos: Float[Tensor, "*shared position frequency"],
    sin: Float[Tensor, "*shared position frequency"],
    planes: Planes,
) -> Float[Tensor, "*batch position coordinate"]:
    """`x` with each plane turned by an angle."""
    real, imaginary = x[..., planes.first], x[..., planes.second]
    turned = x.clone()
    turned[..., planes.first] = real * cos - imaginary * sin
    turned[..., planes.second] = imaginary * cos + real * sin
    return turned


def _mean_log_wavelength(
    push: Float[Tensor, "draw head frequency"],
    planes: Planes,
    orders: Int[Tensor, "draw kv_head frequency"],
) -> Float[Tensor, "draw head"]:
    """Mean over planes that rotate, weighted by what they push toward the picked keys."""
    wavelength = 2 * math.pi / planes.inv_freq.double().abs()
    group = push.shape[1] // max(1, orders.shape[1])
    wavelength = wavelength.expand(orders.shape).gather(-1, orders)
    wavelength = wavelength.repeat_interleave(group, dim=1)
    weight = push.clamp(min=0) * wavelength.isfinite()
    log = torch.where(wavelength.isfinite(), wavelength, 1.0).log()
    return (weight * log).sum(-1) / weight.sum(-1)
