"""The numbers behind the paper's claim on wavelengths, of the model and of its surrogates.

Their rank correlation (see claim.py) is negative by construction, for a plane much slower than
the context cannot tell offsets apart. A surrogate keeps every query and key as the model made
them, gives the planes of each key-value head the same frequencies in a random order, and
rotates: a correlation beyond those of surrogates is the model's choice.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from ropelens.rope.planes import Planes
from ropelens.statistics.block import CallRows
from ropelens.statistics.budget.logit import RIDGE, averaged, sums, tolerance
from ropelens.statistics.budget.offsets import OffsetRows, fit_offsets
from ropelens.statistics.labels import Thresholds, describe_wavelengths
from ropelens.statistics.measures import selectivity_keys
from ropelens.statistics.rows import generator_of

DRAWS = 40  # surrogates by default


@torch.no_grad()
def draw_surrogates(
    rows: CallRows, *, draws: int = DRAWS, seed: int = 0
) -> dict[str, Float[Tensor, "draw head"]]:
    """Both numbers of every head on `rows`: the model's, then those of `draws` surrogates.

    By the names of their variables; NaN of heads that are diffuse or sinks, and of heads that
    push toward no key through planes that rotate. P is fitted to the rows that it is scored
    on, of the model as of its surrogates. `seed` and the layer decide the draws.
    """
    rows, count = averaged(rows)
    heads, kv_heads = rows.q.shape[1], rows.k.shape[1]
    orders = _orders(rows.planes, kv_heads, draws, seed=seed, layer=rows.call.layer)
    inv_freq = rows.planes.of_keys(kv_heads).inv_freq[..., None, :].to(rows.k.device)
    angle = rows.places.to(torch.float32)[:, None] * inv_freq
    waves = torch.polar(torch.ones_like(angle), angle).expand(kv_heads, -1, -1)
    still, drawn = _side_by_side(rows), []
    for order in orders.to(angle.device):
        turned = _turned(still, waves.gather(-1, order[:, None].expand(waves.shape)))
        drawn.append(_attend(turned))
    # In float32: ranks of heads need no more, and 41 times a layer's heads are many.
    masses, total = (torch.cat([each[n] for each in drawn]).float() for n in (0, 1))
    table = OffsetRows.of(rows).of_heads(torch.arange(heads).repeat(len(drawn)))
    table = replace(table, weight=table.weight.float())
    fits = fit_offsets(masses, table, ridge=RIDGE / count, tolerance=4 * tolerance(total))
    uniform = -(table.seen.float().log() @ table.weight)
    points = [model.point for model in fits]
    # in nats over uniform attention, on the rows that are fitted to
    sink, position = ((masses * x).sum(-1) - table.expect(x)[0] - uniform for x in points)
    fraction = (position - sink) / (total - sink).clamp(min=torch.finfo(torch.float32).tiny)
    counts = (total >= Thresholds.diffuse * math.log(2)) & (sink <= Thresholds.sink * total)
    push = torch.stack([each[2] for each in drawn])
    wavelength = (2 * math.pi / inv_freq[..., 0, :].double().abs()).cpu()
    wavelength = wavelength.expand(orders.shape).gather(-1, orders)
    rest = push.shape[-1] - wavelength.shape[-1]
    wavelength = pad(wavelength, (0, rest), value=torch.inf)
    wavelength = wavelength.repeat_interleave(heads // kv_heads, dim=1)
    means = describe_wavelengths(push.numpy(), wavelength.numpy())["mean_wavelength"]
    numbers = {
        "surrogate_offset_fraction": fraction.view(-1, heads),
        "surrogate_log_wavelength": torch.from_numpy(means).log(),
    }
    counts = counts.view(-1, heads)
    return {name: x.double().masked_fill(~counts, torch.nan) for name, x in numbers.items()}


def _orders(
    planes: Planes, kv_heads: int, draws: int, *, seed: int, layer: int
) -> Int[Tensor, "draw kv_head frequency"]:
    """Which frequency each plane has: its own first, then `draws` random orders."""
    size = (1 + draws, kv_heads, planes.rotary_dim // 2)
    orders = torch.rand(size, generator=generator_of(seed, layer)).argsort(-1)
    orders[0] = torch.arange(size[-1])
    return orders


def _side_by_side(rows: CallRows) -> CallRows:
    """These rows alone, scaled and without rotation: the parts of a plane stand together.

    Complex products are several times as fast as those of real and imaginary halves.
    """
    planes = rows.planes
    order = torch.arange(planes.head_dim)
    pairs = torch.stack([order[planes.first], order[planes.second]], dim=-1).flatten()
    order = torch.cat([pairs, order[~torch.isin(order, pairs)]]).to(rows.k.device)
    query = (rows.row_q_still[..., order] * rows.call.scale).flatten(1, 2)
    call = replace(
        rows.call,
        query=query,
        key=rows.k_still[..., order].contiguous(),
        output=query.transpose(1, 2),  # nobody reads it
        at=rows.position,
        visible=rows.visible,
        scale=1.0,
    )
    planes = replace(planes, pairing="interleaved", offset=0)
    return CallRows(call, rows.rows, planes, sinks=rows.sinks)


def _turned(rows: CallRows, wave: Complex[Tensor, "kv_head position frequency"]) -> CallRows:
    """Rows whose keys turn by `wave` at each position, and whose queries by that of theirs."""
    call, at, rotated = rows.call, rows.position.to(wave.device), rows.planes.rotary_dim

    def turn(x: Tensor, by: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x[..., :rotated].unflatten(-1, (-1, 2)).contiguous())
        turned = torch.view_as_real(pairs * by).flatten(-2)
        return torch.cat([turned, x[..., rotated:]], -1) if rotated < x.shape[-1] else turned

    query = turn(rows.row_q, wave[:, at].movedim(0, 1)[:, :, None]).flatten(1, 2)
    call = replace(call, key=turn(call.key, wave), query=query)
    return CallRows(call, rows.rows, rows.planes, sinks=rows.sinks)


def _attend(
    rows: CallRows,
) -> tuple[Float[Tensor, "head variable"], Float[Tensor, " head"], Float[Tensor, "head term"]]:
    """Means over the rows.

    The masses on sinks, by offset, and on sinks by bin; the information over uniform
    attention (nats); and selectivity_keys, the push toward the picked keys by plane.
    """
    means = []
    for block in rows.blocks(slice(0, rows.k.shape[1])):
        push = selectivity_keys(block) * block.weight[:, None, None, :, None]
        push = rows.planes.sum_coordinates(push.sum((0, 3)).to("cpu", torch.float64))
        information = block.log_keys - (block.log_norm - block.expected_score)
        masses = sums(block, block.attention, content=False)
        means.append((masses, block.weigh(information), push))
    masses, information, push = (torch.stack(x).sum(0) for x in zip(*means, strict=True))
    return masses.flatten(0, 1), information.flatten(), push.flatten(0, 1)
