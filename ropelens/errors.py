"""Errors that a user can cause, each saying what, why and what to do.

Everything else is a bug of ours and shows a traceback.
"""

from __future__ import annotations

from numbers import Integral


class RopelensError(ValueError):
    """A mistake in what was passed in: `what` is wrong, what was `seen`, what to `attempt`.

    `str(error)` has a line for each part; `error.line` is the same on one line, which
    is what the command line prints.
    """

    def __init__(
        self, what: str, *, seen: str = "", means: str = "", attempt: str = ""
    ) -> None:
        self.parts = {"seen": seen, "means": means, "try": attempt}
        self.what = what
        lines = [f"  {name + ':':<7}{text}" for name, text in self.parts.items() if text]
        super().__init__("\n".join([what, *lines]))

    @property
    def line(self) -> str:
        """The whole message on one line."""
        parts = [f"{name}: {text}" for name, text in self.parts.items() if text]
        said = [" ".join(part.split()).rstrip(".") for part in (self.what, *parts)]
        return "; ".join(said)


def words_of(error: BaseException, *, kind: bool = False) -> str:
    """What an error of another library says, on one line, for `seen`.

    `kind`: with its type, where its words alone say little. Cut at 300 characters.
    """
    said = f"{type(error).__name__}: {error}" if kind else str(error)
    return " ".join(said.split())[:300]


class UnsupportedModel(RopelensError):
    """The model cannot be measured: it does not rotate, or hides its attention."""


class BadCheckpoint(RopelensError):
    """The checkpoint cannot be read, or its weights are broken."""


class BadText(RopelensError):
    """The text cannot be read, or is too short for what was asked."""


class BadArgument(RopelensError):
    """A value outside what the function can work with."""


def check_count(name: str, value: object, *, least: int = 0) -> None:
    """Raise `BadArgument` for the argument `name` that is no whole number from `least` on."""
    if not isinstance(value, Integral) or value < least:
        raise BadArgument(
            f"{name} must be a whole number, {least} or more.", seen=repr(value)[:80]
        )
