"""The one place where ropelens meets a model: its attention calls.

transformers lets a registered function stand in for the attention of any model that
goes through its attention interface. Ours hands every call to the implementation that
the model had before, so that outputs stay bit-identical, and shows the call to whoever
observes. A registration cannot be undone, so the name is fixed and what happens behind
it is held in a context variable: without an open doorway nothing is registered to do.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedConfig,
    PreTrainedModel,
)

from ropelens.errors import UnsupportedModel
from ropelens.statistics.call import AttentionCall

NAME = "ropelens"
Observer = Callable[[AttentionCall], None]


@dataclass(frozen=True)
class _Door:
    """Who stands behind the name: each config's own implementation, each module's observers."""

    implementations: dict[int, str]
    observers: dict[int, tuple[Observer, ...]]


_open_door: ContextVar[_Door] = ContextVar("ropelens_door")


@contextmanager
def observe_attention(model: PreTrainedModel, observer: Observer) -> Iterator[None]:
    """Show every attention call of `model` to `observer` while the block runs.

    The model computes what it always does, with its own implementation. Blocks nest,
    also over the same model; each restores what it found, on errors too.
    """
    configs = _configs(model)
    outer = _open_door.get(_Door({}, {}))
    own = {
        key: config._attn_implementation
        for key, config in configs.items()
        if config._attn_implementation not in (None, NAME)
    }
    if "flex_attention" in own.values():  # before it compiles kernels for nothing
        raise _hidden_mask("flex_attention")
    # By module, for two models may share a config.
    told = {id(m): (*outer.observers.get(id(m), ()), observer) for m in model.modules()}
    token = _open_door.set(_Door(outer.implementations | own, outer.observers | told))
    try:
        for key in own:
            configs[key]._attn_implementation_internal = NAME
        yield
    finally:
        for key, implementation in own.items():
            configs[key]._attn_implementation_internal = implementation
        _open_door.reset(token)


def device_of(model: PreTrainedModel) -> torch.device:
    """Where the model takes its tokens."""
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    return weight.device


@dataclass(frozen=True)
class TransformersSubject:
    """A transformers model, run as it is and observed through its attention interface."""

    model: PreTrainedModel

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Logits [sequence, position, token] of whole sequences, without a cache."""
        device = device_of(self.model)
        inputs = {"input_ids": tokens.to(device)}
        if positions is not None:
            inputs["position_ids"] = positions.to(device)
        training = [module for module in self.model.modules() if module.training]
        try:
            for module in training:
                module.training = False  # dropout is no part of what a head does
            return self.model(**inputs, use_cache=False).logits
        finally:
            for module in training:
                module.training = True

    def observe(self, observer: Observer) -> AbstractContextManager[None]:
        """See `observe_attention`."""
        return observe_attention(self.model, observer)


def _configs(model: PreTrainedModel) -> dict[int, PreTrainedConfig]:
    """Every configuration that a module of `model` reads, by identity."""
    configs = (vars(module).get("config") for module in model.modules())
    return {id(config): config for config in configs if isinstance(config, PreTrainedConfig)}


def _implementation(module: nn.Module) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The function that computed this module's attention before the doorway opened."""
    name = _open_door.get().implementations[id(module.config)]
    if name != "eager":
        return AttentionInterface()[name]
    # The eager function is not registered: it stands in the file that defines the module.
    for cls in type(module).__mro__:
        eager = vars(sys.modules[cls.__module__]).get("eager_attention_forward")
        if eager is not None:
            return eager
    raise UnsupportedModel(f"{type(module).__name__} has no eager attention of its own.")


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Stands in for the model's attention: the same result, and the observers told."""
    result = _implementation(module)(module, query, key, value, attention_mask, **kwargs)
    observers = _open_door.get().observers.get(id(module))
    if observers is None:  # another model that shares the config
        return result
    scale, sinks = kwargs.get("scaling"), kwargs.get("s_aux")
    call = AttentionCall(
        layer=module.layer_idx,  # type: ignore[arg-type]
        query=query.detach(),
        key=key.detach(),
        value=value.detach(),
        output=result[0].detach(),
        scale=1 / math.sqrt(query.shape[-1]) if scale is None else float(scale),
        softcap=kwargs.get("softcap"),
        sink_logits=None if sinks is None else sinks.detach(),
        start=_start(
            query.shape[2], key.shape[2], attention_mask, kwargs.get("sliding_window")
        ),
    )
    for observer in observers:
        observer(call)
    return result


def _start(
    rows: int, keys: int, mask: Tensor | None, window: int | None
) -> Int[Tensor, " position"]:
    """First key that each row sees, read from the mask that the model was about to use."""
    if rows != keys:
        raise UnsupportedModel(
            "Observing needs whole sequences, not continuations.",
            seen=f"{rows} queries on {keys} keys",
            attempt="call the model with use_cache=False",
        )
    if mask is None:
        window = window or keys
        return (torch.arange(rows) - window + 1).clamp_min(0)
    if not isinstance(mask, Tensor) or mask.ndim != 4:
        raise _hidden_mask(type(mask).__name__)
    visible = mask[:1, 0, :rows, :keys]
    visible = (visible if visible.dtype == torch.bool else visible > -1)[0]
    return visible.byte().argmax(dim=-1).cpu()


def _hidden_mask(seen: str) -> UnsupportedModel:
    return UnsupportedModel(
        "This attention implementation hides its mask.",
        seen=seen,
        attempt='load the model with attn_implementation="sdpa" or "eager"',
    )


def _mask(*args: Any, config: PreTrainedConfig, **kwargs: Any) -> Tensor | None:
    """The mask that the model's own implementation would have been given."""
    name = _open_door.get().implementations[id(config)]
    return AttentionMaskInterface()[name](*args, config=config, **kwargs)


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)
