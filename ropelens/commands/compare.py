"""The command `ropelens compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ropelens.analysis.options import Options, Out, with_options
from ropelens.commands.terminal import finish
from ropelens.models.loading import option


@with_options(Options, only=("seed", "device"))
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
    out: Out,
    sequences: Annotated[
        int,
        option(
            "N", "Sequences of each run's validation text for its loss.", min=2, max=10000000
        ),
    ] = 512,
    options: Options,
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
    from ropelens.files.results import check_out

    if out.resolve() in {path.resolve() for path in paths}:
        raise BadArgument(
            f"{out} is one of the folders to compare.",
            means="its own page and run.json would be lost",
            attempt="another --out",
        )
    check_out(out, "comparison", parts=["measured"])
    from ropelens.analysis.folders import Answer
    from ropelens.comparison.compare import compare
    from ropelens.models.processes import processes, shared

    with shared():
        comparison = compare(
            paths,
            cache=out / "measured",
            sequences=sequences,
            seed=options.seed,
            device=options.device,
            progress=show_progress,
        )
    if processes().is_main_process:
        Answer().save(out, comparison)
        finish(out)
