"""TransformerLens models: the same statistics, fed from the bridge's hooks.

TransformerLens itself is imported only to make a bridge.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ropelens.errors import BadArgument
from ropelens.models.doorway import Observer
from ropelens.statistics.call import AttentionCall

# In the order in which a block fires them; the last one says that the call is complete.
_PARTS = {
    "hook_rot_q": "query",
    "hook_rot_k": "key",
    "v.hook_out": "value",
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

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Logits [sequence, position, token] of whole sequences."""
        device = self.model.get_input_embeddings().weight.device
        if positions is None:
            return self.bridge(tokens.to(device))
        positions = positions.to(device)
        return self.bridge(tokens.to(device), position_ids=positions)

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
    seen[part] = value.detach()
    if part != "output":
        return
    query, key, values = (seen[name].transpose(1, 2) for name in ("query", "key", "value"))
    output = seen["output"].reshape(*seen["query"].shape[:3], -1)
    seen.clear()
    facts = vars(attention)
    rows = query.shape[2]
    window = facts.get("sliding_window") or rows
    observer(
        AttentionCall(
            layer=layer,
            query=query,
            key=key,
            value=values,
            output=output,
            scale=facts["scaling"],
            softcap=facts.get("attn_logit_softcapping"),
            sink_logits=attention._parameters.get("sinks"),
            start=(torch.arange(rows) - window + 1).clamp_min(0),
        )
    )


def bridge(model: PreTrainedModel, tokenizer: Any) -> Any:
    """A `TransformerBridge` around `model`, which it changes: eager attention, wrapped modules.

    Raises `BadArgument` where there is no tokenizer, which a bridge needs.
    """
    if tokenizer is None:
        raise BadArgument(
            "TransformerLens needs a tokenizer, and this checkpoint has none.",
            attempt="the default backend, hf",
        )
    from transformer_lens.model_bridge import TransformerBridge

    return TransformerBridge.boot_transformers(
        model.config.name_or_path, hf_model=model, tokenizer=tokenizer, device=str(model.device)
    )
