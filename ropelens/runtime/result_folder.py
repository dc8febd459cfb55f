"""Result folders: sentences, files with numbers, run.json and a page that shows them."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from ropelens.errors import BadArgument, RopelensError, explained
from ropelens.runtime.folder import (
    PAGE,
    RECORD,
    check_writable,
    locked,
    output_folder,
    write_whole,
)
from ropelens.runtime.netcdf import save
from ropelens.runtime.run_record import KINDS, read_record

CELL_FORMAT = "%.9g"  # floats in tables: netCDF files have all digits
TRAINED = ("config.json", "study.json", "history", "checkpoint.pt", ".lock")

Results = xr.Dataset | pd.DataFrame


@dataclass(frozen=True, eq=False)
class ResultFolder:
    """Contents of a folder with results of one `kind`, a name in `KINDS`.

    `files` maps names to datasets, which become netCDF of the kind that the name gives
    ("profile.nc"), or to tables, which become CSV or JSON. `findings` are sentences about the
    numbers, `record` is the rest of run.json, and `page` draws the page. Without `page`, only
    `ropelens report` draws it, and an earlier page stays.
    """

    kind: str
    findings: Sequence[str]
    files: Mapping[str, Results]
    record: Mapping[str, Any]
    page: Callable[[], str] | None = None

    def write(self, folder: str | Path) -> Path:
        """Write the numbers, then the page; return the path of the page."""
        with locked(folder):
            self.write_numbers(folder)
            if self.page is not None:
                write_page(folder, self.page)
        return Path(folder) / PAGE

    def write_numbers(self, folder: str | Path) -> None:
        """Write run.json and all files or none; remove an earlier page that `page` replaces.

        Raises the errors of `check_out`.
        """
        folder = Path(folder)
        record = {**self.record, "kind": self.kind, "findings": [*self.findings]}
        with locked(folder):
            check_out(folder, self.kind)
            with output_folder(folder) as new:
                for name, results in self.files.items():
                    _write_file(new / name, results)
                text = json.dumps(record, indent=2, allow_nan=False)
                write_whole(new / RECORD, f"{text}\n")
            if self.page is not None:
                (folder / PAGE).unlink(missing_ok=True)  # it shows the earlier numbers


def write_page(folder: str | Path, page: Callable[[], str]) -> Path:
    """Write the page that `page` draws of the numbers in `folder`; return its path."""
    what = f"The page of {folder} could not be drawn; all numbers are saved."
    hint = "read them with ropelens.open, and please report this error"
    with explained(what, hint, error=RopelensError):
        text = page()
    return write_whole(Path(folder) / PAGE, text)


def _write_file(path: Path, results: Results) -> None:
    """Write a dataset as netCDF, or a table as JSON or CSV."""
    if isinstance(results, xr.Dataset):
        save(results.assign_attrs(kind=path.stem), path)
    elif path.suffix == ".json":
        rows = json.dumps(_json_rows(results), indent=2)
        write_whole(path, f"{rows}\n")
    else:
        cells = results.copy()
        for name, column in results.items():
            # Before pandas 3, `map` makes floats of integers if some are missing.
            if not pd.api.types.is_numeric_dtype(column):
                cells[name] = column.map(_no_formula)
        table = cells.to_csv(index=False, lineterminator="\n", float_format=CELL_FORMAT)
        write_whole(path, table)


def _json_rows(table: pd.DataFrame) -> list[dict[Any, Any]]:
    """The rows of a table. Numbers that JSON cannot store become None."""
    finite = table.replace([np.inf, -np.inf], np.nan)
    cells = finite.astype(object)
    cells = cells.where(cells.notna(), None)
    return cells.to_dict("records")


def _no_formula(cell: object) -> object:
    """A cell of a table; formulas of spreadsheets get a "'" in front."""
    if isinstance(cell, str) and cell.startswith(("=", "+", "-", "@", "\t", "\r")):
        return f"'{cell}"
    return cell


def check_out(folder: Path, kind: str, *, parts: Collection[str] = ()) -> None:
    """Raise `BadArgument` if results of `kind` cannot or must not be written to `folder`.

    They must not replace a training run, other results, or files that ropelens did not write.
    `parts` are the names of models, which must not be names of files or links in `folder`.
    """
    check_writable(folder)
    present = read_record(folder).get("kind")
    lost = [name for name in parts if _is_file_or_link(folder / name)]
    if present not in KINDS:
        lost += _other_files(folder)
    elif present != kind and {present, kind} != {"analysis", "truncation"}:
        lost.append(KINDS[present])
    if lost:
        what = f"{folder} holds {', '.join(lost)}: results would replace it or mix with it."
        raise BadArgument(what, hint="another --out")


def _is_file_or_link(path: Path) -> bool:
    return path.is_symlink() or path.is_file()


def _other_files(folder: Path) -> list[str]:
    """Files in a folder without results that a training or another program wrote."""
    others = [name for name in (*TRAINED, RECORD) if (folder / name).exists()]
    page = folder / PAGE
    if page.exists() and not _is_page(page):
        others.append(PAGE)
    return others


def _is_page(path: Path) -> bool:
    """Whether ropelens drew the page."""
    if not path.is_file():
        return False
    beginning = path.read_bytes()[:100_000]
    return b"ropelens</title>" in beginning
