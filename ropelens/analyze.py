"""The main job: a checkpoint and some text go in, four files come out."""

from __future__ import annotations

import math
import platform
import re
import resource
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from json import dumps
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import torch
import xarray as xr
from transformers import PreTrainedModel

from ropelens.bundled import sample_path
from ropelens.errors import BadArgument, BadText
from ropelens.heads import classify_heads
from ropelens.models.checkpoint import locate
from ropelens.models.load import load, maximum_context
from ropelens.output import check_writable, fingerprint, output_folder, write_whole
from ropelens.profiling import profile, versions
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
    for what a user can cause; files that are in `job.out` then stay as they are.
    """
    begin = time.perf_counter()
    _check_out(job.out)
    documents = read_documents(_text(job))
    with _noted_warnings() as noted:
        model, tokenizer = load(
            job.model,
            dtype=job.dtype,
            device=job.device,
            revision=job.revision,
            local_files_only=job.local_files_only,
            trust_remote_code=job.trust_remote_code,
        )
        sequences = _sequences(job, documents, model, tokenizer)
        loaded = time.perf_counter()
        measured = _measure(job, model, tokenizer, sequences)
        heads = classify_heads(measured, seed=job.seed)
        done = time.perf_counter()
    checkpoint = locate(job.model, revision=job.revision, local_files_only=True)
    measured.attrs |= {
        "revision": checkpoint.revision,
        "backend": job.backend,
        "text": sequences.source,
        "command": command,
        "warnings": "\n".join(noted),
    }
    record = {
        "command": command,
        "arguments": _arguments(job),
        "model": {
            "name": measured.attrs["model"],
            "revision": checkpoint.revision,
            "class": type(model).__name__,
            "fingerprint": fingerprint(checkpoint.path),
        },
        "text": {"source": sequences.source, "fingerprint": sequences.fingerprint},
        **_results(measured, heads),
        "warnings": noted,
        **_machine(model),
        "seconds": {"load": round(loaded - begin, 3), "measure": round(done - loaded, 3)},
    }
    _write(job.out, measured, heads, record)
    return job.out / "index.html"


def _check_out(folder: Path) -> None:
    """Refuse a folder that results cannot be written to, or that holds a model.

    The run.json of a training run lies beside its model, and would be lost.
    """
    check_writable(folder)
    if (folder / "config.json").exists():
        raise BadArgument(
            f"{folder} holds a model; results would mix with its files.",
            attempt=f"another folder, such as {folder / 'ropelens'}",
        )


def _is_bundled(model: str) -> bool:
    return model.partition(":")[0] == "bundled"


def _text(job: Job) -> tuple[Path, ...]:
    """The text to measure on: what was passed, or the bundled model's own."""
    if job.text:
        return job.text
    if not _is_bundled(job.model):
        raise BadText(
            f"There is no text to run {job.model} on.",
            attempt="--text FILE (text files, folders of them, or .jsonl); only a bundled "
            "checkpoint comes with text of its own",
        )
    return (sample_path(job.model.partition(":")[2] or "rope"),)


@contextmanager
def _noted_warnings() -> Iterator[list[str]]:
    """The texts of all warnings that are shown while the block runs."""
    noted: list[str] = []
    with warnings.catch_warnings():  # which puts `showwarning` back
        show = warnings.showwarning

        def note(message: Warning | str, *place: Any, **more: Any) -> None:
            noted.append(" ".join(str(message).split()))
            show(message, *place, **more)

        warnings.showwarning = note
        yield noted


def _sequences(
    job: Job, documents: Sequence[str], model: PreTrainedModel, tokenizer: Any
) -> Sequences:
    """The documents as tokens of the model, cut to the context."""
    maximum = maximum_context(model)
    context = job.context
    if context is None:
        context = min(maximum or LONGEST_DEFAULT_CONTEXT, LONGEST_DEFAULT_CONTEXT)
    check_context(context, maximum)
    with warnings.catch_warnings():
        if job.sequences is None:  # then fewer than the default are no surprise
            warnings.filterwarnings("ignore", message=".*were asked for")
        sequences = tokenize(
            documents,
            tokenizer,
            context=context,
            sequences=DEFAULT_SEQUENCES if job.sequences is None else job.sequences,
            seed=job.seed,
        )
    check_vocabulary(sequences, vocabulary=model.config.get_text_config().vocab_size)
    return sequences


def _measure(
    job: Job, model: PreTrainedModel, tokenizer: Any, sequences: Sequences
) -> xr.Dataset:
    """The profile, with progress on stderr."""
    subject: Any = model
    if job.backend == "transformer-lens":
        from ropelens.models.bridge import bridge

        subject = bridge(model, tokenizer)
    total = int(sequences.lengths.sum())
    with (
        _out_of_memory(int(sequences.tokens.shape[1])),
        show_progress("measuring", total=total, unit="tokens") as advance,
    ):
        return profile(
            subject,
            sequences.tokens,
            lengths=sequences.lengths,
            tokenizer=tokenizer,
            rows=job.rows,
            seed=job.seed,
            progress=advance,
        )


@contextmanager
def _out_of_memory(context: int) -> Iterator[None]:
    """Turn what torch raises when memory runs out into an error that says what helps."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        known = isinstance(error, (MemoryError, torch.OutOfMemoryError))
        if not known and "can't allocate memory" not in str(error):
            raise
        raise BadArgument(
            "The measurement does not fit into memory.",
            seen=f"context {context:,}; " + " ".join(str(error).split())[:200],
            attempt="a smaller --context, fewer --rows, --dtype bfloat16, or another --device",
        ) from error


def _write(
    out: Path, measured: xr.Dataset, heads: pd.DataFrame, record: dict[str, Any]
) -> None:
    """The four files, all or none; run.json is last, for it says how long the others took."""
    begin = time.perf_counter()
    with output_folder(out) as folder:
        save_profile(measured, folder / "profile.nc")
        write_whole(folder / "heads.csv", heads.to_csv(index=False, lineterminator="\n"))
        write_report(measured, folder / "index.html", heads=heads)
        record["seconds"]["write"] = round(time.perf_counter() - begin, 3)
        text = dumps(record, indent=2, allow_nan=False)
        write_whole(folder / "run.json", text + "\n")


def _arguments(job: Job) -> dict[str, Any]:
    """The job in JSON's types."""
    return asdict(job) | {"out": str(job.out), "text": [str(path) for path in job.text]}


def _results(measured: xr.Dataset, heads: pd.DataFrame) -> dict[str, Any]:
    """What was measured, in short, in JSON's types: null for a number that is unknown."""
    attrs = measured.attrs
    numbers = {name: int(attrs[name]) for name in ("seed", "context", "sequences", "tokens")}
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


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _machine(model: PreTrainedModel) -> dict[str, Any]:
    """Where it ran, and the most memory that was in use at a time, in bytes."""
    facts = {
        "versions": versions(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
        "device": str(model.device),
        "peak_memory_bytes": _peak_memory(),
    }
    if model.device.type == "cuda":
        facts["peak_cuda_memory_bytes"] = torch.cuda.max_memory_allocated(model.device)
    return facts


def _peak_memory() -> int:
    """Bytes that this process held at most."""
    # On Linux getrusage also counts what the process that started this one held by then.
    status = Path("/proc/self/status")
    found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text()) if status.exists() else None
    if found:
        return 1024 * int(found[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024)
