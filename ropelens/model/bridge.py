"""TransformerLens models, observed and edited through the hooks of their bridge."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ropelens.attention.call import AttentionCall
from ropelens.attention.visibility import Visibility
from ropelens.errors import BadArgument, UnsupportedModel, explained
from ropelens.model.cache_positions import places_in_sequence
from ropelens.model.hook_blocks import Hooks, hooked, hooks_of
from ropelens.model.hooked_call import replace_outputs
from ropelens.model.intervention import HeadInputs, HeadOutputs
from ropelens.model.live_model import LiveModel
from ropelens.runtime.devices import device_of

# In the order in which a block fires them; the last hook completes the call.
_HOOKS = {
    "value": "v.hook_out",
    "query": "hook_rot_q",
    "key": "hook_rot_k",
    "scores": "hook_attn_scores",
    "output": "o.hook_in",
}


class BridgeModel(LiveModel):
    """Live model of a `TransformerBridge`, which computes all scores in memory (eager)."""

    in_chunks = False

    def __init__(self, bridge: Any, tokenizer: Any = None) -> None:
        super().__init__(bridge.original_model, tokenizer)
        self.bridge = self._runner = bridge
        self._modules = [bridge]
        self._takes_logits_to_keep = False

    def logits(
        self, tokens: Tensor, *, hidden: Tensor | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """All logits in one piece, because the output head runs in the forward pass."""
        yield 0, self.forward(tokens, hidden=hidden)

    @contextmanager
    def _hooked(self, change: Callable[[Hooks], Hooks]) -> Iterator[None]:
        """Apply `change`; the outermost block adds our functions to the hooks of the bridge."""
        outermost = hooks_of(self.bridge) is None
        with ExitStack() as stack:
            for layer, block in enumerate(self.bridge.blocks if outermost else ()):
                calls = _CallParts(self, layer, block.attn.original_component)
                begin = block.attn.register_forward_pre_hook(
                    calls.begin, with_kwargs=True
                )
                stack.enter_context(begin)
                names = {
                    part: f"blocks.{layer}.attn.{hook}" for part, hook in _HOOKS.items()
                }
                known = [
                    part
                    for part, name in names.items()
                    if name in self.bridge.hook_dict
                ]
                functions = [
                    (names[part], partial(calls.collect, part)) for part in known
                ]
                stack.enter_context(self.bridge.hooks(fwd_hooks=functions))
            with hooked(self._modules, change):
                yield


@dataclass(frozen=True)
class _CallParts:
    """Parts of the running attention call of one layer, collected as its hooks fire."""

    live: BridgeModel
    layer: int
    attention: nn.Module
    parts: dict[str, Tensor] = field(default_factory=dict)
    """Queries, keys and values [batch, row, head, coordinate], scores, positions."""

    def begin(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Forget a call that did not end, and record the positions of the new call."""
        self.parts.clear()
        if isinstance(kwargs.get("position_ids"), Tensor):
            self.parts["position_ids"] = kwargs["position_ids"]

    def collect(self, part: Any, value: Tensor, hook: Any) -> Tensor | None:
        """Collect a part of the call, and return the value that replaces it."""
        hooks = hooks_of(self.live.bridge) or Hooks()
        if part == "output":
            return self._end(value, hooks)
        used, fault = hooks.observers or hooks.input_changes, ""
        if part == "scores" and value.shape[2] != value.shape[3] and used:
            fault = (
                "A bridge cannot be observed or edited with a key-value cache, because "
            )
            fault += "hook_rot_k fires only for the keys of the new rows."
            hint = "use_past_kv_cache=False"
        elif part != "scores" and hooks.input_changes:
            x = value.transpose(1, 2)
            index = torch.arange(x.shape[2], device=x.device)[
                None
            ]  # no cache: rows are keys
            positions = self.parts.get("position_ids", index)
            self.parts["places"] = places = places_in_sequence(positions)
            for change in hooks.input_changes:
                inputs = HeadInputs(self.layer, part, x, places, positions)
                x = change.change_input(inputs)
            if x.shape[1] != value.shape[2]:
                fault = "At hook_rot_k, a bridge has one key for all query heads of a group."
                hint = "an edit of whole groups"
            value = x.transpose(1, 2)
        if fault:
            raise UnsupportedModel(
                fault, hint=f"{hint}, or the transformers model itself"
            )
        self.parts[part] = value
        return value

    def _end(self, output: Tensor, hooks: Hooks) -> Tensor:
        """Observe the complete call, then silence its heads."""
        missing = [
            hook for part, hook in _HOOKS.items() if part not in (*self.parts, "output")
        ]
        if missing:
            what = f"TransformerLens hides the attention of {type(self.attention).__name__}."
            seen = f"layer {self.layer}: {missing[0]} did not fire"
            hint = "the transformers model itself (the default backend, hf)"
            raise UnsupportedModel(what, seen=seen, hint=hint)
        query, key, value = (
            self.parts[x].transpose(1, 2) for x in ("query", "key", "value")
        )
        by_head = output.reshape(*self.parts["query"].shape[:3], -1)
        scores = self.parts["scores"]  # after the mask
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
        places = self.parts.get("places", torch.arange(past, visible.shape[2])[None])
        self.parts.clear()
        if hooks.output_check is not None:
            hooks.output_check(call, real)
        for observer in hooks.observers:
            observer(call)
        outputs = HeadOutputs(self.layer, by_head, real, places)
        by_head = replace_outputs(hooks.interventions, outputs)
        return by_head.reshape(output.shape)


def bridge(model: PreTrainedModel, tokenizer: Any) -> Any:
    """A `TransformerBridge` around `model`, which becomes eager and gets wrapped modules."""
    if tokenizer is None:
        raise BadArgument(
            "TransformerLens needs a tokenizer, but this checkpoint has none."
        )
    from transformer_lens.model_bridge import TransformerBridge

    options = {
        "hf_model": model,
        "tokenizer": tokenizer,
        "device": str(device_of(model)),
    }
    what = f"TransformerLens cannot run {type(model).__name__}."
    with explained(what, "the default backend, hf", error=UnsupportedModel):
        return TransformerBridge.boot_transformers(model.config.name_or_path, **options)
