"""Analysis of a model on text, from the arguments to an `Analysis`."""

import json
import math
import platform
import resource
import sys
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import xarray as xr

from ropelens.analysis.analysis import (
    Analysis,
    earlier_results,
    open_analysis,
    recorded_key,
)
from ropelens.analysis.options import Options
from ropelens.analysis.plan import (
    Plan,
    TextSource,
    keep_warnings,
    plan_analysis,
    this_command,
)
from ropelens.arguments import public
from ropelens.checkpoints.load import Opened
from ropelens.claims.tables import classify_heads
from ropelens.errors import BadArgument
from ropelens.interventions.truncate import truncate
from ropelens.measured_rotation.probe import RotationProbe
from ropelens.measured_rotation.row_order import warn_of_row_order
from ropelens.model.as_live_model import Model, as_live_model
from ropelens.model.bridge import bridge
from ropelens.model.live_model import LiveModel
from ropelens.profiles.measurement import Measurement, versions
from ropelens.profiles.profile import profile as measure
from ropelens.runtime.devices import explain_full_memory
from ropelens.runtime.keys import Key
from ropelens.runtime.processes import all_agree
from ropelens.runtime.progress import ProgressOption, ShowProgress, display_of, opening
from ropelens.runtime.savepoint import UNFINISHED, savepoint
from ropelens.text.text import Text

DEFAULT = Options()

TEXT_FACTS = ("context", "sequences", "documents", "tokens", "rows")
RECORDED = ("command", "seed", *TEXT_FACTS, "dtype", "loss", "loss_se", "created")
"""Attributes of a profile that are also in run.json."""


@public
def analyze(
    model: str | Path | Model = "bundled",
    text: TextSource | None = None,
    options: Options = DEFAULT,
    *,
    tokenizer: Any = None,
    truncation: Mapping[str, Any] | None = None,
    progress: ProgressOption = None,
) -> Analysis:
    """Measure the profile of a model on text, and the labels of its heads.

    - `model`: a name for `ropelens.load`, a transformers model, or a `TransformerBridge`.
    - `text`: a `Path` of a file or folder (see `read_documents`), a document (`str`), or a list
      of them; or tokens: a `Text`, a BatchEncoding, or a tensor [sequence, position]. By
      default, a bundled checkpoint reads text that was sampled from it.
    - `tokenizer`: for a model in memory, or instead of the tokenizer of a checkpoint.
    - `truncation`: arguments of `ropelens.truncate` from `heads` to `measures`, for a sweep on
      the same sequences and rows with the same seed.
    - `progress`: True shows the progress on stderr.

    Raises `BadText` and `BadCheckpoint` for files that cannot be read, and the errors of
    `ropelens.load`, `profile` and `truncate`.
    """
    show = display_of(progress)
    with opening(show, "reading"):
        plan = plan_analysis(
            model, text, options, tokenizer=tokenizer, truncation=truncation
        )
    analysis = run_plan(plan, folder=None, progress=show)
    shown: Any = analysis.model if isinstance(model, (str, Path)) else model
    return replace(analysis, model=shown)


