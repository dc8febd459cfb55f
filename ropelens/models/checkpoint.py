"""A checkpoint on this machine: its folder, configuration, tokenizer and weight files.

transformers, tokenizers and safetensors read them and say what is wrong. Refused here is what
they accept: pickles, weights outside the folder, adapters, a tokenizer that fails at work.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePath

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from ropelens.errors import BadArgument, BadCheckpoint, RopelensError, words_of
from ropelens.models.checks import check_architecture, check_counts
from ropelens.models.loading import Loading
from ropelens.models.paths import at_home, bundled_path
from ropelens.models.texts import encode

WITHOUT_WEIGHTS = ["*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken", "*.py"]
# Folders in a repository (onnx/, original/, ...) hold conversions, which are not read.
NOT_FETCHED = ["*/*", "consolidated*.safetensors"]
SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")
PICKLE_SUFFIXES = {".bin", ".pt", ".pth", ".ckpt", ".pkl"}
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model"),
    *("sentencepiece.bpe.model", "tekken.json", "tiktoken.model", "*.tiktoken"),
)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's name and folder; `revision` is the commit of a Hub id, else ""."""

    name: str
    path: Path
    revision: str


def locate(name: str, loading: Loading, *, weights: bool = True) -> Checkpoint:
    """The checkpoint `name`, downloaded where it is a Hub id that is not in the cache.

    `name` is a local folder, "bundled", "bundled:NAME" or a Hub id; a folder wins over a Hub
    id of the same name. No pickle is downloaded, and without `weights` no safetensors.

    Raises BadCheckpoint where there is no such checkpoint, BadArgument for a revision of a
    local folder.
    """
    first, _, which = name.partition(":")
    path = at_home(name)
    if first == "bundled":
        path = bundled_path(which or "rope")
    with suppress(OSError):  # a name may be longer than the name of a file
        if path.exists():
            if loading.revision is not None:
                raise BadArgument(
                    f"{name} has no revision {loading.revision}: it is on this machine."
                )
            if not path.is_dir():
                raise BadCheckpoint(f"{path} is a file.", attempt=f"its folder, {path.parent}")
            return Checkpoint(f"bundled:{path.name}" if first == "bundled" else name, path, "")
    folder = _from_hub(name, loading, weights=weights)
    return Checkpoint(name, folder, revision=folder.name)


def read_config(folder: Path, loading: Loading) -> PreTrainedConfig:
    """The configuration in a folder, checked.

    Raises BadCheckpoint where transformers cannot read it or it states impossible numbers,
    UnsupportedModel for a model that is not a causal language model.
    """
    if (folder / "adapter_config.json").exists():
        raise BadCheckpoint(
            f"{folder} holds an adapter (adapter_config.json).",
            attempt="merge it into its base model (peft: merge_and_unload) and save that",
        )
    if not (folder / "config.json").is_file():
        raise BadCheckpoint(f"{folder} has no config.json.", seen=f"it holds {_names(folder)}")
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=loading.trust_remote_code)
        check_architecture(config)
        check_counts(config)
    except RopelensError:
        raise
    except Exception as error:  # the classes of models raise errors of every kind
        raise BadCheckpoint(
            f"transformers cannot read {folder / 'config.json'}.",
            seen=words_of(error, kind=True),
            attempt="a newer transformers; for a model that brings its own code "
            "trust_remote_code=True, once you have read it",
        ) from error
    return config


