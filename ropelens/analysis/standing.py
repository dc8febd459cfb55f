"""What already stands in a folder that an analysis is saved to, and stays."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

from ropelens.analysis.analysis import Analysis, open_analysis
from ropelens.errors import BadArgument
from ropelens.files.results import read_record
from ropelens.models.processes import gather

OF_SWEEP = ("command", "arguments", "seconds", "warnings")
"""What a record tells of a sweep that was measured after the profile beside it."""


def with_what_stands(analysis: Analysis, folder: Path) -> Analysis:
    """An analysis with what `folder` holds of the same weights: a sweep that it lacks, a reach.

    A sweep joins the analysis that stands there of the same text: `analyze` may have looked at
    more of the text, and into other pieces of it, than the sweep does. Without such an
    analysis the sweep's own profile stands.
    """
    made = {key: analysis.provenance[key]["fingerprint"] for key in ("model", "text")}
    held = _held(folder, made["model"])
    if held is None:
        return analysis
    if analysis.truncation is None:
        profile, sweep = analysis, held
    elif _is_joined(held, made["text"]):
        profile, sweep = replace(held, model=analysis.model), analysis
    else:
        profile = sweep = analysis
    found = replace(profile, reach=held.reach)
    if sweep is profile or sweep.truncation is None:
        return found
    record = sweep.provenance
    told = record.get("sweep") or {name: record[name] for name in OF_SWEEP if name in record}
    provenance = profile.provenance | {"kind": "truncation", "sweep": told}
    return replace(found, truncation=sweep.truncation, provenance=provenance)


def joined_by_sweep(
    folder: str | Path | None, *, weights: str | None, text: str | None
) -> Analysis | None:
    """The analysis in `folder` that a sweep of these weights and this text joins; else None."""
    held = None if folder is None else _held(Path(folder), weights)
    fits = held is not None and _is_joined(held, text)
    return held if all(gather(fits)) else None  # all processes that measure it do, or none


def _is_joined(held: Analysis, text: str | None) -> bool:
    looked = held.truncation is None or "sweep" in held.provenance  # its profile is no sweep's
    return (
        looked
        and text is not None
        and held.provenance.get("text", {}).get("fingerprint") == text
    )


def _held(folder: Path, weights: str | None) -> Analysis | None:
    """The analysis in `folder`, whole and of these weights; else None."""
    record = read_record(folder)
    if record.get("kind") not in ("analysis", "truncation") or weights is None:
        return None
    if record.get("model", {}).get("fingerprint") != weights:
        return None
    with contextlib.suppress(BadArgument):  # what is damaged is replaced
        return open_analysis(folder)
    return None
