"""Heads of a live model give zero, their mean, or another sequence's output while a block runs.

with rl.silence_heads(model, "2.3,4.*", to="mean", text=reference):
    model(tokens)
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ropelens.attention.call import AttentionCall
from ropelens.errors import BadArgument, Whole, public
from ropelens.model.as_live_model import Model, as_live_model
from ropelens.model.attention_hooks import HeadSilence
from ropelens.model.live_model import LiveModel
from ropelens.profiles.model_text import model_text
from ropelens.text.rows import generator_of
from ropelens.text.text import Text
from ropelens.text.tokenize import TextInput

Replacement = Literal["zero", "mean", "resample"]
"""What stands in for the output of a head."""


@dataclass(frozen=True, eq=False)
class Silence(AbstractContextManager[None]):
    """Heads that are silenced in a block; see `silence_heads`, whose arguments these are."""

    live: LiveModel
    heads: str
    to: Replacement
    text: Text | None
    seed: int
    blocks: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> None:
        self.blocks.enter_context(self.live.silence(self.outputs()))

    def __exit__(self, *error: Any) -> None:
        self.blocks.close()

    def outputs(self) -> HeadSilence:
        """What stands in for the heads' outputs; means are taken under what is open now."""
        chosen, to = self.live.heads_of(self.heads), self.to
        means = None if self.text is None else _means(self.live, self.text)

        def silenced(
            layer: int, output: Tensor, real: Tensor, *, past: int
        ) -> tuple[Tensor, Tensor] | None:
            of_layer = chosen[layer]
            if not of_layer.any():
                return None
            if to == "zero":
                return of_layer, torch.zeros_like(output)
            if to == "resample":
                return of_layer, output[_partners(real.expand(output.shape[:2]), self.seed)]
            if means is not None:
                return of_layer, means[layer].to(output).expand(output.shape)
            if past:
                raise BadArgument(
                    "The mean of a batch cannot be taken where a cache holds a part of it.",
                    seen=f"{output.shape[1]} tokens after {past} in the cache",
                    hint="text=, to take the mean over a text, or use_cache=False",
                )
            weight = real.expand(output.shape[:2])[..., None, None].double()
            mean = (output * weight).sum((0, 1)) / weight.sum()
            return of_layer, mean.to(output.dtype).expand(output.shape)

        return silenced


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
    """The outputs of `heads` of `model` are replaced while the block runs.

    `heads` is a list such as "2.3,4.*" (layer.head; with grouped keys, query heads). `to` says
    what replaces a head's output, before the output projection:

    - "zero": 0. It may be far from every output of the head, and what later layers make of
      that is part of the effect.
    - "mean": the mean of its output over the real tokens of `text`, which runs once when the
      block opens, under the edits that are open then (mean ablation: Wang et al. 2023, arXiv
      2211.00593, section 2). Without `text` it is the mean over the real tokens of each batch.
    - "resample": its output at the same position of another sequence of the batch, by a
      permutation that leaves none in its place, drawn with `seed` and the same for all heads
      and batches of a size. The sequences have one length.

    Blocks may be opened again, stand among the `edits` of `ropelens.evaluate`, and nest beside
    `edit_rope` and `observe`, which shows the output as the head made it. Of two blocks that
    silence a head the inner one counts. Restored on exit, on errors too. All other heads keep
    every bit. The model need not rotate, and may generate.

    Raises `BadArgument` for heads or tokens that the model does not have; when the model runs,
    for "resample" of one sequence (`profile` and `capture` run one at a time; `evaluate` takes
    a `batch_size`) or of several lengths, and for the mean of a batch of which a cache holds a
    part. Raises `UnsupportedModel` for a model that hides its attention.
    """
    live = as_live_model(model)
    if text is not None and to != "mean":
        raise BadArgument('text is only for to="mean".', hint='to="mean" with text=')
    live.heads_of(heads)
    with live.without_hooks():  # refuse attention that is hidden
        live.record_calls(torch.ones(1, 1, dtype=torch.long), lambda call: None)
    reference = None if text is None else model_text(live, text, tokenizer=tokenizer)
    return Silence(live, heads, to, reference, int(seed))


def _partners(real: Bool[Tensor, "sequence row"], seed: int) -> Int[Tensor, " sequence"]:
    """Another sequence for each: one cycle through all of them, in a random order."""
    if len(real) == 1 or not (real == real[:1]).all():
        raise BadArgument(
            "A head is resampled from another sequence of the batch, of the same length.",
            seen=f"sequences of {', '.join(map(str, real.sum(1).tolist()[:8]))} tokens",
            hint="a batch_size of two or more that divides their number, or "
            'to="mean" with text=',
        )
    order = torch.randperm(len(real), generator=generator_of(seed))
    return torch.empty_like(order).scatter_(0, order, order.roll(1)).to(real.device)


def _means(live: LiveModel, text: Text) -> Mapping[int, Float[Tensor, "head feature"]]:
    """Mean output of every head over the real tokens of `text`, by layer."""
    sums: dict[int, Tensor] = {}
    for index in range(len(text)):
        sequence = text[[index]]
        totals = live.record_calls(
            sequence.ids, partial(_sum_rows, real=sequence.real[0]), hidden=sequence.hidden
        )
        sums = {layer: sums.get(layer, 0) + total for layer, total in totals.items()}
    return {layer: total / int(text.real.sum()) for layer, total in sums.items()}


def _sum_rows(call: AttentionCall, real: Bool[Tensor, " row"]) -> Float[Tensor, "head feature"]:
    return call.output[0, real.to(call.output.device)].double().sum(0)
