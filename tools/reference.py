"""Write the table of a profile's variables in docs/measures.md, from the rows of the schema.

    python tools/reference.py

The table replaces the text between the two marks in that file.
"""

from __future__ import annotations

import re
from pathlib import Path

from ropelens.attention.variables import Derived, Fitted, Statistic, Variable
from ropelens.profiles.measures import MEASURES

PAGE = Path("docs/measures.md")
BEGIN, END = "<!-- reference: begin -->", "<!-- reference: end -->"


def reference() -> str:
    """The table, a row per variable."""
    head = "| variable | dims | unit | is | from | heads.csv |\n|---|---|---|---|---|---|"
    return "\n".join([head, *map(row_of, (row for row in MEASURES if row.saved))])


def row_of(row: Variable) -> str:
    """One row of the table."""
    unit = "" if row.units == "1" else row.units
    column = "yes" if row.column else ""
    dims = ", ".join(row.saved_dims)
    return f"| `{row.name}` | {dims} | {unit} | {row.long_name} | {source(row)} | {column} |"


def source(row: Variable) -> str:
    """The rows, tokens or fits from which the variable is computed."""
    if isinstance(row, Statistic):
        return "mean over tokens" if row.over == "tokens" else "mean over rows"
    if isinstance(row, Derived):
        return "other sums"
    return "fitted models" if isinstance(row, Fitted) else "repeated tokens"


def main() -> None:
    text = PAGE.read_text()
    between = re.compile(f"(?<={BEGIN}\n).*?(?=\n{END})", re.DOTALL)
    PAGE.write_text(between.sub(lambda _: reference(), text))


if __name__ == "__main__":
    main()
