"""One attention call with hooks: change its inputs, run it, observe it, silence its heads."""

import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from ropelens.attention.call import AttentionCall
from ropelens.model.cache_positions import (
    CallPositions,
    CallRows,
    cache_of,
    call_positions,
    call_rows,
    places_in_sequence,
    rounds_keys,
)
from ropelens.model.hook_blocks import Hooks
from ropelens.model.intervention import (
    AttentionInput,
    HeadInputs,
    HeadOutputs,
    Intervention,
)
from ropelens.model.masks import only_hides_keys, real_rows, visible_keys

AttentionResult = tuple[Tensor, Tensor | None]
"""The output [batch, row, head, feature] and, if the function returns them, the weights."""

AttentionFunction = Callable[..., AttentionResult]


@dataclass(frozen=True)
class AttentionArguments:
    """The arguments of an attention function of transformers."""

    module: nn.Module
    query: Float[Tensor, "batch head row coordinate"]
    key: Float[Tensor, "batch _ slot coordinate"]
    value: Float[Tensor, "batch _ slot feature"]
    mask: Tensor | None
    options: Mapping[str, Any]

    @property
    def layer(self) -> int:
        return self.module.layer_idx  # type: ignore[return-value]

    def positions(self, rows: CallRows) -> CallPositions:
        """Positions of the rows and keys; refuses a cache with unknown positions."""
        given = self.options.get("position_ids")
        return call_positions(self.module, rows, self.key, given, self.mask)


@dataclass(frozen=True)
class TokenPlaces:
    """Rows or keys of a call: the index of each in its sequence, and its position.

    Keys may have more positions, for the empty slots of a static cache.
    """

    tokens: Int[Tensor, "_ token"]
    positions: Int[Tensor, "_ slot *axis"]

    def inputs(self, layer: int, name: AttentionInput, x: Tensor) -> HeadInputs:
        return HeadInputs(layer, name, x, self.tokens, self.positions)


@dataclass(frozen=True)
class CallPlaces:
    """The places of the rows and of the keys of a call."""

    of_rows: TokenPlaces
    of_keys: TokenPlaces

    @classmethod
    def of(cls, call: AttentionArguments, rows: CallRows) -> "CallPlaces":
        positions = call.positions(rows)
        of_tokens = positions.of_keys[:, : rows.keys.stop]
        key_tokens = places_in_sequence(of_tokens, rows.dropped)
        row_tokens = key_tokens[:, rows.keys.start :]
        return cls(
            TokenPlaces(row_tokens, positions.of_rows),
            TokenPlaces(key_tokens, positions.of_keys),
        )


def call_with_hooks(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    hooks: Hooks,
    run: AttentionFunction,
    **options: Any,
) -> AttentionResult:
    """The result of the attention function `run`, with the hooks of the module."""
    call = AttentionArguments(module, query, key, value, attention_mask, options)
    rows = call_rows(module, query.shape[2], key.shape[2])
    if hooks.input_changes:
        places = CallPlaces.of(call, rows)
        row_tokens = places.of_rows.tokens
        call = change_inputs(call, hooks.input_changes, places)
    else:
        last = rows.past + len(rows.keys)
        row_tokens = torch.arange(rows.past, last, device="cpu")[None]
        keeps_all = rounds_keys(module) and not rows.dropped
        if hooks.observers and cache_of(module) is not None and not keeps_all:
            call.positions(rows)  # records the keys; refuses a cache that drops keys
    output, weights = run(
        call.module, call.query, call.key, call.value, attention_mask, **options
    )
    real = real_rows(rows.keys, attention_mask).to(query.device)
    if hooks.observers:
        observe_call(call, rows, output, hooks, real)
    if hooks.interventions:
        outputs = HeadOutputs(call.layer, output, real, row_tokens)
        output = replace_outputs(hooks.interventions, outputs)
    return output, weights


def change_inputs(
    call: AttentionArguments, changes: Sequence[Intervention], places: CallPlaces
) -> AttentionArguments:
    """The call with changed queries, keys and values, in the order of the interventions.

    If keys or values of the heads of a group differ, each query head has its own.
    """
    query = call.query
    key = call.key
    value = call.value
    for change in changes:
        query = change.change_input(places.of_rows.inputs(call.layer, "query", query))
        key = change.change_input(places.of_keys.inputs(call.layer, "key", key))
        value = change.change_input(places.of_keys.inputs(call.layer, "value", value))
    heads = max(key.shape[1], value.shape[1])
    module = call.module
    if heads != call.key.shape[1]:
        module = copy(module)
        module.num_key_value_groups = 1  # type: ignore[assignment]
    return replace(
        call,
        module=module,
        query=query,
        key=key.repeat_interleave(heads // key.shape[1], dim=1),
        value=value.repeat_interleave(heads // value.shape[1], dim=1),
    )


def observe_call(
    call: AttentionArguments,
    rows: CallRows,
    output: Float[Tensor, "batch row head feature"],
    hooks: Hooks,
    real: Bool[Tensor, "_ row"],
) -> None:
    """Check a call against the output of the model, and show it to the observers."""
    observed = observed_call(call, rows, output)
    # Only the model uses autocast.
    with torch.autocast(call.query.device.type, enabled=False):
        if hooks.output_check is not None and not call.options.get("dropout"):
            plain_mask = only_hides_keys(call.mask)
            hooks.output_check(observed, real, plain_mask=plain_mask)
        for observer in hooks.observers:
            observer(observed)


def observed_call(
    call: AttentionArguments,
    rows: CallRows,
    output: Float[Tensor, "batch row head feature"],
) -> AttentionCall:
    """The call as observers see it, without empty slots of a static cache."""
    scale = call.options.get("scaling")
    if scale is None:
        scale = 1 / math.sqrt(call.query.shape[-1])
    sinks = call.options.get("s_aux")
    window = call.options.get("sliding_window")
    return AttentionCall(
        layer=call.layer,
        query=call.query.detach(),
        key=call.key[:, :, : rows.keys.stop].detach(),
        value=call.value[:, :, : rows.keys.stop].detach(),
        output=output.detach(),
        scale=float(scale),
        softcap=call.options.get("softcap"),
        sink_logits=None if sinks is None else sinks.detach(),
        visibility=visible_keys(rows.keys, call.mask, window),
        window=window,
    )


def replace_outputs(
    interventions: Sequence[Intervention], outputs: HeadOutputs
) -> Float[Tensor, "batch row head feature"]:
    """The outputs of a layer after all interventions, which see the output of the model."""
    output = outputs.output
    for intervention in interventions:
        replaced = intervention.replace_output(outputs)
        if replaced is not None:
            heads = replaced.heads.to(output.device)[:, None]
            output = torch.where(heads, replaced.output, output)
    return output
