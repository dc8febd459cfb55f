"""Training runs, and studies of several variants of RoPE, sizes and seeds.

Runs of one seed have the same initial weights and read the same tokens in the same order.
"""

import itertools
import os
import sys
import tomllib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from filelock import AcquireReturnProxy, FileLock, Timeout
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ropelens.arguments import public
from ropelens.errors import BadArgument, explained
from ropelens.profiles.measurement import versions
from ropelens.rope.variant_config import variant_config
from ropelens.runtime.devices import explain_full_memory
from ropelens.runtime.folder import RECORD, file_name
from ropelens.runtime.keys import Key
from ropelens.runtime.records import log_line, read_json, write_json
from ropelens.train.data import copy_tokenizer, prepare_data, read_texts
from ropelens.train.loop import CHECKPOINT, TrainingFailed, fit_model, write_model
from ropelens.train.settings import Settings

STUDY = "study.json"  # the file of a study's folder that contains its settings


class Busy(BadArgument):
    """Another process works on the run."""


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
    model_config(settings)
    texts = read_texts(text, valid, data=data)  # before any folder is created
    if before := read_settings(out, RECORD, key="settings"):
        Key(settings.facts()).require(before["settings"], what=f"the run in {out}")
    shape, hint = (
        f"{settings.size}, context {settings.context:,}",
        "a smaller size or context",
    )
    with explain_full_memory("The training", seen=shape, hint=hint), lock_run(out):
        facts = prepare_data(data, texts, settings) | settings.facts()
        record = read_settings(out, RECORD, key="settings") or {
            "kind": "training",
            "settings": facts,
            "data": os.path.relpath(data, out),
            "versions": versions() | {"accelerate": version("accelerate")},
            "threads": torch.get_num_threads(),
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": sys.argv,
        }
        Key(facts).require(record["settings"], what=f"the run in {out}")
        write_json(out / RECORD, record)
        if "finished" in record:
            log_line(f"{out} is finished already")
            return out
        copy_tokenizer(data, out)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(out, local_files_only=True)
        torch.manual_seed(settings.seed)
        model = LlamaForCausalLM(model_config(settings, tokenizer))
        fit_model(model, settings, out=out, data=data, watch=watch)
        write_model(model, out)
        tokens = settings.steps * settings.tokens_per_step
        finished = datetime.now(UTC).isoformat(timespec="seconds")
        write_json(out / RECORD, record | {"finished": finished, "tokens": tokens})
        (out / CHECKPOINT).unlink()
    return out


def model_config(
    settings: Settings, tokenizer: PreTrainedTokenizerFast | None = None
) -> LlamaConfig:
    """Configuration of the model; raises `BadArgument` for an unknown variant or size."""
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
        tie_word_embeddings=True,  # most parameters of a small model are in its layers
        bos_token_id=tokenizer.bos_token_id if tokenizer else 0,
        eos_token_id=tokenizer.eos_token_id if tokenizer else 1,
    )
    return variant_config(config, settings.variant)


def read_settings(out: Path, name: str, *, key: str) -> dict[str, Any]:
    """Read the file `name` in `out`; {} if nothing has begun. Refuses other folders."""
    record = read_json(out / name) if (out / name).exists() else {}
    others = (RECORD, STUDY, CHECKPOINT, "config.json", "tokenizer.json", "history")
    if key not in record and any((out / other).exists() for other in others):
        what = f"{out} holds a model, a run, a study or other results, and files would mix."
        raise BadArgument(what, hint="another --out")
    return record


def lock_run(out: Path) -> AcquireReturnProxy:
    out.mkdir(parents=True, exist_ok=True)
    what = f"another process works on the run in {out}."
    with explained(what, error=Busy, catch=Timeout):
        return FileLock(out / ".lock").acquire(blocking=False)


def runs_of(study: Mapping[str, Any]) -> dict[Path, Settings]:
    """The runs of a study, by folder, with all variants of a seed before the next seed."""
    shared, runs = dict(study), {}
    variants, seeds = shared.pop("variants"), shared.pop("seeds", [0])
    sizes = shared.pop("sizes", ["tiny"])
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
    training, held_out = (list(map(Path, files)) for files in (text, valid))
    data = out / "data" if tokens is None else Path(tokens)
    if before := read_settings(out, STUDY, key="variants"):
        Key(study).require(before, what=f"the study in {out}")
    else:
        read_texts(training, held_out, data=data)  # before any folder is created
        write_json(out / STUDY, study)
    runs = runs_of(study)
    diverged, busy = list[str](), list[str]()
    for number, (folder, settings) in enumerate(runs.items(), start=1):
        log_line(f"run {number} of {len(runs)}: {folder}")
        try:
            train(settings, out=out / folder, text=training, valid=held_out, data=data)
        except Busy:
            busy.append(str(folder))
        except TrainingFailed as error:
            log_line(error.line)
            diverged.append(str(folder))
    if busy:
        log_line(f"another process works on {', '.join(busy)}")
    if diverged:
        what = f"{len(diverged)} of {len(runs)} runs of the study diverged."
        hint = "a lower learning_rate in the study file, in a new folder"
        raise TrainingFailed(what, seen=", ".join(diverged), hint=hint)
    return out
