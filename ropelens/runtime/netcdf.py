"""Labelled arrays as netCDF 4 files."""

import json
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import h5netcdf
import h5py
import numpy as np
import xarray as xr
from xarray.backends import H5NetCDFStore

from ropelens.arguments import public
from ropelens.errors import BadArgument, explained
from ropelens.runtime.digits import FOUR_DIGITS, THREE_DIGITS, rounded
from ropelens.runtime.folder import write_whole
from ropelens.runtime.keys import Key
from ropelens.runtime.run_record import KINDS, read_record

# A file that unpacks to more than both is not read: bytes, and multiples of its size.
MOST_BYTES = 2**30
MOST_RATIO = 100
# Attribute of a file: the names of its variables, to notice damage
CONTENTS = "contents"
TEXTS = "OUT"  # kinds of numpy's types
MANY_TEXTS = 32  # from here on, texts are stored as characters, which are compressed
MANY_BYTES = 4096  # smaller arrays are not compressed, because chunks need an index
MOST_IN_CHUNK = 2**24  # bytes of an array that is stored in one chunk
MAPS_BY_STEP = {"layer", "step"}
ATTENTION_BY_OFFSET = {"entry", "layer", "offset_bin"}
"""Arrays with these dims keep fewer digits: they are large, and only figures show them and
sentences state means of them."""
ADVICE = "a file that ropelens wrote; if the file is damaged, measure again"


@public
def save(results: xr.Dataset, path: str | Path) -> Path:
    """Write a profile, a sweep or other labelled arrays to `path`, completely or not at all.

    The attribute `kind` names their contents. Numbers keep every bit, except maps of heads at
    every step of a training, which keep four digits, and attention by offset of several
    models, which keeps three (`as_saved`). netCDF cannot store two kinds of characters: a NUL
    becomes "␀", and a lone surrogate a backslash escape.
    """
    # The encoding of an earlier file would make its coordinates coordinates again
    written = _with_printable_texts(as_saved(results)).drop_encoding()
    names = sorted(str(name) for name in results.variables)
    written.attrs[CONTENTS] = " ".join(names)
    # Convert in memory, because HDF5 crashes the process if the disk is full.
    return write_whole(path, _netcdf_bytes(written))


def as_saved(results: xr.Dataset) -> xr.Dataset:
    """The results with the precision of their file, so that a page shows what is saved."""
    saved = results.copy()
    for name, variable in results.data_vars.items():
        if variable.dtype.kind != "f":
            continue
        if set(variable.dims) >= MAPS_BY_STEP:
            saved[name] = variable.copy(data=rounded(variable.values, FOUR_DIGITS))
        elif set(variable.dims) >= ATTENTION_BY_OFFSET:
            saved[name] = variable.copy(data=rounded(variable.values, THREE_DIGITS))
    return saved


def _netcdf_bytes(results: xr.Dataset) -> bytes:
    """The netCDF file of `results`, made in memory.

    The format of HDF5 1.10 has smaller indexes than the default, which HDF5 1.8 can read.
    """
    encoding = {}
    for name, variable in results.variables.items():
        encoding[name] = _encoding(variable)
    content = BytesIO()
    with h5netcdf.File(content, "w", libver=("v110", "v110")) as file:
        results.dump_to_store(H5NetCDFStore(file), encoding=encoding)
    return content.getvalue()


def _encoding(variable: xr.Variable) -> dict[str, Any]:
    """How a variable is stored: its type, compression and chunks."""
    if variable.dtype.kind in TEXTS:
        if variable.size < MANY_TEXTS:
            return {}
        return {"dtype": "S1", "zlib": True, "shuffle": True}
    encoding: dict[str, Any] = {"dtype": variable.dtype}
    if variable.nbytes < MANY_BYTES:
        return encoding
    # Shuffling puts the same byte of all numbers next to each other.
    encoding.update(zlib=True, complevel=6, shuffle=True)
    if variable.nbytes <= MOST_IN_CHUNK:
        encoding["chunksizes"] = variable.shape
    return encoding


def _with_printable_texts(results: xr.Dataset) -> xr.Dataset:
    """A copy in which netCDF can store all texts."""
    printable = results.assign_attrs()
    for name, value in results.attrs.items():
        if isinstance(value, str):
            printable.attrs[name] = _printable(value)
    to_printable = np.vectorize(_printable, otypes=[object])
    for name, variable in results.variables.items():
        if variable.dtype.kind in TEXTS:
            texts = to_printable(variable.values)
            printable[name] = (variable.dims, texts, variable.attrs)
    return printable


def _printable(text: object) -> str:
    """Replace the characters of a text that netCDF cannot store."""
    encoded = str(text).encode("utf-8", "backslashreplace")
    return encoded.decode().replace("\0", "␀")


def open_results(path: str | Path, kind: str | None = None) -> xr.Dataset:
    """Read a file of this `kind` that `save` wrote into memory, or raise `BadArgument`."""
    path = Path(path)
    if not path.exists():
        raise _missing_file(path, kind)
    what = kind or "netCDF file of ropelens"
    with explained(f"{path} is not a {what}.", ADVICE, error=BadArgument):
        _require_plain(path)
        results = xr.load_dataset(path, engine="h5netcdf")
        _require_contents(results, kind)
    for name, value in results.attrs.items():
        if isinstance(value, np.generic):
            results.attrs[name] = value.item()
    return results


def _missing_file(path: Path, kind: str | None) -> BadArgument:
    """The error for a `path` that does not exist. A `kind` is a file in a folder."""
    place = path.parent if kind else path
    hint = f"a folder with {path.name}, which ropelens wrote" if kind else ADVICE
    if str(place).startswith("hf:"):
        hint = 'ropelens.open("hf://datasets/...").save("FOLDER")'
        return BadArgument(f"{place} is not a folder.", hint=hint)
    if place.is_dir():
        kind_of_results = read_record(place).get("kind", "")
        held = KINDS.get(kind_of_results, "no results")
        return BadArgument(f"{place} holds {held}.", hint=hint)
    state = "is a file" if place.exists() else "does not exist"
    return BadArgument(f"{place} {state}.", hint=hint)


def _require_plain(path: Path) -> None:
    """Raise ValueError for links, groups, data in other files, and data too large to unpack."""
    size = 0
    with h5py.File(path, "r") as file:
        for name in file:
            if not _is_stored(file, name):
                raise ValueError(f"{name} is not stored in it")
            array = file[name]
            if array.size is not None:
                size += array.size * array.dtype.itemsize
    file_bytes = path.stat().st_size
    if size > max(MOST_BYTES, MOST_RATIO * file_bytes):
        raise ValueError(f"it unpacks to {size / 1e9:.1f} GB")


def _is_stored(file: h5py.File, name: str) -> bool:
    """Whether the numbers of the array `name` are in the file itself."""
    if type(file.get(name, getlink=True)) is not h5py.HardLink:
        return False
    array = file[name]
    if not isinstance(array, h5py.Dataset):
        return False
    return not (array.external or array.is_virtual)


def _require_contents(results: xr.Dataset, kind: str | None) -> None:
    """Raise ValueError for another kind, or if variables are missing; pop their names."""
    contents = str(results.attrs.pop(CONTENTS, "")).split()
    stated = results.attrs.get("kind")
    lacking = [name for name in contents if name not in results.variables]
    if lacking:
        raise ValueError(f"its kind is {stated}; it lacks {', '.join(lacking)}")
    if not contents or kind not in (None, stated):
        raise ValueError(f"its kind is {stated}")


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
