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

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ropelens.rope.planes import Planes, unrotate
from ropelens.statistics.budget.cells import Cells, blocks
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
    rows, count = averaged(rows, torch.zeros(len(call.query), dtype=torch.long), 1)
    orders = _orders(planes, call.key.shape[1], draws, seed=seed, layer=call.layer)
    cells = list(blocks(call, rows, planes, sinks))
    even = [_even_over_others(block, one_for_all=sinks.shape[1] == 1) for block in cells]
    of_keys = planes.of_keys(call.key.shape[1])
    everywhere = torch.arange(call.key.shape[2], device=call.key.device)
    k_still = unrotate(call.key.to(cells[0].k.dtype), everywhere, of_keys)
    inv_freq = of_keys.inv_freq.to(everywhere.device)[..., None, :]
    angle = everywhere.to(torch.float32)[:, None] * inv_freq
    cos, sin = angle.cos().to(k_still.dtype), angle.sin().to(k_still.dtype)
    drawn = []
    for order in orders.to(everywhere.device):
        size = (len(order), *angle.shape[-2:])
        at = order[:, None].expand(size)
        turn = cos.expand(size).gather(-1, at), sin.expand(size).gather(-1, at)
        drawn.append(_attend(cells, even, k_still, *turn))
    # In float32: ranks of heads need no more, and 41 times a layer's heads are many.
    masses, total = (torch.cat([each[n] for each in drawn]).float() for n in (0, 1))
    heads = torch.arange(call.query.shape[1]).repeat(len(drawn))
    table = OffsetRows.of(rows, call.start, sinks).of_heads(heads, torch.float32)
    fits = fit_offsets(
        masses[None],
        [table],
        ridge=RIDGE / count.to(masses.dtype),
        tolerance=4 * tolerance(total)[None],
    )
    uniform = -(table.seen.to(table.weight.dtype).log() @ table.weight)

    def gain(weights: Float[Tensor, "problem variable"]) -> Float[Tensor, "draw head"]:
        """Nats over uniform attention, on the rows that the weights are fitted to."""
        log_norm = table.log_norms(weights) @ table.weight
        return ((masses * weights).sum(-1) - log_norm - uniform).view(len(drawn), -1)

    sink, position = (gain(model.point) for model in fits)
    total = total.view(len(drawn), -1)
    rest = (total - sink).clamp(min=torch.finfo(torch.float32).tiny)
    counts = (total >= thresholds.diffuse * math.log(2)) & (sink <= thresholds.sink * total)
    push = torch.stack([each[2] for each in drawn])[..., : orders.shape[-1]]
    numbers = {
        "surrogate_offset_fraction": (position - sink) / rest,
        "surrogate_log_wavelength": _mean_log_wavelength(push, of_keys, orders),
    }
    return {name: x.double().masked_fill(~counts, torch.nan) for name, x in numbers.items()}


def _orders(
    planes: Planes, kv_heads: int, draws: int, *, seed: int, layer: int
) -> Int[Tensor, "draw kv_head frequency"]:
    """Which frequency each plane has: its own first, then `draws` random orders."""
    size = (1 + draws, kv_heads, planes.rotary_dim // 2)
    orders = torch.rand(size, generator=generator_of(seed, layer)).argsort(-1)
    orders[0] = torch.arange(size[-1])
    return orders


def _attend(
    cells: list[Cells],
    even: list[Tensor],
    k_still: Float[Tensor, "batch kv_head position coordinate"],
    cos: Float[Tensor, "kv_head position frequency"],
    sin: Float[Tensor, "kv_head position frequency"],
) -> tuple[Float[Tensor, "head variable"], Float[Tensor, " head"], Float[Tensor, "head term"]]:
    """Means over the rows, with queries and keys turned by these angles.

    The masses on sinks, by offset, and on sinks by bin; the information over uniform
    attention (nats); and selectivity_keys, the push toward the picked keys by plane.
    """
    planes = cells[0].planes
    k = _rotate(k_still, cos, sin, planes)
    _, kv_heads, group, _, dim = cells[0].q.shape
    push = torch.zeros(kv_heads, group, dim, dtype=torch.float64)
    information, masses = torch.zeros(1, kv_heads, group, dtype=torch.float64), []
    for block, uniform in zip(cells, even, strict=True):
        at = block.position
        here_cos, here_sin = (x[:, at].movedim(0, 1)[:, :, None] for x in (cos, sin))
        q = _rotate(block.q_still, here_cos, here_sin, planes)
        keys = k[:, :, block.low : block.low + uniform.shape[-1]]
        attention, entropy = block.attention(q, keys)
        information += block.weigh(block.log_keys - entropy)
        masses.append(sums(block, attention, content=False))
        on_others = attention  # changed from here on
        on_others[..., block.columns] *= block.kind == 0
        on_others -= on_others.sum(-1, keepdim=True) * uniform
        read = (on_others.flatten(2, 3) @ keys).view_as(q)
        weighted = q * read * block.weight[:, None, None, :, None]
        push += weighted.sum((0, 3)).to("cpu", torch.float64)
    by_plane = planes.sum_coordinates(push).flatten(0, 1)
    return torch.stack(masses).sum(0).flatten(0, 2), information.flatten(), by_plane


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
