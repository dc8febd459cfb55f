"""How an analysis came about, in JSON's types: run.json."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import xarray as xr
from torch import nn
from transformers import PreTrainedModel

from ropelens.analysis.inputs import texts_of
from ropelens.analysis.machine import machine
from ropelens.analysis.plan import Plan
from ropelens.report.words import describe_attention_on, describe_heads, scope


def arguments_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """What `analyze` was asked for, in JSON's types."""
    left_out = (
        "lengths",
        "tokenizer",
        "truncation",
        "standing",
        "cache",
        "progress",
        "announce",
        "command",
    )
    arguments = {name: value for name, value in given.items() if name not in left_out}
    model, text = given["model"], given["text"]
    arguments["model"] = type(model).__name__ if isinstance(model, nn.Module) else str(model)
    for name in ("tokenizer", "ids"):
        value = given[name]
        arguments[name] = str(value) if isinstance(value, (str, Path)) else None
    arguments |= {name: texts_of(given[name], name) for name in ("prompts", "attention_on")}
    arguments["text"] = "tokens"
    if text is None or isinstance(text, (Path, str, Sequence)):
        parts = [text] if isinstance(text, (Path, str)) else text or []
        arguments["text"] = [
            f"a document of {len(part):,} characters" if isinstance(part, str) else str(part)
            for part in parts
        ]
    return arguments | dict(given.get("truncation") or {})


def provenance(
    measured: xr.Dataset,
    heads: pd.DataFrame,
    model: PreTrainedModel,
    plan: Plan,
    *,
    kind: str,
    arguments: Mapping[str, Any],
    digests: Mapping[str, str | None],
    warnings: Sequence[str],
    seconds: Mapping[str, float],
) -> dict[str, Any]:
    """All of run.json; `digests` are those of the model's weights and of the text."""
    attrs = measured.attrs
    findings = [*describe_heads(heads), *describe_attention_on(measured), scope(attrs)]
    return {
        "kind": kind,
        "command": attrs["command"],
        "findings": [line for line in findings if line],
        "arguments": arguments,
        "model": {
            "name": attrs["model"],
            "revision": attrs["revision"],
            "class": type(model).__name__,
            "fingerprint": digests["model"],
        },
        "text": {"source": attrs["text"], "fingerprint": digests["text"]},
        **_numbers(measured, heads),
        "batch_size": plan.batch_size,
        "bf16_speed": plan.bf16_speed,
        "warnings": warnings,
        **machine(model),
        "seconds": {name: round(value, 3) for name, value in seconds.items()},
    }


def _numbers(measured: xr.Dataset, heads: pd.DataFrame) -> dict[str, Any]:
    """What was measured, in short, in JSON's types: null for a number that is unknown."""
    attrs = measured.attrs
    counts = ("seed", "context", "sequences", "documents", "tokens")
    numbers = {name: int(attrs[name]) for name in counts}
    return numbers | {
        "rows": attrs["rows"],
        "dtype": attrs["dtype"],
        "loss": _known(attrs["loss"]),
        "loss_se": _known(attrs["loss_se"]),
        "labels": heads["label"].value_counts().to_dict(),
        "thresholds": heads.attrs["thresholds"],
        "claim": {name: _known(value) for name, value in heads.attrs["claim"].items()},
        "created": attrs["created"],
    }


def _known(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
