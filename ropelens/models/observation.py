"""Every attention call of a live model, shown to a function of one's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn
from transformers import PreTrainedModel

from ropelens.models.door import by_itself
from ropelens.models.rotation import inv_freq_by_head, planes_now, read_layers
from ropelens.models.subject import as_subject
from ropelens.rope.planes import Planes
from ropelens.statistics.call import AttentionCall


@contextmanager
def observe(
    model: nn.Module, function: Callable[[AttentionCall, Planes], object]
) -> Iterator[None]:
    """Hand every attention call of `model` to `function(call, planes)` while the block runs.

    A statistic of one's own, here the mean length of every query plane by head:

        norms = {}

        def measure(call, planes):  # call.query [batch, head, position, coordinate]
            real, imaginary = call.query[..., planes.first], call.query[..., planes.second]
            norms[call.layer] = real.hypot(imaginary).mean((0, 2))  # [head, frequency]

        with rl.observe(model, measure):
            model(tokens)

    `call` (`AttentionCall`) has the layer, queries and keys with their rotation, values, the
    scale, and the keys that each row sees. Its tensors are the model's own, to be read and
    not written; clone what is kept, for a static cache is written over. `planes` (`Planes`)
    says how the layer rotates: measured as `measure_rope` does when the block opens.

    What is seen is what the model computes: under `edit_rope`, opened before or inside, the
    edited queries and keys, and `planes` as edited, with `inv_freq` NaN where an edit
    makes heads of the layer differ; `call.key` then has a head for each query head. Under
    `silence_heads` `call.output` is what the heads gave before they were silenced. The output
    of the model keeps every bit. Blocks nest, and are closed on errors too.

    Generation is seen step by step: with a key-value cache a call has its new rows alone,
    and all keys (`call.past`; under a sliding window the cache may hold the last ones alone).

    `model` is a transformers model or a TransformerLens `TransformerBridge`. Raises
    `UnsupportedModel` as `measure_rope` does, and, when the model runs, for a cache of a RoPE
    that changes with the length, past the length that it was trained for.
    """
    subject = as_subject(model)
    with by_itself(subject.model):
        own = [layer.planes for layer in read_layers(subject)]

    def show(call: AttentionCall) -> None:
        function(call, _planes_of(call, subject.model, own[call.layer]))

    with subject.observe(show):
        yield


def _planes_of(call: AttentionCall, model: PreTrainedModel, own: Planes) -> Planes:
    """How the layer rotates in this call, under an edit that may be open."""
    planes = planes_now(model, call.layer, own, continued=call.past > 0)
    inv_freq = inv_freq_by_head(model, call.layer, planes, length=call.key.shape[2])
    same = (inv_freq == inv_freq[0]).all(0)
    return replace(planes, inv_freq=torch.where(same, inv_freq[0], math.nan))
