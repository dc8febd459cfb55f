"""The checkpoints that come with ropelens, and the text that was sampled from them.

tools/bundle.py writes their folders. A wheel has only the weights of the first one. This file
does not import torch.
"""

import json
from collections.abc import Collection
from importlib.resources import files
from pathlib import Path
from typing import Any

from ropelens.errors import BadArgument, BadText

BUNDLED = {
    "rope": "RoPE with base 10,000; the default model",
    "p-rope-0.75": "the slowest quarter of the planes does not rotate",
    "p-rope-0.25": "the slowest three quarters do not rotate",
    "p-rope-reversed-0.75": "the fastest quarter does not rotate",
    "nope": "no plane rotates",
    "rope-step-1000": "rope after 1,000 of 6,346 steps; prose starts at step 4,638",
    "rope-step-3000": "rope after 3,000 steps",
    "rope-step-5000": "rope after 5,000 steps",
}

SAMPLE = "sample.jsonl"


def bundled_path(name: str = "rope") -> Path:
    """The folder of the bundled checkpoint `name`; raises BadArgument if it is missing."""
    if name not in BUNDLED:
        what = f"no checkpoint called {name!r} is bundled."
        raise BadArgument(what, hint=f"one of: {', '.join(BUNDLED)}")
    folder = _folder(name)
    if not _has_weights(folder):
        raise BadArgument(
            f"The checkpoint bundled:{name} is only in the repository of ropelens.",
            seen=f"this installation has no weights in {folder}",
            hint=f"bundled; or the folder ropelens/bundled/{name} of the repository",
        )
    return folder


def bundled_facts(name: str) -> dict[str, Any]:
    """bundle.json of a checkpoint (tokens, step, validation_loss in nats), and `what` it is."""
    folder = _folder(name)
    what = BUNDLED[name]
    if not _has_weights(folder):
        what += " (only in the repository)"
    facts = json.loads((folder / "bundle.json").read_text("utf-8"))
    return {**facts, "what": what}


def sample_path(model: str = "bundled") -> Path:
    """Text sampled from the checkpoint "bundled:NAME", or from "rope" for an early step."""
    _, _, name = model.partition(":")
    path = bundled_path(name or "rope") / SAMPLE
    return path if path.exists() else bundled_path() / SAMPLE


def writer_of(path: Path) -> str:
    """The bundled checkpoint from which the text was sampled; "" for any other text."""
    path = path.resolve()
    name = path.parent.name
    return f"bundled:{name}" if path == _folder(name) / SAMPLE else ""


def check_text(model: str, text: Collection[object]) -> None:
    """Raise BadText if `model` has no text, or if a path in `text` does not exist."""
    hint = "--text FILE, or a folder of *.txt, *.md and *.jsonl"
    for path in text:
        if isinstance(path, Path) and not path.exists():
            raise BadText(f"The file or folder {path} does not exist.", hint=hint)
    if not text and model.partition(":")[0] != "bundled":
        what = f"{model} needs a text. Only the bundled checkpoints come with text."
        raise BadText(what, hint=hint)


def _has_weights(folder: Path) -> bool:
    return (folder / "model.safetensors").exists()


def _folder(name: str) -> Path:
    package = str(files("ropelens"))
    return Path(package) / "bundled" / name
