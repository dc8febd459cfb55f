"""JSON files that ropelens writes and reads, and lines on stderr."""

import json
import sys
from pathlib import Path
from typing import Any

from ropelens.errors import BadArgument, explained
from ropelens.runtime.folder import write_whole


def log_line(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def read_json(path: Path) -> dict[str, Any]:
    """Read an object that `write_json` wrote; raises BadArgument for any other file."""
    with explained(f"{path} cannot be read.", error=BadArgument):
        text = path.read_text(encoding="utf-8")
        return dict(json.loads(text))


def read_json_if_exists(path: Path) -> dict[str, Any]:
    """Read an object that `write_json` wrote; {} if there is no such file."""
    return read_json(path) if path.is_file() else {}


def write_json(path: Path, value: Any) -> None:
    write_whole(path, json.dumps(value, indent=2, sort_keys=True) + "\n")
