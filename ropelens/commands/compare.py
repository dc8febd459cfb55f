"""The command `ropelens compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import ropelens as rl
from ropelens.commands import options
from ropelens.commands.terminal import finish, stopped_in_its_words, this_command

MEASURED = "measured"
"""The folder in that of the results which keeps what was measured of each checkpoint."""


@stopped_in_its_words()
def compare(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="DIR...",
            help="Runs and studies of ropelens train; or folders that ropelens analyze wrote. "
            "The first is the baseline.",
        ),
    ],
    *,
    out: options.Out,
    sequences: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=2,
            max=10_000_000,
            help="Sequences of each run's validation text for its loss.",
        ),
    ] = 512,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    device_map: options.SpreadOver = None,
    quantize: options.Quantize = None,
) -> None:
    """Set trained runs, or analyzed models, side by side: losses, heads and planes.

    Writes index.html (the page), comparison.nc (every number, netCDF), comparison.csv (a
    row a variant) and run.json to DIR, and prints the path of the page. Every checkpoint
    of a run is measured, on the text that was held out of its training; what was measured
    stays in DIR/measured, so that the same command goes on where it stopped. Of what
    ropelens analyze wrote, nothing is measured again.

    \b
    Examples:
      ropelens compare runs/variants --out out
      ropelens compare analyzed/llama analyzed/qwen --out out
    """
    from ropelens.errors import BadArgument
    from ropelens.files.progress import show_progress
    from ropelens.files.results import check_out, read_record
    from ropelens.models.processes import processes, shared

    if out.resolve() in {path.resolve() for path in paths}:
        raise BadArgument(
            f"{out} is one of the folders to compare.",
            means="its own page and run.json would be lost",
            attempt="another --out",
        )
    check_out(out, "comparison")
    with shared():
        comparison = rl.compare(
            paths,
            cache=out / MEASURED,
            sequences=sequences,
            seed=seed,
            device=device,
            device_map=device_map,
            quantize=quantize,
            progress=show_progress,
        )
    if not processes().is_main_process:
        return
    page = rl.write_comparison(out, comparison, command=this_command())
    finish(read_record(out)["findings"][:5], page)
