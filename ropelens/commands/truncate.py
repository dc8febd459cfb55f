"""The job of `ropelens truncate`: a profile of the model as it is, and a truncation sweep."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from ropelens.commands.analyze import measure_profile
from ropelens.commands.job import Job, Measured, Ready, do
from ropelens.files.progress import show_progress
from ropelens.measure.evaluate import MEASURES, tokens_of_entry, wanted_measures
from ropelens.measure.truncate import KEEP, count_cuts, truncate
from ropelens.rope.cuts import ENDS


@dataclass(frozen=True, kw_only=True)
class Sweep(Job):
    """What `ropelens truncate` was asked for; see its `--help`."""

    keep: tuple[float, ...] = KEEP
    ends: tuple[str, ...] = ENDS
    bands: int = 0
    controls: int = 3
    measures: tuple[str, ...] = MEASURES
    rows: int | Literal["all"] = 64


def run(job: Sweep, *, command: str) -> Path:
    """Do `job`, write its six files to `job.out`, and return the path of the page.

    The files are those of `ropelens analyze`, with truncation.nc and truncation.csv.
    `command` is what a shell would be told to do the same again. Raises `RopelensError`
    for what a user can cause; files that are in `job.out` then stay as they are.
    """
    wanted_measures(job.measures)  # refused before a model is loaded
    return do(job, command=command, measure=partial(_measure, job))


def _measure(job: Sweep, ready: Ready) -> Measured:
    """The sweep, then the profile; bad shares, ends and bands end it before either."""
    sequences = ready.sequences
    entries = count_cuts(
        ready.model,
        keep=job.keep,
        ends=job.ends,
        bands=job.bands,
        controls=job.controls,
        seed=job.seed,
    )
    total = entries * tokens_of_entry(ready.model, sequences.lengths, measures=job.measures)
    with show_progress("stopping planes", total=total, unit="tokens") as advance:
        truncation = truncate(
            ready.model,
            sequences.tokens,
            lengths=sequences.lengths,
            keep=job.keep,
            ends=job.ends,
            bands=job.bands,
            controls=job.controls,
            measures=job.measures,
            rows=job.rows,
            seed=job.seed,
            progress=advance,
        )
    return replace(measure_profile(job, ready), truncation=truncation)
