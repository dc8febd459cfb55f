"""One training run: a folder that the same call starts, resumes and finishes."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
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
from ropelens.files.results import RECORD
from ropelens.measure.tokens import versions
from ropelens.models.device import explain_full_memory
from ropelens.models.processes import processes
from ropelens.train.data import Source, copy_tokenizer, prepare_data, read_texts
from ropelens.train.loop import CHECKPOINT, fit
from ropelens.train.record import read_json, require_same, say, write_json, write_model
from ropelens.train.settings import Settings, passes_of

CHECKPOINT_SECONDS = 60.0

WRITTEN = (
    *("config.json", "generation_config.json", "model.safetensors", "study.json"),
    *("tokenizer.json", "tokenizer_config.json", "metrics.csv", "history", CHECKPOINT),
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

    The same call starts a run, resumes one that was stopped, from its checkpoint and to the
    same losses bit for bit (same machine and thread count), and returns at once from one that
    is finished. `out` then holds config.json, model.safetensors (float32), the tokenizer,
    metrics.csv, run.json, and history/. Tokenizer and tokens are in `data`, which runs may
    share; without it, in `out`/data.

    Raises:
        BadText: no such text, not UTF-8, or too little of it.
        BadArgument: `out` holds a run with other settings, another process is at work on it
            (`Busy`), or the disk is full.
        TrainingFailed: the loss or a weight stopped being a number.
    """
    data = source.tokens or data or out / "data"
    passes_of(settings.size, among=processes().num_processes)
    main = processes().is_main_process
    texts = read_texts(source) if main else None  # before there is a folder to leave behind
    if before := read_record(out):
        require_same(before["settings"], settings.facts(), what=f"the run in {out}")
    fits = explain_full_memory(
        "The training",
        seen=f"{settings.size}, context {settings.context:,}",
        attempt="a smaller size or context, in a new run folder",
    )
    with explain_full_disk(f"the run in {out} cannot go on"), fits, alone(out):
        if texts is not None:
            facts = prepare_data(data, source, texts, settings)
            begin(out, facts | settings.facts(), data=data)
            copy_tokenizer(data, out)
        processes().wait_for_everyone()
        record = read_json(out / RECORD)
        if "finished" in record:
            say(f"{out} is finished already")
        else:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(out, local_files_only=True)
            torch.manual_seed(settings.seed)
            model = LlamaForCausalLM(settings.config(tokenizer))
            try:
                fit(model, settings, out=out, data=data, checkpoint_seconds=checkpoint_seconds)
            except KeyboardInterrupt:
                words = "stopped; the same command resumes from its last checkpoint, if any"
                raise KeyboardInterrupt(words) from None
            if main:
                write_model(model, out)
                tokens = settings.steps * settings.tokens_per_step
                write_json(out / RECORD, record | {"finished": _clock(), "tokens": tokens})
        if main:
            (out / CHECKPOINT).unlink(missing_ok=True)
        processes().wait_for_everyone()
    return out


def read_record(out: Path) -> dict[str, Any]:
    """The run.json of the run in `out`; {} where none has begun.

    Raises:
        BadArgument: `out` holds a model, a study or other results.
    """
    path = out / RECORD
    record = read_json(path) if path.exists() else {}
    taken = [name for name in WRITTEN if (out / name).exists()]
    if "settings" not in record and (record or taken):
        raise BadArgument(
            f"{out} holds a model, a study or other results; a run would mix with them.",
            attempt="another --out",
        )
    return record


@contextmanager
def alone(out: Path) -> Iterator[None]:
    """Hold the lock of the run while the block runs.

    The main process holds it for those that train with it, and tells them if it has it.
    """
    lock = FileLock(out / ".lock")
    if processes().is_main_process:
        make_folder(out)
        with suppress(Timeout):
            lock.acquire(blocking=False)
    if not broadcast_object_list([lock.is_locked])[0]:
        raise Busy(f"another process is at work on the run in {out}.")
    try:
        yield
    finally:
        lock.release()


def begin(out: Path, decides: dict[str, Any], *, data: Path) -> None:
    """Write run.json; on a later call, check that what decides the run is the same.

    A run that is resumed with other versions, processes or threads rounds its sums in another
    way; a line says so.
    """
    computed = {
        "versions": versions() | {"accelerate": version("accelerate")},
        "processes": processes().num_processes,
        "threads": torch.get_num_threads(),
    }
    record = read_record(out)
    if not record:
        facts = {
            "kind": "training",
            "settings": decides,
            "data": os.path.relpath(data, out),
            "started": _clock(),
            "command": sys.argv,
        }
        write_json(out / RECORD, facts | computed)
        return
    require_same(record["settings"], decides, what=f"the run in {out}")
    changed = [name for name, value in computed.items() if record[name] != value]
    if changed and "finished" not in record:
        say(f"other {', '.join(changed)}: not bit for bit the run that it would have been")


def _clock() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
