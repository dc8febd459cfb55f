"""Result folders: one writer, one reader, one schema of run.json; numbers in netCDF 4."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd
import xarray as xr

from ropelens.errors import BadArgument, words_of
from ropelens.files.folder import check_writable, output_folder, write_whole

RECORD, PAGE = "run.json", "index.html"

FILES = (
    *(RECORD, PAGE, "profile.nc", "heads.csv", "truncation.nc", "truncation.csv"),
    *("reach.nc", "comparison.nc", "comparison.csv"),
)
"""What results are called."""

OWN_PAGE = b"ropelens</title>"
"""What the head of every page has."""

LONGEST_RECORD = 100_000_000
"""Bytes of a run.json; what is longer is none."""

KINDS = {
    "analysis": "the results of ropelens analyze",
    "truncation": "the results of ropelens truncate",
    "comparison": "a comparison",
    "answer": "the answer of an analysis",
}
"""What a result folder can be: the `kind` in its run.json, and that in words."""

SCHEMA = {
    "kind": "what the folder holds, of `KINDS`",
    "command": "what a shell would be told to do the same again",
    "question": "the question that the page answers; comparisons and answers",
    "findings": "what was found, in sentences, the most important first",
    "arguments": "what was asked for, by name",
    "sweep": "command, arguments, seconds and warnings of a sweep measured after the profile",
    "model": "name and, where it was loaded by ropelens, revision, class and fingerprint",
    "text": "source in words, and fingerprint (sha256)",
    **dict.fromkeys(("seed", "context", "sequences", "tokens", "rows", "dtype"), "as measured"),
    "bf16_speed": "times as fast as float32, where the faster was asked for; else null",
    "batch_size": "sequences that ran together",
    "documents": "that the text was cut from, in a comparison the fewest; 0: not told apart",
    **dict.fromkeys(("loss", "loss_se"), "nats per token; null where it is unknown"),
    **dict.fromkeys(("labels", "thresholds", "claim"), "heads by label, and the claim on them"),
    **dict.fromkeys(("entries", "baseline", "fingerprints"), "comparisons: what was compared"),
    **dict.fromkeys(("head_sequences", "growth_sequences"), "comparisons of trained runs"),
    "data_sha256": "comparisons of trained runs: of data.json, which names text and tokenizer",
    "created": "when it was measured",
    "warnings": "what was warned of meanwhile",
    "versions": "of ropelens and the libraries that numbers depend on",
    **dict.fromkeys(("python", "platform", "threads", "device"), "where it ran"),
    **dict.fromkeys(("peak_memory_bytes", "peak_cuda_memory_bytes"), "most in use at a time"),
    "seconds": "what loading, measuring and writing took",
}
"""The keys of run.json; those of `REQUIRED` stand in every one."""

OBJECTS = ("arguments", "model", "seconds", "sweep", "text", "versions")
"""The keys whose values have keys themselves."""

REQUIRED = ("kind", "command", "findings", "model", "seed", "created", "versions")

NETCDF = {
    "profile": ("profile", "ropelens analyze"),
    "truncation": ("truncation sweep", "ropelens truncate"),
    "comparison": ("comparison", "ropelens compare"),
    "reach": ("reach", "ropelens.save_results, or analyses/reach.py,"),
    "measurement": ("measurement", "ropelens compare"),
}
"""Kinds of netCDF files, as their attribute `kind` says: in words, and who writes them."""

CONTENTS, DIGEST = "contents", "digest"
"""Attributes that name all variables of a file, and have the sha256 of all that it holds.

A file that lacks a variable, or holds something else than was written, is damaged.
"""

DEFLATED = 1_100
"""Bytes that a byte of a netCDF file can hold at most, compressed: a little above deflate's."""

TRAINED = ("config.json", "study.json", "history", "checkpoints", ".lock")
"""What lies in the folder of a model, of a run that is to become one, or of a study."""


def write_folder(
    folder: str | Path,
    *,
    record: Mapping[str, Any],
    results: Mapping[str, xr.Dataset | pd.DataFrame],
    page: Callable[[], str],
) -> Path:
    """Write a result folder, whole or not at all; the path of its page.

    `record` becomes run.json, by `SCHEMA`. `results` go by the names of their files: a
    dataset becomes netCDF, whose kind is its name ("profile.nc"), a table becomes CSV.
    `page` draws the page. On any error the folder stays as it was; `check_out` says which
    folders are refused. A text that a spreadsheet would run as a formula gets a "'" before it.
    """
    wrong = [name for name in REQUIRED if name not in record]
    wrong += [name for name in record if name not in SCHEMA]
    assert not wrong, f"run.json: {wrong}"
    check_out(Path(folder), record["kind"])
    begin = time.perf_counter()
    with output_folder(folder) as new:
        for name, result in results.items():
            if isinstance(result, xr.Dataset):
                save_results(result.assign_attrs(kind=Path(name).stem), new / name)
            else:
                table = result.map(_no_formula)
                write_whole(new / name, table.to_csv(index=False, lineterminator="\n"))
        write_whole(new / PAGE, page())
        seconds = record.get("seconds", {}) | {"write": round(time.perf_counter() - begin, 3)}
        text = json.dumps(dict(record) | {"seconds": seconds}, indent=2, allow_nan=False)
        write_whole(new / RECORD, text + "\n")
    return Path(folder) / PAGE


