"""A checkpoint on this machine: its folder, configuration, tokenizer and weight files.

transformers, tokenizers and safetensors read them and say what is wrong. Refused here is what
they accept: pickles, weights outside the folder, a tokenizer that fails at work.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from accelerate import init_empty_weights
from huggingface_hub import snapshot_download
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers import modeling_gguf_pytorch_utils as gguf
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils import logging as transformers_logging

from ropelens.checkpoints.load_options import Loading
from ropelens.checkpoints.paths import bundled_path
from ropelens.config_facts import stated_number
from ropelens.errors import BadArgument, BadCheckpoint, explained
from ropelens.text.tokenize import encode

FETCHED = ["*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken", "*.py", "*.safetensors"]
# Folders in a repository (onnx/, original/, ...) hold conversions, which are not read.
NOT_FETCHED = ["*/*", "consolidated*.safetensors"]
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model"),
    *("sentencepiece.bpe.model", "tekken.json", "tiktoken.model", "*.tiktoken"),
)
COUNTS = ("vocab_size", "hidden_size", "num_attention_heads", "num_hidden_layers")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's name, its folder or GGUF file, and the commit of a Hub id, else ""."""

    name: str
    path: Path
    revision: str


def locate(name: str, loading: Loading) -> Checkpoint:
    """The checkpoint `name`, downloaded where it is a Hub id that is not in the cache.

    `name` is a local folder, a GGUF file or a folder that holds one, "bundled", "bundled:NAME"
    or a Hub id; a folder wins over a Hub id of the same name. No pickle is downloaded.
    """
    first, _, which = name.partition(":")
    path = bundled_path(which or "rope") if first == "bundled" else Path(name)
    if os.path.isdir(path):  # noqa: PTH112 (False for a name of any length)
        whole, files = path / "config.json", list(path.glob("*.gguf"))
        path = files[0] if len(files) == 1 and not whole.is_file() else path
    elif not (path.suffix == ".gguf" and path.is_file()):
        at = f" at revision {loading.revision}" * bool(loading.revision)
        with explained(
            f"There is no checkpoint called {name:.80}{at}, and no folder here.",
            "a folder or a GGUF file (a text is --text); a model of the Hub that is not in the "
            "cache needs the network (and HF_HUB_OFFLINE unset), a gated one `hf auth login`",
        ):
            patterns: Any = {"allow_patterns": FETCHED, "ignore_patterns": NOT_FETCHED}
            folder = snapshot_download(name, revision=loading.revision, **patterns)
        return Checkpoint(name, Path(folder), revision=Path(folder).name)
    if loading.revision is not None:
        raise BadArgument(f"{name} has no revision {loading.revision}: it is on this machine.")
    return Checkpoint(f"bundled:{path.name}" if first == "bundled" else name, path, "")


def source_of(path: Path, loading: Loading) -> dict[str, Any]:
    """The arguments by which transformers reads a folder, or a GGUF file."""
    common = {"local_files_only": True, "trust_remote_code": loading.trust_remote_code}
    if path.is_dir():
        return {"pretrained_model_name_or_path": path, **common}
    return {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name, **common}


def read_config(path: Path, loading: Loading) -> tuple[PreTrainedConfig, int]:
    """The configuration in a folder or a GGUF file, and the parameters of its model."""
    hint = (
        "a newer transformers; for a model that brings its own code trust_remote_code=True, "
        "once you have read it; an adapter merged into its model"
    )
    if path.is_file():
        hint = "the whole file, fetched again; a newer transformers"
    elif not (path / "config.json").exists():
        hint = "a folder with config.json; of a folder of models, each of its folders"
    with explained(f"transformers cannot read the configuration in {path}.", hint):
        config = AutoConfig.from_pretrained(**source_of(path, loading))
        for name in COUNTS:  # transformers would build such a model for ever
            if not 1 <= stated_number(config, name, 1) < 2**31:
                raise ValueError(f"impossible {name}")
        vars(config).pop("transformers_weights", None)  # the files are those of weight_files
        with init_empty_weights():
            code = loading.trust_remote_code
            try:
                empty = auto_class(config).from_config(config, trust_remote_code=code)
            except KeyError as error:
                known = ", ".join(["default", *ROPE_INIT_FUNCTIONS])
                raise ValueError(f"it knows no {error}; a rope_type is {known}") from error
        empty.tie_weights()  # or embeddings that are the unembedding too count twice
    return config, empty.num_parameters()


def auto_class(config: PreTrainedConfig) -> Any:
    """What transformers makes a model of this configuration by.

    Models that see are measured on text: their language model runs as it does without images.
    """
    sees = type(config) in AutoModelForImageTextToText._model_mapping
    speaks = type(config) in AutoModelForCausalLM._model_mapping
    return AutoModelForImageTextToText if sees and not speaks else AutoModelForCausalLM


def read_tokenizer(path: Path, loading: Loading) -> PreTrainedTokenizerBase | None:
    """The tokenizer in a folder or a GGUF file, tried on a letter; None without one."""
    # Without any of these files AutoTokenizer makes an empty tokenizer of the model's family.
    if path.is_dir() and not any(any(path.glob(pattern)) for pattern in TOKENIZER_FILES):
        return None
    with explained(f"The tokenizer in {path} cannot be read.", "fetch its files again"):
        tokenizer = AutoTokenizer.from_pretrained(**source_of(path, loading))
        encode("a", tokenizer)
    return tokenizer


def weight_files(folder: Path) -> list[Path]:
    """The files that transformers loads the checkpoint in `folder` from; a file itself."""
    if folder.is_file():
        return [folder]
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.is_file():
        return [whole]
    if not index.is_file():
        raise BadCheckpoint(
            f"{folder} has no {whole.name}.",
            means="ropelens reads no pickle (.bin, .pt), which can run any code",
            hint="if you trust it, CLASS.from_pretrained(OLD).save_pretrained(NEW_FOLDER)",
        )
    with explained(f"{index} cannot be read."):
        names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
        if any(PurePath(name).name != name or not (folder / name).is_file() for name in names):
            raise ValueError("it names weights that are missing, or outside the folder")
    return [folder / name for name in names]


def fingerprint(path: str | Path) -> str:
    """sha256, in hex, of a file, or of the weight files of a checkpoint's folder.

    For one file it is what `sha256sum` prints; for several, that of the listing which
    `sha256sum FILE...` prints. Raises BadCheckpoint for a folder without weights.
    """
    files, listing = weight_files(Path(path)), ""
    for file in files:
        with file.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        listing += f"{digest}  {file.name}\n"
    return digest if len(files) == 1 else hashlib.sha256(listing.encode()).hexdigest()


@contextmanager
def quiet_transformers(*, bars: bool = True) -> Iterator[None]:
    """No messages of libraries but errors, and progress `bars` on a terminal only."""
    before = logging.root.manager.disable
    bars = bars and sys.stderr is not None and sys.stderr.isatty()
    hide_bars = transformers_logging.is_progress_bar_enabled() and not bars
    logging.disable(logging.WARNING)
    if hide_bars:
        transformers_logging.disable_progress_bar()
    own_bar, gguf.tqdm = gguf.tqdm, transformers_logging.tqdm  # which asks if bars are shown
    try:
        yield
    finally:
        gguf.tqdm = own_bar
        logging.disable(before)
        if hide_bars:
            transformers_logging.enable_progress_bar()
