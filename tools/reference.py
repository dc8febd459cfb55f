"""Write the table of a profile's variables to docs/measures.md, between the two marks there.

python tools/reference.py
"""

import re
from collections.abc import Callable
from pathlib import Path

from ropelens.attention.exchange import follow_sums
from ropelens.attention.formulas import attention_budget, describe_kernel
from ropelens.budget.found_sinks import find_sinks
from ropelens.budget.labels import follow_numbers
from ropelens.budget.logit import gains, score_models
from ropelens.budget.surrogates import draw_surrogates
from ropelens.profiles.measures import MEASURES, REQUESTED
from ropelens.profiles.tasks import Repeats
from ropelens.schema.rows import Derived, Statistic, Variable

PAGE = Path("docs/measures.md")
BEGIN = "<!-- reference: begin -->"
END = "<!-- reference: end -->"
FITTED: dict[str, Callable[..., object]] = {
    r"kernel|offset\w*": describe_kernel,
    r"found_sink": find_sinks,
    r"\w+_bits": attention_budget,
    r"group_scored": score_models,
    r"group_follow_\w+": follow_sums,
    r"follow\w+": follow_numbers,
    r"group_\w+": gains,
    r"surrogate_\w+": draw_surrogates,
    r"\w*induction|duplicate_token": Repeats,
}
"""Functions that compute the variables that are neither sums nor derived from sums, by name."""


def reference() -> str:
    """The table, with a row for each variable."""
    head = "| variable | dims | unit | is | computed by | heads.csv |"
    rule = "|---|---|---|---|---|---|"
    rows = [*(row for row in MEASURES if row.saved), *REQUESTED.values()]
    return "\n".join([head, rule, *map(row_of, rows)])


def row_of(row: Variable) -> str:
    """One row of the table."""
    unit = "" if row.units == "1" else row.units
    column = "yes" if row.column else ""
    column = "by bin" if "distance_bin" in row.dims else column
    dims = ", ".join(row.saved_dims)
    return f"| `{row.name}` | {dims} | {unit} | {row.long_name} | {source(row)} | {column} |"


def source(row: Variable) -> str:
    """The function that computes a variable, and the mean that is taken of its values."""
    if isinstance(row, Statistic):
        over = "tokens" if row.over == "tokens" else "rows"
        function = getattr(row.values, "func", row.values)  # of a partial function
        pool = "maximum" if row.pool == "max" else "mean"
        return f"{pool} over {over} of {name_of(function)}"
    if isinstance(row, Derived):
        return name_of(getattr(row.value, "func", row.value))
    found = [name_of(f) for name, f in FITTED.items() if re.fullmatch(name, row.name)]
    return found[0] if found else "fitted models"


def name_of(function: Callable[..., object]) -> str:
    """The file and the name of a function, or the file of the table for an expression there."""
    file = function.__module__.rsplit(".", 1)[-1]
    name = function.__name__
    return f"`{file}`" if name == "<lambda>" else f"`{file}.{name}`"


def main() -> None:
    text = PAGE.read_text()
    between = re.compile(f"(?<={BEGIN}\n).*?(?=\n{END})", re.DOTALL)
    written = between.sub(lambda _: reference(), text)
    PAGE.write_text(written)


if __name__ == "__main__":
    main()
