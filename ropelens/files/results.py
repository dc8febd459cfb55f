"""Result folders: one writer and one reader; numbers in netCDF 4."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd
import xarray as xr

from ropelens.errors import BadArgument, public, words_of
from ropelens.files.folder import check_writable, output_folder, write_whole

RECORD, PAGE = "run.json", "index.html"

FILES = (
    *(RECORD, PAGE, "profile.nc", "heads.csv", "truncation.nc", "truncation.csv"),
    *("reach.nc", "comparison.nc", "comparison.csv"),
)
"""Names of the files in a result folder."""

OWN_PAGE = b"ropelens</title>"
"""In the head of every page that ropelens writes."""

KINDS = {
    "analysis": "the results of ropelens analyze",
    "truncation": "the results of ropelens truncate",
    "comparison": "a comparison",
    "answer": "the answer of an analysis",
}
"""What a result folder holds, by the `kind` in its run.json."""

REQUIRED = ("kind", "command", "findings", "model", "seed", "created", "versions")
"""Keys of every run.json."""

OBJECTS = ("arguments", "model", "seconds", "text", "versions")
"""Keys of run.json whose values are objects."""

NETCDF = ("profile", "truncation", "comparison", "reach", "measurement")
"""What a netCDF file holds, by its attribute `kind`."""

CONTENTS = "contents"
"""The attribute of a netCDF file that names its variables: one without some is damaged."""

DEFLATED = 1_100
"""Bytes that a byte of a netCDF file holds at most, compressed: slightly above deflate's."""

TRAINED = ("config.json", "study.json", "history", "checkpoint.pt", ".lock")
"""What lies in the folder of a model, of a training run or of a study."""


def write_folder(
    folder: str | Path,
    *,
    record: Mapping[str, Any],
    results: Mapping[str, xr.Dataset | pd.DataFrame],
    page: Callable[[], str],
) -> Path:
    """Write a result folder, whole or not at all; returns the path of its page.

    `record` becomes run.json. `results` go by the names of their files: a
    dataset becomes netCDF, whose kind is its name ("profile.nc"), a table becomes CSV, where
    a text that a spreadsheet would run as a formula gets a "'" before it. `page` draws the
    page. Raises `BadArgument` as `check_out`.
    """
    assert record.keys() >= set(REQUIRED), f"run.json: {sorted(record)}"
    check_out(Path(folder), record["kind"])
    begin = time.perf_counter()
    with output_folder(folder) as new:
        for name, result in results.items():
            if isinstance(result, xr.Dataset):
                save(result.assign_attrs(kind=Path(name).stem), new / name)
            else:
                table = result.map(_no_formula)
                write_whole(new / name, table.to_csv(index=False, lineterminator="\n"))
        write_whole(new / PAGE, page())
        seconds = record.get("seconds", {}) | {"write": round(time.perf_counter() - begin, 3)}
        text = json.dumps(dict(record) | {"seconds": seconds}, indent=2, allow_nan=False)
        write_whole(new / RECORD, text + "\n")
    return Path(folder) / PAGE


def write_page(folder: str | Path, page: str) -> Path:
    """Replace the page of a result folder, and nothing else; returns its path."""
    with output_folder(folder) as new:
        write_whole(new / PAGE, page)
    return Path(folder) / PAGE


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


def read_own_record(folder: str | Path) -> dict[str, Any]:
    """The run.json of results in `folder`; {} without one, `BadArgument` for any other."""
    record, path = read_record(folder), Path(folder) / RECORD
    if path.exists() and record.get("kind") not in KINDS:
        state = f"its kind is {record['kind']!r}" if record else "it is damaged"
        raise BadArgument(f"{path} does not describe results: {state}.")
    return record


