"""Checks of arguments of public functions, and the types that they accept."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, wraps
from numbers import Integral, Real
from types import UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    TypeAlias,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from beartype.door import is_bearable
from beartype.vale import Is

from ropelens.errors import BadArgument

Function = TypeVar("Function", bound=Callable[..., Any])

if TYPE_CHECKING:  # at run time, numbers of numpy are accepted as well
    Count: TypeAlias = int
    Positive: TypeAlias = int
    Several: TypeAlias = int
    Whole: TypeAlias = int
    Number: TypeAlias = float
else:
    Whole = Integral
    Number = Real
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
"""Annotations in words. Modules that define further types of arguments add them."""

CONTAINERS = (list, Sequence, Iterable, Mapping)
"""Types of the containers that annotations of arguments name with their items."""

DATASET_IN_WORDS = (
    "results, such as the profile, truncation or reach of rl.open(FOLDER)"
)
"""`xarray.Dataset` in words. It is known by its name: importing xarray takes 0.2 s."""


@dataclass(frozen=True)
class Bounds:
    """The finite numbers from `low` to `high`, or without limit if one is None."""

    low: float | None = None
    high: float | None = None

    def contain(self, number: Any) -> bool:
        if not abs(number) < math.inf:
            return False
        if self.low is not None and number < self.low:
            return False
        return self.high is None or number <= self.high

    def in_words(self) -> str:
        words = ""
        if self.low is not None:
            words += f", at least {self.low}"
        if self.high is not None:
            words += f", at most {self.high}"
        return words


def check_value(
    name: str, value: object, hint: Any, *, bounds: Bounds | None = None
) -> None:
    """Raise `BadArgument` if `value` does not fit the annotation `hint`, or the `bounds`."""
    if _names_container(hint):
        fits = _fits(value, hint)
    else:
        fits = is_bearable(value, hint)
    if fits and bounds is not None and isinstance(value, Number):
        fits = bounds.contain(value)
    if fits:
        return
    words = _in_words(hint)
    if bounds is not None:
        words += bounds.in_words()
    seen = f"{type(value).__name__} {value!r}"[:80]
    raise BadArgument(f"{name} must be {words}.", seen=seen)


def _names_container(hint: Any) -> bool:
    """Whether an annotation names a container with its items."""
    if get_origin(hint) in CONTAINERS:
        return True
    return any(_names_container(each) for each in get_args(hint))


def _fits(value: object, hint: Any) -> bool:
    """Whether `value` fits an annotation that names a container.

    beartype checks one item of a list, which it chooses with the global state of `random`.
    Here, every item of a list is checked, and the state stays as it is.
    """
    if hint is Any:
        return True
    if isinstance(hint, type):
        return isinstance(value, hint)
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, each) for each in get_args(hint))
    if origin not in CONTAINERS:
        return is_bearable(value, hint)
    if not isinstance(value, origin):
        return False
    if origin is Mapping:
        key_hint, item_hint = get_args(hint)
        if not all(_fits(key, key_hint) for key in value):
            return False
        return all(_fits(item, item_hint) for item in value.values())
    if isinstance(value, (str, list, tuple)) or origin is Sequence:
        item_hint = get_args(hint)[0]
        return all(_fits(item, item_hint) for item in value)
    return True  # an iterator would be used up


def _in_words(hint: Any) -> str:
    """The annotation in words, without "or None"; otherwise as code, without modules."""
    for known, words in IN_WORDS.items():
        if hint == known | None:
            return words
    if hint in IN_WORDS:
        return IN_WORDS[hint]
    code = re.sub(r"\b[a-z_.]+\.(?=[A-Z])", "", inspect.formatannotation(hint))
    return DATASET_IN_WORDS if code in ("Dataset", "Dataset | None") else code


def check_count(count: int, what: str, *, most: int = 10_000) -> None:
    """Raise `BadArgument` for a number that would take more time or memory than there is."""
    if count > most:
        raise BadArgument(f"There are at most {most:,} {what}, not {count:,}.")


def public(function: Function) -> Function:
    """Make `function` raise `BadArgument` for an argument that does not fit its annotation."""
    signature = inspect.signature(function)

    @cache
    def annotations() -> dict[str, Any]:
        return get_type_hints(function, include_extras=True)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind_partial(*args, **kwargs).arguments
        for name, value in given.items():
            hint = annotations().get(name, Any)
            parameter = signature.parameters[name]
            is_variadic = parameter.kind is inspect.Parameter.VAR_POSITIONAL
            for item in value if is_variadic else [value]:
                check_value(f"{function.__name__}: {name}", item, hint)
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]
