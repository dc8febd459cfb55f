"""Blocks in which the attention calls of some modules have hooks.

A block belongs to the context (a thread or an asyncio task) that opened it, and to copies of
this context.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, replace
from threading import RLock

from ropelens.attention.call import AttentionCall
from ropelens.errors import BadArgument
from ropelens.model import cache_positions
from ropelens.model.intervention import Intervention
from ropelens.model.output_check import OutputCheck

Observer = Callable[[AttentionCall], None]


@dataclass(frozen=True)
class Hooks:
    """The functions and interventions of the attention calls of one module."""

    observers: tuple[Observer, ...] = ()
    interventions: tuple[Intervention, ...] = ()
    output_check: OutputCheck | None = None

    def intervene(self, *added: Intervention) -> "Hooks":
        """Add interventions. The last change of the rotation stays, and comes last."""
        every = (*self.interventions, *added)
        others = [x for x in every if not x.rotates]
        rotating = [x for x in every if x.rotates]
        return replace(self, interventions=(*others, *rotating[-1:]))

    @property
    def input_changes(self) -> list[Intervention]:
        """The interventions that change queries, keys or values."""
        unchanged = Intervention.change_input
        return [x for x in self.interventions if type(x).change_input is not unchanged]


ChangeOfHooks = Callable[[Hooks], Hooks]


@dataclass(frozen=True, eq=False)
class HookBlock:
    """A block that changes the hooks of modules, which are listed by their id."""

    modules: frozenset[int]
    change: ChangeOfHooks


block_lock = RLock()
_open_blocks: dict[HookBlock, None] = {}  # in all contexts, the oldest first
_own_blocks: ContextVar[tuple[HookBlock, ...]] = ContextVar("_own_blocks", default=())
_is_recomputing: ContextVar[bool] = ContextVar("_is_recomputing", default=False)


def _blocks_now() -> tuple[HookBlock, ...]:
    """The open blocks of this context, or the blocks of the pass that is recomputed."""
    own = _own_blocks.get()
    if _is_recomputing.get():
        return own
    return tuple(block for block in own if block in _open_blocks)


def hooks_of(module: object) -> Hooks | None:
    """The hooks of calls of `module` in this context, or None; refuses other contexts."""
    own = [block for block in _blocks_now() if id(module) in block.modules]
    opened = {block for block in list(_open_blocks) if id(module) in block.modules}
    if not _is_recomputing.get() and not opened <= set(own):
        raise BadArgument(
            "Another thread or asyncio task uses this model in a block of ropelens.",
            seen=f"a call of {type(module).__name__} outside the context of this block",
            hint="one thread after the other, a copy of the model for each thread, or "
            "contextvars.copy_context().run for a call that belongs to the block",
        )
    if not own:
        return None
    hooks = Hooks()
    for block in own:
        hooks = block.change(hooks)
    if not set(own) <= opened:  # a closed block of the pass that is recomputed
        hooks = replace(hooks, observers=())
    return hooks


def _same_hooks(hooks: Hooks) -> Hooks:
    return hooks


@contextmanager
def hooked(
    modules: Iterable[object], change: ChangeOfHooks = _same_hooks
) -> Iterator[None]:
    """Apply `change` to the hooks of `modules`. Blocks may be closed in any order."""
    modules = list(modules)
    block = HookBlock(frozenset(map(id, modules)), change)
    with block_lock:
        for module in modules:
            hooks_of(module)  # it refuses other contexts
        _open_blocks[block] = None
    _own_blocks.set((*_blocks_now(), block))
    try:
        yield
    finally:
        del _open_blocks[block]
        _own_blocks.set(_blocks_now())
        still_open: set[int] = set()
        for other in list(_open_blocks):
            still_open |= other.modules
        cache_positions.forget_positions(block.modules - still_open)


def has_blocks() -> bool:
    """Whether a block of this context is open, for any module."""
    return bool(_blocks_now())


def context_of_recomputation() -> Context:
    """A context in which a recomputation has the blocks of the pass that runs now."""
    blocks = _blocks_now()
    context = copy_context()
    context.run(_own_blocks.set, blocks)
    context.run(_is_recomputing.set, True)
    return context
