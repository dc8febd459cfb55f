"""The numbers behind the paper's claim on wavelengths, of the model and of its surrogates.

Their rank correlation (see claim.py) is negative by construction, for a plane much slower than
the context cannot tell offsets apart. A surrogate keeps every query and key as the model made
them, gives the planes of each key-value head the same frequencies in a random order, and
rotates: a correlation beyond those of surrogates is the model's choice.

The key at offset d scores Re sum_f c_f exp(i w_f d), c_f = s q~_f conj(k~_f). All draws have
the same c_f, so one product with their phases at d gives the scores of all.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from ropelens.attention.block import SampledCall
from ropelens.attention.fast_products import HIDDEN
from ropelens.attention.offset_bins import offset_edges, sampled_offsets
from ropelens.budget.labels import Thresholds, describe_wavelengths
from ropelens.budget.logit import RIDGE, normalize_weights, tolerance
from ropelens.budget.offsets import OffsetRows, fit_offsets
from ropelens.rope.planes import Planes
from ropelens.text.rows import generator_of

DRAWS = 40  # surrogates by default
ROWS = 32  # rows whose scores of all draws stay in a CPU's caches


@torch.no_grad()
def draw_surrogates(
    rows: SampledCall, *, draws: int = DRAWS, seed: int = 0
) -> dict[str, Float[Tensor, "draw head"]]:
    """Both numbers of every head on `rows`: the model's, then those of `draws` surrogates.

    By the names of their variables; NaN of heads that are diffuse or sinks, and of heads that
    push toward no key through planes that rotate. P is fitted to the rows that it is scored
    on, of the model as of its surrogates. `seed` and the layer decide the draws, and at which
    offsets all of them read the keys of a long context.
    """
    rows, count = normalize_weights(rows)
    heads, kv_heads = rows.q.shape[1], rows.k.shape[1]
    orders = _orders(rows.planes, kv_heads, draws, seed=seed, layer=rows.call.layer)
    frequency = rows.planes.of_keys(kv_heads).inv_freq.cpu().expand(orders.shape)
    frequency = frequency.gather(-1, orders)
    frequency = pad(frequency, (0, rows.planes.terms - frequency.shape[-1]))
    context = rows.k.shape[2]
    generator = generator_of(seed, rows.call.layer, context)
    if rows.visible is None:
        offset, size = sampled_offsets(context, generator=generator)
        table = OffsetRows.of(rows, (offset, size))
    else:  # keys ahead of their row stand at offsets below 0
        offset, table = torch.arange(1 - context, context), OffsetRows.of(rows)
        size = torch.ones_like(offset)
    each, group = [], heads // kv_heads
    for head in range(heads):
        if head % group == 0:
            turns = frequency[:, head // group].to(rows.k)
            wave = _waves(offset[:, None, None].to(turns) * turns)
        own = table.of_heads(torch.tensor([head]))
        each.append(_attend(rows, own, head, offset, size, turns, wave))
    masses, total, push = (torch.stack(x, 1) for x in zip(*each, strict=True))
    # In float32: ranks of heads need no more, and 41 times a layer's heads are many.
    masses, total = masses.flatten(0, 1).float(), total.flatten().float()
    table = table.of_heads(torch.arange(heads).repeat(len(orders)))
    table = replace(table, weight=table.weight.float(), within=table.within.float())
    fits = fit_offsets(masses, table, ridge=RIDGE / count, tolerance=10 * tolerance(total))
    uniform = -(table.count.float().log() @ table.weight)
    points = [model.point for model in fits]
    # in nats over uniform attention, on the rows that are fitted to
    sink, position = ((masses * x).sum(-1) - table.expect(x)[0] - uniform for x in points)
    fraction = (position - sink) / (total - sink).clamp(min=torch.finfo(torch.float32).tiny)
    counts = (total >= Thresholds.diffuse * math.log(2)) & (sink <= Thresholds.sink * total)
    wavelength = 2 * math.pi / frequency.double().abs()
    wavelength = wavelength.repeat_interleave(group, dim=1)
    mean = describe_wavelengths(push.numpy(), wavelength.numpy())["mean_wavelength"]
    numbers = {
        "surrogate_offset_fraction": fraction.view(-1, heads),
        "surrogate_log_wavelength": torch.from_numpy(mean).log(),
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


def _attend(
    rows: SampledCall,
    table: OffsetRows,
    head: int,
    offset: Int[Tensor, " sample"],
    size: Int[Tensor, " sample"],
    frequency: Float[Tensor, "draw term"],
    wave: Float[Tensor, "sample draw side"],
) -> tuple[Float[Tensor, "draw variable"], Float[Tensor, " draw"], Float[Tensor, "draw term"]]:
    """Means over the rows of one head, its planes at these frequencies.

    The masses on sinks, by offset, and on sinks by bin; the information over uniform attention
    (nats); and selectivity_keys, the push toward the picked keys by plane. Keys are read at
    each `offset`, in place of `size` keys, and sinks wherever they stand.
    """
    (batch, count), context, device = rows.rows.position.shape, rows.k.shape[2], rows.k.device
    position, first = (x.expand(batch, -1).flatten() for x in (rows.position, rows.first))
    sequence, weight = torch.arange(batch).repeat_interleave(count), rows.weight.flatten()
    q = rows.row_q_still.flatten(1, 2)[:, head].flatten(0, 1) * rows.call.scale
    k = rows.k_still[:, head * rows.k.shape[1] // rows.q.shape[1]].flatten(0, 1)
    is_sink = rows.sinks[:, head % rows.sinks.shape[1]] > 0
    kind, key, others = table.kind[0].to(device), table.key[0], table.others[0].to(q)
    log_keys, log_size = table.count[0].log().to(q), size[:, None].log().to(q)
    place = ((offset >= 0).cumsum(0) - 1).clamp(min=0).to(device)
    by_offset, on_sinks = (q.new_zeros(len(wave[0]), *n) for n in ([table.context], key.shape))
    information, push = on_sinks.new_zeros(len(wave[0])), torch.zeros_like(wave[0])
    for some in position.argsort().split(ROWS):
        at, of = position[some] - offset[:, None], sequence[some]
        seen, at = (at >= first[some]) & (at < context), at.clamp(0, context - 1)
        if rows.visible is not None:
            seen &= rows.visible.flatten(0, 1)[some, at].cpu()
        last = 1 + int(seen.any(1).nonzero().max())
        read = seen[:last].to(device) & ~is_sink[of, at[:last]]
        keys = k.index_select(0, (of * context + at[:last]).flatten().to(device))
        features = _sides(rows.planes.products(q[some], keys.view(last, len(some), -1)))
        behind = (position[some, None] - key[some]).to(q)[..., None]
        turned = _waves(behind * frequency[:, None, None])
        of_sinks = k[(of[:, None] * context + key[some]).to(device)]
        of_sinks = _sides(rows.planes.products(q[some, None], of_sinks))
        scores = q.new_empty(last + key.shape[1], len(wave[0]), len(some))
        torch.bmm(wave[:last], features.mT, out=scores[:last])
        scores[last:] = (of_sinks * turned).sum(-1).movedim(-1, 0)
        scores = rows.call.squash(scores)
        scores[:last] += torch.where(read, log_size[:last], HIDDEN)[:, None]
        scores[last:] += torch.where(kind[some] > 0, 0.0, HIDDEN).mT[:, None]
        attention = scores.softmax(0)
        entropy = scores.amax(0) - attention.amax(0).log()
        entropy -= torch.linalg.vecdot(attention, scores, dim=0)
        entropy += torch.tensordot(log_size[:last, 0], attention[:last], 1)
        information += (log_keys[some] - entropy) @ weight[some]
        attention *= weight[some]
        on_sinks[:, some] = attention[last:].movedim(0, -1)
        attention = attention[:last]
        by_offset.index_add_(1, place[:last], attention.sum(-1).mT)
        evenly = read * size[:last, None].to(device) / others[some].clamp(min=1)
        attention.addcmul_(evenly[:, None], attention.sum(0), value=-1)
        push += (attention @ features).mul_(wave[:last]).sum(0)
    bins = len(offset_edges(context)) - 1
    masses = table.with_sinks(by_offset.cpu(), on_sinks.cpu(), bins=bins)
    return masses, information.cpu(), push.unflatten(-1, (-1, 2)).sum(-1).double().cpu()


def _sides(x: Complex[Tensor, "*batch term"]) -> Float[Tensor, "*batch side"]:
    """Real and imaginary part of each term, side by side."""
    return torch.view_as_real(x).flatten(-2)


def _waves(angle: Float[Tensor, "*batch term"]) -> Float[Tensor, "*batch side"]:
    """The sides of exp(-i angle): cos and sin are several times as fast as complex exp."""
    return torch.stack([angle.cos(), -angle.sin()], dim=-1).flatten(-2)
