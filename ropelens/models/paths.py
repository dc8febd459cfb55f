"""Names of models, texts and ids: refused where there is nothing, before torch is imported."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from ropelens.errors import BadArgument, BadText
from ropelens.files.folder import file_name

NUMBERED = re.compile(r"(seed|step)-\d+")
"""Names of runs and checkpoints in a study, which say nothing alone."""

LONGEST_PATH = 255
"""Characters of a document that may be a path by mistake."""

TEXT_SUFFIXES = (".txt", ".md", ".jsonl")
ID_SUFFIXES = (".npy", ".txt")

MODELS_WITHIN = ("*", "history/step-*", "*/*/seed-*")
"""Where the models in a folder lie: a collection, a run that is not finished, a study."""


def name_checkpoints(
    models: Sequence[str], revisions: Sequence[str | None] = (None,)
) -> dict[str, tuple[str, str | None]]:
    """Every model at every revision, by the shortest names that tell them apart.

    A folder that is no model stands for the models in it (`MODELS_WITHIN`). Raises
    BadArgument for two of the same name.
    """
    checkpoints = [
        (one, revision) for name in models for one in _models(name) for revision in revisions
    ]
    places = [Path(name).resolve() / (revision or "") for name, revision in checkpoints]
    names: list[str] = []
    if len(set(places)) == len(places):
        names = [file_name(name).strip(".-") for name in short_names(places)]
    if len(set(names)) < len(places) or not all(names):
        raise BadArgument(
            "Checkpoints are named twice, or too much alike for a folder each.",
            seen=", ".join(name for name, _ in checkpoints)[:200],
        )
    return dict(zip(names, checkpoints, strict=True))


def _models(name: str) -> list[str]:
    folder = Path(name)
    if not folder.is_dir() or (folder / "config.json").exists():
        return [name]
    within = [path for places in MODELS_WITHIN for path in folder.glob(places)]
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
    """Raise BadText where texts and ids do not exist, or none are given to `model`."""
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
    """Raise BadText for a path that is no file and no folder."""
    try:
        readable = path.is_file() or path.is_dir()
    except OSError:  # a text in place of a path is longer than a name may be
        readable = False
    if not readable:
        raise BadText(
            f"There is no text at {str(path)[:80]}.",
            attempt="text files, or folders of *.txt, *.md and *.jsonl; what a pipe gives is "
            "read from a file",
        )


def check_ids_file(path: Path) -> None:
    """Raise BadText for a path that is no .npy or .txt file."""
    if not path.is_file() or path.suffix not in ID_SUFFIXES:
        raise BadText(
            f"There are no token ids at {path}.",
            attempt="a .npy file (whole numbers [sequence, position]) or a .txt file (a line "
            "a sequence)",
        )


def at_home(name: str | Path) -> Path:
    """The path of a name, in which "~" is the home of the user."""
    with suppress(RuntimeError):  # "~somebody" who has none
        return Path(name).expanduser()
    return Path(name)


def short_name(name: str) -> str:
    """The name of a model in results: a Hub id as it is, a folder by its name, not its place.

    A run or a checkpoint of a study also by that of the folder above: "rope seed-0".
    """
    place = at_home(name)
    if not name or not place.exists():
        return name
    *above, last = (part for part in place.resolve().parts[1:] if part != "history")
    names = [last]
    while above and NUMBERED.fullmatch(names[0]):
        names.insert(0, above.pop())
    return " ".join(names)


def check_document(text: str) -> None:
    """Raise BadText for a text that is the name of a file, or looks like one."""
    if not text or len(text) >= LONGEST_PATH or "\n" in text:
        return
    if Path(text).exists() or (text.endswith(TEXT_SUFFIXES) and len(text.split()) == 1):
        raise BadText(
            f"{text!r} is a document of {len(text)} characters, and looks like a file.",
            means="a str is text, a Path names a file",
            attempt=f"Path({text!r}) for ropelens.analyze; elsewhere the text, as "
            f"ropelens.read_documents([{text!r}]) reads it",
        )
