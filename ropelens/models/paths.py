"""What is given to measure on, by its names: refused before anything slow is imported."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from ropelens.errors import BadArgument, BadText
from ropelens.files.folder import file_name

LONGEST_PATH = 255
"""Characters of a document that are looked up as a path, should one have been meant."""

TEXT_SUFFIXES = (".txt", ".md", ".jsonl")
ID_SUFFIXES = (".npy", ".txt")

MODELS_WITHIN = ("history/step-*", "*/*/seed-*")
"""Where the models lie of a run that is not finished, and of a study."""


def name_checkpoints(
    models: Sequence[str], revisions: Sequence[str | None] = (None,)
) -> dict[str, tuple[str, str | None]]:
    """Every model at every revision, by the shortest names that tell them apart.

    A folder that is no model stands for those in it: in its folders, or where a run or a study
    has them. Names are those of folders. Raises BadArgument for two that are one.
    """
    found = [
        (one, revision) for name in models for one in _models(name) for revision in revisions
    ]
    paths = [Path(name).resolve() if Path(name).exists() else Path(name) for name, _ in found]
    places = [path / (of or "") for path, (_, of) in zip(paths, found, strict=True)]
    if len(set(places)) == len(found):
        names = [file_name(name).strip(".-") for name in short_names(places)]
        if len(set(names)) == len(found) and all(names):
            return dict(zip(names, found, strict=True))
    raise BadArgument(
        "Checkpoints are named twice, or too much alike for a folder each.",
        seen=", ".join(map(str, places))[:200],
    )


def _models(name: str) -> list[str]:
    folder = Path(name)
    if not folder.is_dir() or (folder / "config.json").exists():
        return [name]
    within = [path for places in ("*", *MODELS_WITHIN) for path in folder.glob(places)]
    return [str(path) for path in sorted(within) if (path / "config.json").exists()] or [name]


def short_names(folders: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell them apart."""
    parts = 1
    names = [folder.name for folder in folders]
    while len(set(names)) < len(names):
        parts += 1
        names = ["/".join(folder.parts[-parts:]) for folder in folders]
    return names


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
    try:
        there = path.exists()
    except OSError as error:  # a text in place of a path is longer than a name may be
        raise BadText(
            f"There is no text to be read at {str(path)[:80]!r}.",
            seen=error.strerror or str(error),
            attempt="the path of a file or folder",
        ) from error
    if not there:
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


def at_home(name: str | Path) -> Path:
    """The path of a name, whose "~" stands for the home of a user that there is."""
    with suppress(RuntimeError):
        return Path(name).expanduser()
    return Path(name)


def check_document(text: str) -> None:
    """Raise BadText for a text that is the name of a file, or looks like one."""
    if not text or len(text) >= LONGEST_PATH or "\n" in text:
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
