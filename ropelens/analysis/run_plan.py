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

from ropelens.analysis.analysis_result import Analysis, label_numbers
from ropelens.analysis.beginning import warn_of_beginning
from ropelens.analysis.inputs import TextSource
from ropelens.analysis.options import Options
from ropelens.analysis.plan import Plan, keep_warnings, plan_analysis
from ropelens.analysis.saved_numbers import earlier_numbers, saved_key
from ropelens.arguments import public
from ropelens.checkpoints.load import Opened
from ropelens.claims.classify import classify_heads
from ropelens.errors import BadArgument
from ropelens.interventions.truncate import truncate
from ropelens.measured_rotation.probe import RotationProbe
from ropelens.measured_rotation.row_order import warn_of_row_order
from ropelens.model.as_live_model import Model, as_live_model
from ropelens.model.bridge import bridge
from ropelens.model.live_model import LiveModel
from ropelens.profiles.measurement import Measurement
from ropelens.profiles.profile import profile as measure
from ropelens.runtime.devices import explain_full_memory
from ropelens.runtime.folder import UNFINISHED
from ropelens.runtime.keys import Key
from ropelens.runtime.processes import all_agree
from ropelens.runtime.progress import ProgressOption, ShowProgress, display_of, opening
from ropelens.runtime.run_record import this_command
from ropelens.runtime.savepoint import savepoint

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
    if isinstance(model, (str, Path)):
        return analysis
    given: Any = model  # not its wrapper
    return replace(analysis, model=given)


def run_plan(plan: Plan, *, folder: Path | None, progress: ShowProgress) -> Analysis:
    """Return the analysis that `analyze` returns for the arguments of the plan.

    While a checkpoint is measured, the progress is saved in `folder` once a minute, so that the
    same command continues after a kill. A sweep joins an analysis of the same model and text
    in `folder`, whose profile is not measured again.
    """
    begin = time.perf_counter()
    sweep: xr.Dataset | None = None
    earlier: Analysis | None = None
    with keep_warnings(plan.warnings):
        with opening(progress, "loading"):
            live = plan.read()
            if isinstance(plan.source, Opened):
                warn_of_row_order(live)
            warn_of_beginning(live, plan.text, bos=plan.options.bos)
        loaded = time.perf_counter()
        with _explain_memory(plan), _saved_in(folder, plan):
            measurement = Measurement.of(
                live,
                plan.text,
                rows=plan.options.rows,
                seed=plan.options.seed,
                batch_size=plan.batch_size,
            )
            if plan.truncation is not None:
                sweep = _measure_sweep(plan, measurement, progress)
                earlier = _joined_by_sweep(folder, plan)
            shown: Any = live.model
            if plan.is_bridged and live is not plan.source:
                shown = bridge(live.model, plan.source.tokenizer)
                measurement = _measurement_of_bridge(measurement, shown)
            if earlier is None:
                analysis = _measure_profile(plan, measurement, progress)
            else:
                analysis = earlier
    if earlier is None:
        seconds = {"load": loaded - begin, "measure": time.perf_counter() - loaded}
        analysis = _with_provenance(analysis, plan, measurement.live, seconds)
    if sweep is not None:
        sweep.attrs |= _attributes(plan)
        sweep.attrs["arguments"] = json.dumps(plan.arguments)
    return replace(
        analysis,
        model=shown,
        tokenizer=plan.source.tokenizer,
        text=plan.text,
        truncation=sweep,
    )


def _explain_memory(plan: Plan) -> AbstractContextManager[None]:
    return explain_full_memory(
        "The measurement",
        seen=f"context {plan.text.ids.shape[1]:,}",
        hint="a smaller --context, fewer --rows, --dtype bfloat16, or another --device",
    )


def _saved_in(folder: Path | None, plan: Plan) -> AbstractContextManager[None]:
    """Save the progress in `folder`, with every setting that affects the numbers as the key."""
    if folder is None or isinstance(plan.source, LiveModel):
        return nullcontext()
    documents = plan.text.documents
    settings = {
        **plan.arguments,  # one by one: a message names those that changed
        "weights": plan.model,
        "tokens": plan.text.fingerprint,
        "documents": None if documents is None else documents.tolist(),
        "devices": ", ".join(map(str, plan.source.devices)),
        "versions": plan.versions,
    }
    return savepoint(folder / UNFINISHED, settings)


def _measure_sweep(
    plan: Plan, measurement: Measurement, progress: ShowProgress
) -> xr.Dataset:
    return truncate(
        measurement,
        plan.text,
        **(plan.truncation or {}),
        tokenizer=plan.source.tokenizer,
        progress=progress,
    )


