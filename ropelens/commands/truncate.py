"""The command `ropelens truncate`."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Annotated, Any

import typer

from ropelens.commands import options
from ropelens.commands.terminal import finish, say_plan, stopped_in_its_words, this_command


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


Keep = Annotated[
    Any,
    typer.Option(
        parser=shares_of,
        metavar="P,P,...",
        help="Shares of the planes that go on rotating, from 0 to 1.",
    ),
]
Measures = Annotated[
    Any,
    typer.Option(
        parser=names_of,
        metavar="NAME,NAME,...",
        help="What to measure: loss (on the text), induction (on repeated random tokens), "
        "retrieval (of needles in the text), change (of attention), labels; copying (loss of "
        "random tokens that come again, by distance) goes into truncation.nc alone. "
        "Induction, retrieval and copying run some tens of thousands of tokens of their own "
        "an edit.",
    ),
]
Ends = Annotated[
    list[End] | None,
    typer.Option(
        "--end",
        metavar="slow|fast",
        help="The planes that stop first: the slowest (p-RoPE) or the fastest; may be "
        "repeated. [default: both, one after the other]",
        show_default=False,
    ),
]


@stopped_in_its_words()
def truncate(
    model: options.Model = "bundled",
    *,
    out: options.Out,
    text: options.Text = None,
    ids: options.Ids = None,
    tokenizer: options.Tokenizer = None,
    keep: Keep = "1,0.875,0.75,0.625,0.5,0.375,0.25,0.125,0",
    end: Ends = None,
    bands: Annotated[
        int,
        typer.Option(
            metavar="N", min=0, help="Also stop one of N bands of wavelengths at a time."
        ),
    ] = 0,
    controls: Annotated[
        int,
        typer.Option(
            metavar="N", min=0, help="Random sets of as many planes beside each step."
        ),
    ] = 3,
    measures: Measures = "loss,induction,retrieval,change,labels",
    context: options.Context = None,
    sequences: options.SequenceCount = None,
    rows: options.Rows = "64",
    batch_size: options.BatchSize = None,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    device_map: options.SpreadOver = None,
    quantize: options.Quantize = None,
    dtype: options.Dtype = "float32",
    revision: options.Revision = None,
    local_files_only: options.Offline = False,
    trust_remote_code: options.RemoteCode = False,
) -> None:
    """Stop more and more planes of a model: which does it need, and for what?

    Writes what analyze writes, with truncation.nc (every number, netCDF) and truncation.csv
    (a row an edit) to DIR, and prints the path of the page. Where DIR holds what analyze wrote
    of the same weights and text, that stays, its profile is not measured again, and the sweep
    joins it on its page.

    \b
    Examples:
      ropelens truncate --out out
      ropelens truncate ./my-llama --text book.txt --end slow --bands 8 --out out
      ropelens truncate --measures loss --out out
    """
    from ropelens.files.progress import opening, show_progress
    from ropelens.files.results import check_out
    from ropelens.measure.terms import wanted_measures

    check_out(out, "truncation")
    wanted_measures(measures)
    options.check_first(
        model,
        text,
        ids,
        device=device,
        dtype=dtype,
        device_map=device_map,
        quantize=quantize,
    )
    with opening(show_progress, "starting"):  # torch and transformers take seconds
        from ropelens.analysis.analyze import analyze as measure
        from ropelens.analysis.standing import with_what_stands
        from ropelens.analysis.summary import summarize
        from ropelens.measure.savepoint import UNFINISHED, remove_savepoint
        from ropelens.models.processes import processes, shared
    with shared():
        analysis = measure(
            model,
            text,
            ids=ids,
            tokenizer=tokenizer,
            context=context,
            sequences=sequences,
            rows=rows,
            batch_size=batch_size,
            seed=seed,
            truncation={
                "keep": keep,
                "ends": [str(one) for one in end or End],
                "bands": bands,
                "controls": controls,
                "measures": measures,
            },
            device=device,
            device_map=device_map,
            quantize=quantize,
            dtype=dtype,
            revision=revision,
            local_files_only=local_files_only,
            trust_remote_code=trust_remote_code,
            standing=out,
            cache=out / UNFINISHED,
            progress=show_progress,
            announce=say_plan,
            command=this_command(),
        )
    if not processes().is_main_process:
        return
    with opening(show_progress, "writing"):
        analysis = with_what_stands(analysis, out)
        page = analysis.save(out)
    remove_savepoint(out / UNFINISHED)
    finish(summarize(analysis), page)
