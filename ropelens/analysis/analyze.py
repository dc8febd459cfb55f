"""The main job: a model and some text go in, an `Analysis` comes out."""

from __future__ import annotations

import json
import math
import platform
import resource
import sys
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import xarray as xr

from ropelens.analysis.analysis import Analysis, check_sweep, earlier_analysis
from ropelens.analysis.options import Options
from ropelens.analysis.plan import Plan, Texts, listed_warnings, plan_analysis, this_command
from ropelens.checkpoints.files import fingerprint
from ropelens.claims.heads import classify_heads
from ropelens.errors import public
from ropelens.interventions.truncate import sweep_planes
from ropelens.model.as_live_model import Model, as_live_model
from ropelens.model.bridge import bridge
from ropelens.model.live_model import LiveModel
from ropelens.profiles.measurement import Measurement, versions
from ropelens.profiles.profile import measure_profile
from ropelens.runtime.devices import explain_full_memory
from ropelens.runtime.processes import gather
from ropelens.runtime.progress import ShowProgress, opening, silent
from ropelens.runtime.savepoint import UNFINISHED, savepoint

DEFAULT = Options()

RECORDED = (
    *("command", "seed", "context", "sequences", "documents", "tokens", "rows", "dtype"),
    *("loss", "loss_se", "created"),
)
"""Attributes of a profile that run.json has too."""


@public
def analyze(
    model: str | Path | Model = "bundled",
    text: Texts | None = None,
    options: Options = DEFAULT,
    *,
    tokenizer: Any = None,
    truncation: Mapping[str, Any] | None = None,
    progress: ShowProgress | None = None,
) -> Analysis:
    """Measure a model on text: its profile, the labels of its heads, and how it came about.

    `model` is a name that `ropelens.load` takes, or a transformers model or a
    `TransformerBridge`. `tokenizer` is that of the model, or replaces the one of a checkpoint.

    `text` is a `Path` of a file or folder, read as by `read_documents`; a `str`, which is a
    document; a list of both; or tokens: what `ropelens.tokenize` returns, a BatchEncoding, or
    a tensor [sequence, position]. Without text, a bundled checkpoint reads text that was
    sampled from it.

    `truncation` asks for a sweep too: the arguments keep, ends, bands, controls and measures
    of `ropelens.truncate`, {} for their defaults. It has the same sequences, rows and seed.
    `progress` opens each stage of the work.

    Raises `BadText` and `BadCheckpoint` for what cannot be read, and what `ropelens.load`,
    `profile` and `truncate` raise.
    """
    show = progress or silent
    with opening(show, "reading"):
        plan = plan_analysis(model, text, options, tokenizer=tokenizer, truncation=truncation)
    analysis = run_plan(plan, folder=None, progress=show)
    shown: Any = analysis.model if isinstance(model, (str, Path)) else model
    return replace(analysis, model=shown)


