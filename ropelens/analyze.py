"""The main job: a checkpoint and some text go in, four files come out."""

from __future__ import annotations

import resource
import sys
import time
import warnings
from dataclasses import asdict, dataclass
from json import dumps
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import torch
import xarray as xr
from transformers import PreTrainedModel

from ropelens.bundled import bundled_path, sample_path
from ropelens.errors import BadText
from ropelens.heads import classify_heads
from ropelens.models.load import load, maximum_context
from ropelens.output import check_writable, fingerprint, output_folder
from ropelens.profile import profile, versions
from ropelens.progress import show_progress
from ropelens.report import write_report
from ropelens.results import save_profile
from ropelens.text import (
    Sequences,
    check_context,
    check_vocabulary,
    read_documents,
    tokenize,
)

LONGEST_DEFAULT_CONTEXT = 2048
DEFAULT_SEQUENCES = 64


@dataclass(frozen=True)
class Job:
    """What `ropelens analyze` was asked for; see its `--help`."""

    model: str
    out: Path
    text: tuple[Path, ...] = ()
    context: int | None = None
    sequences: int | None = None
    rows: int | Literal["all"] = "all"
    seed: int = 0
    device: str = "auto"
    dtype: str = "float32"
    backend: str = "hf"
    revision: str | None = None
    local_files_only: bool = False
    trust_remote_code: bool = False


def run(job: Job, *, command: str) -> Path:
    """Do `job`, write its four files to `job.out`, and return the path of the page.

    `command` is what a shell would be told to do the same again. Raises `RopelensError`
    for what a user can cause, before anything in `job.out` is touched.
    """
    begin = time.perf_counter()
    check_writable(job.out)
    text = _text(job)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        model, tokenizer = load(
            job.model,
            dtype=job.dtype,
            device=job.device,
            revision=job.revision,
            local_files_only=job.local_files_only,
            trust_remote_code=job.trust_remote_code,
        )
        maximum = maximum_context(model)
        context = job.context or min(
            maximum or LONGEST_DEFAULT_CONTEXT, LONGEST_DEFAULT_CONTEXT
        )
        check_context(context if job.context is None else job.context, maximum)
        sequences = tokenize(
            read_documents(text),
            tokenizer,
            context=context,
            sequences=job.sequences or DEFAULT_SEQUENCES,
            seed=job.seed,
        )
    if job.sequences is None:
        caught = [w for w in caught if "were asked for" not in str(w.message)]
    for warning in caught:
        warnings.warn(str(warning.message), UserWarning, stacklevel=2)
    check_vocabulary(sequences, vocabulary=model.config.get_text_config().vocab_size)
    loaded = time.perf_counter()
    measured = _measure(job, model, tokenizer, sequences)
    measured.attrs |= {
        "model": _name(job.model),
        "revision": job.revision or measured.attrs["revision"],
        "backend": job.backend,
        "text": sequences.source,
        "command": command,
        "warnings": dumps([str(w.message) for w in caught]),
    }
    heads = classify_heads(measured, seed=job.seed)
    done = time.perf_counter()
    record = _record(job, measured, heads, sequences, model) | {
        "seconds": {"load": round(loaded - begin, 3), "measure": round(done - loaded, 3)},
    }
    with output_folder(job.out) as folder:
        save_profile(measured, folder / "profile.nc")
        heads.to_csv(folder / "heads.csv", index=False)
        write_report(measured, folder / "index.html", heads=heads)
        (folder / "run.json").write_text(dumps(record, indent=2) + "\n")
    return job.out / "index.html"


def _text(job: Job) -> tuple[Path, ...]:
    """The text to measure on: what was passed, or the bundled model's own."""
    if job.text:
        return job.text
    if job.model.partition(":")[0] != "bundled":
        raise BadText(
            f"There is no text to run {job.model} on.",
            attempt="--text FILE (text files, folders of them, or .jsonl); only a bundled "
            "checkpoint comes with text of its own",
        )
    return (sample_path(job.model.partition(":")[2] or "rope"),)


def _name(model: str) -> str:
    """How results call the model: not by where it lies on this machine."""
    path = Path(model)
    return path.resolve().name if path.exists() else model


def _measure(
    job: Job, model: PreTrainedModel, tokenizer: Any, sequences: Sequences
) -> xr.Dataset:
    """The profile, with progress on stderr."""
    subject: Any = model
    if job.backend == "transformer-lens":
        from ropelens.models.bridge import bridge

        subject = bridge(model, tokenizer)
    total = int(sequences.lengths.sum())
    with show_progress("measuring", total=total, unit="tokens") as advance:
        return profile(
            subject,
            sequences.tokens,
            lengths=sequences.lengths,
            tokenizer=tokenizer,
            rows=job.rows,
            seed=job.seed,
            progress=advance,
        )


def _record(
    job: Job,
    measured: xr.Dataset,
    heads: pd.DataFrame,
    sequences: Sequences,
    model: PreTrainedModel,
) -> dict[str, Any]:
    """What run.json says: enough to run it again, and to know that it was the same."""
    attrs = measured.attrs
    asked = {k: str(v) if isinstance(v, Path) else v for k, v in asdict(job).items()}
    asked["text"] = [str(path) for path in job.text]
    return {
        "command": attrs["command"],
        "arguments": asked,
        "versions": versions(),
        "python": sys.version.split()[0],
        "model": {
            "name": attrs["model"],
            "revision": attrs["revision"],
            "class": type(model).__name__,
            "fingerprint": _fingerprint(job.model),
        },
        "text": {"source": sequences.source, "fingerprint": sequences.fingerprint},
        "seed": job.seed,
        "context": int(attrs["context"]),
        "sequences": int(attrs["sequences"]),
        "tokens": int(attrs["tokens"]),
        "loss": attrs["loss"],
        "loss_se": attrs["loss_se"],
        "labels": heads["label"].value_counts().to_dict(),
        "thresholds": heads.attrs["thresholds"],
        "claim": heads.attrs["claim"],
        "warnings": attrs["warnings"],
        "device": str(model.device),
        "peak_memory_bytes": _peak_memory(model),
        "created": attrs["created"],
    }


def _fingerprint(model: str) -> str:
    """sha256 of a local checkpoint's weights; the revision stands for a Hub model."""
    if model.partition(":")[0] == "bundled":
        return fingerprint(bundled_path(model.partition(":")[2] or "rope"))
    return fingerprint(model) if Path(model).exists() else ""


def _peak_memory(model: PreTrainedModel) -> int:
    """Bytes: of the GPU where the model is on one, else of this process."""
    if model.device.type == "cuda":
        return torch.cuda.max_memory_allocated(model.device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024)
