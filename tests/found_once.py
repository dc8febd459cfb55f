"""h5netcdf looks a dataset up by its path some fifty times for each variable that it reads.

Tests read many files, and find it once; the processes of `forked` read as users do.
"""

from __future__ import annotations

from typing import Any

from h5netcdf.core import BaseObject, Dimension


def once(find: Any) -> property:
    def found(self: Any) -> object:
        if self._root._writable:
            return find(self)
        return vars(self).get("_found") or vars(self).setdefault("_found", find(self))

    return property(found)


for of in (BaseObject, Dimension):
    of._h5ds = once(of._h5ds.fget)
