"""Weight files of a checkpoint, and an error for each kind of folder without such files."""

import json
import re
from collections.abc import Iterable
from pathlib import Path, PurePath

import gguf
from safetensors import safe_open

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

LAYER_COUNTS = re.compile(r"(n|num|encoder|decoder)_(\w+_)?(layers?|experts)")
MOST_LAYERS = 1000  # more layers, or experts, than this need a tensor each


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
                raise BadCheckpoint(
                    f"{file} is only a git-LFS pointer to the file.",
                    hint="git lfs pull in its folder, or download the file",
                )


def check_stated(path: Path) -> None:
    """Raise BadCheckpoint for MLX's own quantization, or for more layers than tensors.

    The configuration is read as plain data, because transformers makes a list of all layers.
    """
    if path.is_file():
        fields = gguf.GGUFReader(path).fields.items()
        counts = ("block_count", "expert_count")
        pairs = [(key, field.contents()) for key, field in fields if key.endswith(counts)]
    else:
        stated = json.loads((path / "config.json").read_text("utf-8"))
        bits = stated.get("quantization") or stated.get("quantization_config")
        if isinstance(bits, dict) and "bits" in bits and "quant_method" not in bits:
            raise BadCheckpoint(
                f"{path} has weights in {bits['bits']} bits, in the format of MLX.",
                means="only MLX reads this format",
                hint="the model before its conversion, or mlx_lm.convert --dequantize",
            )
        parts = [stated, *(part for part in stated.values() if isinstance(part, dict))]
        facts = [pair for part in parts for pair in part.items()]
        pairs = [(key, value) for key, value in facts if LAYER_COUNTS.fullmatch(key)]
    for key, value in pairs:
        many = isinstance(value, int) and value > MOST_LAYERS
        if many and value > (count := count_tensors(path)):
            raise BadCheckpoint(
                f"The configuration of {path} does not fit its weights.",
                seen=f"{key} {value:,}; all weights are {count:,} tensors",
                hint="the configuration of these weights",
            )


def count_tensors(path: Path) -> int:
    """Number of tensors in the weight files."""
    if path.is_file():
        return len(gguf.GGUFReader(path).tensors)
    return sum(len(safe_open(file, framework="pt").keys()) for file in weight_files(path))
