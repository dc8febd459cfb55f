"""Training runs, and studies of several variants of RoPE, sizes and seeds.

Runs of one seed have the same initial weights and read the same tokens in the same order.
"""

import itertools
import tomllib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ropelens.arguments import public
from ropelens.errors import BadArgument, explained
from ropelens.rope.variant_config import variant_config
from ropelens.runtime.devices import explain_full_memory
from ropelens.runtime.folder import RECORD, file_name
from ropelens.runtime.keys import Key
from ropelens.runtime.records import log_line, write_json
from ropelens.train.checkpoint import CHECKPOINT, write_model
from ropelens.train.data import copy_tokenizer, prepare_data, read_texts
from ropelens.train.loop import fit_model
from ropelens.train.run_folder import STUDY, begin_record, lock_run, now, read_settings
from ropelens.train.settings import Settings
from ropelens.train.study_runs import run_each


def train(
    settings: Settings,
    *,
    out: Path,
    text: Sequence[Path] = (),
    valid: Sequence[Path] = (),
    data: Path | None = None,
    watch: bool = False,
) -> Path:
    """Train a LLaMA-style model in the folder `out`, and return that folder.

    The same call resumes a stopped run from its checkpoint; the losses are the same bit for bit
    on the same machine with the same number of threads. A finished run contains config.json,
    model.safetensors (float32), the tokenizer, metrics.csv, run.json and history/. `data` is
    the folder of the tokenizer and the tokens, `out`/data by default. Without `text`, it must
    exist. With `watch`, `out`/watch gets a profile at each validation (see `RopeCallback`).

    Raises `BadText` if the text is missing, not UTF-8 or too short, `BadArgument` for an
    unknown variant or size or if `out` contains something else, `Busy` if another process
    works on the run, and `TrainingFailed` if the loss or a weight becomes NaN or infinite.
    """
    data = data or out / "data"
    model_config(settings)  # before any folder is created
    texts = read_texts(text, valid, data=data)
    begun = read_settings(out, RECORD, key="settings")
    if begun:
        Key(settings.recorded()).require(begun["settings"], what=f"the run in {out}")
    full_memory = explain_full_memory(
        "The training",
        seen=f"{settings.size}, context {settings.context:,}",
        hint="a smaller size or context",
    )
    with full_memory, lock_run(out):
        data_record = prepare_data(data, texts, settings)
        record = begin_record(out, data, data_record | settings.recorded())
        if "finished" in record:
            log_line(f"{out} is finished already")
            return out
        copy_tokenizer(data, out)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(out, local_files_only=True)
        torch.manual_seed(settings.seed)
        model = LlamaForCausalLM(model_config(settings, tokenizer))
        fit_model(model, settings, out=out, data=data, watch=watch)
        write_model(model, out)
        record["finished"] = now()
        record["tokens"] = settings.steps * settings.tokens_per_step
        write_json(out / RECORD, record)
        (out / CHECKPOINT).unlink()
    return out


def model_config(
    settings: Settings, tokenizer: PreTrainedTokenizerFast | None = None
) -> LlamaConfig:
    """Configuration of the model; raises `BadArgument` for an unknown variant or size."""
    vocabulary = settings.vocabulary
    bos = 0
    eos = 1
    if tokenizer is not None:
        vocabulary = len(tokenizer)
        bos = tokenizer.bos_token_id
        eos = tokenizer.eos_token_id
    shape = settings.shape
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=settings.context,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,  # most parameters of a small model are in its layers
        bos_token_id=bos,
        eos_token_id=eos,
    )
    return variant_config(config, settings.variant)


def runs_of(study: Mapping[str, Any]) -> dict[Path, Settings]:
    """The runs of a study, by folder, with all variants of a seed before the next seed."""
    shared = dict(study)
    variants = shared.pop("variants")
    seeds = shared.pop("seeds", [0])
    sizes = shared.pop("sizes", ["tiny"])
    runs = {}
    for seed, size, variant in itertools.product(seeds, sizes, variants):
        folder = Path(size, file_name(variant), f"seed-{seed}")
        runs[folder] = Settings(variant=variant, seed=seed, size=size, **shared)
    return runs


def read_study(path: Path) -> dict[str, Any]:
    """Read the TOML file `path`; raises `BadArgument` if a key or a value is wrong."""
    with explained(f"{path} is not a study.", error=BadArgument):
        study = tomllib.loads(path.read_text(encoding="utf-8"))
        for settings in runs_of(study).values():
            model_config(settings)
    return study


@public
def run_study(
    path: str | Path,
    *,
    out: str | Path,
    text: Sequence[str | Path] = (),
    valid: Sequence[str | Path] = (),
    tokens: str | Path | None = None,
) -> Path:
    """Train all runs of the study file `path` in the folder `out`, and return that folder.

    The file lists `variants` (the first is the baseline of comparisons), `seeds`, `sizes`, and
    the settings that all runs share. `text` and `valid` are files or folders. Instead of text,
    `tokens` can be a folder with prepared tokens. Stopped runs are resumed. Several processes
    can share a study, for example one for each GPU. If a run diverges, the others are trained.

    Raises:
        BadArgument: `path` is not a study, or `out` contains another study.
        BadText: the text is missing, not UTF-8 or too short.
        TrainingFailed: at the end, with the names of the runs that diverged.
    """
    out = Path(out)
    study = read_study(Path(path))
    training = [Path(file) for file in text]
    validation = [Path(file) for file in valid]
    data = out / "data" if tokens is None else Path(tokens)
    begun = read_settings(out, STUDY, key="variants")
    if begun:
        Key(study).require(begun, what=f"the study in {out}")
    else:
        read_texts(training, validation, data=data)  # before any folder is created
        write_json(out / STUDY, study)
    runs = {}
    for folder, settings in runs_of(study).items():
        runs[folder] = partial(
            train,
            settings,
            out=out / folder,
            text=training,
            valid=validation,
            data=data,
        )
    run_each(runs)
    return out
