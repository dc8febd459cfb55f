"""A Python process that lacks packages: neither they nor their versions are found."""

import re
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution
from typing import Any

HIDDEN: set[str] = set()


def module_of(distribution: str) -> str:
    """The name of a distribution as a module: "transformer-lens" is transformer_lens."""
    return re.sub("[-.]", "_", distribution).lower()


class FinderOfOthers:
    """The finder of installed packages, which does not find `HIDDEN`."""

    @staticmethod
    def find_spec(name: str, *where: Any) -> ModuleSpec | None:
        if name.partition(".")[0] in HIDDEN:
            return None
        return PathFinder.find_spec(name, *where)

    @staticmethod
    def find_distributions(*where: Any) -> Iterator[Distribution]:
        for distribution in PathFinder.find_distributions(*where):
            if module_of(distribution.name) not in HIDDEN:
                yield distribution

    @staticmethod
    def invalidate_caches() -> None:
        PathFinder.invalidate_caches()


def hide(*modules: str) -> None:
    """Let this process lack the packages `modules`, which must not be imported yet."""
    assert not {*modules} & {*sys.modules}
    HIDDEN.update(modules)
    place = sys.meta_path.index(PathFinder)
    sys.meta_path[place] = FinderOfOthers