def run_plan(plan: Plan, *, folder: Path | None, progress: ShowProgress) -> Analysis:
    """Return the analysis that `analyze` returns for the arguments of the plan.

    While a checkpoint is measured, the progress is saved in `folder` once a minute, so that the
    same command continues after a kill. A sweep joins an analysis of the same model and text
    in `folder`, whose profile is not measured again.
    """
    begin, source, options = time.perf_counter(), plan.source, plan.options
    revision = sweep = earlier = None
    fingerprint = plan.model["fingerprint"]
    how: dict[str, Any] = {name: getattr(options, name) for name in ("rows", "seed")}
    with keep_warnings(plan.warnings):
        with opening(progress, "loading"):
            live = plan.read()
            if isinstance(source, Opened):
                warn_of_row_order(live)
                revision = source.checkpoint.revision
        loaded, shown = time.perf_counter(), live.model
        display: dict[str, Any] = {"tokenizer": source.tokenizer, "progress": progress}
        hint = (
            "a smaller --context, fewer --rows, --dtype bfloat16, or another --device"
        )
        seen = f"context {plan.text.ids.shape[1]:,}"
        explain_memory = explain_full_memory("The measurement", seen=seen, hint=hint)
        with explain_memory, _saved_in(folder, plan):
            measurement = Measurement.of(
                live, plan.text, batch_size=plan.batch_size, **how
            )
            if plan.truncation is not None:
                sweep = truncate(measurement, plan.text, **plan.truncation, **display)
                earlier = _joined_by_sweep(
                    folder, fingerprint, plan.text.documents_sha256
                )
            if options.backend == "transformer-lens" and live is not source:
                shown = bridge(live.model, source.tokenizer)
                live = as_live_model(shown, source.tokenizer)
                measurement = replace(
                    measurement, live=live, rotation=RotationProbe(live)
                )
            if earlier is None:
                display |= {"excerpts": plan.excerpts, "statistics": plan.statistics}
                display |= {"surrogates": options.surrogates}
                profile = measure(measurement, plan.text, **display)
                with opening(progress, "labelling"):
                    heads = classify_heads(profile, seed=options.seed)
    facts: dict[str, Any] = {} if revision is None else {"revision": revision}
    facts |= {
        "backend": options.backend,
        "text": plan.text.source,
        "command": this_command(),
    }
    facts["warnings"] = "\n".join(plan.warnings)
    if sweep is not None:
        sweep.attrs |= facts | {"arguments": json.dumps(plan.arguments)}
    measured: dict[str, Any] = {"model": shown, "tokenizer": source.tokenizer}
    measured |= {"text": plan.text, "truncation": sweep}
    if earlier is not None:
        return replace(earlier, **measured)
    facts["bytes_per_token"] = _bytes_per_token(plan.text, source.tokenizer)
    profile.attrs |= facts
    times = {"load": loaded - begin, "measure": time.perf_counter() - loaded}
    record = _record(profile, heads, plan, live)
    record["seconds"] = {name: round(seconds, 3) for name, seconds in times.items()}
    return Analysis(profile, heads, record, **measured)


def _bytes_per_token(text: Text, tokenizer: Any) -> float:
    """Mean number of UTF-8 bytes of a token after the first of its sequence, or NaN."""
    if tokenizer is None:
        return math.nan
    pairs = zip(text.ids, text.real, strict=True)
    pieces = [tokenizer.decode(ids[1:][real[1:]].tolist()) for ids, real in pairs]
    return len("".join(pieces).encode()) / max(1, int(text.real[:, 1:].sum()))


def _joined_by_sweep(
    folder: Path | None, fingerprint: str, text: str
) -> Analysis | None:
    """The analysis in `folder` that a sweep joins, or None; the same for all processes."""
    analysis = None
    if folder is not None and (results := earlier_results(folder, fingerprint)):
        key = Key({"text": text})
        same_text = text != "" and key.fits(recorded_key(results["provenance"]))
        command, sweep = results["profile"].attrs.get("command"), results["truncation"]
        if same_text and (sweep is None or sweep.attrs.get("command") != command):
            with suppress(BadArgument):  # a damaged profile is measured again
                analysis = open_analysis(folder, results)
    return analysis if all_agree(analysis is not None) else None


def _saved_in(folder: Path | None, plan: Plan) -> AbstractContextManager[None]:
    """Save the progress in `folder`, with every setting that affects the numbers as the key."""
    if folder is None or isinstance(plan.source, LiveModel):
        return nullcontext()
    documents = plan.text.documents
    settings = {
        "model": plan.model,
        "tokens": plan.text.fingerprint,
        "documents": None if documents is None else documents.tolist(),
        "arguments": plan.arguments,
        "device": ", ".join(map(str, plan.source.devices)),
        "versions": versions(),
    }
    return savepoint(folder / UNFINISHED, settings)


def _record(
    profile: xr.Dataset, heads: pd.DataFrame, plan: Plan, live: LiveModel
) -> dict[str, Any]:
    """The contents of run.json."""
    attrs, peak = profile.attrs, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    record = {name: _known(attrs[name]) for name in RECORDED} | {
        "arguments": plan.arguments,
        "model": plan.model | {"revision": attrs["revision"], "class": live.class_name},
        "text": {
            "source": attrs["text"],
            "fingerprint": plan.text.documents_sha256 or None,
        },
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
    """Return `value`, or None (null in JSON) for an unknown number."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
