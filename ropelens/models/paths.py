"""What is given to measure on, by its names: refused before anything slow is imported."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ropelens.errors import BadArgument, BadText

LONGEST_PATH = 255
"""Characters of a document that are looked up as a path, should one have been meant."""

TEXT_SUFFIXES = (".txt", ".md", ".jsonl")
ID_SUFFIXES = (".npy", ".txt")


def check_paths(model: str, text: Iterable[Path], ids: Path | None) -> None:
    """Raise what reading them would, for texts and ids that are not there, or none at all."""
    text = list(text)
    if ids is not None:
        if text:
            raise BadArgument(
                "Both text and token ids are given.", attempt="one of --text and --ids"
            )
        check_ids_file(ids)
    elif not text:
        check_has_text(model)
    for path in text:
        check_text_path(path)


def check_has_text(model: str) -> None:
    """Raise BadText for a model that does not come with text of its own."""
    if model.partition(":")[0] != "bundled":
        raise BadText(
            f"There is no text to run {model} on.",
            attempt="--text FILE (text files, folders of them, or .jsonl); only a bundled "
            "checkpoint comes with text of its own",
        )


def check_text_path(path: Path) -> None:
    """Raise BadText for a path where there is nothing, or what never ends."""
    if not path.exists():
        raise BadText(
            f"There is no text at {path}.",
            attempt="pass text files, or folders of *.txt, *.md and *.jsonl",
        )
    if not (path.is_file() or path.is_dir()):
        raise BadText(
            f"{path} is a pipe or a device, which may never end.",
            attempt="write its text to a file first",
        )


def check_utf8(path: Path) -> None:
    """Raise BadArgument for a path that safetensors and tokenizers cannot open."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise BadArgument(
            f"{path} is no UTF-8.",
            means="the libraries that read and write models take no other paths",
            attempt="another name, or cd into it and a path from there",
        ) from None


def check_ids_file(path: Path) -> None:
    """Raise BadText for a file that is not there, or by its name holds no ids."""
    if not path.is_file():
        raise BadText(f"There are no token ids at {path}.", attempt="a .npy or .txt file")
    if path.suffix not in ID_SUFFIXES:
        raise BadText(
            f"{path} is no file of token ids.",
            attempt=".npy (whole numbers [sequence, position]) or .txt (a line a sequence)",
        )


def check_document(text: str) -> None:
    """Raise BadText for a text that is the name of a file, or looks like one."""
    if len(text) >= LONGEST_PATH or "\n" in text:
        return
    if Path(text).exists():
        seen = f"{text!r} is a document of {len(text)} characters, and a file."
    elif text.endswith(TEXT_SUFFIXES) and len(text.split()) == 1:
        seen = f"{text!r} is a document of {len(text)} characters, and looks like a file."
    else:
        return
    raise BadText(
        seen,
        means="a str is text, a Path names a file",
        attempt=f"Path({text!r}) for ropelens.analyze; elsewhere the text, as "
        f"ropelens.read_documents([{text!r}]) reads it",
    )
