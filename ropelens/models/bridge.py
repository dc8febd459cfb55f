"""TransformerLens models: the same statistics, fed from the bridge's hooks.

TransformerLens itself is imported only to make a bridge.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from ropelens.errors import BadArgument, UnsupportedModel, words_of
from ropelens.models.doorway import Observer, device_of
from ropelens.statistics.call import AttentionCall

# In the order in which a block fires them; the last one says that the call is complete.
_PARTS = {
    "v.hook_out": "value",
    "hook_rot_q": "query",
    "hook_rot_k": "key",
    "hook_attn_scores": "start",
    "o.hook_in": "output",
}


class BridgeSubject:
    """A `TransformerBridge`, run as it is and observed through hook_rot_q and hook_rot_k.

    A bridge reimplements attention step by step (eager, every score in memory), so its
    numbers agree with transformers' to rounding, not to the bit.
    """

    def __init__(self, bridge: Any) -> None:
        self.bridge = bridge
        self.model: PreTrainedModel = bridge.original_model

    def forward(
        self, tokens: Tensor, positions: Tensor | None = None, *, last: int = 0
    ) -> Tensor:
        """Logits [sequence, position, token] of whole sequences, all whatever `last` is."""
        device = device_of(self.model)
        if positions is None:
            return self.bridge(tokens.to(device))
        positions = positions.to(device)
        return self.bridge(tokens.to(device), position_ids=positions)

    def logits(self, tokens: Tensor, *, at_once: int) -> Iterator[tuple[int, Tensor]]:
        """All logits in one piece: a bridge has its head in its forward pass."""
        yield 0, self.forward(tokens)

    @contextmanager
    def observe(self, observer: Observer) -> Iterator[None]:
        """Show every attention call of the bridge to `observer` while the block runs."""
        hooks = []
        for layer, block in enumerate(self.bridge.blocks):
            seen: dict[str, Tensor] = {}
            for hook, part in _PARTS.items():
                note = partial(
                    _note, observer, layer, block.attn.original_component, seen, part
                )
                hooks.append((f"blocks.{layer}.attn.{hook}", note))
                if hooks[-1][0] not in self.bridge.hook_dict:
                    seen_hooks = f"layer {layer}: there is no {hook}"
                    raise _hidden(block.attn.original_component, seen_hooks)
        with self.bridge.hooks(fwd_hooks=hooks):
            yield


def _note(
    observer: Observer,
    layer: int,
    attention: nn.Module,
    seen: dict[str, Tensor],
    part: str,
    value: Tensor,
    hook: Any,
) -> None:
    """Collect the parts of one attention call; show it when the last has come."""
    seen[part] = _first_seen(value) if part == "start" else value.detach()
    if part != "output":
        return
    missing = [hook for hook, part in _PARTS.items() if part not in seen]
    if missing:
        raise _hidden(attention, f"layer {layer}: {missing[0]} did not fire")
    query, key, values = (seen[name].transpose(1, 2) for name in ("query", "key", "value"))
    output = seen["output"].reshape(*seen["query"].shape[:3], -1)
    facts = vars(attention)
    call = AttentionCall(
        layer=layer,
        query=query,
        key=key,
        value=values,
        output=output,
        scale=facts["scaling"],
        softcap=facts.get("attn_logit_softcapping"),
        sink_logits=attention._parameters.get("sinks"),
        start=seen["start"],
    )
    seen.clear()
    observer(call)


def _hidden(attention: nn.Module, seen: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"TransformerLens hides the attention of {type(attention).__name__}.",
        seen=seen,
        means="the bridge runs this family's attention as one piece, or in one of its own",
        attempt="the transformers model itself (the default backend, hf)",
    )


def _first_seen(scores: Float[Tensor, "batch head row key"]) -> Int[Tensor, " row"]:
    """First key that each row sees, read from the mask that lies on the scores."""
    visible = scores[0, 0] > torch.finfo(scores.dtype).min / 2
    return visible.byte().argmax(dim=-1).cpu()


def bridge(model: PreTrainedModel, tokenizer: Any) -> Any:
    """A `TransformerBridge` around `model`, which it changes: eager attention, wrapped modules.

    Raises `BadArgument` where there is no tokenizer, which a bridge needs, and
    `UnsupportedModel` for a family that TransformerLens does not know.
    """
    if tokenizer is None:
        raise BadArgument(
            "TransformerLens needs a tokenizer, and this checkpoint has none.",
            attempt="the default backend, hf",
        )
    from transformer_lens.model_bridge import TransformerBridge

    options = {"hf_model": model, "tokenizer": tokenizer, "device": str(model.device)}
    try:
        return TransformerBridge.boot_transformers(model.config.name_or_path, **options)
    except ValueError as error:
        raise UnsupportedModel(
            f"TransformerLens cannot run {type(model).__name__}.",
            seen=words_of(error),
            attempt="the default backend, hf",
        ) from error
