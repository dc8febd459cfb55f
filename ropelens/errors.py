"""Errors that a user can cause. Any other error is a bug of ropelens and shows a traceback."""

from collections.abc import Iterator
from contextlib import contextmanager


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
