"""The checkpoints that come with ropelens, each trained by its own recipe.

A folder each: config, float16 safetensors, tokenizer, model card, and text sampled from
the checkpoint itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

from ropelens.errors import BadArgument

BUNDLED: Mapping[str, str] = {
    "rope": "RoPE of base 10,000; what ropelens looks at when no model is named",
}
"""The names of the checkpoints, and what each is."""


def bundled_path(name: str = "rope") -> Path:
    """The folder of the bundled checkpoint `name`, to be read only.

    Raises:
        BadArgument: no checkpoint of that name is bundled.
    """
    if name not in BUNDLED:
        raise BadArgument(
            f"no checkpoint called {name!r} is bundled.",
            attempt=f"one of: {', '.join(BUNDLED)}",
        )
    return Path(str(files(__name__))) / name


def sample_path(name: str = "rope") -> Path:
    """Text sampled from the bundled checkpoint `name`: .jsonl, a document a line.

    For an early model of a run, text sampled from the finished one ("rope").

    Raises:
        BadArgument: no checkpoint of that name is bundled.
    """
    own = bundled_path(name) / "sample.jsonl"
    return own if own.exists() else bundled_path() / own.name
