"""What already stands in a folder that an analysis is saved to, and stays."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

from ropelens.analysis.analysis import Analysis, open_analysis
from ropelens.errors import BadArgument
from ropelens.files.results import read_record

OF_SWEEP = ("command", "arguments", "seconds", "warnings")
"""What a record tells of a sweep that was measured after the profile beside it."""


def with_what_stands(analysis: Analysis, folder: Path) -> Analysis:
    """An analysis with what `folder` holds of the same weights: a sweep that it lacks, a reach.

    A sweep joins the analysis that stands there of the same text: `analyze` may have looked at
    more of the text, and into other pieces of it, than the sweep does. Without such an
    analysis the sweep's own profile stands.
    """
    held = _held(analysis, folder)
    if held is None:
        return analysis
    looked = held.truncation is None or "sweep" in held.provenance  # its profile is no sweep's
    if analysis.truncation is None:
        profile, sweep = analysis, held
    elif looked and _same_text(held, analysis):
        profile, sweep = replace(held, model=analysis.model), analysis
    else:
        profile = sweep = analysis
    found = replace(profile, reach=held.reach)
    if sweep is profile or sweep.truncation is None:
        return found
    record = sweep.provenance
    told = record.get("sweep") or {name: record[name] for name in OF_SWEEP}
    provenance = profile.provenance | {"kind": "truncation", "sweep": told}
    return replace(found, truncation=sweep.truncation, provenance=provenance)


def _same_text(*analyses: Analysis) -> bool:
    texts = {one.provenance["text"]["fingerprint"] for one in analyses}
    return len(texts) == 1 and texts != {None}


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
