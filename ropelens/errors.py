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
        self.what = what
        self.parts = {"seen": seen, "means": means, "try": hint}
        lines = [what]
        for name, text in self.parts.items():
            if text:
                label = f"{name}:"
                lines.append(f"  {label:<7}{text}")
        super().__init__("\n".join(lines))

    @property
    def line(self) -> str:
        """The message on one line."""
        clauses = [_on_one_line(self.what)]
        for name, text in self.parts.items():
            if text:
                clauses.append(_on_one_line(f"{name}: {text}"))
        return "; ".join(clause.rstrip(".") for clause in clauses)


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
        # The name ValueError adds nothing to its message.
        seen = words_of(cause, with_type=type(cause) is not ValueError)
        raise error(what, seen=seen, hint=hint) from cause


def words_of(error: BaseException, *, with_type: bool = False) -> str:
    """Up to 300 characters of another library's message, on one line."""
    message = f"{type(error).__name__}: {error}" if with_type else str(error)
    return _on_one_line(message)[:300]


def _on_one_line(text: str) -> str:
    return " ".join(text.split())
