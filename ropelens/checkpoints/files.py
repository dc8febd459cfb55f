"""Files of a checkpoint: the folder, configuration, tokenizer and weight files."""

import hashlib
import json
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import gguf
import numpy as np
from accelerate import init_empty_weights
from huggingface_hub import snapshot_download
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers import modeling_gguf_pytorch_utils as gguf_weights
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils import logging as transformers_logging

from ropelens.checkpoints.bundled import bundled_path
from ropelens.checkpoints.gguf_rope import add_rope, check_rope
from ropelens.checkpoints.load_options import Loading
from ropelens.errors import BadArgument, BadCheckpoint, explained
from ropelens.text.tokenize import encode

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = "ropelens does not read pickles (.bin, .pt), because they can run any code"
UNREAD = {
    "*-of-*.safetensors": (
        f"has shards of weights, but no index {INDEX}",
        "download it",
    ),
    "*.safetensors": (
        f"has weights, but neither {SINGLE} nor an index {INDEX}",
        "the files for transformers, which most repositories also have",
    ),
    "*.gguf": (f"has no {SINGLE}", "one of its GGUF files instead of the folder"),
    "*": (
        f"has no {SINGLE}",
        "if you trust it, CLASS.from_pretrained(OLD).save_pretrained(NEW_FOLDER)",
    ),
}
"""Errors and remedies for folders without weights for transformers, by the first match."""
FETCHED = [
    "*.json",
    "*.model",
    "*.txt",
    "*.jinja",
    "*.tiktoken",
    "*.py",
    "*.safetensors",
]
# Folders in a repository (onnx/, original/, ...) contain conversions for other programs.
NOT_FETCHED = ["*/*", "consolidated*.safetensors"]
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model"),
    *("sentencepiece.bpe.model", "tekken.json", "tiktoken.model", "*.tiktoken"),
)
READ_FILES = (
    *("config.json", "*.safetensors.index.json", "adapter_*", "tokenizer_config.json"),
    *("special_tokens_map.json", "added_tokens.json", "merges.txt"),
)

ConfigInput = PreTrainedConfig | Mapping[str, Any] | str | Path
"""A configuration, its dict or file, or the name of a checkpoint."""


class Checkpoint(NamedTuple):
    """A checkpoint in a folder or GGUF file."""

    name: str
    path: Path
    revision: str  # the commit if it is from the Hub
    adapter: Path | None = None  # folder of an adapter that is added to the model


def locate(name: str, loading: Loading) -> Checkpoint:
    """Find the checkpoint `name`; an adapter without a model names its model."""
    checkpoint = _find(name, loading)
    folder, stated = checkpoint.path, checkpoint.path / "adapter_config.json"
    if not stated.is_file():
        return checkpoint
    if any((folder / weights).is_file() for weights in (SINGLE, INDEX)):
        return checkpoint._replace(adapter=folder)
    with explained(
        f"The adapter in {folder} cannot be read.", "download its files again"
    ):
        refuse_pointers([stated])
        base = str(json.loads(stated.read_text("utf-8"))["base_model_name_or_path"])
    model = _find(base, replace(loading, revision=None), f", the model of {folder}")
    return checkpoint._replace(path=model.path, adapter=folder)


def _find(name: str, loading: Loading, role: str = "") -> Checkpoint:
    prefix, _, bundled_name = name.partition(":")
    path = bundled_path(bundled_name or "rope") if prefix == "bundled" else Path(name)
    if name and os.path.isdir(path):  # noqa: PTH112 (Path.is_dir raises for long names)
        config, files = path / "config.json", list(path.glob("*.gguf"))
        path = files[0] if len(files) == 1 and not config.is_file() else path
    elif not (path.suffix == ".gguf" and path.is_file()):
        revision = f" at revision {loading.revision}" * bool(loading.revision)
        with explained(
            f"No checkpoint and no folder is called {name:.80}{revision}{role}.",
            "a folder, a GGUF file (pass text with --text), or a Hub id; downloads need the "
            "network, with HF_HUB_OFFLINE unset, and `hf auth login` for a gated model",
        ):
            patterns: Any = {"allow_patterns": FETCHED, "ignore_patterns": NOT_FETCHED}
            folder = snapshot_download(name, revision=loading.revision, **patterns)
        return Checkpoint(name, Path(folder), revision=Path(folder).name)
    if loading.revision is not None:
        what = f"{name} has no revision {loading.revision}, because it is a local checkpoint."
        raise BadArgument(what, hint="no revision, or the id of a model on the Hub")
    return Checkpoint(f"bundled:{path.name}" if prefix == "bundled" else name, path, "")


