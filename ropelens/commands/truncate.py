"""The command `ropelens truncate`."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Annotated, Any

import typer

from ropelens.analysis.options import Options
from ropelens.commands.options import Model, Out, Text, Tokenizer, with_options
from ropelens.commands.terminal import finish, measure
from ropelens.models.loading import option

LEFT_OUT = {"prompts", "attention_on", "backend"}
"""Options of `analyze` that a sweep does not have."""


class End(StrEnum):
    """The end of the planes from which they stop."""

    slow = "slow"
    fast = "fast"


def shares_of(text: str) -> Any:
    """The value of --keep."""
    shares = []
    for part in text.split(","):
        try:
            share = float(part)
        except ValueError:
            share = math.nan
        if not 0 <= share <= 1:
            raise typer.BadParameter(f"{part.strip()!r} in {text!r} is no share from 0 to 1")
        shares.append(share)
    return tuple(shares)


def names_of(text: str) -> Any:
    """The value of --measures."""
    return tuple(part.strip() for part in text.split(","))


@with_options(Options, only=Options.__dataclass_fields__.keys() - LEFT_OUT, rows="64")
def truncate(
    model: Model = "bundled",
    *,
    out: Out,
    text: Text = None,
    tokenizer: Tokenizer = None,
    keep: Annotated[
        Any,
        option(
            "P,P,...",
            "Shares of the planes that go on rotating, from 0 to 1.",
            parser=shares_of,
        ),
    ] = "1,0.875,0.75,0.625,0.5,0.375,0.25,0.125,0",
    end: Annotated[
        list[End] | None,
        option(
            "slow|fast",
            "The planes that stop first: the slowest (p-RoPE) or the fastest; may be "
            "repeated. [default: both, one after the other]",
        ),
    ] = None,
    bands: Annotated[
        int,
        option("N", "Also stop one of N bands of wavelengths at a time.", min=0),
    ] = 0,
    controls: Annotated[
        int,
        option("N", "Random sets of as many planes beside each step.", min=0),
    ] = 3,
    measures: Annotated[
        Any,
        option(
            "NAME,NAME,...",
            "What to measure: loss (on the text), induction (on repeated random tokens), "
            "retrieval (of needles in the text), change (of attention), labels, copying "
            "(loss of random tokens that come again, by distance; in truncation.nc alone). "
            "Induction, retrieval and copying run some tens of thousands of tokens more an "
            "edit.",
            parser=names_of,
        ),
    ] = "loss,induction,retrieval,change,labels",
    options: Options,
) -> None:
    """Stop more and more planes of a model: which does it need, and for what?

    Writes what analyze writes, with truncation.nc (every number, netCDF) and truncation.csv
    (a row an edit) to DIR, and prints the path of the page. If DIR holds what analyze wrote
    of the same weights and text, that stays: its profile is not measured again, and the
    sweep joins it on its page.

    \b
    Examples:
      ropelens truncate --out out
      ropelens truncate ./my-llama --text book.txt --end slow --bands 8 --out out
      ropelens truncate --measures loss --out out
    """
    from ropelens.files.progress import opening, show_progress
    from ropelens.files.results import check_out
    from ropelens.measure.terms import wanted_measures
    from ropelens.models.paths import check_text

    check_out(out, "truncation")
    wanted_measures(measures)
    check_text(model, text or ())
    with opening(show_progress, "starting"):  # torch and transformers take seconds
        import ropelens.analysis.analyze  # noqa: F401
    sweep = {
        "keep": keep,
        "ends": [str(one) for one in end or End],
        "bands": bands,
        "controls": controls,
        "measures": measures,
    }
    done = measure(model, text, options, folder=out, tokenizer=tokenizer, truncation=sweep)
    if done:
        finish(*done)
