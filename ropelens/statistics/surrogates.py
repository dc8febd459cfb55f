"""The paper's claim on wavelengths, held against what must be so for any model.

That positional heads use short wavelengths and semantic ones long (Barbero et al. 2024, arXiv
2410.06205) is measured as the rank correlation of two numbers of a head: the share of its
choice that the offset explains by itself, and the mean log wavelength of the planes that it
picks keys through. It is negative by construction: a plane much slower than the context
cannot tell offsets apart. A surrogate keeps every query and key as the model made them,
gives the planes of each key-value head the same frequencies in a random order, and rotates:
what the correlation has beyond its surrogates' is what the model chose.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ropelens.rope.planes import Planes, unrotate
from ropelens.statistics.call import AttentionCall
from ropelens.statistics.cells import Cells, blocks
from ropelens.statistics.generator import generator_of
from ropelens.statistics.labels import Thresholds
from ropelens.statistics.logit import RIDGE, averaged, count_rows, tolerance
from ropelens.statistics.offsets import OffsetRows, fit_offsets, fit_sinks
from ropelens.statistics.rows import Rows

DRAWS = 40
"""Surrogates by default."""


@dataclass(frozen=True)
class LayerSurrogates:
    """Two numbers of every head of a layer: first the model's own, then those of each draw.

    `offset_fraction` is P / rest on the rows that P is fitted to, for what it has too much of
    that, surrogates have as well. `log_wavelength` the mean over planes that rotate, weighted
    by the positive part of selectivity_keys (NaN without any), and `counts` says which heads
    are neither diffuse nor sinks.
    """

    offset_fraction: Float[Tensor, "draw head"]
    log_wavelength: Float[Tensor, "draw head"]
    counts: Bool[Tensor, "draw head"]

    @property
    def of_counting(self) -> dict[str, Float[Tensor, "draw head"]]:
        """The numbers by their rows of `MEASURES`, NaN of heads that do not count."""
        numbers = {
            "surrogate_offset_fraction": self.offset_fraction,
            "surrogate_log_wavelength": self.log_wavelength,
        }
        return {
            name: x.double().masked_fill(~self.counts, torch.nan) for name, x in numbers.items()
        }


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
) -> LayerSurrogates:
    """The model's own numbers on `rows`, and those of `draws` surrogates, by the same code.

    Draws are those of `seed` and the layer.
    """
    thresholds = thresholds or Thresholds()
    one = torch.zeros(len(call.query), dtype=torch.long)
    rows = averaged(rows, one, 1)
    of_keys = planes.of_keys(call.key.shape[1])
    orders = _orders(planes, call.key.shape[1], draws, seed=seed, layer=call.layer)
    cells = list(blocks(call, rows, planes, sinks))
    one_for_all = sinks.shape[1] == 1
    even = [_even_over_others(block, one_for_all=one_for_all) for block in cells]
    everywhere = torch.arange(call.key.shape[2], device=call.key.device)
    k_still = unrotate(call.key.to(cells[0].k.dtype), everywhere, of_keys)
    inv_freq = of_keys.inv_freq.to(everywhere.device)[..., None, :]
    angle = everywhere.to(torch.float32)[:, None] * inv_freq
    turned = [
        _Rotated.by(order, angle.cos(), angle.sin(), k_still, cells, even, planes)
        for order in orders.to(everywhere.device)
    ]
    # In float32: ranks of heads need no more, and 41 times a layer's heads are many.
    observed = torch.cat([each.observed for each in turned], dim=1).float()
    total = torch.cat([each.information for each in turned]).float()
    heads = torch.arange(call.query.shape[1]).repeat(len(turned))
    table = OffsetRows.of(rows, call.start, sinks).of_heads(heads).to(torch.float32)
    sink, position = _gains(observed, total, table, rows=count_rows(rows, one, 1))
    shape = (len(turned), -1)
    total, sink, position = (x.view(shape) for x in (total, sink, position))
    rest = (total - sink).clamp(min=torch.finfo(torch.float32).tiny)
    return LayerSurrogates(
        offset_fraction=(position - sink) / rest,
        log_wavelength=_mean_log_wavelength(
            torch.stack([one.push for one in turned]), of_keys, orders
        ),
        counts=(total >= thresholds.diffuse * math.log(2)) & (sink <= thresholds.sink * total),
    )


def _orders(
    planes: Planes, kv_heads: int, draws: int, *, seed: int, layer: int
) -> Int[Tensor, "draw kv_head frequency"]:
    """Which frequency each plane has: its own first, then `draws` random orders."""
    size = (1 + draws, kv_heads, planes.rotary_dim // 2)
    keys = torch.rand(size, generator=generator_of(seed, layer))
    orders = keys.argsort(-1)
    orders[0] = torch.arange(size[-1])
    return orders


@dataclass(frozen=True)
class _Rotated:
    """Means over the rows of a layer, rotated in one way.

    `observed` are masses on sinks, by offset, and on sinks by offset; `information` nats over
    uniform attention; `push` selectivity_keys.
    """

    observed: Float[Tensor, "1 head variable"]
    information: Float[Tensor, " head"]
    push: Float[Tensor, "head frequency"]

    @classmethod
    def by(
        cls,
        order: Int[Tensor, "kv_head frequency"],
        cos: Float[Tensor, "*kv_head position frequency"],
        sin: Float[Tensor, "*kv_head position frequency"],
        k_still: Float[Tensor, "batch kv_head position coordinate"],
        cells: list[Cells],
        even: list[Tensor],
        planes: Planes,
    ) -> _Rotated:
        """Rotate queries and keys with the frequencies in this order, and attend."""
        size = (len(order), *cos.shape[-2:])
        order = order[:, None].expand(size)
        cos, sin = (x.to(k_still.dtype).expand(size).gather(-1, order) for x in (cos, sin))
        k = _rotate(k_still, cos, sin, planes)
        _, kv_heads, group, _, dim = cells[0].q.shape
        push = torch.zeros(kv_heads, group, dim, dtype=torch.float64)
        information = torch.zeros(kv_heads, group, dtype=torch.float64)
        one, sums = torch.zeros(len(k), dtype=torch.long), []
        for block, uniform in zip(cells, even, strict=True):
            at = block.position
            here_cos, here_sin = (x[:, at].movedim(0, 1)[:, :, None] for x in (cos, sin))
            q = _rotate(block.q_still, here_cos, here_sin, planes)
            keys = k[:, :, block.low : block.low + uniform.shape[-1]]
            attention, entropy = block.attention(q, keys)
            gained = block.log_keys()[:, None, None] - entropy
            information += block.weigh(gained).sum(0)
            sums.append(block.sums(attention, one, slots=1, content=False))
            on_others = attention  # changed from here on
            on_others[..., block.columns] *= block.kind == 0
            on_others -= on_others.sum(-1, keepdim=True) * uniform
            read = (on_others.flatten(2, 3) @ keys).view_as(q)
            weighted = q * read * block.weight[:, None, None, :, None]
            push += weighted.sum((0, 3)).to("cpu", torch.float64)
        by_plane = planes.sum_coordinates(push)[..., : order.shape[-1]]
        return cls(
            observed=torch.stack(sums).sum(0)[..., planes.terms :].flatten(1, 2),
            information=information.flatten(),
            push=by_plane.flatten(0, 1),
        )


def _even_over_others(
    block: Cells, *, one_for_all: bool
) -> Float[Tensor, "batch shared shared_group row key"]:
    """The same weight for each key that a row sees and that is no sink."""
    kind = block.kind[:, :1, :1] if one_for_all else block.kind
    seen = (block.hidden == 0).to(block.k.dtype)
    others = seen.expand(-1, *kind.shape[1:3], -1, -1).clone()
    others[..., block.columns] *= kind == 0
    return others / others.sum(-1, keepdim=True).clamp(min=1)


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


def _gains(
    observed: Float[Tensor, "1 head variable"],
    information: Float[Tensor, " head"],
    table: OffsetRows,
    *,
    rows: Float[Tensor, " part"],
) -> tuple[Float[Tensor, " head"], Float[Tensor, " head"]]:
    """Nats that S and P explain over uniform attention, on the rows that they are fitted to."""
    given = {
        "ridge": RIDGE / rows.to(observed.dtype),
        "tolerance": 4 * tolerance(information)[None],
    }
    sink = fit_sinks(observed, [table], **given).point
    position = fit_offsets(observed, [table], start=sink[None], **given).point

    def gain(weights: Float[Tensor, "head variable"]) -> Float[Tensor, " head"]:
        log_norm = table.log_norms(weights) @ table.weight
        return (observed[0] * weights).sum(-1) - log_norm - table.uniform

    return gain(sink), gain(position)


def _mean_log_wavelength(
    push: Float[Tensor, "draw head frequency"],
    planes: Planes,
    orders: Int[Tensor, "draw kv_head frequency"],
) -> Float[Tensor, "draw head"]:
    """Mean over planes that rotate, weighted by what they push toward the picked keys."""
    wavelength = 2 * math.pi / planes.inv_freq.double().abs()
    group = push.shape[1] // max(1, orders.shape[1])
    own = wavelength.expand(orders.shape).gather(-1, orders).repeat_interleave(group, dim=1)
    weight = push.clamp(min=0) * own.isfinite()
    return (weight * torch.where(own.isfinite(), own, 1.0).log()).sum(-1) / weight.sum(-1)
