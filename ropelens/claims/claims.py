"""The table of published claims about RoPE, which claims.toml states."""

import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ropelens.claims import nulls, numbers
from ropelens.claims.verdict import Claim, Floor


def _read_claim(name: str, row: dict[str, Any], papers: dict[str, dict[str, str]]) -> Claim:
    row |= papers[row["paper"]]
    for field in {"number", "interval", "objection"} & row.keys():
        row[field] = _read_function(row[field])
    if "other" in row:
        row |= {"other": row["other"].pop("what"), "other_number": _read_function(row["other"])}
    for field in {"arrays", "families", "words"} & row.keys():
        row[field] = tuple(row[field])
    row |= {"null": getattr(nulls, row["null"]), "floor": Floor(**row.get("floor", {}))}
    return Claim(name=name, **row)


def _read_function(named: str | dict[str, Any]) -> Callable[..., Any]:
    """A function of numbers.py; a table names it under `of` and has its options."""
    if isinstance(named, str):
        return getattr(numbers, named)
    return partial(getattr(numbers, named.pop("of")), **named)


_tables = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
CLAIMS = tuple(_read_claim(name, row, _tables["papers"]) for name, row in _tables["claims"].items())
