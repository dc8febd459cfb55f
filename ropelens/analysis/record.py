"""How an analysis came about, in JSON's types: run.json."""

from __future__ import annotations

import json
import math
import platform
import resource
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import xarray as xr

from ropelens.analysis.options import Options
from ropelens.analysis.plan import Plan, Text, name_of
from ropelens.measure.measurement import versions
from ropelens.models.subject import Model, Subject
from ropelens.report.words import attention_on, heads_sentences, scope


def this_command() -> str:
    """The command of a shell that runs this again."""
    program = Path(sys.argv[0])
    if program.name in ("ropelens", "__main__.py"):
        return shlex.join(["ropelens", *sys.argv[1:]])
    return shlex.join(["python", *sys.argv])


def arguments_of(
    model: str | Path | Model,
    text: Text | None,
    options: Options,
    *,
    tokenizer: Any = None,
    truncation: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What `analyze` was called with, in JSON's types."""
    documents: Any = "tokens"
    if text is None or isinstance(text, (Path, str, Sequence)):
        parts = [text] if isinstance(text, (Path, str)) else text or []
        documents = [
            f"a document of {len(part):,} characters" if isinstance(part, str) else str(part)
            for part in parts
        ]
    arguments = {
        "model": name_of(model),
        "text": documents,
        "tokenizer": str(tokenizer) if isinstance(tokenizer, (str, Path)) else None,
        **asdict(options),
        **(truncation or {}),
    }
    return json.loads(json.dumps(arguments, default=str))


def record_of(
    profile: xr.Dataset,
    heads: pd.DataFrame,
    plan: Plan,
    *,
    kind: str,
    arguments: Mapping[str, Any],
    model: Subject,
    fingerprint: str | None,
    warnings: Sequence[str],
    seconds: Mapping[str, float],
) -> dict[str, Any]:
    """All of run.json; `fingerprint` is that of the model's weights."""
    attrs = profile.attrs
    findings = [*heads_sentences(heads), *attention_on(profile), scope(attrs)]
    return {
        "kind": kind,
        "command": attrs["command"],
        "findings": [line for line in findings if line],
        "arguments": arguments,
        "model": {
            "name": attrs["model"],
            "revision": attrs["revision"],
            "class": model.kind,
            "fingerprint": fingerprint,
        },
        "text": {"source": attrs["text"], "fingerprint": plan.text.fingerprint or None},
        **{
            name: int(attrs[name])
            for name in ("seed", "context", "sequences", "documents", "tokens")
        },
        "rows": attrs["rows"],
        "dtype": attrs["dtype"],
        "loss": _known(attrs["loss"]),
        "loss_se": _known(attrs["loss_se"]),
        "labels": heads["label"].value_counts().to_dict(),
        "thresholds": heads.attrs["thresholds"],
        "claim": {name: _known(value) for name, value in heads.attrs["claim"].items()},
        "created": attrs["created"],
        "batch_size": plan.batch_size,
        "warnings": warnings,
        **_machine(model.device),
        "seconds": {name: round(value, 3) for name, value in seconds.items()},
    }


def _known(value: Any) -> Any:
    """`value`, or null for a number that is unknown."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _machine(device: torch.device) -> dict[str, Any]:
    """Where it ran, and the most memory in use at a time, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in KiB but on a Mac
    facts = {
        "versions": versions(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
        "device": str(device),
        "peak_memory_bytes": peak * (1 if sys.platform == "darwin" else 1024),
    }
    if device.type == "cuda":
        facts["peak_cuda_memory_bytes"] = torch.cuda.max_memory_allocated(device)
    return facts
