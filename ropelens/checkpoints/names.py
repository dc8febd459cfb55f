"""Short names of models, for folders and results."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from ropelens.errors import BadArgument
from ropelens.runtime.folder import file_name

STEP = re.compile(r"(?:checkpoint|step|epoch)[-_](\d+)")

PathName = TypeVar("PathName", str, Path, str | Path)


def name_checkpoints(models: Sequence[str]) -> dict[str, str]:
    """Map a short name of a folder to each of `models`; raise BadArgument if two are equal.

    Checkpoints of a training are in the order of their steps.
    """
    models = by_step(models)
    paths = [Path(name).absolute() for name in models]
    names: list[str] = []
    if len(set(paths)) == len(paths):
        names = [file_name(name).strip(".-") for name in short_names(paths)]
    if len(set(names)) < len(paths) or not all(names):
        what = "Two checkpoints or texts have the same name, or one without letters or digits."
        hint = "names that differ in letters or digits, because each gets a folder"
        raise BadArgument(what, seen=", ".join(models)[:200], hint=hint)
    return dict(zip(names, models, strict=True))


def by_step(names: Sequence[PathName]) -> list[PathName]:
    """`names`, by number if all are such as checkpoint-500, in the order of a shell's `*`.

    A shell puts checkpoint-1000 before checkpoint-500. Any other order is kept.
    """
    paths = [Path(name) for name in names]
    steps = []
    for path in paths:
        match = STEP.fullmatch(path.name)
        if match is not None:
            steps.append(int(match[1]))
    if len(steps) < len(paths) or paths != sorted(paths):
        return list(names)
    order = sorted(range(len(names)), key=lambda index: steps[index])
    return [names[index] for index in order]


def short_names(folders: Sequence[Path]) -> list[str]:
    """The last parts of each path, as many as make all of them different."""
    parts = 1
    names = [folder.name for folder in folders]
    while len(set(names)) < len(names):
        parts += 1
        names = ["/".join(folder.parts[-parts:]) for folder in folders]
    return names


def short_name(name: str) -> str:
    """The name of a model in results: a Hub id, or names of folders such as "rope seed-0"."""
    path = Path(name)
    if not name or not path.exists():
        return name
    _, *folders = path.resolve().parts
    above = [folder for folder in folders if folder != "history"]
    names = [above.pop()]
    while above and re.fullmatch(r"(seed|step)-\d+", names[0]):
        names.insert(0, above.pop())
    return " ".join(names)