def source_of(path: Path, loading: Loading) -> dict[str, Any]:
    """Arguments of transformers for reading a folder or a GGUF file."""
    common = {"local_files_only": True, "trust_remote_code": loading.trust_remote_code}
    if path.is_dir():
        return {"pretrained_model_name_or_path": path, **common}
    return {
        "pretrained_model_name_or_path": path.parent,
        "gguf_file": path.name,
        **common,
    }


def read_config(path: Path, loading: Loading) -> tuple[PreTrainedConfig, int]:
    """Read the configuration, and count the parameters of a model with this configuration."""
    hint = (
        "a newer transformers; trust_remote_code=True for a model with its own code, after you "
        "have read the code"
    )
    config_file = path if path.is_file() else path / "config.json"
    if path.is_file():
        hint = "download the file again, or use a newer transformers"
    elif not config_file.is_file():
        hint = (
            "a folder with config.json; if it contains several models, pass one of them"
        )
    with explained(f"transformers cannot read the configuration in {path}.", hint):
        if config_file.is_file():
            refuse_pointers([config_file])
            if path.is_dir():
                refuse_mlx(path)
        config = AutoConfig.from_pretrained(**source_of(path, loading))
        vars(config).pop("transformers_weights", None)  # weight_files chooses the files
        inv_freq = add_rope(path, config) if path.is_file() else None
        with init_empty_weights():
            code = loading.trust_remote_code
            try:
                empty = auto_class(config).from_config(config, trust_remote_code=code)
            except KeyError as error:
                known = ", ".join(["default", *ROPE_INIT_FUNCTIONS])
                raise ValueError(
                    f"it does not know {error}; a rope_type is {known}"
                ) from error
        if inv_freq is not None:
            check_rope(path, empty, inv_freq)
        empty.tie_weights()  # else tied embeddings count twice
    return config, empty.num_parameters()


def read_config_of(source: ConfigInput) -> PreTrainedConfig:
    """The text configuration in a dict, a file or a checkpoint."""
    with explained(
        "The configuration cannot be read.", "a config.json with a model_type"
    ):
        config: Any = source
        if isinstance(source, (str, Path)) and Path(source).suffix == ".json":
            config = json.loads(Path(source).read_text("utf-8"))
        if isinstance(config, Mapping):
            config = CONFIG_MAPPING[config["model_type"]].from_dict(dict(config))
        elif not isinstance(config, PreTrainedConfig):
            path = locate(str(config), Loading()).path
            config = AutoConfig.from_pretrained(**source_of(path, Loading()))
    return config.get_text_config()


def auto_class(config: PreTrainedConfig) -> Any:
    """The auto class of transformers for this configuration; it may also take images."""
    classes = (AutoModelForCausalLM, AutoModelForImageTextToText)
    return next((c for c in classes if type(config) in c._model_mapping), classes[0])


def read_tokenizer(path: Path, loading: Loading) -> PreTrainedTokenizerBase | None:
    """Read the tokenizer and encode a letter with it. Return None if its files are missing."""
    found = [file for pattern in TOKENIZER_FILES for file in path.glob(pattern)]
    if path.is_dir() and not found:
        return None  # AutoTokenizer would create an empty tokenizer of the family
    with explained(
        f"The tokenizer in {path} cannot be read.", "download its files again"
    ):
        try:
            tokenizer = AutoTokenizer.from_pretrained(**source_of(path, loading))
            encode("a", tokenizer)
        except Exception:
            refuse_pointers(found)
            raise
    return tokenizer


def loaded_files(checkpoint: Checkpoint, loading: Loading) -> list[Path]:
    """The files that `load` reads, except notes for generating text and templates of chats."""
    patterns = [*READ_FILES, *TOKENIZER_FILES, *["*.py"] * loading.trust_remote_code]
    folders = [
        x for x in (checkpoint.path, checkpoint.adapter) if x is not None and x.is_dir()
    ]
    found = {file for x in folders for pattern in patterns for file in x.glob(pattern)}
    return [*{*weight_files(checkpoint.path), *filter(Path.is_file, found)}]


