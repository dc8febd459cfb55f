"""The numbers of the paper's claim on wavelengths, of the model and its surrogates.

The rank correlation of these numbers (see claims/verdict.py) is negative by construction,
because a plane that is much slower than the context cannot tell offsets apart. A surrogate has
the queries and keys of the model without rotation, but the planes of each key-value head get
the same frequencies in a random order. If the correlation is beyond the correlations of
surrogates, the model has learned it.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.linalg import vecdot
from torch.nn.functional import pad

from ropelens.attention.formulas import describe_wavelengths
from ropelens.attention.sampled_call import SampledCall
from ropelens.budget.labels import Thresholds
from ropelens.budget.logit import RIDGE, count_rows, fit_tolerance, normalize_weights
from ropelens.budget.offsets import OffsetRows, Samples, fit_offsets, sampled_offsets
from ropelens.budget.surrogate_attention import Draws, DrawSums
from ropelens.rope.planes import Planes
from ropelens.text.rows import generator_of

DRAWS = 40  # surrogates by default


@torch.no_grad()
def draw_surrogates(
    sampled: SampledCall, *, draws: int = DRAWS, seed: int = 0
) -> dict[str, Float[Tensor, "draw head"]]:
    """Both numbers of every head, in the model (draw 0) and in `draws` surrogates.

    NaN for heads that are diffuse or sinks, and for heads that push toward no key through
    planes that rotate. P is scored on the rows to which it is fitted, in all draws. `seed` and
    the layer decide the draws, and the offsets at which the keys of a long context are read.
    """
    rows = float(count_rows(sampled.rows))
    sampled = normalize_weights(sampled)
    planes = sampled.planes
    kv_heads = sampled.k.shape[1]
    orders = _orders(planes, kv_heads, draws, seed=seed, layer=sampled.call.layer)
    samples = _samples_of(sampled, seed=seed)
    # Ranks of heads need no more than single precision, and each head has 41 problems.
    table = OffsetRows.of(sampled, samples).float()
    sums = Draws(sampled, table, orders, samples).sums()
    explained = _explained_by_offset(sums, table, rows=rows)
    wavelength = _mean_wavelength(sums.push, planes, orders)
    numbers = {
        "surrogate_offset_fraction": explained.fraction,
        "surrogate_log_wavelength": wavelength.log(),
    }
    return {
        name: x.double().where(explained.counts, torch.nan)
        for name, x in numbers.items()
    }


def _orders(
    planes: Planes, kv_heads: int, draws: int, *, seed: int, layer: int
) -> Int[Tensor, "draw kv_head frequency"]:
    """Index of the frequency of each plane: the model's order, then `draws` random orders."""
    size = (1 + draws, kv_heads, planes.rotary_dim // 2)
    generator = generator_of(seed, layer)
    numbers = torch.rand(size, generator=generator, dtype=torch.float32, device="cpu")
    orders = numbers.argsort(-1)
    orders[0] = torch.arange(size[-1], device="cpu")
    return orders


def _samples_of(sampled: SampledCall, *, seed: int) -> Samples:
    context = sampled.k.shape[2]
    if sampled.visibility.mask is None:
        generator = generator_of(seed, sampled.call.layer, context)
        return sampled_offsets(context, generator=generator)
    # Keys ahead of their row have a negative offset.
    every = torch.arange(1 - context, context, device="cpu")
    return Samples(torch.stack([every, torch.ones_like(every)]))


@dataclass(frozen=True)
class _Explained:
    """Share of a head's bits beyond sinks that the offset explains, and which heads count."""

    fraction: Float[Tensor, "draw head"]
    counts: Bool[Tensor, "draw head"]


def _explained_by_offset(
    sums: DrawSums, table: OffsetRows, *, rows: float
) -> _Explained:
    """Score S and P on the rows to which they are fitted."""
    masses = sums.masses
    information = sums.information
    fits = fit_offsets(
        masses,
        table,
        ridge=masses.new_full(masses.shape[:1], RIDGE / rows),
        tolerance=2 * fit_tolerance(information),
    )
    problems = torch.arange(len(masses), device=masses.device)
    of_problems = table.of_problems(problems, len(masses))
    draws, heads = sums.push.shape[:2]
    uniform = table.uniform[0].expand(heads).repeat(draws)
    # Gains in nats over uniform attention.
    sink = _mean_log_p(fits.sink.point, masses, of_problems) + uniform
    position = _mean_log_p(fits.position.point, masses, of_problems) + uniform
    smallest = torch.finfo(torch.float32).tiny
    fraction = (position - sink) / (information - sink).clamp(min=smallest)
    is_not_diffuse = information >= Thresholds.diffuse * math.log(2)
    counts = is_not_diffuse & (sink <= Thresholds.sink * information)
    on_host = torch.stack([fraction, counts]).view(2, draws, heads).cpu()
    return _Explained(fraction=on_host[0], counts=on_host[1] > 0)


def _mean_log_p(
    weights: Float[Tensor, "problem variable"],
    masses: Float[Tensor, "problem variable"],
    table: OffsetRows,
) -> Float[Tensor, " problem"]:
    """Mean of sum_j A_ij log P_i(j) over rows, in nats, for `weights` of S or P."""
    return vecdot(masses, weights) - table.moments(weights, curvature=False).log_z


def _mean_wavelength(
    push: Float[Tensor, "draw head term"],
    planes: Planes,
    orders: Int[Tensor, "draw kv_head frequency"],
) -> Float[Tensor, "draw head"]:
    """Mean wavelength (tokens) through which each head picks keys, in each draw."""
    kv_heads = orders.shape[1]
    frequency = planes.of_keys(kv_heads).inv_freq.cpu().double().abs()
    of_planes = 2 * math.pi / frequency.expand(orders.shape).gather(-1, orders)
    missing = push.shape[-1] - of_planes.shape[-1]
    wavelength = pad(of_planes, (0, missing), value=torch.inf)
    by_head = wavelength.repeat_interleave(push.shape[1] // kv_heads, dim=1)
    described = describe_wavelengths(push.cpu().numpy(), by_head.numpy())
    return torch.from_numpy(described["mean_wavelength"])