def load_tokenizer(name: str | Path, loading: Loading) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder, a bundled checkpoint or a Hub id.

    Raises BadCheckpoint where there is none.
    """
    with quiet_transformers():
        tokenizer = read_tokenizer(locate(str(name), loading, weights=False).path, loading)
    if tokenizer is None:
        raise BadCheckpoint(f"There is no tokenizer in {name}.")
    return tokenizer


def read_tokenizer(folder: Path, loading: Loading) -> PreTrainedTokenizerBase | None:
    """The tokenizer in a folder, None where there is none.

    Raises BadCheckpoint where transformers cannot read it or it cannot encode a letter.
    """
    # Without any of these files AutoTokenizer makes an empty tokenizer of the model's family.
    if not any(any(folder.glob(pattern)) for pattern in TOKENIZER_FILES):
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=loading.trust_remote_code, local_files_only=True
        )
        encode("a", tokenizer)
    except Exception as error:  # a damaged file raises errors of every kind
        raise BadCheckpoint(
            f"The tokenizer in {folder} cannot be read.",
            seen=words_of(error, kind=True),
            attempt="fetch its files again",
        ) from error
    return tokenizer


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that transformers loads the checkpoint in `folder` from.

    Raises BadCheckpoint for a checkpoint in another format, and for a list of files that is
    damaged, incomplete or names a file outside `folder`.
    """
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
        names = [config.get("transformers_weights"), *SAFETENSORS]
        names = named = [name for name in names if name and (folder / name).is_file()][:1]
        if names and names[0].endswith(".json"):
            index = json.loads((folder / names[0]).read_text("utf-8"))
            names = sorted(set(index["weight_map"].values()))
        paths = [PurePath(name) for name in (*named, *names)]
        outside = [path for path in paths if path.is_absolute() or ".." in path.parts]
    except Exception as error:  # JSON of every form
        raise BadCheckpoint(
            f"{folder} has no readable list of its weight files.",
            seen=words_of(error, kind=True),
        ) from error
    if not names:
        pickles = any(path.suffix in PICKLE_SUFFIXES for path in folder.iterdir())
        raise BadCheckpoint(
            f"{folder} has no weights in safetensors.",
            seen=f"it holds {_names(folder)}",
            means="a pickle can run any code, so ropelens reads none" * pickles,
            attempt="AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER), "
            "where you trust the author"
            if pickles
            else "save_pretrained writes them",
        )
    if outside:
        raise BadCheckpoint(f"{folder} names weights outside itself: {outside[0]!s:.200}.")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise BadCheckpoint(f"{folder} lacks weight files: {', '.join(missing):.200}.")
    return [folder / name for name in names]


def count_numbers(files: list[Path]) -> int:
    """How many numbers safetensors files hold, from their headers."""
    total = 0
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (no dict)
                    total += math.prod(tensors.get_slice(name).get_shape())
        except SafetensorError as error:
            raise BadCheckpoint(
                f"{file} is truncated or damaged.",
                seen=f"{file.stat().st_size:,} bytes; {error}",
                attempt="fetch it again; `git lfs pull` where git-lfs left a pointer",
            ) from error
    return total


def fingerprint(path: str | Path) -> str:
    """sha256, in hex, of a file, or of the weight files of a checkpoint's folder.

    For one file it is what `sha256sum` prints; for several, that of the listing which
    `sha256sum FILE...` prints. Raises BadCheckpoint for a folder without weights.
    """
    path = Path(path)
    files = weight_files(path) if path.is_dir() else [path]
    digests = []
    for file in files:
        with file.open("rb") as stream:
            digests.append(hashlib.file_digest(stream, "sha256").hexdigest())
    if len(files) == 1:
        return digests[0]
    lines = zip(digests, files, strict=True)
    listing = "".join(f"{digest}  {file.relative_to(path)}\n" for digest, file in lines)
    return hashlib.sha256(listing.encode()).hexdigest()


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No messages of transformers and accelerate, and progress bars on a terminal only."""
    loggers = [logging.getLogger(name) for name in ("transformers", "accelerate")]
    levels = [logger.level for logger in loggers]
    on_terminal = sys.stderr is not None and sys.stderr.isatty()
    hide_bars = transformers_logging.is_progress_bar_enabled() and not on_terminal
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    if hide_bars:
        transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
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


def _names(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir())
    return ", ".join(names[:8]) + ", ..." * (len(names) > 8) or "nothing"
