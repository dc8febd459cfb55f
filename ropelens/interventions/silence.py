"""Silencing of heads: a block replaces the outputs of heads while it runs."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ropelens.arguments import Whole, public
from ropelens.attention.call import AttentionCall
from ropelens.errors import BadArgument
from ropelens.measured_rotation.probe import RotationProbe
from ropelens.model.as_live_model import Model, as_live_model
from ropelens.model.intervention import HeadOutputs, Intervention, ReplacedOutputs
from ropelens.model.live_model import LiveModel
from ropelens.profiles.checked_text import model_text
from ropelens.rope.select import HeadMask, heads_by_layer
from ropelens.text.rows import generator_of
from ropelens.text.text import Text
from ropelens.text.tokenize import TextInput

Replacement = Literal["zero", "mean", "resample"]


@dataclass(frozen=True, eq=False)
class Silence(Intervention, AbstractContextManager[None]):
    """A block in which heads are silenced, with the arguments of `silence_heads`.

    `means` are the mean outputs of the heads of each layer over `text`.
    """

    live: LiveModel
    heads: str
    to: Replacement
    text: Text | None
    seed: int
    means: Mapping[int, Float[Tensor, "head feature"]] | None = None
    blocks: ExitStack = field(default_factory=ExitStack, init=False)

    def __enter__(self) -> None:
        self.blocks.enter_context(self.live.intervene(self.measured()))

    def __exit__(self, *error: object) -> None:
        self.blocks.close()

    @cached_property
    def chosen(self) -> HeadMask:
        return _silenced_heads(self.live, self.heads)

    def measured(self) -> "Silence":
        """The silence with the means over its text, which runs under the open blocks."""
        if self.text is None:
            return self
        return replace(self, means=_mean_outputs(self.live, self.text))

    def replace_output(self, outputs: HeadOutputs) -> ReplacedOutputs | None:
        """Zeros, means or outputs of other sequences, for the silenced heads."""
        output = outputs.output
        heads = self.chosen[outputs.layer][: output.shape[2]]
        if not heads.any():
            return None
        if self.to == "zero":
            return ReplacedOutputs(heads, torch.zeros_like(output))
        if self.to == "resample":
            real = outputs.real.expand(output.shape[:2])
            return ReplacedOutputs(heads, output[_other_sequences(real, self.seed)])
        if self.means is None:
            mean = _batch_mean(outputs)
        else:
            mean = self.means[outputs.layer].to(output)
        return ReplacedOutputs(heads, mean.expand(output.shape))


@public
def silence_heads(
    model: Model,
    heads: str,
    *,
    to: Replacement = "zero",
    text: TextInput | None = None,
    tokenizer: Any = None,
    seed: Whole = 0,
) -> Silence:
    """Replace the outputs of `heads` of `model` while the block runs.

    `heads` is a list such as "2.3,4.*" (layer.head; with grouped keys, query heads). `to`
    selects the replacement for the output of a head before the output projection:

    - "zero": 0. The effect includes the response of later layers to an unusual input.
    - "mean": the mean output of the head over the real tokens of `text`, which runs when the
      block opens, under the open edits, or else of each batch (mean ablation: Wang et al. 2023,
      arXiv 2211.00593, section 2).
    - "resample": the output of the head at the same position of another sequence of the batch,
      which must have the same length. The permutation of the sequences is drawn with `seed`. It
      is the same for all heads and for all batches of a size.

    Blocks can be opened several times, can be `edits` of `ropelens.evaluate`, and nest with
    `edit_rope` and `observe` (which shows the original output of a head). If two blocks silence
    the same head, the inner block takes effect. The model is restored on exit, also after an
    error. Other heads keep every bit. The model may generate, and need not rotate.

    Raises `BadArgument` for heads or tokens that the model does not have and, when the model
    runs, for "resample" without another sequence of the same length in the batch (`evaluate`
    has a `batch_size`), and for the mean of a batch that is partly in a cache. Raises
    `UnsupportedModel` for a model that hides its attention.
    """
    live = as_live_model(model)
    if text is not None and to != "mean":
        raise BadArgument('text is only for to="mean".', hint='to="mean" with text=')
    _silenced_heads(live, heads)  # an error also if the model hides its attention
    reference = None if text is None else model_text(live, text, tokenizer=tokenizer)
    return Silence(live, heads, to, reference, int(seed))


def _silenced_heads(live: LiveModel, heads: str) -> HeadMask:
    return heads_by_layer(heads, live.attending_heads, RotationProbe(live).kind_names)


def _batch_mean(outputs: HeadOutputs) -> Float[Tensor, "head feature"]:
    """Mean output of every head over the real tokens of a batch without a cache."""
    output = outputs.output
    if outputs.tokens[:, 0].any():
        what = "The mean of a batch that is partly in a key-value cache is unknown."
        seen = f"{output.shape[1]} tokens after a cache"
        hint = "text=, to use the mean over a text, or use_cache=False"
        raise BadArgument(what, seen=seen, hint=hint)
    weight = outputs.real.expand(output.shape[:2])[..., None, None].double()
    mean = (output * weight).sum((0, 1)) / weight.sum()
    return mean.to(output.dtype)


def _other_sequences(
    real: Bool[Tensor, "sequence row"], seed: int
) -> Int[Tensor, " sequence"]:
    """Index of another sequence for each sequence, by one random cycle through the batch."""
    if len(real) == 1 or not (real == real[:1]).all():
        lengths = [str(length) for length in real.sum(1).tolist()[:8]]
        raise BadArgument(
            "Resampling a head needs another sequence of the same length in the batch.",
            seen=f"sequences of {', '.join(lengths)} tokens",
            hint='a batch_size of 2 or more that divides the text, or to="mean" with text=',
        )
    order = torch.randperm(len(real), generator=generator_of(seed), device="cpu")
    others = torch.empty_like(order).scatter_(0, order, order.roll(1))
    return others.to(real.device)


def _mean_outputs(
    live: LiveModel, text: Text
) -> Mapping[int, Float[Tensor, "head feature"]]:
    """Mean output of every head over the real tokens of `text`, by layer."""
    sums: dict[int, Tensor] = {}
    for index in range(len(text)):
        sequence = text[[index]]
        sum_rows = partial(_sum_rows, real=sequence.real[0])
        totals = live.record_calls(sequence.ids, sum_rows, hidden=sequence.hidden)
        for layer, total in totals.items():
            sums[layer] = sums.get(layer, 0) + total
    tokens = int(text.real.sum())
    return {layer: total / tokens for layer, total in sums.items()}


def _sum_rows(
    call: AttentionCall, *, real: Bool[Tensor, " row"]
) -> Float[Tensor, "head feature"]:
    """Sum of the outputs of every head of one sequence over its `real` rows."""
    return call.output[0, real.to(call.output.device)].double().sum(0)
