"""The command `ropelens report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ropelens.commands.terminal import print_path
from ropelens.models.loading import option


def report(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", help="A folder that ropelens analyze, truncate or compare wrote."
        ),
    ],
    *,
    beside: Annotated[
        Path | None,
        option(
            "DIR",
            "A folder of another model or checkpoint, whose heads the page then shows "
            "beside those of DIR.",
        ),
    ] = None,
) -> None:
    """Make the page of DIR again, from its numbers, and print the path of the page.

    They are in its profile.nc, with truncation.nc where there is one; or comparison.nc.

    \b
    Examples:
      ropelens report out
      ropelens report out/step-1024 --beside out/step-64
    """
    from ropelens.analysis.folders import rewrite_page

    print_path(rewrite_page(folder, beside=beside))
