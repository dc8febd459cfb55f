"""The table of published claims about RoPE, which claims.toml states."""

import math
import tomllib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ropelens.claims import nulls, numbers
from ropelens.claims.verdict import Claim

FACTS = (
    "statement",
    "what",
    "doi",
    "figure",
    "original",
    "original_model",
    "conditions",
)


def _read_claim(
    name: str, row: dict[str, Any], papers: dict[str, dict[str, str]]
) -> Claim:
    row |= papers[row.pop("paper")]
    other, floor = (
        row.pop("other", {"what": ""}),
        row.pop("floor", {"what": "none", "day": ""}),
    )
    parts = (row.pop("cite"), *[row["figure"]] * (row["figure"] != "not stated"))
    facts = {fact: row.pop(fact) for fact in (*FACTS, "nearness", "deviation")}
    facts |= {"source": ", ".join(parts), "floor": floor.pop("what")}
    facts |= {"floor_day": str(floor.pop("day")), "other": other.pop("what")}
    row |= floor | {"null": getattr(nulls, row["null"]), "other_number": other or None}
    functions = [
        x for x in ("number", "other_number", "interval", "objection") if row.get(x)
    ]
    row |= {field: _read_function(row[field]) for field in functions}
    row |= {n: tuple(row[n]) for n in ("arrays", "families", "words") if n in row}
    return Claim(name=name, facts=facts, **row)


def _read_function(named: str | dict[str, Any]) -> Callable[..., Any]:
    """A function of numbers.py; a table names it under `of` and has its options."""
    options = {"of": named} if isinstance(named, str) else named
    function = getattr(numbers, options.pop("of"))
    return partial(function, **options) if options else function


_papers, _rows = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text("utf-8")
).values()
CLAIMS = tuple(_read_claim(name, row, _papers) for name, row in _rows.items())
OTHERS = tuple(
    replace(claim, number=claim.other_number, interval=lambda *_: (math.nan, math.nan))
    for claim in CLAIMS
    if claim.other_number is not None
)
"""The claims with their other statistics."""
