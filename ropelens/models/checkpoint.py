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

from accelerate import init_empty_weights
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from ropelens.errors import BadArgument, BadCheckpoint, words_of
from ropelens.models.device import stated_number
from ropelens.models.loading import Loading
from ropelens.models.paths import at_home, bundled_path
from ropelens.models.texts import encode

WITHOUT_WEIGHTS = ["*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken", "*.py"]
# Folders in a repository (onnx/, original/, ...) hold conversions, which are not read.
NOT_FETCHED = ["*/*", "consolidated*.safetensors"]
INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model"),
    *("sentencepiece.bpe.model", "tekken.json", "tiktoken.model", "*.tiktoken"),
)
GGUF = ".gguf"
COUNTS = ("vocab_size", "hidden_size", "num_attention_heads", "num_hidden_layers")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's name, its folder or GGUF file, and the commit of a Hub id, else ""."""

    name: str
    path: Path
    revision: str


def locate(name: str, loading: Loading, *, weights: bool = True) -> Checkpoint:
    """The checkpoint `name`, downloaded where it is a Hub id that is not in the cache.

    `name` is a local folder, a GGUF file or a folder that holds one, "bundled", "bundled:NAME"
    or a Hub id; a folder wins over a Hub id of the same name. No pickle is downloaded, and
    without `weights` no safetensors.

    Raises BadCheckpoint where there is no such checkpoint, BadArgument for a revision of a
    local folder.
    """
    first, _, which = name.partition(":")
    path = bundled_path(which or "rope") if first == "bundled" else at_home(name)
    if os.path.isdir(path):  # noqa: PTH112 (False for a name of any length)
        whole, files = path / "config.json", list(path.glob(f"*{GGUF}"))
        path = files[0] if len(files) == 1 and not whole.is_file() else path
    elif not (path.suffix == GGUF and path.is_file()):
        folder = _from_hub(name, loading, weights=weights)
        return Checkpoint(name, folder, revision=folder.name)
    if loading.revision is not None:
        raise BadArgument(f"{name} has no revision {loading.revision}: it is on this machine.")
    return Checkpoint(f"bundled:{path.name}" if first == "bundled" else name, path, "")


def source_of(path: Path) -> tuple[Path, dict[str, str]]:
    """The folder that transformers reads, and the option that names a GGUF file in it."""
    return (path.parent, {"gguf_file": path.name}) if path.suffix == GGUF else (path, {})


def read_config(path: Path, loading: Loading) -> tuple[PreTrainedConfig, int]:
    """The configuration in a folder or a GGUF file, and the parameters of its model.

    Raises BadCheckpoint where transformers cannot read it, or make a causal model of it.
    """
    code = {"trust_remote_code": loading.trust_remote_code}
    try:
        folder, options = source_of(path)
        config = AutoConfig.from_pretrained(folder, **code, **options)
        for name in COUNTS:  # transformers would build such a model for ever
            if not 1 <= stated_number(config, name, 1) < 2**31:
                raise ValueError(f"impossible {name}")
        vars(config).pop("transformers_weights", None)  # the files are those of weight_files
        with init_empty_weights():
            empty = AutoModelForCausalLM.from_config(config, **code)
    except Exception as error:  # the classes of models raise errors of every kind
        raise BadCheckpoint(
            f"transformers cannot read the configuration in {path}.",
            seen=words_of(error, kind=True),
            attempt="a newer transformers; for a model that brings its own code "
            "trust_remote_code=True, once you have read it; an adapter merged into its model",
        ) from error
    return config, empty.num_parameters()


def load_tokenizer(name: str | Path, loading: Loading) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder, a bundled checkpoint or a Hub id.

    Raises BadCheckpoint where there is none.
    """
    with quiet_transformers():
        tokenizer = read_tokenizer(locate(str(name), loading, weights=False).path, loading)
    if tokenizer is None:
        raise BadCheckpoint(f"There is no tokenizer in {name}.")
    return tokenizer


def read_tokenizer(path: Path, loading: Loading) -> PreTrainedTokenizerBase | None:
    """The tokenizer in a folder or a GGUF file, None where there is none.

    Raises BadCheckpoint where transformers cannot read it or it cannot encode a letter.
    """
    # Without any of these files AutoTokenizer makes an empty tokenizer of the model's family.
    folder, options = source_of(path)
    if not options and not any(any(folder.glob(pattern)) for pattern in TOKENIZER_FILES):
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder,
            trust_remote_code=loading.trust_remote_code,
            local_files_only=True,
            **options,
        )
        encode("a", tokenizer)
    except Exception as error:  # a damaged file raises errors of every kind
        raise BadCheckpoint(
            f"The tokenizer in {path} cannot be read.",
            seen=words_of(error, kind=True),
            attempt="fetch its files again",
        ) from error
    return tokenizer


def weight_files(folder: Path) -> list[Path]:
    """The files that transformers loads the checkpoint in `folder` from, or a GGUF file.

    Raises BadCheckpoint for a checkpoint in another format, and for a list of files that is
    damaged or names a file outside `folder`.
    """
    if folder.suffix == GGUF:
        return [folder]
    whole, index = folder / "model.safetensors", folder / INDEX
    if whole.is_file():
        return [whole]
    if not index.is_file():
        raise BadCheckpoint(
            f"{folder} has no {whole.name}.",
            means="ropelens reads no pickle (.bin, .pt), which can run any code",
            attempt="AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER), "
            "where you trust the author",
        )
    try:
        names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
        if any(PurePath(name).name != name or not (folder / name).is_file() for name in names):
            raise ValueError("it names weights that are missing, or outside the folder")
    except Exception as error:  # JSON of every form
        raise BadCheckpoint(
            f"{index} cannot be read.", seen=words_of(error, kind=True)
        ) from error
    return [folder / name for name in names]


def fingerprint(path: str | Path) -> str:
    """sha256, in hex, of a file, or of the weight files of a checkpoint's folder.

    For one file it is what `sha256sum` prints; for several, that of the listing which
    `sha256sum FILE...` prints. Raises BadCheckpoint for a folder without weights.
    """
    path = Path(path)
    files = weight_files(path) if path.is_dir() else [path]
    listing = ""
    for file in files:
        with file.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        listing += f"{digest}  {file.name}\n"
    return digest if len(files) == 1 else hashlib.sha256(listing.encode()).hexdigest()


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No messages of transformers and accelerate, and progress bars on a terminal only."""
    levels = {name: logging.getLogger(name).level for name in ("transformers", "accelerate")}
    on_terminal = sys.stderr is not None and sys.stderr.isatty()
    hide_bars = transformers_logging.is_progress_bar_enabled() and not on_terminal
    for name in levels:
        logging.getLogger(name).setLevel(logging.ERROR)
    if hide_bars:
        transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        if hide_bars:
            transformers_logging.enable_progress_bar()


def _from_hub(name: str, loading: Loading, *, weights: bool) -> Path:
    try:
        return Path(
            snapshot_download(
                name,
                revision=loading.revision,
                local_files_only=loading.local_files_only,
                allow_patterns=[*WITHOUT_WEIGHTS, *["*.safetensors"] * weights],
                ignore_patterns=NOT_FETCHED,
            )
        )
    except (OSError, HFValidationError) as error:  # those of the network are OSErrors
        where = f"{name:.80}" + f" at revision {loading.revision}" * bool(loading.revision)
        raise BadCheckpoint(
            f"There is no checkpoint called {where}.",
            seen="no folder of that name here; " + words_of(error),
            attempt="a model of the Hub that is not in the cache needs the network (and "
            "HF_HUB_OFFLINE unset), a gated one `hf auth login`",
        ) from error
