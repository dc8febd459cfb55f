"""The order of models in galleries and tables of the reports."""

import re
from collections.abc import Iterable

FIRST_MODELS = (
    "bundled-rope",
    "bundled-p-rope-0",
    "bundled-p-rope",
    "bundled",
    "babyllama",
    "stories",
    "smollm2",
    "gemma",
)
"""Beginnings of the names of models, small models first. Other models follow by name."""

LAST_MODELS = ("random", "models")
"""Names of models that come last: random weights, and a comparison of all models."""


def in_model_order(names: Iterable[str]) -> list[str]:
    """Names of models in the order of the reports; numbers in names are compared as numbers."""
    return sorted(names, key=_place)


def _place(name: str) -> tuple[int, list[tuple[int, str]]]:
    parts: list[tuple[int, str]] = []
    for part in re.findall(r"\d+|\D+", name.lower()):
        number = int(part) if part.isdigit() else 0
        parts.append((number, part))
    return _group(name), parts


def _group(name: str) -> int:
    """Number of the group of models with the same beginning."""
    if name in LAST_MODELS:
        return len(FIRST_MODELS) + 1 + LAST_MODELS.index(name)
    for number, beginning in enumerate(FIRST_MODELS):
        if name.lower().startswith(beginning):
            return number
    return len(FIRST_MODELS)
