"""The attention of a layer and of its surrogates, on sampled offsets and on all sinks.

The score of the key at offset d is Re sum_f c_f exp(i w_f d), c_f = s q~_f conj(k~_f). All
draws have the same c_f, so one product with their phases at d gives the scores of all draws. A
side of a term is its real or its imaginary part.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Complex, Float, Int, Shaped
from torch import Tensor
from torch.linalg import vecdot
from torch.nn.functional import pad

from ropelens.attention.fast_products import BLOCK_ELEMENTS, HIDDEN
from ropelens.attention.sampled_call import SampledCall
from ropelens.budget.offsets import OffsetRows, Samples
from ropelens.caches import on_device
from ropelens.rope.planes import Planes


@dataclass(frozen=True)
class DrawSums:
    """Means over rows of the attention in each draw.

    A problem is a head of a draw. `masses` are by the variables of P, `information` is in nats,
    and `push` is `selectivity_keys`.
    """

    masses: Float[Tensor, "problem variable"]
    information: Float[Tensor, " problem"]
    push: Float[Tensor, "draw head term"]


class Draws:
    """The attention of all heads in all draws. The rows of all sequences are one list.

    `orders` has the index of the frequency of each plane in each draw. `group_size` is the
    number of pairs of a row and a head that are computed together.
    """

    def __init__(
        self,
        sampled: SampledCall,
        table: OffsetRows,
        orders: Int[Tensor, "draw kv_head frequency"],
        samples: Samples,
    ) -> None:
        self.call = sampled.call
        self.table = table
        self.terms = _Terms(sampled.planes)
        q = self.terms.complex(sampled.row_q_still)
        k = self.terms.complex(sampled.k_still)
        self.q = q.permute(1, 2, 0, 3, 4).flatten(2, 3) * sampled.call.scale
        self.k = k.conj().transpose(0, 1).flatten(1, 2).resolve_conj()
        self.weight = sampled.weight.flatten()
        self.log_keys = table.log_keys.to(sampled.k)
        self.waves = _Waves.of(sampled, orders)
        self.keys = _KeyReader(sampled, table, samples.on(sampled.k.device))
        scores = len(samples) + len(orders) * table.sinks.key.shape[-1]
        elements = BLOCK_ELEMENTS[sampled.k.device.type]
        pairs = elements // (2 * sampled.planes.terms * scores)
        # Products of 29 rows take as long as products of 56 rows.
        self.group_size = 8 * (1 + pairs // 8)
        self.row_groups = self._split_rows(sampled, samples)

    def _split_rows(
        self, sampled: SampledCall, samples: Samples
    ) -> list["_KeysOfRows"]:
        """Groups of rows at similar positions, and the keys that they read."""
        visibility = sampled.visibility.flatten(len(sampled.q))
        position = visibility.position[0]
        farthest = position - visibility.first[0]
        groups = []
        for rows in position.argsort().split(self.group_size):
            count = int((samples.offset <= farthest[rows].max()).sum())
            groups.append(self.keys.read(rows.to(sampled.k.device), count))
        return groups

    def sums(self) -> DrawSums:
        """Masses, information and push of all heads in all draws."""
        kv_heads, group = self.q.shape[:2]
        together = max(1, self.group_size // len(self.row_groups[0].rows))
        step = max(1, together // group)
        parts = []
        for first in range(0, kv_heads, step):
            heads = slice(first, first + step)
            waves = self.waves.at(heads, self.keys.offset[None])
            waves = waves.transpose(0, 1)[:, :, None]
            of_group = []
            for member in range(0, group, together):
                members = slice(member, member + together)
                of_group.append(self._attend(heads, members, waves))
            parts.append(_concatenate(of_group, dim=1))
        by_draw = _concatenate(parts, dim=0).by_draw()
        problems = torch.arange(by_draw.information.numel(), device=self.k.device)
        table = self.table.of_problems(problems, len(problems))
        by_offset = by_draw.by_offset.flatten(0, 1)
        on_sinks = by_draw.on_sinks.flatten(0, 1)
        return DrawSums(
            masses=table.with_sinks(by_offset, on_sinks).float(),
            information=by_draw.information.flatten().float(),
            push=by_draw.push,
        )

    def _attend(
        self,
        heads: slice,
        members: slice,
        waves: Float[Tensor, "sample kv_head 1 draw side"],
    ) -> "_HeadDraws":
        attending = _AttendingHeads(self, heads, members, waves)
        for keys in self.row_groups:
            attending.add(keys)
        return attending.result()


@dataclass(frozen=True)
class _Terms:
    """The terms of a score: its planes, and its other coordinates together."""

    planes: Planes

    def complex(
        self, x: Float[Tensor, "*batch coordinate"]
    ) -> Complex[Tensor, "*batch pair"]:
        """The planes of `x` as complex numbers, then its other coordinates in pairs."""
        begin = self.planes.offset
        end = begin + self.planes.rotary_dim
        rest = torch.cat([x[..., :begin], x[..., end:]], dim=-1)
        even = pad(rest, (0, rest.shape[-1] % 2))
        pairs = torch.view_as_complex(even.unflatten(-1, (-1, 2)).contiguous())
        return torch.cat([self.planes.complex(x), pairs], dim=-1)

    def sides(self, q: Tensor, k: Tensor) -> Float[Tensor, "*batch side"]:
        """The real and the imaginary part of q conj(k) in each term; `k` is conjugated."""
        product = q * k
        count = self.planes.rotary_dim // 2
        if count < self.planes.terms:
            rest = product[..., count:].sum(-1, keepdim=True)
            product = torch.cat([product[..., :count], rest], dim=-1)
        return torch.view_as_real(product).flatten(-2)


@dataclass(frozen=True)
class _Waves:
    """The frequencies of all draws: `orders` of the `frequency` of the model."""

    frequency: Float[Tensor, "kv_head frequency"]
    orders: Int[Tensor, "kv_head draw frequency"]
    terms: int

    @classmethod
    def of(
        cls, sampled: SampledCall, orders: Int[Tensor, "draw kv_head frequency"]
    ) -> "_Waves":
        kv_heads = sampled.k.shape[1]
        inv_freq = sampled.planes.of_keys(kv_heads).inv_freq
        frequency = on_device(inv_freq, sampled.k.device).to(sampled.k)
        return cls(
            frequency=frequency.expand(kv_heads, -1),
            orders=orders.transpose(0, 1).to(sampled.k.device),
            terms=sampled.planes.terms,
        )

    def at(
        self, heads: slice, distance: Float[Tensor, "*shape"]
    ) -> Float[Tensor, "*kv_head_and_shape draw side"]:
        """The sides of exp(-i w d) at each distance d, in every draw."""
        frequency = self.frequency[heads]
        orders = self.orders[heads]
        angle = distance.flatten(1)[..., None] * -frequency[:, None]
        index = orders.flatten(1)[:, None].expand(-1, angle.shape[1], -1)
        wave = torch.polar(torch.ones_like(angle), angle).gather(-1, index)
        wave = wave.view(*wave.shape[:2], *orders.shape[1:])
        wave = pad(wave, (0, self.terms - frequency.shape[-1]), value=1.0)
        return torch.view_as_real(wave).flatten(-2).unflatten(1, distance.shape[1:])


@dataclass(frozen=True)
class _KeysOfRows:
    """Some rows, and the keys that they read at each sampled offset, for all heads or by head.

    `key` is the index of a key. `bias` is the logarithm of the number of keys that it
    represents, or a score that hides it. `evenly` is the share of these keys among the keys
    that are not sinks.
    """

    rows: Int[Tensor, " row"]
    key: Int[Tensor, "sample row"]
    bias: Float[Tensor, "shared sample row"]
    evenly: Float[Tensor, "shared sample row"]


class _KeyReader:
    """The keys at sampled offsets, and the sinks, in a list of the keys of all sequences.

    `sample` is the index of each sampled offset in the masses by offset. `sink` are the indices
    of the sinks of each row, and `behind` the distances of the row from them.
    """

    def __init__(
        self, sampled: SampledCall, table: OffsetRows, samples: Samples
    ) -> None:
        k = sampled.k
        self.context = k.shape[2]
        self.visibility = sampled.device_visibility.flatten(len(sampled.q))
        self.integer_offset = samples.offset
        self.offset = samples.offset.to(k)
        self.sample = ((samples.offset >= 0).cumsum(0) - 1).clamp(min=0)
        self.size = samples.size.to(k)
        self.log_size = self.size.log()
        self.others = table.others
        row = torch.arange(len(self.visibility.position[0]), device=k.device)
        # The index of the first key of each row's sequence.
        self.first_key = row // sampled.position.shape[1] * self.context
        self.sink = table.sinks.key + self.first_key[:, None]
        distance = self.visibility.position[0][:, None] - table.sinks.key
        self.behind = distance.to(k)
        by_head = (sampled.sink_kind > 0).flatten(1, 2)
        self.is_sink = by_head.transpose(0, 1).flatten(1)

    def read(self, rows: Int[Tensor, " row"], count: int) -> _KeysOfRows:
        """The keys of some rows at the first `count` sampled offsets."""
        offset = self.integer_offset[:count]
        position = self.visibility.position[0, rows] - offset[:, None]
        exists = (position >= 0) & (position < self.context)
        position = position.clamp(0, self.context - 1)
        if self.visibility.mask is None:
            seen = exists & (position >= self.visibility.first[0, rows])
        else:
            sees = self.visibility.mask[0, rows].gather(1, position.mT).mT
            seen = exists & sees
        key = self.first_key[rows] + position
        counted = seen & ~self.is_sink[:, key]
        bias = torch.where(counted, self.log_size[:count, None], HIDDEN)
        others = self.others[:, None, rows].clamp(min=1).to(self.size)
        evenly = counted * self.size[:count, None] / others
        return _KeysOfRows(rows, key, bias, evenly)


@dataclass(frozen=True)
class _HeadDraws:
    """Masses by offset and on sinks, information and push of some heads in all draws.

    The axes are [kv_head, group, draw, ...], or [draw, head, ...] after `by_draw`.
    """

    by_offset: Float[Tensor, "*heads offset"]
    on_sinks: Float[Tensor, "*heads row sink"]
    information: Float[Tensor, "*heads"]
    push: Float[Tensor, "*heads term"]

    def by_draw(self) -> "_HeadDraws":
        return _HeadDraws(
            by_offset=self.by_offset.flatten(0, 1).transpose(0, 1),
            on_sinks=self.on_sinks.flatten(0, 1).transpose(0, 1),
            information=self.information.flatten(0, 1).transpose(0, 1),
            push=self.push.flatten(0, 1).transpose(0, 1),
        )


def _concatenate(parts: Sequence[_HeadDraws], dim: int) -> _HeadDraws:
    return _HeadDraws(
        by_offset=torch.cat([x.by_offset for x in parts], dim),
        on_sinks=torch.cat([x.on_sinks for x in parts], dim),
        information=torch.cat([x.information for x in parts], dim),
        push=torch.cat([x.push for x in parts], dim),
    )


RowQueries = Complex[Tensor, "kv_head group row pair"]


class _AttendingHeads:
    """Some heads in all draws, and the running sums over the rows that were added."""

    def __init__(
        self,
        draws: Draws,
        heads: slice,
        members: slice,
        waves: Float[Tensor, "sample kv_head 1 draw side"],
    ) -> None:
        self.draws = draws
        self.heads = heads
        self.members = members
        self.q = draws.q[heads, members]
        self.k = draws.k[heads]
        self.waves = waves.expand(-1, -1, self.q.shape[1], -1, -1)
        shape = self.waves.shape[1:4]
        zeros = waves.new_zeros
        self.by_offset = zeros(*shape, draws.table.counts.number)
        self.on_sinks = zeros(*shape, *draws.table.sinks.key.shape[1:])
        self.information = zeros(shape)
        self.push = zeros(self.waves.shape)

    def result(self) -> _HeadDraws:
        by_side = self.push.mul_(self.waves).sum(0)
        push = by_side.unflatten(-1, (-1, 2)).sum(-1)
        return _HeadDraws(self.by_offset, self.on_sinks, self.information, push)

    def add(self, keys: _KeysOfRows) -> None:
        """Add the attention of some rows."""
        count = len(keys.key)
        weight = self.draws.weight[keys.rows]
        q = self.q[:, :, keys.rows]
        features = self._features(keys, q)
        scores = self._scores(keys, q, features)
        attention = scores.softmax(0)
        self.information += self._gain(keys, scores, attention) @ weight
        attention *= weight
        at_sinks = attention[count:].movedim(0, -1)
        self.on_sinks[:, :, :, keys.rows] = at_sinks
        at_keys = attention[:count]
        by_sample = at_keys.sum(-1).movedim(0, -1)
        self.by_offset.index_add_(3, self.draws.keys.sample[:count], by_sample)
        evenly = self._of_heads(keys.evenly).permute(2, 0, 1, 3)[:, :, :, None]
        at_keys.addcmul_(evenly, at_keys.sum(0), value=-1)
        self.push[:count].flatten(0, 2).baddbmm_(at_keys.flatten(0, 2), features)

    def _features(
        self, keys: _KeysOfRows, q: RowQueries
    ) -> Float[Tensor, "sample_and_head row side"]:
        """The sides of c_f of each row and key."""
        read = self.k.index_select(1, keys.key.flatten())
        by_sample = read.unflatten(1, (len(keys.key), -1)).transpose(0, 1)
        return self.draws.terms.sides(q, by_sample[:, :, None]).flatten(0, 2)

    def _scores(
        self,
        keys: _KeysOfRows,
        q: RowQueries,
        features: Float[Tensor, "sample_and_head row side"],
    ) -> Float[Tensor, "key kv_head group draw row"]:
        """Scores of the sampled keys and of all sinks, plus log of the keys they represent."""
        count = len(keys.key)
        sinks = self.draws.table.sinks.key.shape[-1]
        shape = (*self.waves.shape[1:4], len(keys.rows))
        scores = self.waves.new_empty(count + sinks, *shape)
        of_keys = scores[:count].flatten(0, 2)
        torch.bmm(self.waves[:count].flatten(0, 2), features.mT, out=of_keys)
        scores[count:] = self._sink_scores(keys.rows, q)
        scores = self.draws.call.squash(scores)
        bias = self._of_heads(keys.bias).permute(2, 0, 1, 3)
        scores[:count] += bias[:, :, :, None]
        is_no_sink = self._of_heads(self.draws.table.sinks.kind[:, keys.rows]) == 0
        hidden = is_no_sink.permute(3, 0, 1, 2).float() * HIDDEN
        scores[count:] += hidden[:, :, :, None]
        return scores

    def _sink_scores(
        self, rows: Int[Tensor, " row"], q: RowQueries
    ) -> Float[Tensor, "sink kv_head group draw row"]:
        sink = self._of_heads(self.draws.keys.sink[:, rows])
        index = sink.flatten(2).expand(len(self.k), -1, -1)[..., None]
        k = self.k[:, None].expand(-1, index.shape[1], -1, -1)
        k = k.gather(2, index.expand(-1, -1, -1, self.k.shape[-1]))
        k = k.unflatten(2, sink.shape[2:])
        features = self.draws.terms.sides(q[:, :, :, None], k)
        behind = self._of_heads(self.draws.keys.behind[:, rows])
        scores = self.draws.waves.at(self.heads, behind) @ features[..., None]
        return scores[..., 0].permute(3, 0, 1, 4, 2)

    def _gain(
        self, keys: _KeysOfRows, scores: Tensor, attention: Tensor
    ) -> Float[Tensor, "kv_head group draw row"]:
        """KL(A || U) of each row in nats. A sampled key has the attention of several keys."""
        count = len(keys.key)
        entropy = scores.amax(0) - attention.amax(0).log()
        entropy -= vecdot(attention, scores, dim=0)
        log_size = self.draws.keys.log_size[:count]
        entropy += torch.tensordot(log_size, attention[:count], 1)
        log_keys = self._of_heads(self.draws.log_keys[:, keys.rows])
        return log_keys[:, :, None] - entropy

    def _of_heads(
        self, x: Shaped[Tensor, " shared *shape"]
    ) -> Shaped[Tensor, " _ _ *shape"]:
        """A table by these heads [kv_head, group, ...]; both axes are 1 if heads share it."""
        if len(x) == 1:
            return x[None]
        return x.unflatten(0, (-1, self.draws.q.shape[1]))[self.heads, self.members]
