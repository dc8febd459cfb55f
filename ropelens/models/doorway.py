"""The one place where ropelens meets a model: its attention calls.

transformers lets a registered function stand in for the attention of any model that
goes through its attention interface. Ours hands every call to the implementation that
the model had before, so that outputs stay bit-identical, and shows the call to whoever
observes. An edit, where one is open, changes queries and keys on their way: the model
computes with them, and observers see them. A registration cannot be undone, so the name
is fixed and what happens behind it is held in a context variable (`door`): without an open
doorway nothing is registered to do.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedConfig,
    PreTrainedModel,
)

from ropelens.errors import UnsupportedModel
from ropelens.models.cache import cache_with_room
from ropelens.models.door import (
    AttentionEdit,
    Door,
    HeadSilence,
    Observer,
    door_of,
    edited,
    in_another_thread,
    observed,
    open_door,
    opened,
    silenced,
)
from ropelens.models.head import as_measured, head_by_itself, once
from ropelens.models.masks import first_keys, hidden_mask, own_keys, positions, real_rows
from ropelens.models.places import device_of
from ropelens.statistics.call import AttentionCall

NAME = "ropelens"


_opening = Lock()


class _Doorway(str):
    """`NAME`, as it stands in a config while the doorway is open; its copies are closed.

    A copy or a pickle of a model holds what stood there before, so it is the plain model.
    """

    own: str

    def __new__(cls, own: str) -> _Doorway:
        name = super().__new__(cls, NAME)
        name.own = own
        return name

    def __deepcopy__(self, memo: dict[int, Any]) -> str:
        return self.own

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (self.own,)


@contextmanager
def observe_attention(model: PreTrainedModel, observer: Observer) -> Iterator[None]:
    """Show every attention call of `model` to `observer` while the block runs.

    The model computes what it always does, with its own implementation. Blocks nest,
    also over the same model; each restores what it found, on errors too.
    """
    with _opened(model, observed(model, observer)):
        yield


@contextmanager
def _opened(model: PreTrainedModel, added: Door) -> Iterator[None]:
    """Add observers, edits and silences at the doorway of `model` while the block runs."""
    configs = _configs(model)
    with _opening:
        found = {key: config._attn_implementation for key, config in configs.items()}
        own = {key: name for key, name in found.items() if name not in (None, NAME)}
        held = {key for key, name in found.items() if name == NAME}
        if not held <= open_door().passed.keys():
            raise in_another_thread("edited or observed")
        if "flex_attention" in own.values():  # before it compiles kernels for nothing
            raise hidden_mask("flex_attention")
        for key, name in own.items():
            configs[key]._attn_implementation_internal = _Doorway(name)
    try:
        with opened(model, replace(added, passed=own)):
            yield
    finally:
        for key, name in own.items():
            configs[key]._attn_implementation_internal = name


@dataclass(frozen=True)
class TransformersSubject:
    """A transformers model, run as it is and observed through its attention interface."""

    model: PreTrainedModel

    def forward(
        self, tokens: Tensor, positions: Tensor | None = None, *, last: int = 0
    ) -> Tensor:
        """Logits [sequence, position, token] of whole sequences, without a cache.

        Of the `last` positions where that is not 0 and the model can leave out the others.
        """
        device = device_of(self.model)
        inputs: dict[str, Any] = {"input_ids": tokens.to(device)}
        if positions is not None:
            inputs["position_ids"] = positions.to(device)
        if last and head_by_itself(self.model):
            inputs["logits_to_keep"] = last
        with as_measured(self.model):
            return self.model(**inputs, use_cache=False).logits

    def logits(
        self, tokens: Tensor, *, at_once: int, chunk: int | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """The logits of whole sequences in pieces of about `at_once` numbers.

        Each with its first position. The layers run once, when the first piece is asked for;
        the model's own head, with all that it does to logits, runs on each piece. With `chunk`
        so many tokens run at a time, on all before them in a cache that forgets none.
        """
        if chunk is None:
            yield from self._pieces(tokens, at_once, {"use_cache": False})
            return
        cache = {"past_key_values": cache_with_room(tokens.shape[1]), "use_cache": True}
        for first in range(0, tokens.shape[1], chunk):
            part = tokens[:, first : first + chunk]
            for begin, logits in self._pieces(part, at_once, cache):
                yield first + begin, logits

    def _pieces(
        self, tokens: Tensor, at_once: int, cache: dict[str, Any]
    ) -> Iterator[tuple[int, Tensor]]:
        """The logits of these tokens, which follow those in the `cache`."""
        ids, context = tokens.to(device_of(self.model)), tokens.shape[1]
        vocabulary = self.model.config.get_text_config().vocab_size
        size = max(1, at_once // (len(tokens) * vocabulary))
        hidden: list[Any] = []
        if not head_by_itself(self.model):
            size = context
        for begin in range(0, context, size):
            piece = torch.arange(begin, min(begin + size, context), device=ids.device)
            asked = {} if size >= context else {"logits_to_keep": piece}
            # Closed before the piece is given away: who gets it may never come back.
            with as_measured(self.model), once(self.model.base_model, hidden):
                logits = self.model(ids, **cache, **asked).logits
            yield begin, logits

    def observe(self, observer: Observer) -> AbstractContextManager[None]:
        """See `observe_attention`."""
        return observe_attention(self.model, observer)

    def edit(self, edit: AttentionEdit) -> AbstractContextManager[None]:
        """Pass every query and key through `edit`, in place of one that is open already."""
        return _opened(self.model, edited(self.model, edit))

    def silence(self, silence: HeadSilence) -> AbstractContextManager[None]:
        """Let `silence` stand in for outputs of heads; the inner block has the last word."""
        return _opened(self.model, silenced(self.model, silence))


def _configs(model: PreTrainedModel) -> dict[int, PreTrainedConfig]:
    """Every configuration that a module of `model` reads, by identity."""
    configs = (vars(module).get("config") for module in model.modules())
    return {id(config): config for config in configs if isinstance(config, PreTrainedConfig)}


def _name_of(module: nn.Module) -> str:
    """What the module's attention implementation was called before the doorway opened."""
    return door_of(module.config).passed[id(module.config)]