def check_out(folder: Path, kind: str, *, parts: Iterable[str] = ()) -> None:
    """Raise `BadArgument` for a folder that results of `kind` must not or cannot go into.

    They would replace the run.json of a training run, the page of other results, or a page
    or run.json that ropelens did not write; or go elsewhere, where one of the folders `parts`
    in `folder` is a symbolic link.
    """
    check_writable(folder)
    if any((folder / name).exists() for name in TRAINED):
        raise BadArgument(
            f"{folder} holds a model, a run or a study; results would mix with its files.",
            attempt=f"another folder, such as {folder / 'ropelens'}",
        )
    record = read_record(folder).get("kind")
    if record in KINDS and record != kind and {record, kind} != {"analysis", "truncation"}:
        raise BadArgument(
            f"{folder} holds {KINDS[record]}; the page would be lost.", attempt="another --out"
        )
    for path in (folder / name for name in parts):
        if path.is_symlink():
            raise BadArgument(f"{path} is a symbolic link; results would go elsewhere.")
    for path in (folder / name for name in FILES):
        foreign = record not in KINDS and path.name in (RECORD, PAGE) and not _is_own_page(path)
        if path.exists() and (foreign or not path.is_file()):
            raise BadArgument(
                f"{path} is not of ropelens's, or damaged; it would be lost.",
                attempt="another --out, or move it away",
            )


def _is_own_page(path: Path) -> bool:
    return path.name == PAGE and path.is_file() and OWN_PAGE in path.read_bytes()[:100_000]


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
    encoding = {
        name: {"zlib": True, "complevel": 4}
        for name, variable in results.variables.items()
        if variable.dtype.kind == "f" and variable.ndim >= 2
    }
    written.attrs[CONTENTS] = " ".join(sorted(map(str, results.variables)))
    # In memory first: HDF5 crashes the process when the disk is full.
    return write_whole(path, bytes(written.to_netcdf(engine="h5netcdf", encoding=encoding)))


def open_results(path: str | Path, kind: str | None = None) -> xr.Dataset:
    """Read what `save` wrote, into memory; with `kind`, of this kind alone.

    Raises `BadArgument` for a file that is missing, damaged or of another kind.
    """
    path, what = Path(path), kind or "netCDF file of ropelens"
    if not path.is_file():
        raise BadArgument(f"There is no {what} at {path}.")
    try:
        _check_within(path)
        results = xr.load_dataset(path, engine="h5netcdf")
        contents = str(results.attrs.pop(CONTENTS, "")).split()
        missing = [name for name in contents if name not in results.variables]
        states = results.attrs.get("kind")
        if missing or not contents:
            raise ValueError(f"it has no {missing[0] if missing else CONTENTS}")
        if states not in ([kind] if kind else NETCDF):
            raise ValueError(f"its kind is {states}")
    except Exception as error:  # whatever a damaged file makes HDF5, h5py and xarray raise
        raise BadArgument(
            f"{path} is no {what}.",
            seen=words_of(error, kind=True),
            attempt="a file that ropelens wrote; if it is damaged, measure again",
        ) from error
    plain = (v.item() if isinstance(v, np.generic) else v for v in results.attrs.values())
    results.attrs = dict(zip(results.attrs, plain, strict=True))
    return results


def _check_within(path: Path) -> None:
    """Raise ValueError for a file that refers to other files, or claims an absurd size.

    netCDF has no links and no storage in other files, and ours has no groups. This follows
    nothing.
    """
    size = 0
    with h5py.File(path, "r") as file:
        for name in file:
            if type(file.get(name, getlink=True)) is not h5py.HardLink:
                raise ValueError(f"{name} is a link")
            entry = file[name]
            if not isinstance(entry, h5py.Dataset):
                raise ValueError(f"{name} is a {type(entry).__name__.lower()}")
            if entry.external or entry.is_virtual:
                raise ValueError(f"{name} is stored in another file")
            size += entry.nbytes
    if size > DEFLATED * path.stat().st_size:
        raise ValueError(f"it claims to hold {size:,} bytes")


def _no_formula(value: object) -> object:
    """`value`; a text that a spreadsheet would run, with a "'" before it."""
    runs = isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r"))
    return f"'{value}" if runs else value


def _printable(value: object) -> object:
    """`value`; a text without what netCDF cannot hold."""
    if not isinstance(value, str):
        return value
    return value.encode("utf-8", "backslashreplace").decode().replace("\0", "␀")
