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

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor
from torch.linalg import vecdot
from torch.nn.functional import pad

from ropelens.attention.fast_products import BLOCK_ELEMENTS, HIDDEN
from ropelens.attention.formulas import describe_wavelengths
from ropelens.attention.sampled_call import SampledCall
from ropelens.attention.visibility import Visibility
from ropelens.budget.labels import Thresholds
from ropelens.budget.logit import RIDGE, fit_tolerance, normalize_weights
from ropelens.budget.offsets import OffsetRows, Samples, fit_offsets, sampled_offsets
from ropelens.caches import on_device
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
    sampled, number = normalize_weights(sampled)
    heads, kv_heads, context = (
        sampled.q.shape[1],
        sampled.k.shape[1],
        sampled.k.shape[2],
    )
    orders = _orders(
        sampled.planes, kv_heads, draws, seed=seed, layer=sampled.call.layer
    )
    if sampled.visibility.mask is None:
        generator = generator_of(seed, sampled.call.layer, context)
        samples = sampled_offsets(context, generator=generator)
        table = OffsetRows.of(sampled, samples)
    else:  # keys ahead of their row have negative offsets
        every = torch.arange(1 - context, context)
        samples, table = (
            torch.stack([every, torch.ones_like(every)]),
            OffsetRows.of(sampled),
        )
    table = table.float()  # ranks of heads need no more, and each head has 41 problems
    masses, total, push = Draws(sampled, table, orders, samples).sums()
    ridge = masses.new_full(masses.shape[:1], RIDGE / float(number))
    fits = fit_offsets(masses, table, ridge=ridge, tolerance=2 * fit_tolerance(total))
    # Gains in nats over uniform attention, on the rows to which the models are fitted.
    uniform = table.uniform[0].expand(heads).repeat(len(orders))
    table = table.of_problems(
        torch.arange(len(masses), device=masses.device), len(masses)
    )
    sink, position = (
        vecdot(masses, x.point)
        - table.log_z_and_moments(x.point, curvature=False)[0]
        + uniform
        for x in fits
    )
    fraction = (position - sink) / (total - sink).clamp(
        min=torch.finfo(torch.float32).tiny
    )
    counts = (total >= Thresholds.diffuse * math.log(2)) & (
        sink <= Thresholds.sink * total
    )
    fraction, counts = torch.stack([fraction, counts]).view(2, -1, heads).cpu()
    frequency = sampled.planes.of_keys(kv_heads).inv_freq.cpu().double().abs()
    wavelength = 2 * math.pi / frequency.expand(orders.shape).gather(-1, orders)
    wavelength = pad(
        wavelength, (0, push.shape[-1] - wavelength.shape[-1]), value=torch.inf
    )
    wavelength = wavelength.repeat_interleave(heads // kv_heads, dim=1)
    mean = describe_wavelengths(push.cpu().numpy(), wavelength.numpy())[
        "mean_wavelength"
    ]
    numbers = {
        "surrogate_offset_fraction": fraction,
        "surrogate_log_wavelength": torch.from_numpy(mean).log(),
    }
    return {
        name: x.double().where(counts > 0, torch.nan) for name, x in numbers.items()
    }


def _orders(
    planes: Planes, kv_heads: int, draws: int, *, seed: int, layer: int
) -> Int[Tensor, "draw kv_head frequency"]:
    """Index of the frequency of each plane: the model's order, then `draws` random orders."""
    size = (1 + draws, kv_heads, planes.rotary_dim // 2)
    orders = torch.rand(size, generator=generator_of(seed, layer)).argsort(-1)
    orders[0] = torch.arange(size[-1])
    return orders


class Draws:
    """The attention of all heads in all draws, on sampled offsets and on all sinks."""

    def __init__(
        self,
        sampled: SampledCall,
        table: OffsetRows,
        orders: Int[Tensor, "draw kv_head frequency"],
        samples: Samples,
    ) -> None:
        self.call, self.planes, self.table = sampled.call, sampled.planes, table
        q, k = self._complex(sampled.row_q_still), self._complex(sampled.k_still)
        self.q = q.permute(1, 2, 0, 3, 4).flatten(2, 3) * sampled.call.scale
        self.k = k.conj().transpose(0, 1).flatten(1, 2).resolve_conj()
        self.weight, device = sampled.weight.flatten(), self.k.device
        offset, size = on_device(samples, device)
        frequency = on_device(sampled.planes.of_keys(len(self.k)).inv_freq, device)
        self.frequency = frequency.to(sampled.k).expand(len(self.k), -1)
        self.orders, self.offset = (
            orders.transpose(0, 1).to(device),
            offset.to(sampled.k),
        )
        self.sample = ((offset >= 0).cumsum(0) - 1).clamp(min=0)
        self.size, self.log_keys = size.to(sampled.k), table.log_keys.to(sampled.k)
        self.log_size = self.size.log()
        visibility = sampled.device_visibility.flatten(len(sampled.q))
        row = torch.arange(len(self.weight), device=device)
        self.sequence = (
            row // sampled.position.shape[1] * sampled.k.shape[2]
        )  # its first key
        self.sink = table.key + self.sequence[:, None]
        self.behind = (visibility.position[0][:, None] - table.key).to(sampled.k)
        self.is_sink = (sampled.sink_kind > 0).flatten(1, 2).transpose(0, 1).flatten(1)
        scores = len(offset) + len(orders) * table.key.shape[-1]
        pairs = BLOCK_ELEMENTS[device.type] // (2 * self.planes.terms * scores)
        self.pairs = 8 * (
            1 + pairs // 8
        )  # products of 29 rows take as long as those of 56
        on_host = sampled.visibility.flatten(len(sampled.q))
        position, self.rows = on_host.position[0], []
        for rows in position.argsort().split(self.pairs):
            farthest = (position - on_host.first[0])[rows].max()
            last = int((samples[0] <= farthest).sum())
            self.rows.append(self._keys_of(rows.to(device), offset[:last], visibility))

    def _keys_of(
        self,
        rows: Int[Tensor, " row"],
        offset: Int[Tensor, " sample"],
        visibility: Visibility,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The rows, and the keys that they read at each offset, for all heads or by head.

        For each key the index, the logarithm of the number of keys that it represents (or a
        score that hides it), and the share of these keys among keys that are not sinks.
        """
        read, context = (
            visibility.position[0, rows] - offset[:, None],
            self.call.key.shape[2],
        )
        exists, read = (read >= 0) & (read < context), read.clamp(0, context - 1)
        if visibility.mask is None:
            seen = exists & (read >= visibility.first[0, rows])
        else:
            seen = exists & visibility.mask[0, rows].gather(1, read.mT).mT
        last, key = len(offset), self.sequence[rows] + read
        counted = seen & ~self.is_sink[:, key]
        others = self.table.others[:, None, rows].clamp(min=1).to(self.size)
        bias = torch.where(counted, self.log_size[:last, None], HIDDEN)
        return rows, key, bias, counted * self.size[:last, None] / others

    def sums(self) -> tuple[Tensor, Tensor, Tensor]:
        """Masses [problem, variable], information [problem] (nats), and `selectivity_keys`.

        They are means over rows. A problem is a head of a draw; the last is [draw, head, term].
        """
        kv_heads, group = self.q.shape[:2]
        most, parts = max(1, self.pairs // len(self.rows[0][0])), []
        for first in range(0, kv_heads, max(1, most // group)):
            heads = slice(first, first + max(1, most // group))
            wave = self._waves(heads, self.offset[None]).transpose(0, 1)[:, :, None]
            members = (slice(x, x + most) for x in range(0, group, most))
            of_group = [self._attend(heads, some, wave) for some in members]
            parts.append([torch.cat(x, dim=1) for x in zip(*of_group, strict=True)])
        by_draw = (
            torch.cat(x).flatten(0, 1).transpose(0, 1) for x in zip(*parts, strict=True)
        )
        by_offset, on_sinks, information, push = by_draw
        problems = torch.arange(information.numel(), device=push.device)
        table = self.table.of_problems(problems, len(problems))
        masses = table.with_sinks(by_offset.flatten(0, 1), on_sinks.flatten(0, 1))
        return masses.float(), information.flatten().float(), push

    def _attend(
        self,
        heads: slice,
        members: slice,
        wave: Float[Tensor, "sample kv_head 1 draw side"],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Masses by offset and on sinks, information, push: [kv_head, group, draw, ...]."""
        q, k = self.q[heads, members], self.k[heads]
        wave = wave.expand(-1, -1, q.shape[1], -1, -1)
        shape = wave.shape[1:4]
        by_offset = wave.new_zeros(*shape, self.table.context)
        on_sinks = wave.new_zeros(*shape, *self.table.key.shape[1:])
        information, push = wave.new_zeros(shape), wave.new_zeros(wave.shape)

        def of_heads(x: Tensor) -> Tensor:
            if len(x) == 1:
                return x[None]
            return x.unflatten(0, (-1, self.q.shape[1]))[heads, members]

        for rows, key, bias, evenly in self.rows:
            last, own, sink = len(key), q[:, :, rows], of_heads(self.sink[:, rows])
            keys = (
                k.index_select(1, key.flatten())
                .unflatten(1, (last, -1))
                .transpose(0, 1)
            )
            features = self._sides(own, keys[:, :, None]).flatten(0, 2)
            scores = wave.new_empty(last + sink.shape[-1], *shape, len(rows))
            torch.bmm(
                wave[:last].flatten(0, 2), features.mT, out=scores[:last].flatten(0, 2)
            )
            index = sink.flatten(2).expand(len(k), -1, -1)[..., None]
            sink_keys = k[:, None].expand(-1, index.shape[1], -1, -1)
            sink_keys = sink_keys.gather(2, index.expand(-1, -1, -1, k.shape[-1]))
            at_sinks = self._sides(
                own[:, :, :, None], sink_keys.unflatten(2, sink.shape[2:])
            )
            at_sinks = (
                self._waves(heads, of_heads(self.behind[:, rows])) @ at_sinks[..., None]
            )
            scores[last:] = at_sinks[..., 0].permute(3, 0, 1, 4, 2)
            scores = self.call.squash(scores)
            scores[:last] += of_heads(bias).permute(2, 0, 1, 3)[:, :, :, None]
            hidden = (of_heads(self.table.kind[:, rows]) == 0).permute(
                3, 0, 1, 2
            ) * HIDDEN
            scores[last:] += hidden[:, :, :, None]
            attention = scores.softmax(0)
            entropy = scores.amax(0) - attention.amax(0).log()
            entropy -= vecdot(attention, scores, dim=0)
            entropy += torch.tensordot(self.log_size[:last], attention[:last], 1)
            gain = of_heads(self.log_keys[:, rows])[:, :, None] - entropy
            information += gain @ self.weight[rows]
            attention *= self.weight[rows]
            on_sinks[:, :, :, rows] = attention[last:].movedim(0, -1)
            attention = attention[:last]
            by_offset.index_add_(
                3, self.sample[:last], attention.sum(-1).movedim(0, -1)
            )
            evenly = of_heads(evenly).permute(2, 0, 1, 3)[:, :, :, None]
            attention.addcmul_(evenly, attention.sum(0), value=-1)
            push[:last].flatten(0, 2).baddbmm_(attention.flatten(0, 2), features)
        push = push.mul_(wave).sum(0).unflatten(-1, (-1, 2)).sum(-1)
        return by_offset, on_sinks, information, push

    def _complex(
        self, x: Float[Tensor, "*batch coordinate"]
    ) -> Complex[Tensor, "*batch pair"]:
        """The planes of `x` as complex numbers, then its other coordinates in pairs."""
        first, count = self.planes.offset, self.planes.rotary_dim
        rest = torch.cat([x[..., :first], x[..., first + count :]], dim=-1)
        rest = pad(rest, (0, rest.shape[-1] % 2)).unflatten(-1, (-1, 2)).contiguous()
        return torch.cat([self.planes.complex(x), torch.view_as_complex(rest)], dim=-1)

    def _sides(self, q: Tensor, k: Tensor) -> Float[Tensor, "*batch side"]:
        """The real and the imaginary part of q conj(k) in each term; `k` is conjugated."""
        product, count = q * k, self.planes.rotary_dim // 2
        if count < self.planes.terms:
            rest = product[..., count:].sum(-1, keepdim=True)
            product = torch.cat([product[..., :count], rest], dim=-1)
        return torch.view_as_real(product).flatten(-2)

    def _waves(
        self, heads: slice, distance: Float[Tensor, "*shape"]
    ) -> Float[Tensor, "*kv_head_and_shape draw side"]:
        """The sides of exp(-i w d) at each distance d, in every draw."""
        frequency, orders = self.frequency[heads], self.orders[heads]
        angle = distance.flatten(1)[..., None] * -frequency[:, None]
        index = orders.flatten(1)[:, None].expand(-1, angle.shape[1], -1)
        wave = torch.polar(torch.ones_like(angle), angle).gather(-1, index)
        wave = wave.view(*wave.shape[:2], *orders.shape[1:])
        wave = pad(wave, (0, self.planes.terms - frequency.shape[-1]), value=1.0)
        return torch.view_as_real(wave).flatten(-2).unflatten(1, distance.shape[1:])
