"""Result folders: one writer and one reader; numbers in netCDF 4."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd
import xarray as xr

from ropelens.errors import BadArgument, RopelensError, explained, public
from ropelens.runtime.folder import check_writable, output_folder, write_whole

RECORD, PAGE = "run.json", "index.html"

OWN_PAGE = b"ropelens</title>"
"""In the head of every page that ropelens writes."""

KINDS = {
    "analysis": "the results of ropelens analyze",
    "truncation": "the results of ropelens truncate",
    "comparison": "a comparison",
    "answer": "the answer of an analysis",
    "claims": "a ledger of claims",
}
"""What a result folder holds, by the `kind` in its run.json."""

OBJECTS = ("arguments", "model", "seconds", "text", "versions")
"""Keys of run.json whose values are objects."""

CONTENTS = "contents"
"""The attribute of a netCDF file that names its variables: one without some is damaged."""

TRAINED = ("config.json", "study.json", "history", "checkpoint.pt", ".lock")
"""What lies in the folder of a model, of a training run or of a study."""


def write_folder(
    folder: str | Path,
    *,
    record: Mapping[str, Any],
    results: Mapping[str, xr.Dataset | pd.DataFrame],
    page: Callable[[], str],
) -> Path:
    """Write a result folder, its numbers first; returns the path of its page.

    `record` becomes run.json. `results` go by the names of their files: a
    dataset becomes netCDF, whose kind is its name ("profile.nc"), a table becomes CSV, where
    a text that a spreadsheet would run as a formula gets a "'" before it. They are written
    all or none; then `page` draws the page. Raises `BadArgument` as `check_out`.
    """
    check_out(Path(folder), record["kind"])
    with output_folder(folder) as new:
        for name, result in results.items():
            if isinstance(result, xr.Dataset):
                save(result.assign_attrs(kind=Path(name).stem), new / name)
            else:
                table = result.map(_no_formula)
                write_whole(new / name, table.to_csv(index=False, lineterminator="\n"))
        write_whole(new / RECORD, json.dumps(dict(record), indent=2, allow_nan=False) + "\n")
    (Path(folder) / PAGE).unlink(missing_ok=True)  # of other numbers
    return write_page(folder, page)


def write_page(folder: str | Path, page: Callable[[], str]) -> Path:
    """Write what `page` draws of the numbers in `folder`; the path of the page."""
    what = f"The page of {folder} could not be drawn; its numbers are saved."
    with explained(what, "ropelens.open reads them; please report this", error=RopelensError):
        text = page()
    return write_whole(Path(folder) / PAGE, text)


def read_record(folder: str | Path) -> dict[str, Any]:
    """The run.json in `folder`; {} without one, and for one that ropelens cannot have made."""
    path = Path(folder) / RECORD
    try:
        record = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError, RecursionError):
        return {}
    if not (isinstance(record, dict) and isinstance(record.get("kind"), str)):
        return {}
    findings = record.get("findings", [])
    plain = isinstance(findings, list) and all(isinstance(one, str) for one in findings)
    objects = all(isinstance(record.get(name, {}), dict) for name in OBJECTS)
    return record if plain and objects else {}


def other_place(place: str | Path, wanted: str) -> BadArgument:
    """The error that says what `place` is, where it is not what is `wanted`."""
    held = KINDS.get(read_record(place).get("kind", ""), "no results")
    found = "is a file" if Path(place).exists() else "is no file or folder"
    found = f"holds {held}" if Path(place).is_dir() else found
    return BadArgument(f"{place} {found}.", hint=wanted)


def check_out(folder: Path, kind: str, *, parts: Iterable[str] = ()) -> None:
    """Raise `BadArgument` for a folder that results of `kind` must not or cannot go into.

    They would replace the run.json of a training run, the page of other results, or a page
    or run.json that ropelens did not write; or go elsewhere, where one of the folders `parts`
    in `folder` is a symbolic link.
    """
    check_writable(folder)
    record = read_record(folder).get("kind")
    lost = [name for name in parts if (folder / name).is_symlink()]
    if record not in KINDS:
        page = folder / PAGE
        own = page.is_file() and OWN_PAGE in page.read_bytes()[:100_000]
        others = (*TRAINED, RECORD, *[PAGE] * (not own))
        lost += [name for name in others if (folder / name).exists()]
    elif record != kind and {record, kind} != {"analysis", "truncation"}:
        lost.append(KINDS[record])
    if lost:
        raise BadArgument(
            f"{folder} holds {', '.join(lost)}: results would replace that, or mix with it.",
            hint="another --out",
        )


@public
def save(results: xr.Dataset, path: str | Path) -> Path:
    """Write a profile, a sweep or other labelled arrays to `path`, whole or not at all.

    Their attribute `kind` says what they are. Numbers keep every bit. netCDF cannot hold
    every text: a NUL becomes "␀", half a surrogate pair a backslash escape.
    """
    named = {name: _printable(value) for name, value in results.attrs.items()}
    written = results.assign_attrs(named)
    for name, variable in results.variables.items():
        if variable.dtype.kind in "OUT":
            texts = [_printable(str(text)) for text in variable.values.ravel()]
            values = np.array(texts, dtype=object).reshape(variable.shape)
            written[name] = (variable.dims, values, variable.attrs)  # a coordinate stays one
    large = [n for n, of in results.variables.items() if of.dtype.kind == "f" and of.ndim >= 2]
    encoding = {name: {"zlib": True, "complevel": 4} for name in large}
    written.attrs[CONTENTS] = " ".join(sorted(map(str, results.variables)))
    # In memory first: HDF5 crashes the process when the disk is full.
    return write_whole(path, bytes(written.to_netcdf(engine="h5netcdf", encoding=encoding)))


def open_results(path: str | Path, kind: str | None = None) -> xr.Dataset:
    """Read what `save` wrote, into memory; with `kind`, of this kind alone.

    Raises `BadArgument` for a file that is missing, damaged or of another kind.
    """
    path, what = Path(path), kind or "netCDF file of ropelens"
    advice = "a file that ropelens wrote; if it is damaged, measure again"
    if not path.exists():
        wanted = f"a folder with {path.name}, which ropelens wrote" if kind else advice
        raise other_place(path.parent if kind else path, wanted)
    with explained(f"{path} is no {what}.", advice, error=BadArgument):
        _require_plain(path)
        results = xr.load_dataset(path, engine="h5netcdf")
        contents = set(str(results.attrs.pop(CONTENTS, "")).split())
        states = results.attrs.get("kind")
        if not contents or not contents <= set(results.variables) or kind not in (None, states):
            lacks = ", ".join(sorted(contents - set(results.variables)))
            raise ValueError(f"its kind is {states}" + f"; it lacks {lacks}" * bool(lacks))
    plain = (v.item() if isinstance(v, np.generic) else v for v in results.attrs.values())
    results.attrs = dict(zip(results.attrs, plain, strict=True))
    return results


def _require_plain(path: Path) -> None:
    """Raise ValueError for a file with links, groups or storage in other files.

    netCDF has none of them, and they may name any file of whoever opens this one. This
    follows nothing.
    """
    with h5py.File(path, "r") as file:
        for name in file:
            linked = type(file.get(name, getlink=True)) is not h5py.HardLink
            entry = None if linked else file[name]
            if not isinstance(entry, h5py.Dataset) or entry.external or entry.is_virtual:
                raise ValueError(f"{name} is not stored in it")


def _no_formula(value: object) -> object:
    """`value`; a text that a spreadsheet would run, with a "'" before it."""
    runs = isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r"))
    return f"'{value}" if runs else value


def _printable(value: object) -> object:
    """`value`; a text without what netCDF cannot hold."""
    if not isinstance(value, str):
        return value
    return value.encode("utf-8", "backslashreplace").decode().replace("\0", "␀")
