"""The job of `ropelens compare`: runs or analyses side by side, measured and written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ropelens.commands.job import check_out
from ropelens.comparison.compare import compare_entries, count_checkpoints
from ropelens.comparison.entries import find_entries, unfinished_runs
from ropelens.errors import BadArgument
from ropelens.files.progress import show_progress
from ropelens.report import write_comparison

MEASURED = "measured"
"""The folder in that of the results which keeps what was measured of each checkpoint."""


def run(
    paths: Sequence[Path], *, out: Path, sequences: int, seed: int, device: str, command: str
) -> Path:
    """Compare what stands in `paths`, write four files to `out`; the path of the page.

    Stopped and started again, it goes on where it was. `command` is what a shell would be
    told to do the same again. Raises `RopelensError` for what a user can cause; files that
    are in `out` then stay as they are.
    """
    check_out(out)
    if out.resolve() in {path.resolve() for path in paths}:
        raise BadArgument(
            f"{out} is one of the folders to compare.",
            means="its own page and run.json would be lost",
            attempt="another --out",
        )
    if (out / "profile.nc").exists():
        raise BadArgument(
            f"{out} holds the results of ropelens analyze; their page would be lost.",
            attempt="another --out",
        )
    entries = find_entries(paths)
    total = count_checkpoints(entries)
    with show_progress("comparing", total=total, unit="checkpoints") as advance:
        comparison = compare_entries(
            entries,
            cache=out / MEASURED,
            sequences=sequences,
            seed=seed,
            device=device,
            progress=advance,
            unfinished=unfinished_runs(paths),
        )
    return write_comparison(out, comparison, command=command)
