"""One training run: a folder that the same call starts, resumes and finishes."""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from filelock import FileLock, Timeout
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from ropelens.errors import BadArgument
from ropelens.files.folder import explain_full_disk, make_folder
from ropelens.models.memory import explain_full_memory
from ropelens.models.processes import processes
from ropelens.train.data import Source, copy_tokenizer, prepare_data, read_texts
from ropelens.train.loop import fit
from ropelens.train.record import (
    differences,
    last_whole_checkpoint,
    read_json,
    remove_broken_checkpoints,
    require_same,
    say,
    write_json,
    write_model,
)
from ropelens.train.settings import (
    Settings,
    check_compiler,
    chosen_precision,
    model_config,
    passes_of,
)

CHECKPOINT_SECONDS = 60.0

PACKAGES = ("ropelens", "torch", "transformers", "accelerate", "tokenizers", "numpy")

WRITTEN = (
    *("config.json", "generation_config.json", "model.safetensors", "study.json"),
    *("tokenizer.json", "tokenizer_config.json", "metrics.csv", "history", "checkpoints"),
)
"""What a run writes after its run.json; without that it belongs to somebody else."""


class Busy(BadArgument):
    """Another process is at work on the run."""


def train(
    settings: Settings,
    source: Source,
    *,
    out: Path,
    data: Path | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
) -> Path:
    """Train a LLaMA-style model in the folder `out`, and return that folder.

    The same call starts a run, resumes one that was stopped, from its last whole checkpoint
    and to the same losses bit for bit (same machine and thread count), and returns at once
    from one that is finished. `out` then holds config.json, model.safetensors (float32), the
    tokenizer, metrics.csv, run.json, and history/. Tokenizer and tokens are kept in `data`,
    which runs may share; without it, in `out`/data.

    Raises:
        BadText: no such text, not UTF-8, or too little of it.
        BadArgument: `out` holds a run with other settings, another process is at work on it
            (`Busy`), or the disk is full.
        TrainingFailed: the loss or a weight stopped being a number.
    """
    data = source.tokens or data or out / "data"
    if settings.compile and not is_finished(out):
        check_compiler()
    passes_of(settings.size, among=processes().num_processes)
    main = processes().is_main_process
    texts = read_texts(source) if main else None  # before there is a folder to leave behind
    settings = settled(out, settings)
    checkpoints = out / "checkpoints"
    explained = explain_full_disk(
        f"the run in {out} cannot go on",
        means=lambda: _name_of_last(checkpoints, "{} is kept", "no checkpoint was written yet"),
        attempt="free some space; the same command then resumes it",
    )
    fits = explain_full_memory(
        "The training",
        seen=f"{settings.size}, context {settings.context:,}",
        attempt="a smaller size or context, in a new run folder",
    )
    with explained, fits, alone(out):
        if texts is not None:
            facts = prepare_data(
                data,
                source,
                texts,
                vocabulary=settings.vocabulary,
                context=settings.context,
                batch=settings.size.batch,
            )
            begin_record(out, facts | settings.facts(), data=data)
            copy_tokenizer(data, out)
            remove_broken_checkpoints(checkpoints)
        processes().wait_for_everyone()
        if is_finished(out):
            say(f"{out} is finished already")
        else:
            model = first_model(out, settings)
            try:
                fit(model, settings, out=out, data=data, checkpoint_seconds=checkpoint_seconds)
            except KeyboardInterrupt:
                begins = "begins again, for no checkpoint was due"
                goes_on = _name_of_last(checkpoints, "resumes from {}", begins)
                raise KeyboardInterrupt(f"stopped; the same command {goes_on}") from None
            if main:
                write_model(model, out)
                tokens = settings.steps * settings.tokens_per_step
                record = read_json(out / "run.json")
                write_json(out / "run.json", record | {"finished": _clock(), "tokens": tokens})
        if main:
            shutil.rmtree(checkpoints, ignore_errors=True)
        processes().wait_for_everyone()
    return out


def _name_of_last(checkpoints: Path, words: str, without: str) -> str:
    last = last_whole_checkpoint(checkpoints)
    return words.format(last.name) if last else without


def first_model(out: Path, settings: Settings) -> LlamaForCausalLM:
    """The model that a run begins with, its weights drawn by the seed."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(out, local_files_only=True)
    torch.manual_seed(settings.seed)
    return LlamaForCausalLM(
        model_config(
            settings.size,
            vocabulary=len(tokenizer),
            context=settings.context,
            variant=settings.variant,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )


def check_free(out: Path, *, of: Sequence[str]) -> None:
    """Raise BadArgument for a folder that has one of the files `of` a model, run or study."""
    taken = [name for name in of if (out / name).exists()]
    if taken:
        raise BadArgument(
            f"{out} holds a model, a run or a study already; this would mix with it.",
            seen=", ".join(taken),
            attempt="another --out",
        )


def settled(out: Path, settings: Settings) -> Settings:
    """`settings` with a precision: that of the run in `out`, if it has begun.

    Raises:
        BadArgument: run.json is of a run with other settings, or of something else.
    """
    path, before = out / "run.json", None
    if not path.exists():
        check_free(out, of=WRITTEN)
    else:
        before = read_json(path).get("settings")
        if not isinstance(before, dict):
            raise BadArgument(
                f"{out} holds the results of another command; a run would mix with them.",
                attempt="another --out",
            )
    known = before.get("precision") if before else None
    precision = chosen_precision(settings.precision, before=known)
    settings = dataclasses.replace(settings, precision=precision)
    if before is not None:
        require_same(before, settings.facts(), what=f"the run in {out}")
    return settings


@contextmanager
def alone(out: Path) -> Iterator[None]:
    """Keep other commands from the run while the block runs.

    The main process holds the lock for those that train with it, and tells them if it has it.
    """
    lock = FileLock(out / ".lock")
    if processes().is_main_process:
        make_folder(out)
        with suppress(Timeout):
            lock.acquire(blocking=False)
    if not broadcast_object_list([lock.is_locked])[0]:
        raise Busy(
            f"another process is at work on the run in {out}.",
            attempt="wait for it, or pass another folder",
        )
    try:
        yield
    finally:
        lock.release()


def begin_record(out: Path, decides: dict[str, Any], *, data: Path) -> None:
    """Write run.json; on a later call, check that what decides the run is the same.

    A run that is resumed with other versions, processes or threads rounds its sums in another
    way; a line says so.
    """
    path = out / "run.json"
    computed = {
        "versions": {name: version(name) for name in PACKAGES},
        "processes": processes().num_processes,
        "threads": torch.get_num_threads(),
    }
    if path.exists():
        record = read_json(path)
        require_same(record["settings"], decides, what=f"the run in {out}")
        before, now = _flat(record), _flat(computed)
        changed = differences(before, now, now, between=", now ")
        if changed and "finished" not in record:
            say(f"{changed}: not bit for bit the run that it would have been")
        return
    record = {
        "kind": "training",
        "settings": decides,
        "data": os.path.relpath(data, out),
        "started": _clock(),
        "command": sys.argv,
        **computed,
    }
    write_json(path, record)


def _flat(record: Mapping[str, Any]) -> dict[str, Any]:
    """What rounds the sums of a run: versions, processes, threads."""
    return record["versions"] | {name: record[name] for name in ("processes", "threads")}


def is_finished(out: Path) -> bool:
    """Whether there is a run in `out` that came to its end, by its run.json."""
    path = out / "run.json"
    return path.exists() and "finished" in read_json(path)


def _clock() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
