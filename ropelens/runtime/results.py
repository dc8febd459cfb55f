"""Writing and reading of result folders; numbers are stored as netCDF 4."""

import json
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd
import xarray as xr

from ropelens.arguments import public
from ropelens.errors import BadArgument, RopelensError, explained
from ropelens.runtime.folder import (
    RECORD,
    check_writable,
    locked,
    output_folder,
    write_whole,
)
from ropelens.runtime.keys import Key

PAGE = "index.html"

KINDS = {  # of result folders, by the `kind` in run.json
    "analysis": "the results of ropelens analyze",
    "truncation": "the results of ropelens truncate",
    "comparison": "a comparison",
    "answer": "the answer of an analysis",
    "claims": "a ledger of claims",
    "prompt": "the page of a prompt",
    "watch": "the measurements of a training",
}
MOST_BYTES, MOST_RATIO = 2**30, 100  # a file that unpacks to more than both is not read
CONTENTS = (
    "contents"  # attribute of a file: the names of its variables, to notice damage
)


def write_folder(
    folder: str | Path,
    *,
    record: Mapping[str, Any],
    results: Mapping[str, xr.Dataset | pd.DataFrame],
    page: Callable[[], str],
) -> Path:
    """Write the numbers of a result folder, then its page; return the path of the page.

    `record` becomes run.json. `results` maps names of files to datasets, which become netCDF of
    the kind that the name gives ("profile.nc"), or to tables, which become CSV or JSON.
    """
    Path(folder).parent.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        check_out(Path(folder), record["kind"])
        with output_folder(folder) as new:
            for name, result in results.items():
                if isinstance(result, xr.Dataset):
                    save(result.assign_attrs(kind=Path(name).stem), new / name)
                elif name.endswith(".json"):
                    known = result.replace([np.inf, -np.inf], np.nan).astype(object)
                    rows = known.where(known.notna(), None).to_dict("records")
                    write_whole(new / name, f"{json.dumps(rows, indent=2)}\n")
                else:
                    table = result.map(_no_formula)
                    write_whole(
                        new / name, table.to_csv(index=False, lineterminator="\n")
                    )
            facts = json.dumps(dict(record), indent=2, allow_nan=False)
            write_whole(new / RECORD, f"{facts}\n")
        (Path(folder) / PAGE).unlink(missing_ok=True)  # it shows the earlier numbers
        return write_page(folder, page)


def write_page(folder: str | Path, page: Callable[[], str]) -> Path:
    """Write the page that `page` draws of the numbers in `folder`; return its path."""
    what = f"The page of {folder} could not be drawn; all numbers are saved."
    hint = "read them with ropelens.open, and please report this error"
    with explained(what, hint, error=RopelensError):
        text = page()
    return write_whole(Path(folder) / PAGE, text)


def read_record(folder: str | Path) -> dict[str, Any]:
    """The run.json in `folder`; {} if it is missing or not written by ropelens."""
    path = Path(folder) / RECORD
    try:
        record = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError, RecursionError):
        return {}
    if not (isinstance(record, dict) and isinstance(record.get("kind"), str)):
        return {}
    findings = record.get("findings", [])
    plain = isinstance(findings, list) and all(
        isinstance(line, str) for line in findings
    )
    names = ("arguments", "model", "seconds", "text", "versions")
    objects = all(isinstance(record.get(name, {}), dict) for name in names)
    return record if plain and objects else {}


def check_out(folder: Path, kind: str, *, parts: Collection[str] = ()) -> None:
    """Raise `BadArgument` if results of `kind` cannot or must not be written to `folder`.

    They must not replace a training run, other results, or files that ropelens did not write.
    `parts` are the names of models, which must not be names of files or links in `folder`.
    """
    check_writable(folder)
    record = read_record(folder).get("kind")
    lost = [
        name
        for name in parts
        if (folder / name).is_symlink() or (folder / name).is_file()
    ]
    if record not in KINDS:
        page = folder / PAGE
        by_ropelens = (
            page.is_file() and b"ropelens</title>" in page.read_bytes()[:100_000]
        )
        trained = ("config.json", "study.json", "history", "checkpoint.pt", ".lock")
        others = (*trained, RECORD, *[PAGE] * (not by_ropelens))
        lost += [name for name in others if (folder / name).exists()]
    elif record != kind and {record, kind} != {"analysis", "truncation"}:
        lost.append(KINDS[record])
    if lost:
        what = f"{folder} holds {', '.join(lost)}: results would replace it or mix with it."
        raise BadArgument(what, hint="another --out")


