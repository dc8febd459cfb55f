"""What the commands that measure a model share: it is loaded, measured and written whole."""

from __future__ import annotations

import math
import platform
import re
import resource
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from json import dumps
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import torch
import xarray as xr
from transformers import PreTrainedModel

from ropelens.errors import BadArgument, BadText
from ropelens.files.folder import check_writable, fingerprint, output_folder, write_whole
from ropelens.files.results import save_results
from ropelens.measure.profile import versions
from ropelens.measure.truncation_table import summarize_truncation
from ropelens.models.bundled import sample_path
from ropelens.models.checkpoint import locate
from ropelens.models.load import load
from ropelens.models.memory import explain_full_memory
from ropelens.models.subject import stated_context
from ropelens.models.texts import (
    Sequences,
    check_context,
    check_vocabulary,
    read_documents,
    tokenize,
)
from ropelens.report import write_report

LONGEST_DEFAULT_CONTEXT = 2048
DEFAULT_SEQUENCES = 64


@dataclass(frozen=True)
class Job:
    """What a command was asked to measure; see the `--help` of `ropelens analyze`."""

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


@dataclass(frozen=True)
class Ready:
    """A loaded model, and its text cut into sequences of its tokens."""

    model: PreTrainedModel
    tokenizer: Any
    sequences: Sequences


@dataclass(frozen=True)
class Measured:
    """The labelled arrays that a job ends with; a truncation sweep where it made one."""

    profile: xr.Dataset
    heads: pd.DataFrame
    truncation: xr.Dataset | None = None


def do(job: Job, *, command: str, measure: Callable[[Ready], Measured]) -> Path:
    """Load what `job` names, `measure` it, write all files, and return the path of the page.

    `command` is what a shell would be told to do the same again. Raises `RopelensError`
    for what a user can cause; files that are in `job.out` then stay as they are.
    """
    begin = time.perf_counter()
    check_out(job.out)
    if (job.out / "comparison.nc").exists():
        raise BadArgument(
            f"{job.out} holds a comparison; its page would be lost.", attempt="another --out"
        )
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
        with explain_full_memory(
            "The measurement",
            seen=f"context {int(sequences.tokens.shape[1]):,}",
            attempt="a smaller --context, fewer --rows, --dtype bfloat16, or another --device",
        ):
            ready = Ready(model, tokenizer, sequences)
            measured = measure(ready)
        done = time.perf_counter()
    checkpoint = locate(job.model, revision=job.revision, local_files_only=True)
    facts = {
        "revision": checkpoint.revision,
        "backend": job.backend,
        "text": sequences.source,
        "command": command,
        "warnings": "\n".join(noted),
    }
    for results in (measured.profile, measured.truncation):
        if results is not None:
            results.attrs |= facts
    seconds = {"load": round(loaded - begin, 3), "measure": round(done - loaded, 3)}
    record = _record(job, ready, measured, fingerprint(checkpoint.path))
    _write(job.out, measured, record | {"seconds": seconds})
    return job.out / "index.html"


def _record(
    job: Job, ready: Ready, measured: Measured, model_fingerprint: str
) -> dict[str, Any]:
    """run.json, but for the seconds that it took."""
    attrs = measured.profile.attrs
    return {
        "command": attrs["command"],
        "arguments": _arguments(job),
        "model": {
            "name": attrs["model"],
            "revision": attrs["revision"],
            "class": type(ready.model).__name__,
            "fingerprint": model_fingerprint,
        },
        "text": {"source": attrs["text"], "fingerprint": ready.sequences.fingerprint},
        **_results(measured.profile, measured.heads),
        "warnings": attrs["warnings"].splitlines(),
        **_machine(ready.model),
    }


TRAINED = ("config.json", "study.json", "history", "checkpoints", ".lock")
"""What lies in the folder of a model, of a run that is to become one, or of a study."""


def check_out(folder: Path) -> None:
    """Refuse a folder that results cannot be written to, or that holds a model.

    The run.json of a training run lies beside its model, and would be lost.
    """
    check_writable(folder)
    if any((folder / name).exists() for name in TRAINED):
        raise BadArgument(
            f"{folder} holds a model, a run or a study; results would mix with its files.",
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
    maximum = stated_context(model)
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


def _write(out: Path, measured: Measured, record: dict[str, Any]) -> None:
    """The files, all or none; run.json is last, for it says how long the others took."""
    begin = time.perf_counter()
    heads, truncation = measured.heads, measured.truncation
    with output_folder(out) as folder:
        save_results(measured.profile, folder / "profile.nc")
        _write_table(heads, folder / "heads.csv")
        if truncation is not None:
            save_results(truncation, folder / "truncation.nc")
            _write_table(summarize_truncation(truncation), folder / "truncation.csv")
        page = folder / "index.html"
        write_report(measured.profile, page, heads=heads, truncation=truncation)
        record["seconds"]["write"] = round(time.perf_counter() - begin, 3)
        text = dumps(record, indent=2, allow_nan=False)
        write_whole(folder / "run.json", text + "\n")


def _write_table(table: pd.DataFrame, path: Path) -> None:
    write_whole(path, table.to_csv(index=False, lineterminator="\n"))


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