def run_plan(plan: Plan, *, folder: str | Path | None, progress: ShowProgress) -> Analysis:
    """What `analyze` with the arguments of the plan returns.

    `folder` is where the results will be saved. The measurement of a checkpoint is saved there
    once a minute, until `Analysis.save`, and goes on after a kill. A sweep joins an analysis
    of the same weights and text in `folder`, whose profile is then not measured again.
    """
    begin, source, options = time.perf_counter(), plan.source, plan.options
    if folder is not None and plan.truncation is not None:
        check_sweep(Path(folder), plan.arguments)
    with listed_warnings(plan.warnings):
        with opening(progress, "loading"):
            if isinstance(source, LiveModel):
                live, weights, revision = source, None, None
            else:
                live, at = as_live_model(source.read(), source.tokenizer), source.checkpoint
                weights, revision = fingerprint(at.path), at.revision
        loaded = time.perf_counter()
        shown: Any = live.model
        full = explain_full_memory(
            "The measurement",
            seen=f"context {plan.text.ids.shape[1]:,}",
            hint="a smaller --context, fewer --rows, --dtype bfloat16, or another --device",
        )
        common: dict[str, Any] = {"tokenizer": source.tokenizer, "progress": progress}
        with full, _saved_in(folder, plan, weights):
            measurement = Measurement.of(
                live,
                plan.text,
                rows=options.rows,
                seed=options.seed,
                batch_size=plan.batch_size,
            )
            swept = earlier = None
            if plan.truncation is not None:
                swept = sweep_planes(measurement, **common, **plan.truncation)
                earlier = _joined_by_sweep(folder, weights, plan.text.documents_sha256)
            if options.backend == "transformer-lens" and weights is not None:
                shown = bridge(live.model, source.tokenizer)
                live = as_live_model(shown, source.tokenizer)
                measurement = replace(measurement, live=live)
            if earlier is None:
                common |= {"excerpts": plan.excerpts, "statistics": plan.statistics}
                common |= {"surrogates": options.surrogates}
                profile = measure_profile(measurement, **common)
                with opening(progress, "labelling"):
                    heads = classify_heads(profile, seed=options.seed)
    facts = {
        "backend": options.backend,
        "text": plan.text.source,
        "command": this_command(),
        "warnings": "\n".join(plan.warnings),
    } | ({} if revision is None else {"revision": revision})
    if swept is not None:
        swept.attrs |= facts | {"arguments": json.dumps(plan.arguments)}
    measured: dict[str, Any] = {"model": shown, "tokenizer": source.tokenizer}
    measured |= {"text": plan.text, "truncation": swept}
    if earlier is not None:
        return replace(earlier, **measured)
    profile.attrs |= facts
    times = {"load": loaded - begin, "measure": time.perf_counter() - loaded}
    record = _record(profile, heads, plan, live, weights)
    record["seconds"] = {name: round(seconds, 3) for name, seconds in times.items()}
    return Analysis(profile, heads, record, **measured)


def _joined_by_sweep(
    folder: str | Path | None, weights: str | None, text: str
) -> Analysis | None:
    """The analysis in `folder` that a sweep joins; the same for all processes, or None.

    The profile that another sweep made for itself is measured anew.
    """
    earlier = None if folder is None else earlier_analysis(Path(folder), weights)
    if earlier is not None:
        alike = earlier.provenance.get("text", {}).get("fingerprint") == text != ""
        runs = [of.attrs.get("command") for of in (earlier.profile, earlier.truncation) if of]
        if not alike or len(set(runs)) < len(runs):
            earlier = None
    return earlier if all(gather(earlier is not None)) else None


def _saved_in(
    folder: str | Path | None, plan: Plan, weights: str | None
) -> AbstractContextManager[None]:
    """The measurement is saved in `folder` under all that decides its numbers."""
    if folder is None or isinstance(plan.source, LiveModel):
        return nullcontext()  # a model in memory has no files by which it is known again
    text = (plan.text.ids, plan.text.lengths, plan.text.documents, plan.text.hidden)
    key = {
        "weights": weights,
        "config": plan.source.config.to_dict(),
        "tokens": [None if of is None else of.tolist() for of in text],
        "arguments": plan.arguments,
        "device": ", ".join(map(str, plan.source.devices)),
        "versions": versions(),
    }
    return savepoint(Path(folder) / UNFINISHED, key)


def _record(
    profile: xr.Dataset, heads: pd.DataFrame, plan: Plan, live: LiveModel, weights: str | None
) -> dict[str, Any]:
    """What run.json says of an analysis; `weights` is their fingerprint."""
    attrs, peak = profile.attrs, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    record = {name: _known(attrs[name]) for name in RECORDED} | {
        "arguments": plan.arguments,
        "model": {
            "name": attrs["model"],
            "revision": attrs["revision"],
            "class": live.class_name,
            "fingerprint": weights,
        },
        "text": {"source": attrs["text"], "fingerprint": plan.text.documents_sha256 or None},
        "labels": heads["label"].value_counts().to_dict(),
        "thresholds": heads.attrs["thresholds"],
        "claim": {name: _known(value) for name, value in heads.attrs["claim"].items()},
        "warnings": plan.warnings,
        "versions": versions(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
        "device": str(live.device),
        "peak_memory_bytes": peak * (1 if sys.platform == "darwin" else 1024),
    }
    if live.device.type == "cuda":
        record["peak_cuda_memory_bytes"] = torch.cuda.max_memory_allocated(live.device)
    return record


def _known(value: Any) -> Any:
    """`value`, or null for a number that is unknown."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
