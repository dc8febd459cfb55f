"""Weight files of a checkpoint, and an error for each kind of folder without such files."""

import json
from collections.abc import Iterable
from pathlib import Path, PurePath

from ropelens.errors import BadCheckpoint, explained

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = "ropelens does not read pickles (.bin, .pt), because they can run any code"
UNREAD = {
    "*-of-*.safetensors": (f"has shards of weights, but no index {INDEX}", "download it"),
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


def weight_files(folder: Path) -> list[Path]:
    """The files from which transformers loads the weights in `folder`, which may be a file."""
    single, index = folder / SINGLE, folder / INDEX
    if folder.is_file() or single.is_file():
        files = [folder if folder.is_file() else single]
    elif index.is_file():
        refuse_pointers([index])
        with explained(f"{index} cannot be read."):
            names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
            files = [folder / name for name in names]
            if any(PurePath(n).name != n for n in names) or not all(f.is_file() for f in files):
                raise ValueError("it names weights that are missing, or outside the folder")
    else:
        pattern = next((pattern for pattern in UNREAD if any(folder.glob(pattern))), "*")
        what, hint = UNREAD[pattern]
        raise BadCheckpoint(f"{folder} {what}.", means=PICKLES * (pattern == "*"), hint=hint)
    refuse_pointers(files)
    return files


def refuse_pointers(files: Iterable[Path]) -> None:
    """Raise BadCheckpoint if git-LFS has not downloaded one of the files."""
    for file in files:
        with file.open("rb") as stream:
            if stream.read(40).startswith(b"version https://git-lfs"):
                hint = "git lfs pull in its folder, or download the file"
                raise BadCheckpoint(f"{file} is only a git-LFS pointer to the file.", hint=hint)


def refuse_mlx(folder: Path) -> None:
    """Raise BadCheckpoint for MLX's own quantization."""
    stated = json.loads((folder / "config.json").read_text("utf-8"))
    bits = stated.get("quantization") or stated.get("quantization_config")
    if isinstance(bits, dict) and "bits" in bits and "quant_method" not in bits:
        what = f"{folder} has weights in {bits['bits']} bits, in the format of MLX."
        hint = "the model before its conversion by MLX, or mlx_lm.convert --dequantize"
        raise BadCheckpoint(what, hint=hint)
