"""Names of the measures of an evaluation."""

from collections.abc import Sequence

from ropelens.errors import BadArgument

DEFAULT_MEASURES = (  # of `evaluate`
    "loss",
    "induction",
    "retrieval",
    "change",
    "labels",
)
ALL_MEASURES = (*DEFAULT_MEASURES, "copying")  # default of a sweep


def wanted_measures(measures: str | Sequence[str]) -> set[str]:
    """The set of `measures`. Raises `BadArgument` for a name that does not exist."""
    names = [measures] if isinstance(measures, str) else list(measures)
    hint = f"measures: any of {', '.join(ALL_MEASURES)}"
    if not names:
        raise BadArgument("No measure was given.", hint=hint)
    for name in names:
        if name not in ALL_MEASURES:
            raise BadArgument(f"There is no measure {name!r}.", hint=hint)
    return set(names)
