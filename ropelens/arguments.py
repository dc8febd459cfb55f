"""Checks of arguments of public functions, and the types that they accept."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from functools import cache, wraps
from numbers import Integral, Real
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar, get_type_hints

from beartype.door import is_bearable
from beartype.vale import Is

from ropelens.errors import BadArgument

Function = TypeVar("Function", bound=Callable[..., Any])
Bounds: TypeAlias = tuple[float | None, float | None] | None

if TYPE_CHECKING:  # at run time, numbers of numpy are accepted as well
    Count: TypeAlias = int
    Positive: TypeAlias = int
    Several: TypeAlias = int
    Whole: TypeAlias = int
    Number: TypeAlias = float
else:
    Whole, Number = Integral, Real
    Count = Annotated[Integral, Is[lambda number: number >= 0]]
    Positive = Annotated[Integral, Is[lambda number: number >= 1]]
    Several = Annotated[Integral, Is[lambda number: number >= 2]]

IN_WORDS: dict[Any, str] = {
    Count: "a whole number, 0 or more",
    Positive: "a whole number, 1 or more",
    Several: "a whole number, 2 or more",
    Whole: "a whole number",
    Number: "a number",
}


def check_value(name: str, value: object, hint: Any, *, bounds: Bounds = None) -> None:
    """Raise `BadArgument` if `value` does not fit the annotation `hint`, or the `bounds`."""
    low, high = bounds or (None, None)
    fits = is_bearable(value, hint)
    if fits and bounds and isinstance(value, Number):
        fits = abs(value) < math.inf
        fits &= (low is None or value >= low) and (high is None or value <= high)
    if not fits:
        written = inspect.formatannotation(hint)
        plain = next((key for key in IN_WORDS if key | None == hint), hint)
        words = IN_WORDS.get(plain) or re.sub(r"\b[a-z_.]+\.(?=[A-Z])", "", written)
        words += f", at least {low}" * (low is not None)
        words += f", at most {high}" * (high is not None)
        seen = f"{type(value).__name__} {value!r}"[:80]
        raise BadArgument(f"{name} must be {words}.", seen=seen)


def check_count(count: int, what: str, *, most: int = 10_000) -> None:
    """Raise `BadArgument` for a number that would take more time or memory than there is."""
    if count > most:
        raise BadArgument(f"There are at most {most:,} {what}, not {count:,}.")


def public(function: Function) -> Function:
    """Make `function` raise `BadArgument` for an argument that does not fit its annotation."""
    signature = inspect.signature(function)
    hints = cache(lambda: get_type_hints(function, include_extras=True))

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for name, value in signature.bind_partial(*args, **kwargs).arguments.items():
            variadic = (
                signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL
            )
            for item in value if variadic else [value]:
                check_value(
                    f"{function.__name__}: {name}", item, hints().get(name, Any)
                )
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]
