"""Files of a checkpoint: the files of weights, and files that transformers cannot read."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePath

from ropelens.errors import BadCheckpoint, explained

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

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


@dataclass(frozen=True)
class UnreadFiles:
    """Files that a folder without weights for transformers may have, the error and a remedy."""

    pattern: str
    fault: str
    hint: str
    means: str = ""


UNREAD = (
    UnreadFiles(
        pattern="*-of-*.safetensors",
        fault=f"has shards of weights, but no index {INDEX}",
        hint="download it",
    ),
    UnreadFiles(
        pattern="*.safetensors",
        fault=f"has weights, but neither {SINGLE} nor an index {INDEX}",
        hint="the files for transformers, which most repositories also have",
    ),
    UnreadFiles(
        pattern="*.gguf",
        fault=f"has no {SINGLE}",
        hint="one of its GGUF files instead of the folder",
    ),
)
PICKLES = UnreadFiles(
    pattern="*",
    fault=f"has no {SINGLE}",
    hint="if you trust it, CLASS.from_pretrained(OLD).save_pretrained(NEW_FOLDER)",
    means="ropelens does not read pickles (.bin, .pt), because they can run any code",
)


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
        raise _without_weights(path)
    refuse_pointers(files)
    return files


def _files_in_index(index: Path) -> list[Path]:
    refuse_pointers([index])
    with explained(f"{index} cannot be read."):
        file_of_weight = json.loads(index.read_text("utf-8"))["weight_map"]
        names = sorted(set(file_of_weight.values()))
        files = [index.parent / name for name in names]
        outside = any(PurePath(name).name != name for name in names)
        if outside or not all(file.is_file() for file in files):
            raise ValueError("it names weights that are missing, or outside the folder")
    return files


def _without_weights(folder: Path) -> BadCheckpoint:
    present = PICKLES
    for unread in UNREAD:
        if any(folder.glob(unread.pattern)):
            present = unread
            break
    what = f"{folder} {present.fault}."
    return BadCheckpoint(what, means=present.means, hint=present.hint)


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
    config = json.loads((folder / "config.json").read_text("utf-8"))
    quantization = config.get("quantization") or config.get("quantization_config")
    if not isinstance(quantization, dict) or "quant_method" in quantization:
        return
    if "bits" in quantization:
        bits = quantization["bits"]
        what = f"{folder} has weights in {bits} bits, in the format of MLX."
        hint = "the model before its conversion by MLX, or mlx_lm.convert --dequantize"
        raise BadCheckpoint(what, hint=hint)


def sha256_of(file: Path) -> str:
    """SHA-256 of a file, in hex."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
