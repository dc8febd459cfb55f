"""Checkpoints on this machine by name. Commands check a name before they import torch."""

import os
from pathlib import Path

from ropelens.checkpoints.bundled import bundled_path
from ropelens.checkpoints.optional_packages import GGUF
from ropelens.errors import BadCheckpoint


def is_bundled(name: str) -> bool:
    """Whether `name` is "bundled" or "bundled:NAME"."""
    prefix, _, _ = name.partition(":")
    return prefix == "bundled"


def local_path(name: str) -> Path | None:
    """The folder or GGUF file called `name`; None if it can only be on the Hub.

    Raises BadArgument for a bundled checkpoint that is not installed, and for a GGUF file if
    the package that reads it is missing. Raises BadCheckpoint for another file.
    """
    path = Path(name)
    if is_bundled(name):
        _, _, bundled_name = name.partition(":")
        path = bundled_path(bundled_name or "rope")
    if name and os.path.isdir(path):  # noqa: PTH112 (Path.is_dir raises for long names)
        gguf_files = list(path.glob("*.gguf"))
        if len(gguf_files) != 1 or (path / "config.json").is_file():
            return path
        path = gguf_files[0]
    elif not (name and os.path.isfile(path)):  # noqa: PTH113
        return None
    elif path.suffix != ".gguf":
        what = f"{name} is a file, and not the folder of a model."
        hint = f"{path.parent} if it has config.json, or a GGUF file; text with --text"
        raise BadCheckpoint(what, hint=hint)
    GGUF.require(f"{path.name} is a GGUF file, which the package gguf reads.")
    return path
