"""The one place where ropelens meets a model: its attention calls.

transformers lets a registered function stand in for the attention of any model that
goes through its attention interface. Ours hands every call to the implementation that
the model had before, so that outputs stay bit-identical, and shows the call to whoever
observes. An edit, where one is open, changes queries and keys on their way: the model
computes with them, and observers see them. A registration cannot be undone, so the name
is fixed and what happens behind it is held in a context variable: without an open doorway
nothing is registered to do.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedConfig,
    PreTrainedModel,
)

from ropelens.errors import BadArgument, UnsupportedModel
from ropelens.rope.planes import Planes
from ropelens.statistics.call import AttentionCall

NAME = "ropelens"
Observer = Callable[[AttentionCall], None]


@runtime_checkable
class AttentionEdit(Protocol):
    """A change of the queries and keys that a model's attention is given."""

    def __call__(
        self,
        layer: int,
        query: Float[Tensor, "batch head row coordinate"],
        key: Float[Tensor, "batch kv_head key coordinate"],
        rows: Int[Tensor, "_ row"],
        keys: Int[Tensor, "_ key"],
    ) -> tuple[Tensor, Tensor]:
        """The changed queries and keys: one for each query head where heads of a group differ.

        `rows` and `keys` are their positions, up to a shift that a sequence has in common.
        """
        ...

    def planes(self, layer: int, planes: Planes, *, length: int) -> Planes:
        """How the layer rotates under the edit, where by itself it rotates as `planes`."""
        ...


@dataclass(frozen=True)
class _Door:
    """Each config's own implementation, and each module's observers and edit, by their ids."""

    implementations: dict[int, str]
    observers: dict[int, tuple[Observer, ...]]
    edits: dict[int, AttentionEdit]


_open_door: ContextVar[_Door] = ContextVar("ropelens_door")
_CLOSED = _Door({}, {}, {})
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
    # By module, for two models may share a config.
    outer = _open_door.get(_CLOSED).observers
    told = {id(m): (*outer.get(id(m), ()), observer) for m in model.modules()}
    with _opened(model, observers=told, edits={}):
        yield


@contextmanager
def edit_attention(model: PreTrainedModel, edit: AttentionEdit) -> Iterator[None]:
    """Pass every query and key of `model` through `edit` while the block runs.

    In place of an edit that is open already: `open_edit` says which, to build on it.
    """
    with _opened(model, observers={}, edits={id(m): edit for m in model.modules()}):
        yield


def open_edit(model: PreTrainedModel) -> AttentionEdit | None:
    """The edit that the queries and keys of `model` pass through now."""
    return _open_door.get(_CLOSED).edits.get(id(model))


@contextmanager
def by_itself(model: PreTrainedModel) -> Iterator[None]:
    """`model` without any open edit or observer while the block runs."""
    token = _open_door.set(_without(_open_door.get(_CLOSED), model))
    try:
        yield
    finally:
        _open_door.reset(token)


@contextmanager
def _opened(
    model: PreTrainedModel,
    *,
    observers: dict[int, tuple[Observer, ...]],
    edits: dict[int, AttentionEdit],
) -> Iterator[None]:
    """Add observers and edits at the doorway of `model` while the block runs."""
    configs = _configs(model)
    outer = _open_door.get(_CLOSED)
    with _opening:
        found = {key: config._attn_implementation for key, config in configs.items()}
        own = {key: name for key, name in found.items() if name not in (None, NAME)}
        opened = {key for key, name in found.items() if name == NAME}
        if not opened <= outer.implementations.keys():
            raise _in_another_thread("edited or observed")
        if "flex_attention" in own.values():  # before it compiles kernels for nothing
            raise _hidden_mask("flex_attention")
        for key, name in own.items():
            configs[key]._attn_implementation_internal = _Doorway(name)
    door = _Door(outer.implementations | own, outer.observers | observers, outer.edits | edits)
    token = _open_door.set(door)
    try:
        yield
    finally:
        for key, name in own.items():
            configs[key]._attn_implementation_internal = name
        if _open_door.get(_CLOSED) is door:
            _open_door.reset(token)
        else:
            _open_door.set(_without(_open_door.get(_CLOSED), model))
            raise BadArgument(
                "Blocks that edit or observe a model were not closed in the order that "
                "nests them: the one opened last comes first.",
                means="all of them are closed now, and the model is as it was",
            )


