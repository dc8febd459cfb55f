"""The checkpoints that come with ropelens, each trained by its own recipe (tools/bundle.py).

A folder each: config, float16 safetensors, tokenizer, model card, and text sampled from
the checkpoint itself. A wheel has no weights of the early ones; a checkout has them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from ropelens.errors import BadArgument

BUNDLED: Mapping[str, str] = {
    "rope": "RoPE of base 10,000; what ropelens looks at when no model is named",
    "p-rope-0.75": "the slowest quarter of the planes stands still",
    "p-rope-0.25": "the slowest three quarters stand still",
    "p-rope-reversed-0.75": "the fastest quarter stands still",
    "nope": "no plane turns",
    "rope-step-1000": "rope after 1,000 of its 6,346 steps; prose comes after 4,638",
    "rope-step-3000": "rope after 3,000 steps",
    "rope-step-5000": "rope after 5,000 steps",
}
"""The names of the checkpoints, and what each is."""


def bundled_path(name: str = "rope") -> Path:
    """The folder of the bundled checkpoint `name`, to be read only.

    Raises:
        BadArgument: no checkpoint of that name is bundled, or its weights were left out.
    """
    if name not in BUNDLED:
        raise BadArgument(
            f"no checkpoint called {name!r} is bundled.",
            attempt=f"one of: {', '.join(BUNDLED)}",
        )
    if not (_folder(name) / "model.safetensors").exists():
        raise BadArgument(
            f"bundled:{name} has its weights in the repository alone.",
            means="ropelens was installed from a wheel, which leaves early models out",
            attempt=f"a checkout of the repository, which has ropelens/bundled/{name}",
        )
    return _folder(name)


def bundled_facts(name: str) -> dict[str, Any]:
    """What bundle.json says of the checkpoint `name`: tokens, step, validation_loss (nats).

    And `what` it is, in words that say where its weights are missing.
    """
    facts: dict[str, Any] = json.loads((_folder(name) / "bundle.json").read_text("utf-8"))
    here = (_folder(name) / "model.safetensors").exists()
    return facts | {"what": BUNDLED[name] + ("" if here else " (in the repository alone)")}


def _folder(name: str) -> Path:
    return Path(str(files("ropelens"))) / "bundled" / name


def sample_path(name: str = "rope") -> Path:
    """Text sampled from the bundled checkpoint `name`: .jsonl, a document a line.

    For an early model of a run, text sampled from the finished one ("rope").

    Raises:
        BadArgument: no checkpoint of that name is bundled.
    """
    own = bundled_path(name) / "sample.jsonl"
    return own if own.exists() else bundled_path() / own.name
