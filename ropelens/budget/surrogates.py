"""The numbers of the paper's claim on wavelengths, of the model and its surrogates.

The rank correlation of these numbers (see claims/verdict.py) is negative by construction,
because a plane that is much slower than the context cannot tell offsets apart. A surrogate has
the queries and keys of the model without rotation, but the planes of each key-value head get
the same frequencies in a random order. If the correlation is beyond the correlations of
surrogates, the model has learned it.

The score of the key at offset d is Re sum_f c_f exp(i w_f d), c_f = s q~_f conj(k~_f). All
draws have the same c_f, so one product with their phases at d gives the scores of all draws.
"""

import math
from dataclasses import replace

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from ropelens.attention.fast_products import HIDDEN
from ropelens.attention.formulas import describe_wavelengths
from ropelens.attention.sampled_call import SampledCall
from ropelens.attention.visibility import offset_edges
from ropelens.budget.labels import Thresholds
from ropelens.budget.logit import RIDGE, fit_tolerance, normalize_weights
from ropelens.budget.offsets import OffsetRows, fit_offsets, sampled_offsets
from ropelens.rope.planes import Planes
from ropelens.text.rows import generator_of

DRAWS = 40  # surrogates by default
ROWS_AT_ONCE = 32  # rows whose scores under all draws fit into a CPU's caches