def write_page(folder: str | Path, page: str) -> Path:
    """Replace the page of a result folder, and nothing else; its path."""
    with output_folder(folder) as new:
        write_whole(new / PAGE, page)
    return Path(folder) / PAGE


def read_record(folder: str | Path) -> dict[str, Any]:
    """The run.json in `folder`; {} where there is none, or none that ropelens can have made."""
    path = Path(folder) / RECORD
    try:
        if not path.is_file() or path.stat().st_size > LONGEST_RECORD:
            return {}
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    if not (isinstance(record, dict) and isinstance(record.get("kind"), str)):
        return {}
    findings = record.get("findings", [])
    told = isinstance(findings, list) and all(isinstance(one, str) for one in findings)
    whole = told and all(isinstance(record.get(name, {}), dict) for name in OBJECTS)
    return record if whole else {}


def read_own_record(folder: str | Path) -> dict[str, Any]:
    """The run.json of results in `folder`; {} without one, BadArgument for any other."""
    record, path = read_record(folder), Path(folder) / RECORD
    if path.exists() and record.get("kind") not in KINDS:
        raise BadArgument(
            f"{path} does not tell of results.",
            seen=f"it says that it is of kind {record['kind']!r}"
            if record
            else "it is damaged",
            means="what else lies in the folder is not known",
            attempt="measure again into another folder, or put the file back",
        )
    return record


def check_out(folder: Path, kind: str) -> None:
    """Refuse a folder that results of `kind` cannot be written to, or would do harm in.

    The run.json of a training run lies beside its model, and would be lost; so would the
    page of other results, and a page or run.json that ropelens did not write.
    """
    check_writable(folder)
    for name in FILES:
        if (folder / name).exists() and not (folder / name).is_file():
            raise BadArgument(
                f"{folder / name} is no file; a result of that name is.",
                attempt="another --out",
            )
    if any((folder / name).exists() for name in TRAINED):
        raise BadArgument(
            f"{folder} holds a model, a run or a study; results would mix with its files.",
            attempt=f"another folder, such as {folder / 'ropelens'}",
        )
    held = read_record(folder).get("kind")
    if held in KINDS and held != kind and {held, kind} != {"analysis", "truncation"}:
        raise BadArgument(
            f"{folder} holds {KINDS[held]}; the page would be lost.", attempt="another --out"
        )
    if held not in KINDS and (folder / RECORD).exists():
        raise _foreign(folder / RECORD)
    if held not in KINDS and (folder / PAGE).exists() and not _is_own_page(folder / PAGE):
        raise _foreign(folder / PAGE)


def _is_own_page(path: Path) -> bool:
    with path.open("rb") as file:
        return OWN_PAGE in file.read(100_000)


def _foreign(path: Path) -> BadArgument:
    return BadArgument(
        f"{path} is not of ropelens's, or damaged; it would be lost.",
        attempt="another --out, or move it away",
    )


def save_profile(profile: xr.Dataset, path: str | Path) -> Path:
    """Write a profile to `path`, whole or not at all; see `save_results`."""
    return save_results(profile.assign_attrs(kind="profile"), path)


def save_results(results: xr.Dataset, path: str | Path) -> Path:
    """Write a profile, a sweep or any other labelled arrays to `path`, whole or not at all.

    The attribute `kind` of the arrays says what they are. Numbers keep every bit. Of texts,
    what netCDF cannot hold is told in another way: a NUL becomes "␀", half a surrogate pair
    a backslash escape. The file is made in memory, for HDF5 crashes the process where a disk
    runs full under it.
    """
    if not isinstance(results, xr.Dataset):
        raise BadArgument("Results are labelled arrays.", seen=repr(results)[:80])
    told = results.assign_attrs({name: _told(value) for name, value in results.attrs.items()})
    for name, variable in results.variables.items():
        if variable.dtype.kind in "OUT":
            texts = [_told(str(text)) for text in variable.values.ravel()]
            values = np.array(texts, dtype=object).reshape(variable.shape)
            told[name] = (variable.dims, values, variable.attrs)  # a coordinate stays one
    encoding = {
        name: {"zlib": True, "complevel": 4}
        for name, variable in results.variables.items()
        if variable.dtype.kind == "f" and variable.ndim >= 2
    }
    told.attrs[CONTENTS] = " ".join(sorted(map(str, results.variables)))
    told.attrs[DIGEST] = _digest(told)
    return write_whole(path, bytes(told.to_netcdf(engine="h5netcdf", encoding=encoding)))