def _joined_by_sweep(folder: Path | None, plan: Plan) -> Analysis | None:
    """The analysis in `folder` that a sweep joins, or None; the same for all processes."""
    analysis = None if folder is None else _analysis_without_sweep(folder, plan)
    return analysis if all_agree(analysis is not None) else None


def _analysis_without_sweep(folder: Path, plan: Plan) -> Analysis | None:
    """The analysis of the same model and text in `folder`.

    None if there is none, if the same command measured it with a sweep, or if it is damaged.
    """
    numbers = earlier_numbers(folder, plan.model["fingerprint"])
    text = plan.text.documents_sha256
    if numbers is None or text == "":
        return None
    if not Key({"text": text}).fits(saved_key(numbers.provenance)):
        return None
    sweep = numbers.truncation
    command = numbers.profile.attrs.get("command")
    if sweep is not None and sweep.attrs.get("command") == command:
        return None
    with suppress(BadArgument):  # a damaged profile is measured again
        return label_numbers(numbers, folder)
    return None


def _measurement_of_bridge(measurement: Measurement, shown: Any) -> Measurement:
    """The same measurement of a TransformerLens bridge."""
    live = as_live_model(shown, measurement.live.tokenizer)
    return replace(measurement, live=live, rotation=RotationProbe(live))


def _measure_profile(
    plan: Plan, measurement: Measurement, progress: ShowProgress
) -> Analysis:
    """The profile and the labels of its heads, without provenance."""
    profile = measure(
        measurement,
        plan.text,
        tokenizer=plan.source.tokenizer,
        excerpts=plan.excerpts,
        statistics=plan.statistics,
        surrogates=plan.options.surrogates,
        progress=progress,
    )
    with opening(progress, "labelling"):
        heads = classify_heads(profile, seed=plan.options.seed)
    return Analysis(profile, heads, provenance={})


def _attributes(plan: Plan) -> dict[str, str]:
    """Attributes of the datasets of an analysis: text, library, command and warnings."""
    attributes = {
        "backend": plan.options.backend,
        "text": plan.text.source,
        "command": this_command(),
        "warnings": "\n".join(plan.warnings),
    }
    if isinstance(plan.source, Opened):
        attributes["revision"] = plan.source.checkpoint.revision
    return attributes


def _with_provenance(
    measured: Analysis, plan: Plan, live: LiveModel, seconds: Mapping[str, float]
) -> Analysis:
    """The analysis with its provenance, and the profile with attributes."""
    profile = measured.profile
    profile.attrs |= _attributes(plan)
    profile.attrs["bytes_per_token"] = _bytes_per_token(plan)
    record = _record(profile, measured.heads, plan, live)
    record["seconds"] = {name: round(spent, 3) for name, spent in seconds.items()}
    return replace(measured, provenance=record)


def _bytes_per_token(plan: Plan) -> float:
    """Mean number of UTF-8 bytes of a token after the first of its sequence, or NaN."""
    text = plan.text
    tokenizer: Any = plan.source.tokenizer
    if tokenizer is None:
        return math.nan
    byte_count = 0
    token_count = int(text.real[:, 1:].sum())
    for ids, real in zip(text.ids, text.real, strict=True):
        decoded = tokenizer.decode(ids[1:][real[1:]].tolist())
        byte_count += len(decoded.encode())
    return byte_count / max(1, token_count)


def _record(
    profile: xr.Dataset, heads: pd.DataFrame, plan: Plan, live: LiveModel
) -> dict[str, Any]:
    """The contents of run.json."""
    attrs = profile.attrs
    record = {name: _none_if_unknown(attrs[name]) for name in RECORDED}
    record["arguments"] = plan.arguments
    record["model"] = {
        **plan.model,
        "revision": attrs["revision"],
        "class": live.class_name,
    }
    record["text"] = {
        "source": attrs["text"],
        "beginning": attrs["beginning"],
        "fingerprint": plan.text.fingerprint,
        "documents_sha256": plan.text.documents_sha256 or None,
    }
    record["labels"] = heads["label"].value_counts().to_dict()
    record["thresholds"] = heads.attrs["thresholds"]
    record["claim"] = {
        name: _none_if_unknown(value) for name, value in heads.attrs["claim"].items()
    }
    record["warnings"] = plan.warnings
    record["versions"] = plan.versions
    record["python"] = platform.python_version()
    record["platform"] = platform.platform()
    record["threads"] = torch.get_num_threads()
    record["device"] = str(live.device)
    record["peak_memory_bytes"] = _peak_memory()
    if live.device.type == "cuda":
        record["peak_cuda_memory_bytes"] = torch.cuda.max_memory_allocated(live.device)
    return record


def _peak_memory() -> int:
    """Largest main memory of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def _none_if_unknown(value: Any) -> Any:
    """Return `value`, or None (null in JSON) for an unknown number."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
