"""TransformerLens models, observed and edited through the hooks of their bridge."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from ropelens.attention.call import AttentionCall
from ropelens.attention.visibility import Visibility
from ropelens.errors import BadArgument, UnsupportedModel, explained
from ropelens.model.cache_positions import places_in_sequence
from ropelens.model.hook_blocks import ChangeOfHooks, Hooks, hooked, hooks_of
from ropelens.model.hooked_call import replace_outputs
from ropelens.model.intervention import AttentionInput, HeadInputs, HeadOutputs
from ropelens.model.live_model import LiveModel
from ropelens.runtime.devices import device_of

# In the order in which a block fires its hooks; the last hook completes the call.
INPUT_HOOKS: dict[AttentionInput, str] = {
    "value": "v.hook_out",
    "query": "hook_rot_q",
    "key": "hook_rot_k",
}
SCORES_HOOK = "hook_attn_scores"
OUTPUT_HOOK = "o.hook_in"


class BridgeModel(LiveModel):
    """Live model of a `TransformerBridge`, which computes all scores in memory (eager)."""

    in_chunks = False

    def __init__(self, bridge: Any, tokenizer: Any = None) -> None:
        super().__init__(bridge.original_model, tokenizer)
        self.bridge = bridge
        self._runner = bridge
        self._modules = [bridge]
        self._takes_logits_to_keep = False

    def logits(
        self, tokens: Tensor, *, hidden: Tensor | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """All logits in one piece, because the output head runs in the forward pass."""
        yield 0, self.forward(tokens, hidden=hidden)

    @contextmanager
    def _hooked(self, change: ChangeOfHooks) -> Iterator[None]:
        """Apply `change`; the outermost block adds our functions to the hooks of the bridge."""
        is_outermost = hooks_of(self.bridge) is None
        with ExitStack() as stack:
            if is_outermost:
                for layer, block in enumerate(self.bridge.blocks):
                    self._add_functions(stack, layer, block.attn)
            stack.enter_context(hooked(self._modules, change))
            yield

    def _add_functions(self, stack: ExitStack, layer: int, attention: Any) -> None:
        """Add the functions that collect the calls of a layer, until `stack` is closed."""
        calls = BridgeLayer(self, layer, attention.original_component)
        begin = attention.register_forward_pre_hook(calls.begin, with_kwargs=True)
        stack.enter_context(begin)
        functions: dict[str, Callable[..., Any]] = {
            hook: partial(calls.change_input, name)
            for name, hook in INPUT_HOOKS.items()
        }
        functions[SCORES_HOOK] = calls.keep_scores
        functions[OUTPUT_HOOK] = calls.end
        of_block: list[tuple[str, Callable[..., Any]]] = []
        for hook, function in functions.items():
            name = f"blocks.{layer}.attn.{hook}"
            if name in self.bridge.hook_dict:
                of_block.append((name, function))
        stack.enter_context(self.bridge.hooks(fwd_hooks=of_block))


@dataclass
class BridgeCall:
    """Parts of the running attention call of a layer, as far as its hooks have fired."""

    position_ids: Tensor | None = None
    tokens: Tensor | None = None  # index of each token in its sequence, after a change
    scores: Float[Tensor, "batch head row key"] | None = None  # after the mask
    inputs: dict[AttentionInput, Float[Tensor, "batch row _ _"]] = field(
        default_factory=dict
    )


class BridgeLayer:
    """Collects the calls of one layer of a bridge, and runs the hooks of the open blocks."""

    def __init__(self, live: BridgeModel, layer: int, attention: nn.Module) -> None:
        self.live = live
        self.layer = layer
        self.attention = attention
        self.call = BridgeCall()

    @property
    def hooks(self) -> Hooks:
        return hooks_of(self.live.bridge) or Hooks()

    def begin(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Forget a call that did not end, and record the positions of the new call."""
        self.call = BridgeCall()
        if isinstance(kwargs.get("position_ids"), Tensor):
            self.call.position_ids = kwargs["position_ids"]

    def change_input(
        self, name: AttentionInput, given: Float[Tensor, "batch row _ _"], hook: Any
    ) -> Tensor:
        """Queries, keys or values after the interventions, which the call continues with."""
        changes = self.hooks.input_changes
        if changes:
            x = given.transpose(1, 2)
            positions = self.call.position_ids
            if positions is None:  # without a cache, rows are keys
                positions = torch.arange(x.shape[2], device=x.device)[None]
            tokens = places_in_sequence(positions)
            for change in changes:
                inputs = HeadInputs(self.layer, name, x, tokens, positions)
                x = change.change_input(inputs)
            if x.shape[1] != given.shape[2]:
                raise UnsupportedModel(
                    "At hook_rot_k, a bridge has one key for all query heads of a group.",
                    hint="an edit of whole groups, or the transformers model itself",
                )
            self.call.tokens = tokens
            given = x.transpose(1, 2)
        self.call.inputs[name] = given
        return given

    def keep_scores(
        self, scores: Float[Tensor, "batch head row key"], hook: Any
    ) -> None:
        """Keep the scores of the call, which show its mask; refuse a cache."""
        hooks = self.hooks
        if scores.shape[2] != scores.shape[3] and (
            hooks.observers or hooks.input_changes
        ):
            raise UnsupportedModel(
                "A bridge cannot be observed or edited with a key-value cache, because "
                "hook_rot_k fires only for the keys of the new rows.",
                hint="use_past_kv_cache=False, or the transformers model itself",
            )
        self.call.scores = scores

    def end(self, output: Tensor, hook: Any) -> Tensor:
        """Observe the complete call, then replace outputs of its heads."""
        call = self.call
        self.call = BridgeCall()
        scores = self._complete_scores(call)
        visible = scores[:, 0] > torch.finfo(scores.dtype).min / 2
        past = visible.shape[2] - visible.shape[1]
        rows = range(past, visible.shape[2])
        tokens = call.tokens
        if tokens is None:
            tokens = torch.arange(rows.start, rows.stop, device="cpu")[None]
        outputs = HeadOutputs(
            self.layer,
            output=output.reshape(*call.inputs["query"].shape[:3], -1),
            real=visible.diagonal(past, 1, 2),
            tokens=tokens,
        )
        hooks = self.hooks
        if hooks.observers:
            visibility = Visibility.from_mask(visible, rows)
            observed = self._observed(call, outputs.output, visibility)
            if hooks.output_check is not None:
                hooks.output_check(observed, outputs.real)
            for observer in hooks.observers:
                observer(observed)
        return replace_outputs(hooks.interventions, outputs).reshape(output.shape)

    def _complete_scores(self, call: BridgeCall) -> Tensor:
        """The scores of a call; refuse a call of which a part is missing."""
        for name, hook in INPUT_HOOKS.items():
            if name not in call.inputs:
                self._refuse(hook)
        if call.scores is None:
            self._refuse(SCORES_HOOK)
        return call.scores

    def _observed(
        self,
        call: BridgeCall,
        output: Float[Tensor, "batch row head feature"],
        visibility: Visibility,
    ) -> AttentionCall:
        """The call as observers see it."""
        attributes = vars(self.attention)
        return AttentionCall(
            layer=self.layer,
            query=call.inputs["query"].transpose(1, 2).detach(),
            key=call.inputs["key"].transpose(1, 2).detach(),
            value=call.inputs["value"].transpose(1, 2).detach(),
            output=output.detach(),
            scale=attributes["scaling"],
            softcap=attributes.get("attn_logit_softcapping"),
            sink_logits=self.attention._parameters.get("sinks"),
            visibility=visibility,
        )

    def _refuse(self, hook: str) -> NoReturn:
        attention = type(self.attention).__name__
        raise UnsupportedModel(
            f"TransformerLens hides the attention of {attention}.",
            seen=f"layer {self.layer}: {hook} did not fire",
            hint="the transformers model itself (the default backend, hf)",
        )


def bridge(model: PreTrainedModel, tokenizer: Any) -> Any:
    """A `TransformerBridge` around `model`, which becomes eager and gets wrapped modules."""
    if tokenizer is None:
        what = "TransformerLens needs a tokenizer, but this checkpoint has none."
        raise BadArgument(what)
    from transformer_lens.model_bridge import TransformerBridge

    what = f"TransformerLens cannot run {type(model).__name__}."
    with explained(what, "the default backend, hf", error=UnsupportedModel):
        return TransformerBridge.boot_transformers(
            model.config.name_or_path,
            hf_model=model,
            tokenizer=tokenizer,
            device=str(device_of(model)),
        )