def _without(door: _Door, model: PreTrainedModel) -> _Door:
    """The doorway without the observers and edits of `model`."""
    own = {id(m) for m in model.modules()}
    told = {module: who for module, who in door.observers.items() if module not in own}
    edits = {module: edit for module, edit in door.edits.items() if module not in own}
    return replace(door, observers=told, edits=edits)


def device_of(model: PreTrainedModel) -> torch.device:
    """The device on which the model takes its tokens."""
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


def _door_of(config: Any) -> _Door:
    """The open doorway of a model that calls its attention."""
    door = _open_door.get(_CLOSED)
    if id(config) not in door.implementations:
        raise _in_another_thread("running")
    return door


def _in_another_thread(what: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"The model is {what} in another thread than the one that edits or observes it.",
        means="what a block does to a model holds in the thread that opened the block",
        attempt="a copy of the model for each thread (copy.deepcopy), or to run it within the "
        "block: contextvars.copy_context().run, copied in the thread that opened it",
    )


def _name_of(module: nn.Module) -> str:
    """What the module's attention implementation was called before the doorway opened."""
    return _door_of(module.config).implementations[id(module.config)]


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
    """Stands in for the model's attention: the same result, and the observers told."""
    door = _door_of(module.config)
    edit = door.edits.get(id(module))
    groups: AbstractContextManager[None] = nullcontext()
    if edit is not None:
        positions = _positions(module, query, key, attention_mask, kwargs.get("position_ids"))
        query, key = edit(module.layer_idx, query, key, *positions)  # type: ignore[arg-type]
        if key.shape[1] != value.shape[1]:
            value = value.repeat_interleave(key.shape[1] // value.shape[1], dim=1)
            groups = _a_key_for_every_query(module)
    with groups:
        result = _implementation(module)(module, query, key, value, attention_mask, **kwargs)
    observers = door.observers.get(id(module))
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


@contextmanager
def _a_key_for_every_query(module: nn.Module) -> Iterator[None]:
    """The module expects a key and a value for every query head while the block runs."""
    groups = module.num_key_value_groups
    module.num_key_value_groups = 1  # type: ignore[assignment]
    try:
        yield
    finally:
        module.num_key_value_groups = groups


def _positions(
    module: nn.Module,
    query: Float[Tensor, "batch head row coordinate"],
    key: Float[Tensor, "batch kv_head key coordinate"],
    mask: Tensor | None,
    position_ids: Tensor | None,
) -> tuple[Int[Tensor, "_ row"], Int[Tensor, "_ key"]]:
    """Positions of queries and keys, up to a shift that a sequence has in common.

    A cache holds the past too, a static one also places that are still empty: the last row
    sees its own key last. Models that keep `position_ids` to themselves count from 0.
    """
    rows, keys = query.shape[2], key.shape[2]
    index = torch.arange(keys, device=query.device)[None]
    last = keys - 1
    if rows < keys and mask is None and rows > 1 and _name_of(module) == "sdpa":
        last = rows - 1  # it leaves the mask out where the cache was empty
    elif rows < keys and mask is not None and mask.ndim == 4:
        row = mask[:, 0, -1, :keys]
        visible = row if row.dtype == torch.bool else row > -1
        last = int(visible.any(0).nonzero().max())
    if position_ids is None or position_ids.ndim != 2:
        return index[:, last + 1 - rows : last + 1], index
    if rows == keys:
        return position_ids, position_ids
    return position_ids, index + (position_ids[:, -1:] - last)


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
    name = _door_of(config).implementations[id(config)]
    return AttentionMaskInterface()[name](*args, config=config, **kwargs)


# Traced, it would keep the edit or the observers of the call that was traced.
AttentionInterface.register(NAME, torch.compiler.disable(_attention))
AttentionMaskInterface.register(NAME, torch.compiler.disable(_mask))
