"""TransformerLens models: the same statistics, fed from the bridge's hooks.

TransformerLens itself is imported only to make a bridge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ropelens.attention.call import AttentionCall
from ropelens.attention.visibility import Visibility
from ropelens.errors import BadArgument, UnsupportedModel, explained
from ropelens.model.attention_hooks import (
    Hooks,
    Patch,
    hooked,
    hooks_of,
    silence_outputs,
)
from ropelens.model.live_model import LiveModel
from ropelens.runtime.devices import device_of

# In the order in which a block fires them; the last one says that the call is complete.
_HOOKS = {
    "value": "v.hook_out",
    "query": "hook_rot_q",
    "key": "hook_rot_k",
    "scores": "hook_attn_scores",
    "output": "o.hook_in",
}


class BridgeModel(LiveModel):
    """A `TransformerBridge`, run as it is and observed and edited at its hooks.

    A bridge reimplements attention step by step (eager, every score in memory), so its
    numbers agree with transformers' to rounding, not to the bit.
    """

    in_chunks = False

    def __init__(self, bridge: Any, tokenizer: Any = None) -> None:
        super().__init__(bridge.original_model, tokenizer)
        self.bridge = bridge

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        *,
        hidden: Tensor | None = None,
        last: int = 0,
    ) -> Tensor:
        """Logits [sequence, position, token] of whole sequences, all whatever `last` is."""
        inputs = self._inputs(hidden, positions)
        return self.bridge(tokens.to(self.device), **inputs, use_cache=False)

    def logits(self, tokens: Tensor, **options: Any) -> Iterator[tuple[int, Tensor]]:
        """All logits in one piece: a bridge has its head in its forward pass."""
        yield 0, self.forward(tokens, hidden=options["hidden"])

    @cached_property
    def _modules(self) -> list[Any]:
        return [self.bridge]

    @contextmanager
    def _hooked(self, change: Callable[[Hooks], Hooks]) -> Iterator[None]:
        """Hooks of ours stand at the bridge's while the block runs; the outermost adds them."""
        outermost = hooks_of(self.bridge) is None
        with ExitStack() as stack:
            for layer, block in enumerate(self.bridge.blocks if outermost else ()):
                calls = _Calls(self, layer, block.attn.original_component)
                begins = block.attn.register_forward_pre_hook(calls.begin, with_kwargs=True)
                stack.callback(begins.remove)
                hooks = {f"blocks.{layer}.attn.{hook}": part for part, hook in _HOOKS.items()}
                passed = [
                    (hook, partial(calls.come, part))
                    for hook, part in hooks.items()
                    if hook in self.bridge.hook_dict
                ]
                stack.enter_context(self.bridge.hooks(fwd_hooks=passed))
            with hooked(self._modules, change):
                yield


@dataclass(frozen=True)
class _Calls:
    """The calls of one layer's attention, each collected part by part as its hooks fire."""

    live: BridgeModel
    layer: int
    attention: nn.Module
    parts: dict[str, Tensor] = field(default_factory=dict)
    """Queries, keys and values [batch, row, head, coordinate], scores, positions."""

    def begin(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """A call begins: forget one that did not end, note the positions that it is given."""
        self.parts.clear()
        if isinstance(kwargs.get("position_ids"), Tensor):
            self.parts["position_ids"] = kwargs["position_ids"]

    def come(self, part: str, value: Tensor, hook: Any) -> Tensor | None:
        """A part of the call comes by; what is returned takes its place."""
        hooks = hooks_of(self.live.bridge) or Hooks()
        if part == "output":
            return self._end(value, hooks)
        looks = hooks.observers or hooks.changes
        if part == "scores" and value.shape[2] != value.shape[3] and looks:
            raise UnsupportedModel(
                "A bridge is neither observed nor edited with a key-value cache: hook_rot_k "
                "fires for the keys of the rows alone.",
                hint="use_past_kv_cache=False, or the transformers model itself",
            )
        if part != "scores":
            for change in hooks.changes:
                value = self._changed(change, part, value)
        self.parts[part] = value
        return value

    def _changed(self, change: Patch, part: Any, value: Tensor) -> Tensor:
        x = value.transpose(1, 2)
        index = torch.arange(x.shape[2], device=x.device)[None]  # rows are keys: no cache
        positions = self.parts.get("position_ids", index)
        changed = change(self.layer, part, x, range(x.shape[2]), positions)
        if changed.shape[1] != x.shape[1]:
            raise UnsupportedModel(
                "A bridge has one key for all query heads of a group, at hook_rot_k.",
                hint="an edit of whole groups, or the transformers model itself",
            )
        return changed.transpose(1, 2)

    def _end(self, output: Tensor, hooks: Hooks) -> Tensor:
        """The call is complete: it is shown, then silenced."""
        missing = [hook for part, hook in _HOOKS.items() if part not in (*self.parts, "output")]
        if missing:
            raise UnsupportedModel(
                f"TransformerLens hides the attention of {type(self.attention).__name__}.",
                seen=f"layer {self.layer}: {missing[0]} did not fire",
                hint="the transformers model itself (the default backend, hf)",
            )
        heads = ("query", "key", "value")
        query, key, value = (self.parts[part].transpose(1, 2) for part in heads)
        by_head = output.reshape(*self.parts["query"].shape[:3], -1)
        scores = self.parts["scores"]  # on which the mask lies
        visible = scores[:, 0] > torch.finfo(scores.dtype).min / 2
        past = visible.shape[2] - visible.shape[1]
        real = visible.diagonal(past, 1, 2)
        facts = vars(self.attention)
        call = AttentionCall(
            layer=self.layer,
            query=query.detach(),
            key=key.detach(),
            value=value.detach(),
            output=by_head.detach(),
            scale=facts["scaling"],
            softcap=facts.get("attn_logit_softcapping"),
            sink_logits=self.attention._parameters.get("sinks"),
            visibility=Visibility.from_mask(visible, range(past, visible.shape[2])),
        )
        self.parts.clear()
        if hooks.judge is not None:
            hooks.judge(call, real)
        for observer in hooks.observers:
            observer(call)
        by_head = silence_outputs(hooks.silences, self.layer, by_head, real, past=past)
        return by_head.reshape(output.shape)


def bridge(model: PreTrainedModel, tokenizer: Any) -> Any:
    """A `TransformerBridge` around `model`, which it changes: eager attention, wrapped modules.

    Raises `BadArgument` where there is no tokenizer, which a bridge needs, and
    `UnsupportedModel` for a family that TransformerLens does not know.
    """
    if tokenizer is None:
        raise BadArgument("TransformerLens needs a tokenizer, and this checkpoint has none.")
    from transformer_lens.model_bridge import TransformerBridge

    options = {"hf_model": model, "tokenizer": tokenizer, "device": str(device_of(model))}
    what = f"TransformerLens cannot run {type(model).__name__}."
    with explained(what, "the default backend, hf", error=UnsupportedModel):
        return TransformerBridge.boot_transformers(model.config.name_or_path, **options)