def open_profile(path: str | Path) -> xr.Dataset:
    """Read a profile that `save_profile` or `ropelens analyze` wrote, into memory.

    Raises `BadArgument` for a file that is missing, damaged or no profile.
    """
    return open_results(path, "profile")


def open_truncation(path: str | Path) -> xr.Dataset:
    """Read a sweep that `save_results` or `ropelens truncate` wrote, into memory.

    Raises `BadArgument` for a file that is missing, damaged or no truncation sweep.
    """
    return open_results(path, "truncation")


def open_reach(path: str | Path) -> xr.Dataset:
    """Read what `save_results` wrote of a reach, or analyses/reach.py, into memory.

    Raises `BadArgument` for a file that is missing, damaged or no reach.
    """
    return open_results(path, "reach")


def open_comparison(path: str | Path) -> xr.Dataset:
    """Read a comparison that `save_results` or `ropelens compare` wrote, into memory.

    Raises `BadArgument` for a file that is missing, damaged or no comparison.
    """
    return open_results(path, "comparison")


def open_results(path: str | Path, kind: str) -> xr.Dataset:
    """The results in a netCDF file that says it is of `kind`, with all that it names."""
    path = Path(path)
    what, by = NETCDF[kind]
    again = f"a folder that {by} wrote; where it was damaged, run that again"
    if not path.is_file():
        raise BadArgument(f"There is no {what} at {path}.", attempt=again)
    try:
        _check_within(path)
        results = xr.load_dataset(path, engine="h5netcdf")
    except Exception as error:  # whatever a damaged file makes HDF5, h5py and xarray raise
        raise BadArgument(
            f"{path} is no {what}.", seen=words_of(error, kind=True), attempt=again
        ) from error
    digest = results.attrs.pop(DIGEST, None)  # which files of earlier versions lack
    if digest not in (None, _digest(results)):
        raise BadArgument(
            f"{path} is no {what}.",
            seen="it holds something else than was written",
            means="it was edited, or damaged",
            attempt=again,
        )
    contents = str(results.attrs.pop(CONTENTS, "")).split()
    missing = [name for name in contents if name not in results.variables]
    held = results.attrs.get("kind")
    if held != kind or not contents or missing:
        seen = f"it has no {missing[0]}" if missing else "it does not say what it holds"
        if held not in (kind, None):
            seen = f"it says that it is of kind {held}"
        raise BadArgument(f"{path} is no {what}.", seen=seen, attempt=again)
    plain = (v.item() if isinstance(v, np.generic) else v for v in results.attrs.values())
    results.attrs = dict(zip(results.attrs, plain, strict=True))
    return results


def _check_within(path: Path) -> None:
    """Raise ValueError for a file that would have other files read, or more than it can hold.

    Links to other files, storage in them, and links at all are none of netCDF's; nor are
    groups of ours. Nothing is followed to find out.
    """
    held = 0
    with h5py.File(path, "r") as file:
        for name in file:
            if type(file.get(name, getlink=True)) is not h5py.HardLink:
                raise ValueError(f"{name} is a link")
            entry = file[name]
            if not isinstance(entry, h5py.Dataset):
                raise ValueError(f"{name} is a {type(entry).__name__.lower()}")
            if entry.external or entry.is_virtual:
                raise ValueError(f"{name} is stored in another file")
            held += entry.nbytes
    if held > DEFLATED * path.stat().st_size:
        raise ValueError(f"it claims to hold {held:,} bytes")


def _digest(results: xr.Dataset) -> str:
    """sha256, in hex, of every name, number, text and attribute of some results."""
    digest = hashlib.sha256()
    for name in sorted(results.variables, key=str):
        variable = results.variables[name]
        values = variable.values
        if values.dtype.kind in "OUT":
            content = json.dumps([str(text) for text in values.ravel()]).encode()
        else:
            content = np.ascontiguousarray(values).tobytes()
        kind = "text" if values.dtype.kind in "OUT" else values.dtype.name
        about = [str(name), list(variable.dims), list(values.shape)]
        digest.update(json.dumps([*about, kind, _plain(variable.attrs)]).encode() + content)
    attrs = {name: value for name, value in results.attrs.items() if name != DIGEST}
    digest.update(json.dumps(_plain(attrs)).encode())
    return digest.hexdigest()


def _plain(attrs: Mapping[Any, Any]) -> dict[str, str]:
    """Attributes as texts, the same before they were written and after."""
    values = {str(name): np.asarray(value).tolist() for name, value in attrs.items()}
    return {name: repr(value) for name, value in sorted(values.items())}


def _no_formula(value: object) -> object:
    """`value`; a text that a spreadsheet would run, with a "'" before it."""
    runs = isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r"))
    return f"'{value}" if runs else value


def _told(value: object) -> object:
    """`value`; a text without what netCDF cannot hold."""
    if not isinstance(value, str):
        return value
    return value.encode("utf-8", "backslashreplace").decode().replace("\0", "␀")
