"""Checks of calls against their signatures, once for each kind of call.

Calls have the same kind if the types, dtypes and shapes of all arguments and of the result are
the same, and the values of arguments that are not arrays. Only the first call of a kind is
checked, because a check takes longer than most functions. Only functions with an array in their
signature are checked, except with `make test-slow`, because mypy checks the other types.
"""

import functools
import inspect
import os
import re
from collections.abc import Callable
from dataclasses import is_dataclass
from types import FunctionType
from typing import Any

import jaxtyping
import numpy as np
from jaxtyping import jaxtyped
from torch import Tensor


def kind(value: object) -> object:
    cls = type(value)
    try:
        form = FORMS[cls]
    except KeyError:
        form = FORMS[cls] = next(
            (form for base, form in KINDS if issubclass(cls, base)), None
        )
    return cls if form is None else form(cls, value)


Form = Callable[[type, Any], tuple[object, ...]]
KINDS: list[tuple[Any, Form]] = [
    ((Tensor, np.ndarray), lambda cls, value: (cls, value.dtype, value.shape)),
    (tuple, lambda cls, value: (cls, *map(kind, value))),
    ((list, set, frozenset), lambda cls, value: (cls, frozenset(map(kind, value)))),
    (
        dict,
        lambda cls, value: (
            cls,
            frozenset((kind(x), kind(y)) for x, y in value.items()),
        ),
    ),
    ((str, int, float, type(None)), lambda cls, value: (cls, value)),
]
FORMS: dict[type, Form | None] = {}
"""The row of KINDS for each type."""


class Checks:
    """The checks of one function, and the kinds of calls that passed."""

    def __init__(self, function: FunctionType, typechecker: Callable[..., Any]) -> None:
        self.function = function
        self.typechecker = typechecker
        self.passed: set[object] = set()
        self.checkers: dict[bool, Callable[..., object]] = {}
        self.result: list[object] = []

    def make_checker(self, *, of_result: bool) -> Callable[..., object]:
        """A function with the same signature that returns the prepared result."""
        function = self.function
        result = self.result
        signature = inspect.signature(function)
        if not of_result:
            signature = signature.replace(return_annotation=signature.empty)

        def stand_in(*_: object, **__: object) -> object:
            return result.pop()

        names = (function.__globals__, function.__name__, None, stand_in.__closure__)
        copy = functools.wraps(function)(FunctionType(stand_in.__code__, *names))
        copy.__signature__ = signature
        if not of_result:
            copy.__annotations__ = dict(function.__annotations__)
            copy.__annotations__.pop("return", None)  # jaxtyping before 0.3 reads them
        return jaxtyped(copy, typechecker=self.typechecker)

    def check(self, key: tuple, args: tuple, kwargs: dict, *results: object) -> None:
        if key in self.passed:
            return
        if bool(results) not in self.checkers:
            self.checkers[bool(results)] = self.make_checker(of_result=bool(results))
        self.result[:] = results or [None]
        try:
            self.checkers[bool(results)](*args, **kwargs)
        finally:
            self.result.clear()
        self.passed.add(key)


ARRAY = re.compile(r"\b(Bool|Complex|Float|Int|Num|Real|Shaped)\w*\[")
"""Annotations of jaxtyping."""
CHECKS: dict[object, Checks] = {}


def checked(*, typechecker: Callable[..., Any]) -> Callable[[Any], Any]:
    """Replace `jaxtyping.jaxtyped`. All copies of an inner function share their checks."""

    def decorate(function: Any) -> Any:
        if inspect.isclass(function):
            if is_dataclass(function):
                function.__init__ = decorate(function.__init__)
            return function
        if "ALL_SHAPES" not in os.environ and not ARRAY.search(
            str(function.__annotations__)
        ):
            return function
        # Names, because torch.compile evaluates the key as an expression.
        line = function.__code__.co_firstlineno
        key = f"{function.__module__}.{function.__qualname__}:{line}"
        if key not in CHECKS:
            CHECKS[key] = Checks(function, typechecker)
        checks = CHECKS[key]
        passed = checks.passed

        @functools.wraps(function)
        def call(*args: object, **kwargs: object) -> object:
            given = (*map(kind, args), *kwargs, *map(kind, kwargs.values()))
            try:
                result = function(*args, **kwargs)
            except Exception:  # report a wrong shape first
                checks.check(given, args, kwargs)
                raise
            if (given, kind(result)) not in passed:
                checks.check((given, kind(result)), args, kwargs, result)
            return result

        return call

    return decorate


def check_shapes(modules: list[str]) -> None:
    """Check all calls of functions in these modules, which must not be imported yet."""
    jaxtyping.jaxtyped = checked  # imported modules use this name
    jaxtyping.install_import_hook(modules, "beartype.beartype")
