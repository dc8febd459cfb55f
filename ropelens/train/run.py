"""One training run: a folder that the same call starts, resumes and finishes."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    set_seed,
)

from ropelens.errors import BadArgument
from ropelens.text import fingerprint_of, read_documents
from ropelens.train.loop import (
    CheckedTrainer,
    Checkpoints,
    Sequences,
    last_whole_checkpoint,
)
from ropelens.train.record import (
    Metrics,
    ShownProgress,
    say,
    transformers_bars_off,
    write_json,
    write_model,
)
from ropelens.train.settings import Precision, Settings, check_settings, training_arguments
from ropelens.train.sizes import Size, get_size, model_config
from ropelens.train.tokens import (
    open_sequences,
    require_sequences,
    train_tokenizer,
    write_sequences,
)

VALID_SHARE = 0.02  # of the sequences, where no text of its own is given
VALID_SEQUENCES = 128  # seen at each validation: 65,000 tokens at context 512
PACKAGES = ("ropelens", "torch", "transformers", "accelerate", "tokenizers", "numpy")


def train(
    text: Sequence[Path],
    *,
    out: Path,
    valid: Sequence[Path] = (),
    size: str | Size = "tiny",
    context: int = 512,
    vocabulary: int = 2048,
    steps: int = 2500,
    learning_rate: float | None = None,
    rope_parameters: Mapping[str, Any] | None = None,
    seed: int = 0,
    precision: Precision = "bf16",
    log_every: int = 10,
    eval_every: int = 250,
    checkpoint_seconds: float = 60.0,
) -> Path:
    """Train a LLaMA-style model on `text` in the folder `out`, and return that folder.

    The same call starts a run, goes on with one that was stopped, at its last whole
    checkpoint and to the same losses bit for bit (same machine and thread count), and
    returns at once from one that is finished. `out` then holds config.json,
    model.safetensors (float32), the tokenizer, metrics.csv, run.json and tokens/.

    AdamW (0.9, 0.95), weight decay 0.1, gradients clipped at norm 1, cosine to zero
    after a warm-up over the first 4% of steps; `precision` bf16 is autocast over float32
    weights. Without `valid`, the last 2% of the sequences are kept for validation.
    `rope_parameters` are transformers' own; without them, plain RoPE with base 10,000.

    Raises:
        BadText: no such text, not UTF-8, or too little of it.
        BadArgument: a value out of range, or `out` holds a run with other settings.
        TrainingFailed: the loss or a weight stopped being a number.
    """
    shape = get_size(size)
    settings = Settings(
        size=shape,
        context=context,
        vocabulary=vocabulary,
        steps=steps,
        learning_rate=shape.learning_rate if learning_rate is None else learning_rate,
        warmup_steps=max(1, steps // 25),
        rope_parameters=rope_parameters,
        seed=seed,
        precision=precision,
        log_every=log_every,
        eval_every=eval_every,
    )
    check_settings(settings)
    record = _prepare(out, settings, text=text, valid=valid)
    if "finished" in record:
        say(f"{out} is finished already")
        return out
    model = _fit(out, settings, checkpoint_seconds=checkpoint_seconds)
    write_model(model, out)
    shutil.rmtree(out / "checkpoints")
    tokens = settings.steps * settings.tokens_per_step
    write_json(out / "run.json", record | {"finished": _clock(), "tokens": tokens})
    return out


def _prepare(
    out: Path, settings: Settings, *, text: Sequence[Path], valid: Sequence[Path]
) -> dict[str, Any]:
    """What run.json says; before that is written, the tokenizer and the tokens are there.

    On a later call, the settings and the text are compared with those of the first.
    """
    documents, held_out = read_documents(text), read_documents(valid)
    decides = dataclasses.asdict(settings) | {
        "text_sha256": fingerprint_of(documents),
        "valid_sha256": fingerprint_of(held_out),
    }
    path = out / "run.json"
    if path.exists():
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        _check_same(out, record["settings"], decides)
        return record
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadArgument(f"cannot make the folder {out}: {error.strerror}.") from error
    _write_tokens(out, settings, documents, held_out)
    record = {
        "settings": decides,
        "started": _clock(),
        "command": sys.argv,
        "versions": {name: version(name) for name in PACKAGES},
        "threads": torch.get_num_threads(),
    }
    write_json(path, record)
    return record


def _check_same(out: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    changed = [name for name in now if before.get(name) != now[name]]
    if changed:
        raise BadArgument(
            f"{out} holds a run with other settings.",
            seen="; ".join(f"{name}: {before.get(name)}, now {now[name]}" for name in changed),
            attempt="the same command as before to resume it, or another folder",
        )


def _clock() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _write_tokens(
    out: Path, settings: Settings, documents: Sequence[str], held_out: Sequence[str]
) -> None:
    """Train the tokenizer, write the token arrays, and see that they are enough."""
    context = settings.context
    say(f"training a tokenizer on {len(documents):,} documents")
    tokenizer = train_tokenizer(documents, vocabulary=settings.vocabulary, context=context)
    tokenizer.save_pretrained(out)
    shutil.rmtree(out / "tokens", ignore_errors=True)
    (out / "tokens").mkdir()
    # Where no text is given for it, validation takes at least one of the sequences.
    batch = settings.size.batch if held_out else settings.size.batch + 1
    for name, group, needed in (("train", documents, batch), ("valid", held_out, 1)):
        if group:
            array = out / "tokens" / f"{name}.npy"
            count = write_sequences(group, tokenizer, array, context=context)
            say(f"{name}: {count:,} sequences of {context} tokens")
            require_sequences(count, needed=needed, context=context)


def training_and_validation(out: Path, *, batch: int) -> tuple[np.ndarray, np.ndarray]:
    """The token sequences of the run folder `out`, uint16 [sequence, context] each.

    The training ones are cut to whole batches, so that every step sees as many tokens.
    """
    rows = open_sequences(out / "tokens" / "train.npy")
    if (out / "tokens" / "valid.npy").exists():
        held_out = open_sequences(out / "tokens" / "valid.npy")
    else:
        apart = max(1, round(len(rows) * VALID_SHARE))
        rows, held_out = rows[:-apart], rows[-apart:]
    return rows[: len(rows) // batch * batch], held_out


def _fit(
    out: Path,
    settings: Settings,
    *,
    checkpoint_seconds: float,
) -> LlamaForCausalLM:
    size = settings.size
    tokenizer = PreTrainedTokenizerFast.from_pretrained(out, local_files_only=True)
    rows, held_out = training_and_validation(out, batch=size.batch)
    set_seed(settings.seed)
    model = LlamaForCausalLM(
        model_config(
            size,
            vocabulary=len(tokenizer),
            context=settings.context,
            rope_parameters=settings.rope_parameters,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    progress = ShownProgress()
    trainer = CheckedTrainer(
        tokens_per_step=settings.tokens_per_step,
        model=model,
        args=training_arguments(settings, folder=out / "checkpoints"),
        train_dataset=Sequences(rows),
        eval_dataset=Sequences(held_out[:VALID_SEQUENCES]),
        callbacks=[
            Checkpoints(seconds=checkpoint_seconds),
            Metrics(out / "metrics.csv", tokens_per_step=settings.tokens_per_step),
            progress,
        ],
    )
    checkpoint = last_whole_checkpoint(out / "checkpoints")
    if checkpoint is not None:
        say(f"going on from {checkpoint.name}")
    try:
        with transformers_bars_off():
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    finally:
        progress.close()
    # The Trainer turns the cache off; whoever loads the model wants it to write quickly.
    model.config.use_cache = model.generation_config.use_cache = True
    return model
