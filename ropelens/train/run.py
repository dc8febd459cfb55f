"""One training run: a folder that the same call starts, resumes and finishes."""

from __future__ import annotations

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
    prepare_data,
    read_json,
    read_texts,
    require_same,
    say,
    write_json,
)
from ropelens.train.loop import CHECKPOINT, fit, write_model
from ropelens.train.settings import Settings

STUDY = "study.json"
"""The file of a study's folder that says which study it is."""


class Busy(BadArgument):
    """Another process is at work on the run."""


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

    The same call starts a run, resumes one that was stopped, from its checkpoint and to the
    same losses bit for bit (same machine and thread count), and returns at once from one that
    is finished. `out` then holds config.json, model.safetensors (float32), the tokenizer,
    metrics.csv, run.json, and history/. Tokenizer and tokens are in `data`, which runs may
    share; without it, in `out`/data. Without `text` they must be there.

    Raises `BadText` for text that is missing, not UTF-8 or too short; `BadArgument` for an
    unknown variant or size, and where `out` holds something else or another process is at
    work on it (`Busy`); `TrainingFailed` where the loss or a weight stopped being a number.
    """
    data = data or out / "data"
    model_config(settings)
    texts = read_texts(text, valid, data=data)  # before there is a folder to leave behind
    if before := read_own(out, RECORD, key="settings"):
        require_same(before["settings"], settings.facts(), what=f"the run in {out}")
    fits = explain_full_memory(
        "The training",
        seen=f"{settings.size}, context {settings.context:,}",
        hint="a smaller size or context, in a new run folder",
    )
    with fits, alone(out):
        facts = prepare_data(data, texts, settings) | settings.facts()
        record = read_own(out, RECORD, key="settings")
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
            say(f"{out} is finished already")
            return out
        copy_tokenizer(data, out)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(out, local_files_only=True)
        torch.manual_seed(settings.seed)
        model = LlamaForCausalLM(model_config(settings, tokenizer))
        fit(model, settings, out=out, data=data, checkpoint_seconds=checkpoint_seconds)
        write_model(model, out)
        tokens = settings.steps * settings.tokens_per_step
        finished = datetime.now(UTC).isoformat(timespec="seconds")
        write_json(out / RECORD, record | {"finished": finished, "tokens": tokens})
        (out / CHECKPOINT).unlink()
    return out


def model_config(
    settings: Settings, tokenizer: PreTrainedTokenizerBase | None = None
) -> LlamaConfig:
    """The model's configuration, for the tokens of `tokenizer`.

    Embeddings are tied, so that a small model spends its parameters on layers. Raises
    `BadArgument` where there is no such variant or size.
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


def read_own(out: Path, name: str, *, key: str) -> dict[str, Any]:
    """The record `name` in `out`, which has a `key`; {} where nothing has begun.

    Raises `BadArgument` where `out` holds a model, a run, a study or other results.
    """
    record = read_json(out / name) if (out / name).exists() else {}
    others = (RECORD, STUDY, CHECKPOINT, "config.json", "tokenizer.json", "history")
    if key not in record and any((out / other).exists() for other in others):
        raise BadArgument(
            f"{out} holds a model, a run, a study or other results, which would mix.",
            hint="another --out",
        )
    return record


@contextmanager
def alone(out: Path) -> Iterator[None]:
    """Hold the lock of the run while the block runs."""
    out.mkdir(parents=True, exist_ok=True)
    try:
        lock = FileLock(out / ".lock").acquire(blocking=False)
    except Timeout as error:
        raise Busy(f"another process is at work on the run in {out}.") from error
    with lock:
        yield
