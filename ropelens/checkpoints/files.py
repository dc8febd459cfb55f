"""Files of a checkpoint: the files of weights, and files that transformers cannot read."""

import hashlib
import json
import re
import shlex
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path, PurePath
from typing import Any

from ropelens.checkpoints.unread_folders import (
    INDEX,
    NO_PICKLES,
    SINGLE,
    folder_without_weights,
)
from ropelens.errors import BadCheckpoint, explained

DOWNLOAD_AGAIN = "download, copy or save it again"
LENGTH_BYTES = 8  # of the length of the header of a file of safetensors
LONGEST_HEADER = 10**8  # bytes that safetensors accepts

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "tiktoken.model",
    "*.tiktoken",
)

GGUF_PART = re.compile(r"-\d{5}-of-(?P<parts>\d{5})\.gguf$")
"""End of the name of each part of a model that llama.cpp splits."""


def weight_files(path: Path) -> list[Path]:
    """The files from which transformers loads the weights of a folder or a GGUF file."""
    single = path / SINGLE
    index = path / INDEX
    if path.is_file():
        files = [path]
    elif single.is_file():
        files = [single]
    elif index.is_file():
        files = _files_in_index(index)
    else:
        raise folder_without_weights(path)
    refuse_pointers(files)
    return files


def adapter_weights(folder: Path) -> Path:
    """The weights of an adapter; raises BadCheckpoint if there is only a pickle, or no file."""
    weights = folder / "adapter_model.safetensors"
    if weights.is_file():
        refuse_pointers([weights])
        return weights
    what = f"{folder} has no {weights.name}."
    if (folder / "adapter_model.bin").is_file():
        hint = "if you trust it, PeftModel.from_pretrained(MODEL, OLD).save_pretrained(NEW)"
        raise BadCheckpoint(what, seen="adapter_model.bin", means=NO_PICKLES, hint=hint)
    seen = "adapter_config.json without weights"
    raise BadCheckpoint(what, seen=seen, hint=DOWNLOAD_AGAIN)


def _files_in_index(index: Path) -> list[Path]:
    with explained(f"{index} cannot be read.", DOWNLOAD_AGAIN):
        file_of_weight = read_settings(index)["weight_map"]
        names = sorted(set(file_of_weight.values()))
        if any(PurePath(name).name != name for name in names):
            raise ValueError("it names weights that are outside the folder")
    files = [index.parent / name for name in names]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        what = f"{index.parent} lacks {len(missing)} of {len(files)} files of weights."
        seen = f"{', '.join(missing[:3])}, which {index.name} names"
        raise BadCheckpoint(what, seen=seen, hint="download or copy these files")
    return files


def read_settings(file: Path) -> dict[str, Any]:
    """The contents of a JSON file of a checkpoint; raises BadCheckpoint if it is damaged."""
    refuse_pointers([file])
    text = file.read_text("utf-8", errors="replace")
    try:
        settings = json.loads(text)
    except ValueError as error:
        what = f"{file} is not complete JSON."
        seen = f"{len(text)} characters: {error}"
        raise BadCheckpoint(what, seen=seen, hint=DOWNLOAD_AGAIN) from error
    if not isinstance(settings, dict):
        what = f"{file} has no settings."
        seen = f"{type(settings).__name__} instead of an object with names"
        raise BadCheckpoint(what, seen=seen, hint=DOWNLOAD_AGAIN)
    return settings


def refuse_truncated(files: Iterable[Path]) -> None:
    """Raise BadCheckpoint for files of safetensors that are shorter than they state."""
    for file in files:
        if file.suffix != ".safetensors":
            continue
        size = file.stat().st_size
        stated = _stated_size(file)
        if size < stated:
            what = f"{file} ends too early."
            seen = f"{size:,} bytes of at least {stated:,}"
            means = "the file was not downloaded, copied or saved completely"
            raise BadCheckpoint(what, seen=seen, means=means, hint=DOWNLOAD_AGAIN)


def _stated_size(file: Path) -> int:
    """Size of a file of safetensors in bytes, as far as its beginning states it.

    A file begins with the length of its header in 8 bytes, and the header has the offsets of
    the tensors.
    """
    with file.open("rb") as stream:
        beginning = stream.read(LENGTH_BYTES)
        header_length = int.from_bytes(beginning, "little")
        before_tensors = LENGTH_BYTES + header_length
        if len(beginning) < LENGTH_BYTES or header_length > LONGEST_HEADER:
            return LENGTH_BYTES
        header = stream.read(header_length)
    if len(header) < header_length:
        return before_tensors
    ends = [0]
    # safetensors explains the fault of another header.
    with suppress(ValueError, LookupError, TypeError, AttributeError):
        for name, tensor in json.loads(header).items():
            if name != "__metadata__":
                ends.append(tensor["data_offsets"][1])
    return before_tensors + max(ends)


def refuse_pointers(files: Iterable[Path]) -> None:
    """Raise BadCheckpoint if git-LFS has not downloaded one of the files."""
    for file in files:
        with file.open("rb") as stream:
            begin = stream.read(40)
        if begin.startswith(b"version https://git-lfs"):
            what = f"{file} is only a git-LFS pointer to the file."
            hint = "git lfs pull in its folder, or download the file"
            raise BadCheckpoint(what, hint=hint)


def refuse_mlx(folder: Path) -> None:
    """Raise BadCheckpoint for MLX's own quantization."""
    config = read_settings(folder / "config.json")
    quantization = config.get("quantization") or config.get("quantization_config")
    if not isinstance(quantization, dict) or "quant_method" in quantization:
        return
    if "bits" in quantization:
        bits = quantization["bits"]
        what = f"{folder} has weights in {bits} bits, in the format of MLX."
        hint = "the model before its conversion by MLX, or mlx_lm.convert --dequantize"
        raise BadCheckpoint(what, hint=hint)


def refuse_gguf_part(file: Path) -> None:
    """Raise BadCheckpoint for one of several GGUF files of a model, by its name."""
    match = GGUF_PART.search(file.name)
    if match is None or int(match["parts"]) == 1:
        return
    beginning = file.name[: match.start()]
    first = file.with_name(f"{beginning}-00001-of-{match['parts']}.gguf")
    merge = f"llama-gguf-split --merge {shlex.quote(str(first))}"
    raise BadCheckpoint(
        f"{file} is one of {int(match['parts'])} files of a model.",
        means="transformers reads only one GGUF file",
        hint=f"{merge} MERGED.gguf (of llama.cpp), then MERGED.gguf",
    )


def sha256_of(file: Path) -> str:
    """SHA-256 of a file, in hex."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
