"""The checkpoints that come with ropelens, each trained by its own recipe (tools/bundle.py).

Each is a folder with config, float16 safetensors, tokenizer, model card and text sampled from
the checkpoint itself. A wheel leaves out the weights of the early ones; a checkout has them.
"""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from ropelens.errors import BadArgument

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
    if name not in BUNDLED:
        raise BadArgument(
            f"no checkpoint called {name!r} is bundled.",
            attempt=f"one of: {', '.join(BUNDLED)}",
        )
    if not _has_weights(name):
        raise BadArgument(
            f"bundled:{name} has its weights in the repository alone, not in a wheel."
        )
    return _folder(name)


def bundled_facts(name: str) -> dict[str, Any]:
    """bundle.json of the checkpoint (tokens, step, validation_loss nats) and `what` it is."""
    facts: dict[str, Any] = json.loads((_folder(name) / "bundle.json").read_text("utf-8"))
    where = "" if _has_weights(name) else " (in the repository alone)"
    return facts | {"what": BUNDLED[name] + where}


def sample_path(name: str = "rope") -> Path:
    """Text sampled from the bundled checkpoint `name`: .jsonl, a document a line.

    For an early model of a run it is text sampled from the finished one ("rope").
    """
    path = bundled_path(name) / "sample.jsonl"
    return path if path.exists() else bundled_path() / path.name


def _has_weights(name: str) -> bool:
    return (_folder(name) / "model.safetensors").exists()


def _folder(name: str) -> Path:
    return Path(str(files("ropelens"))) / "bundled" / name