def _implementation(module: nn.Module) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The function that computed this module's attention before the doorway opened."""
    name = _name_of(module)
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
    """Stands in for the model's attention: edited before it, shown, and silenced after it."""
    door, at = door_of(module.config), id(module)
    layer: int = module.layer_idx  # type: ignore[assignment]
    groups: AbstractContextManager[None] = nullcontext()
    own = own_keys(query.shape[2], key.shape[2], attention_mask, _name_of(module))
    if at in door.edits:
        where = positions(own, key.shape[2], kwargs.get("position_ids"), query.device)
        query, key = door.edits[at](layer, query, key, *where)
        if key.shape[1] != value.shape[1]:
            value = value.repeat_interleave(key.shape[1] // value.shape[1], dim=1)
            groups = _a_key_for_every_query(module)
    with groups:
        result = _implementation(module)(module, query, key, value, attention_mask, **kwargs)
    if at in door.observers:  # else it is another model that shares the config
        scale, sinks = kwargs.get("scaling"), kwargs.get("s_aux")
        call = AttentionCall(
            layer=layer,
            query=query.detach(),
            key=key[:, :, : own.stop].detach(),
            value=value[:, :, : own.stop].detach(),
            output=result[0].detach(),
            scale=1 / math.sqrt(query.shape[-1]) if scale is None else float(scale),
            softcap=kwargs.get("softcap"),
            sink_logits=None if sinks is None else sinks.detach(),
            start=first_keys(own, attention_mask, kwargs.get("sliding_window")),
            past=own.start,
        )
        for observer in door.observers[at]:
            observer(call)
    if at not in door.silences:
        return result
    real = real_rows(own, attention_mask).to(query.device)
    output = result[0]
    for silence in door.silences[at]:
        found = silence(layer, result[0], real, past=own.start)
        if found is not None:
            chosen, instead = found
            output = torch.where(chosen.to(output.device)[:, None], instead, output)
    return output, *result[1:]


@contextmanager
def _a_key_for_every_query(module: nn.Module) -> Iterator[None]:
    """The module expects a key and a value for every query head while the block runs."""
    groups = module.num_key_value_groups
    module.num_key_value_groups = 1  # type: ignore[assignment]
    try:
        yield
    finally:
        module.num_key_value_groups = groups


def _mask(*args: Any, config: PreTrainedConfig, **kwargs: Any) -> Tensor | None:
    """The mask that the model's own implementation would have been given."""
    name = door_of(config).passed[id(config)]
    return AttentionMaskInterface()[name](*args, config=config, **kwargs)


# Traced, it would keep the edit or the observers of the call that was traced.
AttentionInterface.register(NAME, torch.compiler.disable(_attention))
AttentionMaskInterface.register(NAME, torch.compiler.disable(_mask))
