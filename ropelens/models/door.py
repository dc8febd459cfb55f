"""What the attention calls of each model meet: observers, edits and silences, while open.

Held in a context variable, so that it ends with its block and holds in its thread. Whoever
runs a model's attention asks here: transformers' interface (`doorway`) and TransformerLens'
hooks (`bridge`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from ropelens.errors import BadArgument, UnsupportedModel
from ropelens.rope.planes import Planes
from ropelens.statistics.call import AttentionCall

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

    def inv_freq(
        self, layer: int, planes: Planes, *, length: int
    ) -> Float[Tensor, "head frequency"]:
        """How each head rotates under the edit, in rad/token, where by itself as `planes`."""
        ...


@runtime_checkable
class HeadSilence(Protocol):
    """What stands in for the outputs of some heads, before the output projection."""

    def __call__(
        self,
        layer: int,
        output: Float[Tensor, "batch row head feature"],
        real: Bool[Tensor, "_ row"],
        *,
        past: int,
    ) -> tuple[Bool[Tensor, " head"], Tensor] | None:
        """Which heads, and what stands in for them, as large as `output`; None: no head.

        `real` says which rows are no padding, `past` how many tokens a cache holds before.
        """
        ...


@dataclass(frozen=True)
class Door:
    """What each module's calls meet, by their ids.

    `passed` has whatever the calls pass through, by its id: of a config the implementation that
    it names by itself.
    """

    passed: dict[int, str] = field(default_factory=dict)
    observers: dict[int, tuple[Observer, ...]] = field(default_factory=dict)
    edits: dict[int, AttentionEdit] = field(default_factory=dict)
    silences: dict[int, tuple[HeadSilence, ...]] = field(default_factory=dict)


_open_door: ContextVar[Door] = ContextVar("ropelens_door")
_CLOSED = Door()


def open_door() -> Door:
    """The doorway as it stands open here."""
    return _open_door.get(_CLOSED)


def observed(model: PreTrainedModel, observer: Observer) -> Door:
    """A doorway where `observer` sees the calls of `model` too, after those that do."""
    outer = open_door().observers  # by module, for two models may share a config
    return Door(observers={id(m): (*outer.get(id(m), ()), observer) for m in model.modules()})


def edited(model: PreTrainedModel, edit: AttentionEdit) -> Door:
    """A doorway where the queries and keys of `model` pass through `edit` alone."""
    return Door(edits={id(m): edit for m in model.modules()})


def silenced(model: PreTrainedModel, silence: HeadSilence) -> Door:
    """A doorway where `silence` has the last word on the heads of `model`."""
    outer = open_door().silences
    return Door(silences={id(m): (*outer.get(id(m), ()), silence) for m in model.modules()})


@contextmanager
def opened(model: PreTrainedModel, added: Door) -> Iterator[None]:
    """The doorway holds what is `added` for the calls of `model` while the block runs."""
    outer = open_door()
    door = Door(
        outer.passed | added.passed,
        outer.observers | added.observers,
        outer.edits | added.edits,
        outer.silences | added.silences,
    )
    token = _open_door.set(door)
    try:
        yield
    finally:
        if open_door() is door:
            _open_door.reset(token)
        else:
            _open_door.set(_without(open_door(), model))
            raise BadArgument(
                "Blocks that edit or observe a model were not closed in the order that "
                "nests them: the one opened last comes first.",
                means="all of them are closed now, and the model is as it was",
            )


def open_edit(model: PreTrainedModel) -> AttentionEdit | None:
    """The edit that the queries and keys of `model` pass through now."""
    return open_door().edits.get(id(model))


@contextmanager
def by_itself(model: PreTrainedModel) -> Iterator[None]:
    """`model` without any open edit, silence or observer while the block runs."""
    token = _open_door.set(_without(open_door(), model))
    try:
        yield
    finally:
        _open_door.reset(token)


def door_of(passed: object) -> Door:
    """The open doorway of a model whose calls come through `passed`."""
    door = open_door()
    if id(passed) not in door.passed:
        raise in_another_thread("running")
    return door


def in_another_thread(what: str) -> UnsupportedModel:
    """The error over a model that meets nothing here, though somebody edits or observes it."""
    return UnsupportedModel(
        f"The model is {what} in another thread than the one that edits or observes it.",
        means="what a block does to a model holds in the thread that opened the block",
        attempt="a copy of the model for each thread (copy.deepcopy), or to run it within the "
        "block: contextvars.copy_context().run, copied in the thread that opened it",
    )


def _without(door: Door, model: PreTrainedModel) -> Door:
    """The doorway without what the calls of `model` meet."""
    own = {id(m) for m in model.modules()}
    return Door(
        door.passed,
        {module: who for module, who in door.observers.items() if module not in own},
        {module: edit for module, edit in door.edits.items() if module not in own},
        {module: who for module, who in door.silences.items() if module not in own},
    )
