"""Faster reading of netCDF files: h5netcdf looks up each dataset about fifty times.

Tests read many files, and look up each dataset once. The processes of `forked` do not use this.
"""

from typing import Any

from h5netcdf.core import BaseObject, Dimension


def cached(find: Any) -> property:
    def dataset(self: Any) -> object:
        if self._root._writable:
            return find(self)
        return vars(self).get("_cached") or vars(self).setdefault("_cached", find(self))

    return property(dataset)


for cls in (BaseObject, Dimension):
    cls._h5ds = cached(cls._h5ds.fget)
