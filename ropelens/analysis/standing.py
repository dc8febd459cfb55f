"""What already stands in a folder that an analysis is saved to, and stays."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from ropelens.analysis.analysis import Analysis, open_analysis
from ropelens.errors import BadArgument
from ropelens.files.results import read_record

OF_SWEEP = ("command", "arguments", "seconds", "warnings")
"""What a record tells of a sweep that was measured after the profile beside it."""


def on_its_profile(swept: Analysis, folder: Path) -> Analysis:
    """A sweep beside the analysis that `folder` holds of the same weights and text.

    `analyze` may have looked at more of the text, and into other pieces of it, than the sweep
    does; its profile stays. Without such an analysis the sweep's own stands.
    """
    held = _held(swept, folder)
    if held is None or (held.truncation is not None and "sweep" not in held.provenance):
        return swept
    texts = {one.provenance["text"]["fingerprint"] for one in (held, swept)}
    if len(texts) > 1 or texts == {None}:
        return swept
    told = {name: swept.provenance[name] for name in OF_SWEEP}
    record = held.provenance | {"kind": "truncation", "sweep": told}
    return replace(held, truncation=swept.truncation, provenance=record, model=swept.model)


def with_what_stands(analysis: Analysis, folder: Path) -> Analysis:
    """An analysis with the sweep and the reach of the same weights that `folder` holds."""
    held = _held(analysis, folder)
    if held is None:
        return analysis
    more: dict[str, Any] = {"reach": analysis.reach or held.reach}
    if analysis.truncation is None and held.truncation is not None:
        record = held.provenance
        told = record.get("sweep") or {name: record[name] for name in OF_SWEEP}
        provenance = analysis.provenance | {"kind": "truncation", "sweep": told}
        more |= {"truncation": held.truncation, "provenance": provenance}
    return replace(analysis, **more)


def _held(analysis: Analysis, folder: Path) -> Analysis | None:
    """The analysis in `folder`, whole and of the same weights; else None."""
    weights, record = analysis.provenance["model"]["fingerprint"], read_record(folder)
    if record.get("kind") not in ("analysis", "truncation") or weights is None:
        return None
    if record.get("model", {}).get("fingerprint") != weights:
        return None
    with contextlib.suppress(BadArgument):  # what is damaged is replaced
        return open_analysis(folder)
    return None
