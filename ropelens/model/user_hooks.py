"""Forward hooks of the user in passes that ropelens makes by itself, on tokens of its own.

Such a pass measures the rotation or the noise of the model. A hook that steers may not fit its
tokens, and a hook that records would record a pass that the user did not make. Hooks that
libraries put into a model belong to the model and stay. So do hooks that can change how queries
and keys rotate, because the rotation is what such a pass measures.
"""

import functools
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from traceback import walk_tb
from types import CodeType
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

from ropelens.errors import RopelensError, UnsupportedModel

Hook = Callable[..., Any]
Table = MutableMapping[int, Hook]

LIBRARIES = frozenset(
    {
        "accelerate",
        "bitsandbytes",
        "compressed_tensors",
        "deepspeed",
        "optimum",
        "peft",
        "ropelens",
        "torch",
        "torchao",
        "transformer_lens",
        "transformers",
        "transformers_modules",  # the code of a model on the Hub
    }
)
"""Packages whose hooks belong to the model."""

GLOBAL_TABLES: tuple[Table, ...] = (
    torch_module._global_forward_pre_hooks,
    torch_module._global_forward_hooks,
)
"""Hooks on all modules."""

ANY_LENGTH = "a hook that accepts sequences of any length, or no hook"


@dataclass(frozen=True)
class UserHook:
    """A hook of the user in a table of torch. `can_rotate`: it may change the rotation."""

    table: Table
    number: int
    hook: Hook
    where: str
    can_rotate: bool


def user_hooks(model: nn.Module) -> list[UserHook]:
    """The forward hooks of the user in `model`."""
    found = []
    for table in GLOBAL_TABLES:
        for number, hook in table.items():
            found.append(
                UserHook(table, number, hook, where="all modules", can_rotate=False)
            )
    attention = _attention_of_layers(model)
    inside: set[nn.Module] = set()
    for module in attention:
        inside.update(module.modules())
    inside.difference_update(attention)
    for name, module in model.named_modules():
        rotates = module in inside or "rotary" in name
        parts = [*module.modules()] if module._forward_pre_hooks else []
        gets_positions = any(part in attention for part in parts)
        for number, hook in module._forward_pre_hooks.items():
            # With keyword arguments, it may change the positions of a layer.
            changes_positions = number in module._forward_pre_hooks_with_kwargs
            can_rotate = rotates or (gets_positions and changes_positions)
            found.append(
                UserHook(module._forward_pre_hooks, number, hook, name, can_rotate)
            )
        for number, hook in module._forward_hooks.items():
            found.append(UserHook(module._forward_hooks, number, hook, name, rotates))
    return [each for each in found if not belongs_to_model(each.hook, model)]


def _attention_of_layers(model: nn.Module) -> set[nn.Module]:
    """The modules that know their layer, without those around them, such as whole layers."""
    attention = {module for module in model.modules() if hasattr(module, "layer_idx")}
    for module in [*attention]:
        inner = {*module.modules()} - {module}
        if inner & attention:
            attention.discard(module)
    return attention


def belongs_to_model(hook: Hook, model: nn.Module) -> bool:
    """Whether a library defines the hook, or it is a method of a module in `model`."""
    owner = getattr(_innermost(hook), "__self__", None)
    if any(module is owner for module in model.modules()):
        return True
    return package_of(hook) in LIBRARIES


def package_of(hook: Hook) -> str:
    """The package that defines the function of a hook."""
    package, _, _ = str(getattr(_innermost(hook), "__module__", "")).partition(".")
    return package


def _innermost(hook: Hook) -> Hook:
    """The function in a hook that `functools.partial` made."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    return hook


@dataclass(frozen=True)
class Suspended:
    """A hook that is taken from its table, and the hooks that the table had `before`."""

    hook: UserHook
    before: dict[int, Hook]

    def restore(self) -> None:
        """Put the hook back in its place. Hooks that were removed since then stay removed."""
        table = self.hook.table
        since = dict(table)
        table.clear()
        for number, hook in self.before.items():
            if number in since or number == self.hook.number:
                table[number] = hook
        table.update(since)


@contextmanager
def without_user_hooks(model: nn.Module) -> Iterator[None]:
    """Suspend hooks of the user in the block, except hooks that can change the rotation.

    Raises UnsupportedModel for an error in the block if such a hook remains.
    """
    remaining = []
    tables: list[Suspended] = []
    for user_hook in user_hooks(model):
        if user_hook.can_rotate:
            remaining.append(user_hook)
            continue
        tables.append(Suspended(user_hook, before=dict(user_hook.table)))
        del user_hook.table[user_hook.number]
    try:
        yield
    except RopelensError:
        raise
    except Exception as error:
        if not remaining:
            raise
        raise _failure(model, error, remaining[0]) from error
    finally:
        for suspended in reversed(tables):
            suspended.restore()


@contextmanager
def explained_user_hooks(model: nn.Module) -> Iterator[None]:
    """Raise UnsupportedModel if a hook of the user raises an error in the block."""
    try:
        yield
    except Exception as error:
        codes = _codes_in_traceback(error)
        for user_hook in user_hooks(model):
            if _code_of(user_hook.hook) in codes:
                raise _failure(model, error, user_hook) from error
        raise


def _failure(
    model: nn.Module, error: Exception, user_hook: UserHook
) -> UnsupportedModel:
    return UnsupportedModel(
        f"A pass that ropelens ran on {type(model).__name__} failed.",
        seen=f"{type(error).__name__}: {error}",
        means=f"your forward hook on {user_hook.where or 'the model'} was called, maybe with "
        "tokens of ropelens's own",
        hint=ANY_LENGTH,
    )


def _codes_in_traceback(error: Exception) -> set[CodeType]:
    return {frame.f_code for frame, _ in walk_tb(error.__traceback__)}


def _code_of(hook: Hook) -> CodeType | None:
    """The code of a hook, which may be a function, a method or an object."""
    hook = _innermost(hook)
    if not hasattr(hook, "__code__") and not hasattr(hook, "__func__"):
        hook = type(hook).__call__
    function = getattr(hook, "__func__", hook)
    return getattr(function, "__code__", None)
