"""One training run: a folder that the same call starts, resumes and finishes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from ropelens.files.folder import explain_full_disk
from ropelens.models.memory import explain_full_memory
from ropelens.models.processes import processes
from ropelens.train.checkpoints import remove_broken_checkpoints, remove_checkpoints
from ropelens.train.data import (
    LEAST_VALID,
    VALID_SHARE,
    Source,
    copy_tokenizer,
    prepare_data,
    read_texts,
)
from ropelens.train.folder import (
    alone,
    begin_record,
    finish_record,
    how_to_go_on,
    is_finished,
    settled,
    what_is_kept,
)
from ropelens.train.loop import fit
from ropelens.train.machine import Precision, check_compiler, say
from ropelens.train.record import write_model
from ropelens.train.settings import Settings, passes_of
from ropelens.train.sizes import Size, get_size, model_config

CHECKPOINT_SECONDS = 60.0


def train(
    text: Sequence[Path] = (),
    *,
    out: Path,
    valid: Sequence[Path] = (),
    dataset: str | None = None,
    tokens: Path | None = None,
    data: Path | None = None,
    variant: str = "rope",
    size: str | Size = "tiny",
    context: int = 512,
    vocabulary: int = 2048,
    steps: int = 2500,
    learning_rate: float | None = None,
    seed: int = 0,
    precision: Precision = "auto",
    log_every: int = 10,
    eval_every: int = 250,
    history_every: int = 0,
    decay: float = 1.0,
    compile: bool = False,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
) -> Path:
    """Train a LLaMA-style model on `text` in the folder `out`, and return that folder.

    The same call starts a run, goes on with one that was stopped, at its last whole
    checkpoint and to the same losses bit for bit (same machine and thread count), and
    returns at once from one that is finished. `out` then holds config.json,
    model.safetensors (float32), the tokenizer, metrics.csv, run.json, and history/: the
    model after steps 1, 2, 4, 8, ..., and after every `history_every` steps.

    In place of `text`, `dataset` (a name or "name:config" of `datasets`) is streamed until
    there is enough; or `tokens` is a folder of what was made before: a tokenizer, valid.npy,
    data.json, and the arrays that this names as "stages", uint16 [sequence, position], learnt
    one after another (`context` and `vocabulary` are then theirs). `variant` is the model's
    RoPE, written as in `ropelens.VARIANTS`, with base 10,000. `size` is a name, or "layers x
    width x heads x kv_heads" such as "8x384x6x2".
    `seed` decides the first weights and the order of the text. The tokenizer and the
    tokens are kept in `data`, which runs may share; without it, in `out`/data. AdamW (0.9,
    0.95), weight decay 0.1, gradients clipped at norm 1, a warm-up over the first 4% of steps,
    cosine to zero over the last `decay` of the others. Weights are float32; `precision` bf16
    is autocast over them, and "auto" takes it where it is faster. run.json says which it was,
    and a run that goes on keeps it. `compile` runs the model as `torch.compile` makes it, which
    needs a C++ compiler and a minute, then takes up to 1.6 times as many tokens a second; the
    last bits are others. Without `valid`, the last 2% of the sequences are kept for validation.

    Raises:
        BadText: no such text, not UTF-8, or too little of it.
        BadArgument: a value out of range, `out` holds a run with other settings, another
            process is at work on it (`Busy`), or the disk is full.
        UnsupportedModel: LLaMA's configuration cannot express the variant.
        TrainingFailed: the loss or a weight stopped being a number.
    """
    settings = Settings(
        size=get_size(size),
        context=context,
        vocabulary=vocabulary,
        steps=steps,
        learning_rate=learning_rate,
        variant=variant,
        seed=seed,
        precision=precision,
        log_every=log_every,
        eval_every=eval_every,
        history_every=history_every,
        decay=decay,
        compile=compile,
    )
    wanted = math.ceil(steps * settings.size.batch * (1 + 2 * VALID_SHARE)) + LEAST_VALID
    source = Source(
        text=tuple(text),
        valid=tuple(valid),
        vocabulary=vocabulary,
        context=context,
        dataset=dataset,
        sequences=wanted if dataset else None,
        tokens=tokens,
    )
    return train_in(
        out,
        settings,
        source,
        data=tokens or data or out / "data",
        checkpoint_seconds=checkpoint_seconds,
    )


def train_in(
    out: Path,
    settings: Settings,
    source: Source,
    *,
    data: Path,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
) -> Path:
    """`train` by `settings` on `source`, whose tokens are kept in the folder `data`."""
    if settings.compile and not is_finished(out):
        check_compiler()
    passes_of(settings.size, among=processes().num_processes)
    main = processes().is_main_process
    texts = read_texts(source) if main else None  # before there is a folder to leave behind
    settings = settled(out, settings)
    explained = explain_full_disk(
        f"the run in {out} cannot go on",
        means=lambda: what_is_kept(out),
        attempt="free some space; the same command then goes on",
    )
    fits = explain_full_memory(
        "The training",
        seen=f"{settings.size}, context {settings.context:,}",
        attempt="a smaller size or context, in a new run folder",
    )
    with explained, fits, alone(out):
        if texts is not None:
            learnt_from = prepare_data(data, source, texts, batch=settings.size.batch)
            begin_record(out, learnt_from | settings.facts(), data=data)
            copy_tokenizer(data, out)
            remove_broken_checkpoints(out / "checkpoints")
        processes().wait_for_everyone()
        if is_finished(out):
            if main:
                remove_checkpoints(out / "checkpoints")  # of a run stopped while it did so
            say(f"{out} is finished already")
            return out
        model = first_model(out, settings)
        try:
            fit(model, settings, out=out, data=data, checkpoint_seconds=checkpoint_seconds)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"stopped; the same command {how_to_go_on(out)}") from None
        if main:
            write_model(model, out)
            finish_record(out, tokens=settings.steps * settings.tokens_per_step)
            remove_checkpoints(out / "checkpoints")
        processes().wait_for_everyone()
    return out


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
