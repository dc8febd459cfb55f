"""Change of the attention of each head from one model to another one, on the same tokens."""

import math

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float
from torch import Tensor

from ropelens.attention.attention_change import attention_change as change_of_calls
from ropelens.attention.call import AttentionCall
from ropelens.errors import BadArgument
from ropelens.model.live_model import LiveModel
from ropelens.profiles.measurement import Batch, Measured, Measurement
from ropelens.runtime.progress import ProgressOption, Stage, display_of
from ropelens.text.rows import HowMany
from ropelens.text.tokenize import TextInput


def attention_change(
    first_model: Measured,
    second_model: Measured,
    text: TextInput,
    *,
    rows: HowMany = "auto",
    seed: int = 0,
    progress: ProgressOption = None,
) -> xr.DataArray:
    """Change of the attention [layer, head] from the first to the second model, in bits.

    It is the mean over rows of KL(A of the first model || A of the second model), as in
    `ropelens.evaluate` for an edit; NaN for heads that do not attend or see other keys. Both
    models have the same layers and heads, and are on the same device. One sequence runs at a
    time, and only its queries and keys are stored.

    Raises `BadArgument` for models of different shapes, and the errors of `profile`.
    """
    first = Measurement.of(first_model, text, rows=rows, seed=seed)
    second = Measurement.of(second_model, first.text, rows=rows, seed=seed)
    _require_same_heads(first.live, second.live)
    # RoPE that changes with the length needs the length of the whole text.
    depends = first.live.depends_on_length or second.live.depends_on_length
    width = first.text.context if depends else None
    attends = first.live.attending_heads
    nats = torch.zeros(attends.shape, dtype=torch.float64, device="cpu")
    weight = 0.0
    sequences = range(len(first.text))
    stage = Stage("comparing attention", len(sequences), "sequences")
    with display_of(progress)(stage) as advance:
        for number in sequences:
            batch = first.batch([number], width=width)
            for layer, change in _changes(first.live, second.live, batch).items():
                nats[layer, : len(change)] += change
            weight += float(batch.rows.by_position(batch.text.ids.shape[1]).sum())
            advance(1)
    bits = nats / (weight * math.log(2))
    layers, heads = bits.shape
    return xr.DataArray(
        bits.where(attends, torch.nan).numpy(),
        coords={"layer": np.arange(layers), "head": np.arange(heads)},
        dims=("layer", "head"),
        name="attention_change",
        attrs={
            "long_name": "divergence from the attention of the first model",
            "units": "bit",
        },
    )


def _changes(
    first: LiveModel, second: LiveModel, batch: Batch
) -> dict[int, Float[Tensor, " head"]]:
    """Sum over the rows of the batch of the divergence of each head, by layer, in nats."""
    text = batch.text
    calls = first.record_calls(
        text.ids, AttentionCall.without_values, hidden=text.hidden
    )
    sequences, width = text.ids.shape
    every_row = torch.ones(sequences, 1, width, dtype=torch.bool, device="cpu")

    def compare(call: AttentionCall) -> Float[Tensor, " head"]:
        before = calls.pop(call.layer)
        return change_of_calls(before, call, batch.rows, every_row)[0]

    return second.record_calls(text.ids, compare, hidden=text.hidden)


def _require_same_heads(first: LiveModel, second: LiveModel) -> None:
    """Raise `BadArgument` unless the same heads of the same layers attend."""
    if torch.equal(first.attending_heads, second.attending_heads):
        return
    counts = [
        f"{live.layers} layers of {live.heads} heads, {int(live.attending_heads.sum())} of "
        "which attend"
        for live in (first, second)
    ]
    raise BadArgument(
        "The attention of these models cannot be compared.",
        seen=" and ".join(counts),
        hint="two models of the same shape, such as a base and its recalibrated model",
    )
