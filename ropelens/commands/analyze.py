"""The main job: a checkpoint and some text go in, four files come out."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from ropelens.commands.job import Job, Measured, Ready, do
from ropelens.files.progress import show_progress
from ropelens.measure.heads import classify_heads
from ropelens.measure.profile import profile


def run(job: Job, *, command: str) -> Path:
    """Do `job`, write its four files to `job.out`, and return the path of the page.

    `command` is what a shell would be told to do the same again. Raises `RopelensError`
    for what a user can cause; files that are in `job.out` then stay as they are.
    """
    return do(job, command=command, measure=partial(measure_profile, job))


def measure_profile(job: Job, ready: Ready) -> Measured:
    """The profile and the labels of its heads, with progress on stderr."""
    subject: Any = ready.model
    if job.backend == "transformer-lens":
        from ropelens.models.bridge import bridge

        subject = bridge(ready.model, ready.tokenizer)
    sequences = ready.sequences
    total = int(sequences.lengths.sum())
    with show_progress("measuring", total=total, unit="tokens") as advance:
        measured = profile(
            subject,
            sequences.tokens,
            lengths=sequences.lengths,
            tokenizer=ready.tokenizer,
            rows=job.rows,
            seed=job.seed,
            progress=advance,
        )
    return Measured(measured, classify_heads(measured, seed=job.seed))
