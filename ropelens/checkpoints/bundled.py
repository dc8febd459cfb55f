"""The checkpoints that come with ropelens, and the text that was sampled from them.

tools/bundle.py writes their folders. This file does not import torch.
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


def bundled_path(name: str = "rope") -> Path:
    """The folder of the bundled checkpoint `name`; raises BadArgument if there is none."""
    folder = _folder(name)
    if name not in BUNDLED or not (folder / "model.safetensors").exists():
        hint = f"one of: {', '.join(BUNDLED)}; a wheel does not contain the early steps"
        raise BadArgument(f"no checkpoint called {name!r} is bundled.", hint=hint)
    return folder


def bundled_facts(name: str) -> dict[str, Any]:
    """bundle.json of a checkpoint (tokens, step, validation_loss in nats), and `what` it is."""
    folder = _folder(name)
    left_out = " (only in the repository)" * (
        not (folder / "model.safetensors").exists()
    )
    facts = json.loads((folder / "bundle.json").read_text("utf-8"))
    return facts | {"what": BUNDLED[name] + left_out}


def sample_path(model: str = "bundled") -> Path:
    """Text sampled from the checkpoint "bundled:NAME", or from "rope" for an early step."""
    path = bundled_path(model.partition(":")[2] or "rope") / "sample.jsonl"
    return path if path.exists() else bundled_path() / path.name


def writer_of(path: Path) -> str:
    """The bundled checkpoint from which the text was sampled; "" for any other text."""
    name = path.resolve().parent.name
    return f"bundled:{name}" if path.resolve() == _folder(name) / "sample.jsonl" else ""


def check_text(model: str, text: Collection[object]) -> None:
    """Raise BadText if `model` has no text, or if a path in `text` does not exist."""
    missing = [path for path in text if isinstance(path, Path) and not path.exists()]
    faults = [f"The file or folder {path} does not exist." for path in missing]
    if not text and model.partition(":")[0] != "bundled":
        faults.append(
            f"{model} needs a text. Only the bundled checkpoints come with text."
        )
    if faults:
        raise BadText(
            faults[0], hint="--text FILE, or a folder of *.txt, *.md and *.jsonl"
        )


def _folder(name: str) -> Path:
    return Path(str(files("ropelens"))) / "bundled" / name
