"""Result folders: one writer, one reader, one schema of run.json; numbers in netCDF 4."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from ropelens.errors import BadArgument, words_of
from ropelens.files.folder import check_writable, output_folder, write_whole

RECORD, PAGE = "run.json", "index.html"

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

REQUIRED = ("kind", "command", "findings", "model", "seed", "created", "versions")

NETCDF = {
    "profile": ("profile", "ropelens analyze"),
    "truncation": ("truncation sweep", "ropelens truncate"),
    "comparison": ("comparison", "ropelens compare"),
    "reach": ("reach", "analyses/reach.py"),
    "measurement": ("measurement", "ropelens compare"),
}
"""Kinds of netCDF files, as their attribute `kind` says: in words, and who writes them."""

CONTENTS = "contents"
"""The attribute that names all variables of a file: one that lacks some is damaged."""

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
    `page` draws the page. On any error the folder stays as it was.
    """
    wrong = [name for name in REQUIRED if name not in record]
    wrong += [name for name in record if name not in SCHEMA]
    assert not wrong, f"run.json: {wrong}"
    begin = time.perf_counter()
    with output_folder(folder) as new:
        for name, result in results.items():
            if isinstance(result, xr.Dataset):
                save_results(result.assign_attrs(kind=Path(name).stem), new / name)
            else:
                write_whole(new / name, result.to_csv(index=False, lineterminator="\n"))
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
    """The run.json in `folder`; {} where there is none or it is no JSON object."""
    try:
        record = json.loads((Path(folder) / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def check_out(folder: Path, kind: str) -> None:
    """Refuse a folder that results of `kind` cannot be written to, or would do harm in.

    The run.json of a training run lies beside its model, and would be lost; so would the
    page of other results.
    """
    check_writable(folder)
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
        results = xr.load_dataset(path, engine="h5netcdf")
    except Exception as error:  # whatever a damaged file makes HDF5, h5py and xarray raise
        raise BadArgument(
            f"{path} is no {what}.", seen=words_of(error, kind=True), attempt=again
        ) from error
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


def _told(value: object) -> object:
    """`value`; a text without what netCDF cannot hold."""
    if not isinstance(value, str):
        return value
    return value.encode("utf-8", "backslashreplace").decode().replace("\0", "␀")
