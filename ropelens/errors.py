"""Errors that a user can cause. Any other error is a bug of ropelens and shows a traceback."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from numbers import Integral, Real
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar, get_type_hints

from beartype.door import is_bearable
from beartype.vale import Is

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


class RopelensError(ValueError):
    """A mistake in the input: `what` is wrong, `seen` is its evidence, `hint` the remedy.

    `str(error)` has one line for each part. The command line prints `error.line`.
    """

    def __init__(
        self, what: str, *, seen: str = "", means: str = "", hint: str = ""
    ) -> None:
        self.parts = {"seen": seen, "means": means, "try": hint}
        self.what = what
        lines = [
            f"  {name + ':':<7}{text}" for name, text in self.parts.items() if text
        ]
        super().__init__("\n".join([what, *lines]))

    @property
    def line(self) -> str:
        """The message on one line."""
        parts = [f"{name}: {text}" for name, text in self.parts.items() if text]
        return "; ".join(" ".join(p.split()).rstrip(".") for p in (self.what, *parts))


class UnsupportedModel(RopelensError):
    """The model cannot be measured, because it does not rotate or hides its attention."""


class BadCheckpoint(RopelensError):
    """The checkpoint cannot be read, or its weights are broken."""


class BadText(RopelensError):
    """The text cannot be read, or it is too short."""


class BadArgument(RopelensError):
    """An argument has a value that the function cannot use."""


@contextmanager
def explained(
    what: str,
    hint: str = "",
    *,
    error: type[RopelensError] = BadCheckpoint,
    catch: type[Exception] = Exception,
) -> Iterator[None]:
    """Convert a `catch` of another library to `error`; errors of ropelens pass unchanged."""
    try:
        yield
    except RopelensError:
        raise
    except catch as cause:
        kind = type(cause) is not ValueError  # this name adds nothing to its message
        raise error(what, seen=words_of(cause, kind=kind), hint=hint) from cause


def words_of(error: BaseException, *, kind: bool = False) -> str:
    """Up to 300 characters of another library's message, after the error's type if `kind`."""
    name = f"{type(error).__name__}: " if kind else ""
    return " ".join(f"{name}{error}".split())[:300]


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
