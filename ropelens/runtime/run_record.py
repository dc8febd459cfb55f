"""run.json, the record of a result folder: the kind of results, sentences and provenance."""

import json
import shlex
import sys
from pathlib import Path
from typing import Any

from ropelens.runtime.folder import RECORD

KINDS = {  # of result folders, by the `kind` in run.json
    "analysis": "the results of ropelens analyze",
    "truncation": "the results of ropelens truncate",
    "comparison": "a comparison",
    "answer": "the answer of an analysis",
    "claims": "a ledger of claims",
    "prompt": "the page of a prompt",
    "watch": "the measurements of a training",
}
OBJECTS = ("arguments", "model", "seconds", "text", "versions")


def read_record(folder: str | Path) -> dict[str, Any]:
    """The run.json in `folder`; {} if it is missing or not written by ropelens."""
    path = Path(folder) / RECORD
    try:
        record = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return record if _is_by_ropelens(record) else {}


def _is_by_ropelens(record: Any) -> bool:
    """Whether the values that ropelens reads have the types that it writes."""
    if not (isinstance(record, dict) and isinstance(record.get("kind"), str)):
        return False
    findings = record.get("findings", [])
    if not isinstance(findings, list):
        return False
    if not all(isinstance(sentence, str) for sentence in findings):
        return False
    objects = [record[name] for name in OBJECTS if name in record]
    return all(isinstance(value, dict) for value in objects)


def this_command() -> str:
    """The shell command that runs this process again."""
    program = Path(sys.argv[0]).name
    if program in ("ropelens", "__main__.py"):
        return shlex.join(["ropelens", *sys.argv[1:]])
    return shlex.join(["python", *sys.argv])
