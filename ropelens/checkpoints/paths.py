"""Names of models and texts: refused where there is nothing, before torch is imported.

Each bundled checkpoint is a folder with config, float16 safetensors, tokenizer, model card and
text sampled from it, made by tools/bundle.py. A wheel leaves out the weights of early ones.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from ropelens.errors import BadArgument, BadText
from ropelens.runtime.folder import file_name


def name_checkpoints(models: Sequence[str]) -> dict[str, str]:
    """Every model by the shortest name that tells it from the others, fit for a folder.

    Raises BadArgument for two of the same name.
    """
    places = [Path(name).absolute() for name in models]
    distinct = len(set(places)) == len(places)
    names = [file_name(n).strip(".-") for n in short_names(places)] if distinct else []
    if len(set(names)) < len(places) or not all(names):
        raise BadArgument(
            "Checkpoints need names that differ in letters or digits: each gets a folder.",
            seen=", ".join(models)[:200],
        )
    return dict(zip(names, models, strict=True))


def short_names(folders: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell them apart."""
    parts = 1
    names = [folder.name for folder in folders]
    while len(set(names)) < len(names):
        parts += 1
        names = ["/".join(folder.parts[-parts:]) for folder in folders]
    return names


def check_text(model: str, text: Collection[object]) -> None:
    """Raise BadText where `model` comes without text and is given none, or a path is wrong."""
    if not text and model.partition(":")[0] != "bundled":
        raise BadText(
            f"There is no text to run {model} on.",
            hint="--text FILE; only a bundled checkpoint comes with text of its own",
        )
    for path in text:
        if isinstance(path, Path) and not path.exists():
            raise BadText(
                f"There is no file or folder {path}.",
                hint="text files, or folders of *.txt, *.md and *.jsonl",
            )


def short_name(name: str) -> str:
    """The name of a model in results: a Hub id as it is, a folder by its name, not its place.

    A run or a checkpoint of a study also by that of the folder above: "rope seed-0".
    """
    place = Path(name)
    if not name or not place.exists():
        return name
    *above, last = (part for part in place.resolve().parts[1:] if part != "history")
    names = [last]
    while above and re.fullmatch(r"(seed|step)-\d+", names[0]):  # which says nothing alone
        names.insert(0, above.pop())
    return " ".join(names)


# bundled checkpoints

BUNDLED = {
    "rope": "RoPE of base 10,000; what ropelens looks at when no model is named",
    "p-rope-0.75": "the slowest quarter of the planes stands still",
    "p-rope-0.25": "the slowest three quarters stand still",
    "p-rope-reversed-0.75": "the fastest quarter stands still",
    "nope": "no plane turns",
    "rope-step-1000": "rope after 1,000 of its 6,346 steps; prose comes after 4,638",
    "rope-step-3000": "rope after 3,000 steps",
    "rope-step-5000": "rope after 5,000 steps",
}
"""The name of each checkpoint, and what it is."""


def bundled_path(name: str = "rope") -> Path:
    """The folder of the bundled checkpoint `name`, to be read only.

    Raises BadArgument where no checkpoint of that name is bundled, or its weights are not
    installed.
    """
    folder = _folder(name)
    if name not in BUNDLED or not (folder / "model.safetensors").exists():
        raise BadArgument(
            f"no checkpoint called {name!r} is bundled.",
            hint=f"one of: {', '.join(BUNDLED)}; the early ones are not in a wheel",
        )
    return folder


def bundled_facts(name: str) -> dict[str, Any]:
    """bundle.json of the checkpoint (tokens, step, validation_loss nats) and `what` it is."""
    folder = _folder(name)
    left_out = " (in the repository alone)" * (not (folder / "model.safetensors").exists())
    facts: dict[str, Any] = json.loads((folder / "bundle.json").read_text("utf-8"))
    return facts | {"what": BUNDLED[name] + left_out}


def sample_path(name: str = "rope") -> Path:
    """Text sampled from the bundled checkpoint `name`: .jsonl, a document per line.

    For an early model of a run it is text sampled from the finished one ("rope").
    """
    path = bundled_path(name) / "sample.jsonl"
    return path if path.exists() else bundled_path() / path.name


def writer_of(path: Path) -> str:
    """The bundled checkpoint that the text was sampled from; "" of any other text."""
    name = path.resolve().parent.name
    return f"bundled:{name}" if path.resolve() == _folder(name) / "sample.jsonl" else ""


def _folder(name: str) -> Path:
    return Path(str(files("ropelens"))) / "bundled" / name
