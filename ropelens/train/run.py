"""One training run: a folder that the same call starts, resumes and finishes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

from transformers import LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

from ropelens.files.folder import explain_full_disk
from ropelens.models.memory import explain_full_memory
from ropelens.train.data import (
    LEAST_VALID,
    VALID_SHARE,
    Source,
    copy_tokenizer,
    prepare_data,
    read_texts,
    training_and_validation,
)
from ropelens.train.folder import (
    alone,
    begin_record,
    check_folder,
    finish_record,
    how_to_go_on,
    is_finished,
    what_is_kept,
)
from ropelens.train.loop import (
    CheckedTrainer,
    Checkpoints,
    History,
    RunningLoss,
    Sequences,
    last_whole_checkpoint,
    remove_broken_checkpoints,
    remove_checkpoints,
    step_of,
)
from ropelens.train.record import (
    Metrics,
    ShownProgress,
    say,
    transformers_bars_off,
    write_model,
)
from ropelens.train.settings import (
    Precision,
    Settings,
    make_settings,
    processes,
    shared_batch,
    training_arguments,
)
from ropelens.train.sizes import Size, model_config

VALID_SEQUENCES = 128  # seen at each validation: 65,000 tokens at context 512


def train(
    text: Sequence[Path] = (),
    *,
    out: Path,
    valid: Sequence[Path] = (),
    dataset: str | None = None,
    data: Path | None = None,
    variant: str = "rope",
    size: str | Size = "tiny",
    context: int = 512,
    vocabulary: int = 2048,
    steps: int = 2500,
    learning_rate: float | None = None,
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
    model.safetensors (float32), the tokenizer, metrics.csv, run.json, and history/: the
    model after steps 1, 2, 4, 8, ...

    In place of `text`, `dataset` (a name or "name:config" of `datasets`) is streamed until
    there is enough. `variant` is the model's RoPE, written as in `ropelens.VARIANTS`, with
    base 10,000. `size` is a name, or "layers x width x heads x kv_heads" such as "8x384x6x2".
    `seed` decides the first weights and the order of the text. The tokenizer and the
    tokens are kept in `data`, which runs may share; without it, in `out`/data. AdamW (0.9,
    0.95), weight decay 0.1, gradients clipped at norm 1, cosine to zero after a warm-up
    over the first 4% of steps; `precision` bf16 is autocast over float32 weights. Without
    `valid`, the last 2% of the sequences are kept for validation.

    Raises:
        BadText: no such text, not UTF-8, or too little of it.
        BadArgument: a value out of range, `out` holds a run with other settings, another
            process is at work on it (`Busy`), or the disk is full.
        UnsupportedModel: LLaMA's configuration cannot express the variant.
        TrainingFailed: the loss or a weight stopped being a number.
    """
    settings = make_settings(
        size=size,
        context=context,
        vocabulary=vocabulary,
        steps=steps,
        learning_rate=learning_rate,
        variant=variant,
        seed=seed,
        precision=precision,
        log_every=log_every,
        eval_every=eval_every,
    )
    batch = settings.size.batch
    wanted = math.ceil(steps * batch * (1 + 2 * VALID_SHARE)) + LEAST_VALID
    source = Source(
        tuple(text), tuple(valid), vocabulary, context, dataset, wanted if dataset else None
    )
    data = data or out / "data"
    together = processes()
    shared_batch(settings.size, among=together.num_processes)
    main = together.is_main_process
    check_folder(out, settings)
    texts = read_texts(source) if main else None  # before there is a folder to leave behind
    explained = explain_full_disk(
        f"the run in {out} cannot go on",
        means=lambda: what_is_kept(out),
        attempt="free some space; the same command then goes on",
    )
    fits = explain_full_memory(
        "The training",
        seen=f"{settings.size}, context {context:,}",
        attempt="a smaller size or context, in a new run folder",
    )
    with explained, fits, alone(out):
        if texts is not None:
            learnt_from = prepare_data(data, source, texts, batch=batch)
            begin_record(out, dataclasses.asdict(settings) | learnt_from, data=data)
            copy_tokenizer(data, out)
            remove_broken_checkpoints(out / "checkpoints")
        together.wait_for_everyone()
        if is_finished(out):
            if main:
                remove_checkpoints(out / "checkpoints")  # of a run stopped while it did so
                say(f"{out} is finished already")
            return out
        try:
            model = _fit(out, settings, data=data, checkpoint_seconds=checkpoint_seconds)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"stopped; the same command {how_to_go_on(out)}") from None
        if main:
            # The Trainer turns it off; whoever loads the model wants it to write quickly.
            model.config.use_cache = model.generation_config.use_cache = True
            write_model(model, out)
            finish_record(out, tokens=settings.steps * settings.tokens_per_step)
            remove_checkpoints(out / "checkpoints")
        together.wait_for_everyone()
    return out


def _fit(
    out: Path, settings: Settings, *, data: Path, checkpoint_seconds: float
) -> LlamaForCausalLM:
    size = settings.size
    checkpoint = last_whole_checkpoint(out / "checkpoints")
    if checkpoint is not None and step_of(checkpoint) >= settings.steps:
        with transformers_bars_off():  # stopped at the end; the Trainer would go past it
            return LlamaForCausalLM.from_pretrained(checkpoint, local_files_only=True)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(out, local_files_only=True)
    rows, held_out = training_and_validation(data, batch=size.batch)
    held_out = held_out[:VALID_SEQUENCES]
    if len(held_out) >= size.batch:  # shared evenly, for each process takes as many of them
        held_out = held_out[: len(held_out) // size.batch * size.batch]
    set_seed(settings.seed)
    model = LlamaForCausalLM(
        model_config(
            size,
            vocabulary=len(tokenizer),
            context=settings.context,
            variant=settings.variant,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    running = RunningLoss(checkpoint)
    progress = ShownProgress(tokens_per_step=settings.tokens_per_step)
    trainer = CheckedTrainer(
        running=running,
        tokens_per_step=settings.tokens_per_step,
        model=model,
        args=training_arguments(settings, folder=out / "checkpoints"),
        train_dataset=Sequences(rows),
        eval_dataset=Sequences(held_out),
        callbacks=[
            History(out / "history", tokenizer=data),
            running,
            Checkpoints(seconds=checkpoint_seconds),
            Metrics(out / "metrics.csv", tokens_per_step=settings.tokens_per_step),
            progress,
        ],
    )
    if checkpoint is not None and processes().is_main_process:
        say(f"going on from {checkpoint.name}")
    try:
        with transformers_bars_off():
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    finally:
        progress.close()
    return model
