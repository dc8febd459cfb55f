"""The command `ropelens report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ropelens.commands.terminal import print_path


def report(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", help="A folder that ropelens analyze, truncate or compare wrote."
        ),
    ],
) -> None:
    """Make the page of DIR again, from its numbers, and print the path of the page.

    They are in its profile.nc, with truncation.nc where there is one; or comparison.nc.

    \b
    Example:
      ropelens report out
    """
    from ropelens.analysis.folders import rewrite_page

    print_path(rewrite_page(folder))
