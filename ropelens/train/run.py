"""A training run: the same call starts, resumes and finishes it in its folder."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from ropelens.errors import BadArgument
from ropelens.profiles.measurement import versions
from ropelens.rotation.variant_config import variant_config
from ropelens.runtime.devices import explain_full_memory
from ropelens.runtime.results import RECORD
from ropelens.train.data import (
    copy_tokenizer,
    log_line,
    prepare_data,
    read_json,
    read_texts,
    require_same,
    write_json,
)
from ropelens.train.loop import CHECKPOINT, fit_model, write_model
from ropelens.train.settings import Settings

STUDY = "study.json"
"""The file of a study's folder that contains its settings."""


class Busy(BadArgument):
    """Another process works on the run."""


def train(
    settings: Settings,
    *,
    out: Path,
    text: Sequence[Path] = (),
    valid: Sequence[Path] = (),
    data: Path | None = None,
    checkpoint_seconds: float = 60.0,
) -> Path:
    """Train a LLaMA-style model in the folder `out`, and return that folder.

    The same call starts a run, resumes a stopped run from its checkpoint, or returns at once
    if the run is finished. A resumed run has the same losses bit for bit on the same machine
    with the same number of threads. A finished run contains config.json, model.safetensors
    (float32), the tokenizer, metrics.csv, run.json and history/. `data` is the folder of the
    tokenizer and the tokens, `out`/data by default. Without `text`, it must exist.

    Raises `BadText` if the text is missing, not UTF-8 or too short, `BadArgument` for an
    unknown variant or size or if `out` contains something else, `Busy` if another process
    works on the run, and `TrainingFailed` if the loss or a weight becomes NaN or infinite.
    """
    data = data or out / "data"
    model_config(settings)
    texts = read_texts(text, valid, data=data)  # before any folder is created
    if before := read_settings(out, RECORD, key="settings"):
        require_same(before["settings"], settings.facts(), what=f"the run in {out}")
    memory_errors = explain_full_memory(
        "The training",
        seen=f"{settings.size}, context {settings.context:,}",
        hint="a smaller size or context, in a new run folder",
    )
    with memory_errors, lock_run(out):
        facts = prepare_data(data, texts, settings) | settings.facts()
        record = read_settings(out, RECORD, key="settings")
        if not record:
            record = {
                "kind": "training",
                "settings": facts,
                "data": os.path.relpath(data, out),
                "versions": versions() | {"accelerate": version("accelerate")},
                "threads": torch.get_num_threads(),
                "started": datetime.now(UTC).isoformat(timespec="seconds"),
                "command": sys.argv,
            }
            write_json(out / RECORD, record)
        require_same(record["settings"], facts, what=f"the run in {out}")
        if "finished" in record:
            log_line(f"{out} is finished already")
            return out
        copy_tokenizer(data, out)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(out, local_files_only=True)
        torch.manual_seed(settings.seed)
        model = LlamaForCausalLM(model_config(settings, tokenizer))
        fit_model(model, settings, out=out, data=data, checkpoint_seconds=checkpoint_seconds)
        write_model(model, out)
        tokens = settings.steps * settings.tokens_per_step
        finished = datetime.now(UTC).isoformat(timespec="seconds")
        write_json(out / RECORD, record | {"finished": finished, "tokens": tokens})
        (out / CHECKPOINT).unlink()
    return out


def model_config(
    settings: Settings, tokenizer: PreTrainedTokenizerBase | None = None
) -> LlamaConfig:
    """Configuration of the model, with the vocabulary of `tokenizer` if it is given.

    Embeddings are tied, so that most parameters of a small model are in its layers. Raises
    `BadArgument` for an unknown variant or size.
    """
    shape = settings.shape
    config = LlamaConfig(
        vocab_size=len(tokenizer) if tokenizer else settings.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=settings.context,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id if tokenizer else 0,
        eos_token_id=tokenizer.eos_token_id if tokenizer else 1,
    )
    return variant_config(config, settings.variant)


def read_settings(out: Path, name: str, *, key: str) -> dict[str, Any]:
    """Read the file `name` in `out`, which must contain `key`; {} if nothing has begun.

    Raises `BadArgument` if `out` contains a model, another run or study, or other results.
    """
    record = read_json(out / name) if (out / name).exists() else {}
    others = (RECORD, STUDY, CHECKPOINT, "config.json", "tokenizer.json", "history")
    if key not in record and any((out / other).exists() for other in others):
        raise BadArgument(
            f"{out} holds a model, a run, a study or other results, and files would mix.",
            hint="another --out",
        )
    return record


@contextmanager
def lock_run(out: Path) -> Iterator[None]:
    out.mkdir(parents=True, exist_ok=True)
    try:
        lock = FileLock(out / ".lock").acquire(blocking=False)
    except Timeout as error:
        raise Busy(f"another process works on the run in {out}.") from error
    with lock:
        yield
