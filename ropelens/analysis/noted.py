"""Warnings that wait until the plan is told."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Noted:
    """The texts of all warnings; they are shown as they come once `show` was called."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._show = warnings.showwarning
        self._held: list[tuple[Any, ...]] | None = []

    def note(self, message: Warning | str, *place: Any, **more: Any) -> None:
        """Keep a warning, and show it or hold it back."""
        self.lines.append(" ".join(str(message).split()))
        if self._held is None:
            self._show(message, *place, **more)
        else:
            self._held.append((message, place, more))

    def show(self) -> None:
        """Show those that were held back, and from now on all."""
        held, self._held = self._held or [], None
        for message, place, more in held:
            self._show(message, *place, **more)


@contextmanager
def noted_warnings() -> Iterator[Noted]:
    """All warnings of the block, held back until its plan is told."""
    with warnings.catch_warnings():  # which puts `showwarning` back
        noted = Noted()
        warnings.showwarning = noted.note
        try:
            yield noted
        finally:
            noted.show()
