"""One attention call as the model made it, its attention matrix, and every term of a head."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ropelens.attention.visibility import SequenceIndex, Visibility
from ropelens.caches import on_device


@dataclass(frozen=True)
class AttentionCall:
    """The inputs of one layer's attention, and the output of the model's own implementation.

    `query` and `key` carry their rotation. A score is `scale` q . k, or with a `softcap`
    softcap tanh(scale q . k / softcap). `sink_logits` (gpt-oss) take part in the softmax
    without a key. `visibility` has the position of each row and the keys that the row sees;
    `call.visibility.sees()` is the table [sequence or 1, row, key]. `window` is the number of
    keys that a row sees at most, if the model passes it to its attention function.
    """

    layer: int
    query: Float[Tensor, "batch head row coordinate"]
    key: Float[Tensor, "batch kv_head key coordinate"]
    value: Float[Tensor, "batch kv_head key feature"]
    output: Float[Tensor, "batch row head feature"]
    scale: float
    softcap: float | None
    sink_logits: Float[Tensor, " head"] | None
    visibility: Visibility
    window: int | None = None

    @property
    def past(self) -> int:
        """Number of keys before the key of the first row, for example from a cache."""
        return int(self.visibility.position[0, 0]) - self.visibility.keys.start

    def of_rows(self, index: Int[Tensor, " some"]) -> "AttentionCall":
        """The call of some rows, by their indices in `query`."""
        return replace(
            self,
            query=self.query[:, :, index],
            output=self.output[:, index],
            visibility=self.visibility.rows(index[None]),
        )

    def of_heads(self, heads: Int[Tensor, " head"]) -> "AttentionCall":
        """The call of some query heads, each with the key and value that it reads."""
        read = heads // (self.query.shape[1] // self.key.shape[1])
        sinks = self.sink_logits
        return replace(
            self,
            query=self.query[:, heads.to(self.query.device)],
            key=self.key[:, read.to(self.key.device)],
            value=self.value[:, read.to(self.value.device)],
            output=self.output[:, :, heads.to(self.output.device)],
            sink_logits=None if sinks is None else sinks[heads.to(sinks.device)],
        )

    def of_sequences(self, index: SequenceIndex) -> "AttentionCall":
        """The call of some sequences. `index` may be on the host or on the device."""
        device_index = index
        if isinstance(index, Tensor):
            device_index = on_device(index, self.key.device)
        return replace(
            self,
            query=self.query[device_index],
            key=self.key[device_index],
            value=self.value[device_index],
            output=self.output[device_index],
            visibility=self.visibility.of_sequences(index),
        )

    def without_values(self) -> "AttentionCall":
        """The call without its values and its output, whose memory becomes free."""
        return replace(
            self,
            value=self.key[..., :0],
            output=self.query[..., :0].transpose(1, 2),
        )

    def squash(self, scores: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """`scores` after the model's soft-cap, if it has one; changed in place."""
        if self.softcap is None:
            return scores
        return scores.div_(self.softcap).tanh_().mul_(self.softcap)


def attention_map(call: AttentionCall) -> Float[Tensor, "batch head row key"]:
    """Attention matrix of a short call. If there is a sink logit, rows sum to less than 1."""
    dtype = torch.promote_types(call.query.dtype, torch.float32)
    group = call.query.shape[1] // call.key.shape[1]
    key = call.key.to(dtype).repeat_interleave(group, dim=1)
    scores = call.squash(call.query.to(dtype) @ key.mT * call.scale)
    hidden = ~call.visibility.sees()[:, None]
    scores = scores.masked_fill(hidden.to(scores.device), -torch.inf)
    if call.sink_logits is None:
        return scores.softmax(-1)
    sink_logits = call.sink_logits.to(dtype)[None, :, None, None]
    with_sink = torch.cat([scores, sink_logits.expand(*scores.shape[:3], 1)], dim=-1)
    return with_sink.softmax(-1)[..., :-1]


def output_error(
    call: AttentionCall, weights: Float[Tensor, "batch head row key"]
) -> Float[Tensor, "batch row head feature"]:
    """A V minus the model's output, relative to the size of the output."""
    group = call.query.shape[1] // call.key.shape[1]
    value = call.value.to(weights.dtype).repeat_interleave(group, dim=1)
    ours = (weights @ value).transpose(1, 2)
    theirs = call.output.to(weights.dtype).reshape(ours.shape)
    return (ours - theirs) / theirs.norm().clamp(min=1e-30)
