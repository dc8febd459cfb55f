"""What the run.json beside a page says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_record(folder: Path) -> dict[str, Any]:
    """The run.json in `folder`; {} where there is none or it is no JSON object."""
    try:
        record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}