@torch.no_grad()
def draw_surrogates(
    sampled: SampledCall, *, draws: int = DRAWS, seed: int = 0
) -> dict[str, Float[Tensor, "draw head"]]:
    """Both numbers of every head, in the model (draw 0) and in `draws` surrogates.

    NaN for heads that are diffuse or sinks, and for heads that push toward no key through
    planes that rotate. P is scored on the rows to which it is fitted, in all draws. `seed` and
    the layer decide the draws, and the offsets at which the keys of a long context are read.
    """
    sampled, number = normalize_weights(sampled)
    heads, kv_heads = sampled.q.shape[1], sampled.k.shape[1]
    orders = _orders(sampled.planes, kv_heads, draws, seed=seed, layer=sampled.call.layer)
    frequency = sampled.planes.of_keys(kv_heads).inv_freq.cpu().expand(orders.shape)
    frequency = frequency.gather(-1, orders)
    frequency = pad(frequency, (0, sampled.planes.terms - frequency.shape[-1]))
    context = sampled.k.shape[2]
    generator = generator_of(seed, sampled.call.layer, context)
    if sampled.visibility.mask is None:
        offset, size = sampled_offsets(context, generator=generator)
        table = OffsetRows.of(sampled, (offset, size))
    else:  # keys ahead of their row have negative offsets
        offset, table = torch.arange(1 - context, context), OffsetRows.of(sampled)
        size = torch.ones_like(offset)
    results, group = [], heads // kv_heads
    for head in range(heads):
        if head % group == 0:
            by_draw = frequency[:, head // group].to(sampled.k)
            wave = _waves(offset[:, None, None].to(by_draw) * by_draw)
        of_head = table.of_heads(torch.tensor([head]))
        results.append(_attend_by_draw(sampled, of_head, head, offset, size, by_draw, wave))
    masses, total, push = (torch.stack(x, 1) for x in zip(*results, strict=True))
    # Ranks of heads need only float32, and each head has 41 problems.
    masses, total = masses.flatten(0, 1).float(), total.flatten().float()
    table = table.of_heads(torch.arange(heads).repeat(len(orders)))
    table = replace(table, weight=table.weight.float(), within=table.within.float())
    tolerance = 10 * fit_tolerance(total)
    fits = fit_offsets(masses, table, ridge=RIDGE / number, tolerance=tolerance)
    uniform = -(table.count.float().log() @ table.weight)
    points = [model.point for model in fits]
    # Gains in nats over uniform attention, on the rows to which the models are fitted.
    sink, position = (
        (masses * x).sum(-1) - table.log_z_and_moments(x)[0] - uniform for x in points
    )
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
    """Index of the frequency of each plane: the model's order, then `draws` random orders."""
    size = (1 + draws, kv_heads, planes.rotary_dim // 2)
    orders = torch.rand(size, generator=generator_of(seed, layer)).argsort(-1)
    orders[0] = torch.arange(size[-1])
    return orders


def _attend_by_draw(
    sampled: SampledCall,
    table: OffsetRows,
    head: int,
    offset: Int[Tensor, " sample"],
    size: Int[Tensor, " sample"],
    frequency: Float[Tensor, "draw term"],
    wave: Float[Tensor, "sample draw side"],
) -> tuple[Float[Tensor, "draw variable"], Float[Tensor, " draw"], Float[Tensor, "draw term"]]:
    """Masses, information (nats) and `selectivity_keys` of a head, as means over the rows.

    A key is read at each `offset` and stands for `size` keys; sinks are read at every position.
    """
    batch, context, device = len(sampled.q), sampled.k.shape[2], sampled.k.device
    visibility = sampled.visibility.flatten(batch)
    visible, position = visibility.sees()[0].cpu(), visibility.position[0]
    weight = sampled.weight.flatten()
    sequence = torch.arange(batch).repeat_interleave(len(position) // batch)
    q = sampled.row_q_still.flatten(1, 2)[:, head].flatten(0, 1) * sampled.call.scale
    k = sampled.k_still[:, head * sampled.k.shape[1] // sampled.q.shape[1]].flatten(0, 1)
    is_sink = sampled.sinks[:, head % sampled.sinks.shape[1]] > 0
    kind, key, others = table.kind[0].to(device), table.key[0], table.others[0].to(q)
    log_keys, log_size = table.count[0].log().to(q), size[:, None].log().to(q)
    sample = ((offset >= 0).cumsum(0) - 1).clamp(min=0).to(device)
    by_offset, on_sinks = (q.new_zeros(len(wave[0]), *n) for n in ([table.context], key.shape))
    information, push = on_sinks.new_zeros(len(wave[0])), torch.zeros_like(wave[0])
    for rows in position.argsort().split(ROWS_AT_ONCE):
        read, of_row = position[rows] - offset[:, None], sequence[rows]
        exists, read = (read >= 0) & (read < context), read.clamp(0, context - 1)
        seen = exists & visible[rows, read]
        last = 1 + int(seen.any(1).nonzero().max())
        counted = seen[:last].to(device) & ~is_sink[of_row, read[:last]]
        keys = k.index_select(0, (of_row * context + read[:last]).flatten().to(device))
        features = _sides(sampled.planes.products(q[rows], keys.view(last, len(rows), -1)))
        behind = (position[rows, None] - key[rows]).to(q)[..., None]
        sink_wave = _waves(behind * frequency[:, None, None])
        sink_keys = k[(of_row[:, None] * context + key[rows]).to(device)]
        sink_features = _sides(sampled.planes.products(q[rows, None], sink_keys))
        scores = q.new_empty(last + key.shape[1], len(wave[0]), len(rows))
        torch.bmm(wave[:last], features.mT, out=scores[:last])
        scores[last:] = (sink_features * sink_wave).sum(-1).movedim(-1, 0)
        scores = sampled.call.squash(scores)
        scores[:last] += torch.where(counted, log_size[:last], HIDDEN)[:, None]
        scores[last:] += torch.where(kind[rows] > 0, 0.0, HIDDEN).mT[:, None]
        attention = scores.softmax(0)
        entropy = scores.amax(0) - attention.amax(0).log()
        entropy -= torch.linalg.vecdot(attention, scores, dim=0)
        entropy += torch.tensordot(log_size[:last, 0], attention[:last], 1)
        information += (log_keys[rows] - entropy) @ weight[rows]
        attention *= weight[rows]
        on_sinks[:, rows] = attention[last:].movedim(0, -1)
        attention = attention[:last]
        by_offset.index_add_(1, sample[:last], attention.sum(-1).mT)
        evenly = counted * size[:last, None].to(device) / others[rows].clamp(min=1)
        attention.addcmul_(evenly[:, None], attention.sum(0), value=-1)
        push += (attention @ features).mul_(wave[:last]).sum(0)
    bins = len(offset_edges(context)) - 1
    masses = table.with_sinks(by_offset.cpu(), on_sinks.cpu(), bins=bins)
    return masses, information.cpu(), push.unflatten(-1, (-1, 2)).sum(-1).double().cpu()


def _sides(x: Complex[Tensor, "*batch term"]) -> Float[Tensor, "*batch side"]:
    """Real and imaginary part of each term, next to each other."""
    return torch.view_as_real(x).flatten(-2)


def _waves(angle: Float[Tensor, "*batch term"]) -> Float[Tensor, "*batch side"]:
    """The sides of exp(-i angle), because cos and sin are several times as fast as exp."""
    return torch.stack([angle.cos(), -angle.sin()], dim=-1).flatten(-2)
