"""Shapes in signatures, held for every call by jaxtyping and beartype: once for each kind.

Whether a call keeps to its signature is a matter of the types, dtypes and shapes of what goes
in and comes out, and of the values of what is no array. Calls alike in all of these are checked
once, for a check costs more than most of the functions do.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import is_dataclass
from types import FunctionType
from typing import Any

import jaxtyping
import numpy as np
from jaxtyping import jaxtyped
from torch import Tensor


def kind(value: object) -> object:
    """What a check of `value` depends on."""
    of = type(value)
    try:
        form = FORMS[of]
    except KeyError:
        form = FORMS[of] = next((form for known, form in KINDS if issubclass(of, known)), None)
    return of if form is None else form(of, value)


Form = Callable[[type, Any], tuple[object, ...]]
KINDS: list[tuple[Any, Form]] = [
    ((Tensor, np.ndarray), lambda of, value: (of, value.dtype, value.shape)),
    (tuple, lambda of, value: (of, *map(kind, value))),
    ((list, set, frozenset), lambda of, value: (of, frozenset(map(kind, value)))),
    (dict, lambda of, value: (of, frozenset((kind(x), kind(y)) for x, y in value.items()))),
    ((str, int, float, type(None)), lambda of, value: (of, value)),
]
FORMS: dict[type, Form | None] = {}
"""The row of KINDS that a type has: looked for once."""


class Checks:
    """The checks of one function, made when first needed, and the kinds that passed."""

    def __init__(self, function: FunctionType, typechecker: Callable[..., Any]) -> None:
        self.function, self.typechecker = function, typechecker
        self.passed: set[object] = set()
        self.by: dict[bool, Callable[..., object]] = {}
        self.result: list[object] = []

    def made(self, *, of_result: bool) -> Callable[..., object]:
        """What returns the result that is held ready, if all is as the signature says."""
        function, result = self.function, self.result
        signature = inspect.signature(function)
        if not of_result:
            signature = signature.replace(return_annotation=signature.empty)

        def stand_in(*_: object, **__: object) -> object:
            return result.pop()

        names = (function.__globals__, function.__name__, None, stand_in.__closure__)
        copy = functools.wraps(function)(FunctionType(stand_in.__code__, *names))
        copy.__signature__ = signature
        return jaxtyped(copy, typechecker=self.typechecker)

    def check(self, key: tuple, args: tuple, kwargs: dict, *results: object) -> None:
        """By all of the signature; without a result, what goes in."""
        if key in self.passed:
            return
        if bool(results) not in self.by:
            self.by[bool(results)] = self.made(of_result=bool(results))
        self.result[:] = results or [None]
        try:
            self.by[bool(results)](*args, **kwargs)
        finally:
            self.result.clear()
        self.passed.add(key)


CHECKS: dict[object, Checks] = {}


def checked(*, typechecker: Callable[..., Any]) -> Callable[[Any], Any]:
    """As `jaxtyping.jaxtyped`; of a function within a function the checks are made once."""

    def decorate(what: Any) -> Any:
        if inspect.isclass(what):
            if is_dataclass(what):
                what.__init__ = decorate(what.__init__)
            return what
        key = what.__module__, what.__qualname__, what.__code__
        if key not in CHECKS:
            CHECKS[key] = Checks(what, typechecker)
        checks = CHECKS[key]
        passed = checks.passed

        @functools.wraps(what)
        def call(*args: object, **kwargs: object) -> object:
            given = (*map(kind, args), *kwargs, *map(kind, kwargs.values()))
            try:
                result = what(*args, **kwargs)
            except Exception:  # a shape that is wrong is said first
                checks.check(given, args, kwargs)
                raise
            if (given, kind(result)) not in passed:
                checks.check((given, kind(result)), args, kwargs, result)
            return result

        return call

    return decorate


def check_shapes(modules: list[str]) -> None:
    """Check all calls of functions of these modules, which are not imported yet."""
    jaxtyping.jaxtyped = checked  # what the code of a module that is imported asks for
    jaxtyping.install_import_hook(modules, "beartype.beartype")
