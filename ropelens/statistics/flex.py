"""The engine "flex": sums by torch's flex attention, which on a GPU holds no matrix of scores.

With keys in the place of values flex attention gives A K, and beside it the log norm of every
row. The rest are derivatives of log norms, which are means under A: by a bias of the scores at
each offset the attention there, by a factor of each row's scores their mean. On CUDA torch
compiles all of it. On a CPU it runs eagerly and holds every score, which serves to hold its
numbers to those of blocks. It has not been run on a GPU yet.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ropelens.errors import BadArgument
from ropelens.statistics.block import Block, RowsOfCall

ENGINES = ("blocks", "flex")
"""What sums attention: blocks of scores, on any device; or flex attention, made for GPUs."""


def check_engine(name: str) -> None:
    """Raise `BadArgument` for an engine that does not exist, or not in this torch."""
    if name not in ENGINES:
        raise BadArgument(
            f"There is no engine {name!r}.", attempt=f"one of {', '.join(ENGINES)}"
        )
    if name == "flex":
        try:
            from torch.nn.attention.flex_attention import AuxRequest  # noqa: F401
        except ImportError as error:
            raise BadArgument(
                "The engine flex needs torch 2.9 or newer.",
                seen=f"torch {torch.__version__}",
                attempt="the engine blocks",
            ) from error


@dataclass(frozen=True)
class _Output:
    """What flex attention gives of all rows; `by_offset` is weighted and without position 0."""

    read: Float[Tensor, "batch kv_head group row coordinate"]
    log_norm: Float[Tensor, "batch kv_head group row"]
    mean_score: Float[Tensor, "batch kv_head group row"]
    by_offset: Float[Tensor, "batch kv_head group offset"]


class FlexBlock(Block):
    """All rows of an attention call as one block, whose matrices are not made.

    Statistics read it as any block; one that asks for `scores` or `attention` makes them, of
    all rows at once. `by_offset` takes the place of sums of the attention by offset.
    """

    def __init__(self, rows: RowsOfCall) -> None:
        super().__init__(rows, slice(0, rows.q.shape[3]), slice(0, rows.q.shape[1]))

    @property
    def read(self) -> Float[Tensor, "batch kv_head group row coordinate"]:
        """A K."""
        return self._output.read

    @property
    def log_norm(self) -> Float[Tensor, "batch kv_head group row"]:
        """log sum_j exp(L_ij)."""
        return self._output.log_norm

    @property
    def expected_score(self) -> Float[Tensor, "batch kv_head group row"]:
        """sum_j A_ij L_ij; 0 for rows without weight."""
        return self._output.mean_score

    @property
    def by_offset(self) -> Float[Tensor, "batch kv_head group offset"]:
        """Weighted sum of the attention at each offset, without position 0."""
        return self._output.by_offset

    def attention_on(
        self, columns: Int[Tensor, " column"]
    ) -> Float[Tensor, "batch kv_head group row column"]:
        """A_ij on some of the block's keys, from their scores and the log norms."""
        k = self.call.scale * self.k[:, :, columns]
        scores = self._capped((self.q.flatten(2, 3) @ k.mT).unflatten(2, self.q.shape[2:4]))
        key, row = columns + self.keys.start, self.position.to(self.k.device)[..., None]
        seen = (key <= row) & (key >= self.call.start.to(self.k.device)[row])
        scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
        return (scores - self.log_norm[..., None]).exp()

    @cached_property
    def _output(self) -> _Output:
        from torch.nn.attention.flex_attention import AuxRequest, create_block_mask

        batch, _, _, count, _ = self.q.shape
        q, low, context = self.q.flatten(1, 2), self.keys.start, self._rows.context
        position = self.position.to(q.device)
        start = self.call.start.to(q.device)[position].expand(batch, -1).contiguous()
        position = position.expand(batch, -1).contiguous()
        softcap, weight = self.call.softcap, self.weight[:, None]

        def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (j + low <= position[b, i]) & (j + low >= start[b, i])

        def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            if softcap is not None:
                s = softcap * torch.tanh(s / softcap)
            offset = (position[b, i] - j - low).clamp(min=0)  # of a key that is seen
            at = torch.where(j + low > 0, offset, context)
            return s * factor[b, h, i] + bias[b, h, at]

        with torch.enable_grad():
            bias = q.new_zeros(*q.shape[:2], context + 1, requires_grad=True)
            factor = q.new_ones(*q.shape[:3], requires_grad=True)
            shared = len(self.position)
            mask = create_block_mask(sees, shared, None, count, len(self.keys), q.device)
            read, aux = _flex_attention(q.device.type)(
                q,
                self.k,
                self.k,
                score_mod=score,
                block_mask=mask,
                scale=self.call.scale,
                enable_gqa=self.k.shape[1] < q.shape[1],
                return_aux=AuxRequest(lse=True),
            )
            by_factor, by_bias = torch.autograd.grad((weight * aux.lse).sum(), [factor, bias])
        found = {
            "read": read,
            "log_norm": aux.lse,
            "mean_score": torch.where(weight > 0, by_factor / weight, 0),
            "by_offset": by_bias[..., :context],
        }
        heads = self.q.shape[1:3]
        return _Output(**{name: x.detach().unflatten(1, heads) for name, x in found.items()})


@functools.cache
def _flex_attention(device: str) -> Callable[..., Any]:
    """Flex attention, compiled where that makes one kernel of it and its derivatives."""
    from torch.nn.attention.flex_attention import flex_attention

    if device == "cuda":
        return torch.compile(flex_attention)

    def eager(*args: Any, **options: Any) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="flex_attention called without")
            return flex_attention(*args, **options)

    return eager
