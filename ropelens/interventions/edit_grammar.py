"""The grammar of edits on the command line, such as "drop:slowest=0.25:3.4,5.*"."""

import re
from typing import TYPE_CHECKING

from ropelens.errors import BadArgument, explained

if TYPE_CHECKING:  # the examples below appear in --help, which does not wait for torch
    from ropelens.interventions.plane_edits import Edit
    from ropelens.rope.select import Selection

EDIT_EXAMPLES = "stop:0-3,7 or drop:slowest=0.25 or scale=0.5:fastest=0.25:3.4,5.*"
EDIT = re.compile(
    r"(?P<action>stop|drop|scale)(=(?P<factor>[^:=]+))?"
    r":(?P<planes>[^:]+)"
    r"(:(?P<heads>.+))?"
)
SHARE_OF_PLANES = re.compile(r"(?P<end>slowest|fastest)=(?P<share>[^=]+)")
SPAN = re.compile(r"\s*(?P<first>\d+)(-(?P<last>\d+))?\s*")


def parse_edit(text: str) -> "Edit":
    """The edit ACTION[=FACTOR]:PLANES[:HEADS]; raises `BadArgument` for any other text."""
    with explained(f"{text!r} is not an edit.", EDIT_EXAMPLES, error=BadArgument):
        return _edit_of(text)


def _edit_of(text: str) -> "Edit":
    from ropelens.interventions.edit import drop, scale, stop
    from ropelens.rope.select import ALL_HEADS

    match = EDIT.fullmatch(text)
    if match is None:
        raise ValueError("it is not ACTION:PLANES or ACTION:PLANES:HEADS")
    action = match["action"]
    factor = match["factor"]
    if (action == "scale") != (factor is not None):
        raise ValueError("scale needs a factor, and no other action has a factor")
    planes = _planes_of(match["planes"])
    heads = match["heads"] or ALL_HEADS
    if action == "scale":
        return scale(planes, by=float(factor), heads=heads)
    if action == "drop":
        return drop(planes, heads=heads)
    return stop(planes, heads=heads)


def _planes_of(text: str) -> "Selection":
    """Planes by their numbers ("0-3,7"), or a share of them ("slowest=0.25")."""
    from ropelens.rope.select import Fastest, PlaneNumbers, Slowest

    match = SHARE_OF_PLANES.fullmatch(text)
    if match is not None:
        share = float(match["share"])
        return Slowest(share) if match["end"] == "slowest" else Fastest(share)
    numbers: list[int] = []
    for span in text.split(","):
        match = SPAN.fullmatch(span)
        if match is None:
            raise ValueError(f"{span!r} is not a number of a plane, such as 3 or 0-3")
        first = int(match["first"])
        last = first if match["last"] is None else int(match["last"])
        numbers += range(first, last + 1)
    if not numbers:
        raise ValueError("no planes")
    return PlaneNumbers(numbers)