@public
def save(results: xr.Dataset, path: str | Path) -> Path:
    """Write a profile, a sweep or other labelled arrays to `path`, completely or not at all.

    The attribute `kind` names their contents. Numbers keep every bit. netCDF cannot store two
    kinds of characters: a NUL becomes "␀", and a lone surrogate a backslash escape.
    """
    texts = {
        name: text for name, text in results.attrs.items() if isinstance(text, str)
    }
    written = results.assign_attrs(
        {name: _printable(text) for name, text in texts.items()}
    )
    for name, variable in results.variables.items():
        if variable.dtype.kind in "OUT":
            values = np.vectorize(_printable, otypes=[object])(variable.values)
            written[name] = (variable.dims, values, variable.attrs)
    encoding = {
        name: {"zlib": True, "complevel": 4}
        for name, variable in results.variables.items()
        if variable.dtype.kind == "f" and variable.ndim >= 2
    }
    written.attrs[CONTENTS] = " ".join(sorted(map(str, results.variables)))
    # Convert in memory, because HDF5 crashes the process if the disk is full.
    return write_whole(
        path, bytes(written.to_netcdf(engine="h5netcdf", encoding=encoding))
    )


def open_results(path: str | Path, kind: str | None = None) -> xr.Dataset:
    """Read a file of this `kind` that `save` wrote into memory, or raise `BadArgument`."""
    path, what = Path(path), kind or "netCDF file of ropelens"
    advice = "a file that ropelens wrote; if the file is damaged, measure again"
    if not path.exists():
        place = path.parent if kind else path
        state = "is a file" if place.exists() else "does not exist"
        if place.is_dir():
            state = (
                f"holds {KINDS.get(read_record(place).get('kind', ''), 'no results')}"
            )
        hint = f"a folder with {path.name}, which ropelens wrote" if kind else advice
        if str(place).startswith("hf:"):
            state, hint = (
                "is not a folder",
                'ropelens.open("hf://datasets/...").save("FOLDER")',
            )
        raise BadArgument(f"{place} {state}.", hint=hint)
    with explained(f"{path} is not a {what}.", advice, error=BadArgument):
        _require_plain(path)
        results = xr.load_dataset(path, engine="h5netcdf")
        contents = set(str(results.attrs.pop(CONTENTS, "")).split())
        stated = results.attrs.get("kind")
        if (
            not contents
            or not contents <= set(results.variables)
            or kind not in (None, stated)
        ):
            lacks = ", ".join(sorted(contents - set(results.variables)))
            raise ValueError(
                f"its kind is {stated}" + f"; it lacks {lacks}" * bool(lacks)
            )
    plain = (
        v.item() if isinstance(v, np.generic) else v for v in results.attrs.values()
    )
    results.attrs = dict(zip(results.attrs, plain, strict=True))
    return results


def with_key(results: xr.Dataset, key: Key) -> xr.Dataset:
    """The results with the attribute `key`, by which `read_if_fits` knows them."""
    return results.assign_attrs(key=json.dumps(key.recorded))


def saved_key(results: xr.Dataset) -> dict[str, Any]:
    """The key that `with_key` added; {} for other results."""
    return json.loads(results.attrs.get("key", "{}"))


def read_if_fits(path: Path, kind: str, key: Key) -> xr.Dataset | None:
    """The results in a file of this kind; None if missing, damaged or with another key."""
    with suppress(BadArgument):
        results = open_results(path, kind)
        if key.fits(saved_key(results)):
            return results
    return None


def _require_plain(path: Path) -> None:
    """Raise ValueError for links, groups, data in other files, and data too large to unpack."""
    with h5py.File(path, "r") as file:
        linked = {
            n for n in file if type(file.get(n, getlink=True)) is not h5py.HardLink
        }
        arrays = {
            n: file[n]
            for n in file.keys() - linked
            if isinstance(file[n], h5py.Dataset)
        }
        stored = {n for n, x in arrays.items() if not (x.external or x.is_virtual)}
        size = sum((arrays[n].size or 0) * arrays[n].dtype.itemsize for n in stored)
        faults = [f"{name} is not stored in it" for name in file.keys() - stored]
    if size > max(MOST_BYTES, MOST_RATIO * path.stat().st_size):
        faults.append(f"it unpacks to {size / 1e9:.1f} GB")
    if faults:
        raise ValueError(faults[0])


def _no_formula(value: object) -> object:
    """A cell of a table; formulas of spreadsheets get a "'" in front."""
    runs = isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r"))
    return f"'{value}" if runs else value


def _printable(text: object) -> str:
    """Replace the characters of a text that netCDF cannot store."""
    return str(text).encode("utf-8", "backslashreplace").decode().replace("\0", "␀")