def weight_files(folder: Path) -> list[Path]:
    """The files from which transformers loads the weights in `folder`, which may be a file."""
    single, index = folder / SINGLE, folder / INDEX
    if folder.is_file() or single.is_file():
        files = [folder if folder.is_file() else single]
    elif index.is_file():
        refuse_pointers([index])
        with explained(f"{index} cannot be read."):
            names = sorted(
                set(json.loads(index.read_text("utf-8"))["weight_map"].values())
            )
            files = [folder / name for name in names]
            if any(PurePath(n).name != n for n in names) or not all(
                f.is_file() for f in files
            ):
                raise ValueError(
                    "it names weights that are missing, or outside the folder"
                )
    else:
        pattern = next(
            (pattern for pattern in UNREAD if any(folder.glob(pattern))), "*"
        )
        what, hint = UNREAD[pattern]
        raise BadCheckpoint(
            f"{folder} {what}.", means=PICKLES * (pattern == "*"), hint=hint
        )
    refuse_pointers(files)
    return files


def refuse_pointers(files: Iterable[Path]) -> None:
    """Raise BadCheckpoint if git-LFS has not downloaded one of the files."""
    for file in files:
        with file.open("rb") as stream:
            if stream.read(40).startswith(b"version https://git-lfs"):
                hint = "git lfs pull in its folder, or download the file"
                raise BadCheckpoint(
                    f"{file} is only a git-LFS pointer to the file.", hint=hint
                )


def refuse_mlx(folder: Path) -> None:
    """Raise BadCheckpoint for MLX's own quantization."""
    stated = json.loads((folder / "config.json").read_text("utf-8"))
    bits = stated.get("quantization") or stated.get("quantization_config")
    if isinstance(bits, dict) and "bits" in bits and "quant_method" not in bits:
        what = f"{folder} has weights in {bits['bits']} bits, in the format of MLX."
        hint = "the model before its conversion by MLX, or mlx_lm.convert --dequantize"
        raise BadCheckpoint(what, hint=hint)


def sha256_of(file: Path) -> str:
    """SHA-256 of a file, in hex."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def quiet_transformers(*, bars: bool = True) -> Iterator[None]:
    """Hide messages of libraries except errors, and show progress `bars` only on a terminal."""
    bars = bars and sys.stderr is not None and sys.stderr.isatty()
    with ExitStack() as stack:
        stack.callback(logging.disable, logging.root.manager.disable)
        logging.disable(logging.WARNING)
        if transformers_logging.is_progress_bar_enabled() and not bars:
            stack.callback(transformers_logging.enable_progress_bar)
            transformers_logging.disable_progress_bar()
        # transformers reads the file several times, and maps names once for each module.
        changes = (
            (
                gguf_weights,
                "tqdm",
                transformers_logging.tqdm,
            ),  # obeys disable_progress_bar
            (gguf_weights, "_gguf_parse_value", _parse_value),
            (gguf, "GGUFReader", cache(_FastReader)),
            (gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map)),
        )
        for module, name, function in changes:
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, function)
        yield


class _FastReader(gguf.GGUFReader):
    """GGUF reader with plain arrays, whose slices are quick, and with quick lists of tokens.

    The original makes several slices of a memory map for each token.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(
            name, np.asarray(value) if isinstance(value, np.memmap) else value
        )

    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list[np.ndarray], list[int], list[gguf.GGUFValueType]]:
        """Size, parts, indices of values among the parts, and types; a string is one part."""
        types, start = gguf.GGUFValueType, orig_offs + 12
        if raw_type != types.ARRAY or self.byte_order == "S":  # swapped bytes
            return super()._get_field_parts(orig_offs, raw_type)
        head = [self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)]
        kind, count, items = types(head[0][0]), int(head[1][0]), list[np.ndarray]()
        if kind == types.STRING:
            end, file = start, self.data.data
            while len(items) < count and end < len(file):
                begin = end + 8
                end = begin + int.from_bytes(file[end:begin], sys.byteorder)
                items.append(self.data[begin:end])
        elif (dtype := self.gguf_scalar_to_np.get(kind)) is None:
            return super()._get_field_parts(orig_offs, raw_type)
        elif (end := start + np.dtype(dtype).itemsize * count) <= len(self.data):
            items = list(self._get(start, dtype, count)[:, None])
        if len(items) < count or end > len(self.data):
            raise ValueError("the file ends within a list")
        parts, kinds = [*head, *items], [types.ARRAY, kind]
        return end - orig_offs, parts, list(range(len(head), len(parts))), kinds


def _parse_value(value: np.ndarray, types: Sequence[int]) -> Any:
    """A value of a GGUF file, by the last of its `types`; the original parses bytes singly."""
    return (
        value.tobytes().decode()
        if types[-1] == gguf.GGUFValueType.STRING
        else value.item()
    )
