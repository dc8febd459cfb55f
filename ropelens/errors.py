"""Errors that a user can cause. Everything else is a bug of ours and shows a traceback."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from numbers import Integral, Real
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar, get_type_hints

from beartype.door import is_bearable
from beartype.vale import Is

Function = TypeVar("Function", bound=Callable[..., Any])

if TYPE_CHECKING:  # numbers of numpy pass at run time
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


class RopelensError(ValueError):
    """A mistake in what was passed in: `what` is wrong, what was `seen`, what to `hint`.

    `str(error)` has a line for each part; the command line prints `error.line`.
    """

    def __init__(self, what: str, *, seen: str = "", means: str = "", hint: str = "") -> None:
        self.parts = {"seen": seen, "means": means, "try": hint}
        self.what = what
        lines = [f"  {name + ':':<7}{text}" for name, text in self.parts.items() if text]
        super().__init__("\n".join([what, *lines]))

    @property
    def line(self) -> str:
        """The whole message on one line."""
        parts = [f"{name}: {text}" for name, text in self.parts.items() if text]
        return "; ".join(" ".join(p.split()).rstrip(".") for p in (self.what, *parts))


class UnsupportedModel(RopelensError):
    """The model cannot be measured: it does not rotate, or hides its attention."""


class BadCheckpoint(RopelensError):
    """The checkpoint cannot be read, or its weights are broken."""


class BadText(RopelensError):
    """The text cannot be read, or is too short for what was asked."""


class BadArgument(RopelensError):
    """A value outside what the function can work with."""


@contextmanager
def explained(
    what: str, hint: str = "", *, error: type[RopelensError] = BadCheckpoint
) -> Iterator[None]:
    """Raise `error` for errors of other libraries, which are of every kind; ours pass."""
    try:
        yield
    except RopelensError:
        raise
    except Exception as cause:
        kind = type(cause) is not ValueError  # which says no more than its words
        raise error(what, seen=words_of(cause, kind=kind), hint=hint) from cause


def words_of(error: BaseException, *, kind: bool = False) -> str:
    """What another library's error says, in 300 characters; with its type where `kind`."""
    name = f"{type(error).__name__}: " if kind else ""
    return " ".join(f"{name}{error}".split())[:300]


def public(function: Function) -> Function:
    """`function`, which raises `BadArgument` for an argument that its annotation excludes.

    Types are checked here and nowhere else, so annotations exist at run time.
    """
    signature = inspect.signature(function)
    hints = cache(lambda: get_type_hints(function, include_extras=True))

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for name, value in signature.bind_partial(*args, **kwargs).arguments.items():
            hint = hints().get(name, Any)
            several = signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL
            if not all(is_bearable(one, hint) for one in (value if several else [value])):
                written = inspect.formatannotation(hint)
                asked = IN_WORDS.get(hint) or re.sub(r"\b[a-z_.]+\.(?=[A-Z])", "", written)
                raise BadArgument(
                    f"{function.__name__}: {name} must be {asked}.",
                    seen=f"{type(value).__name__} {value!r}"[:80],
                )
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]
