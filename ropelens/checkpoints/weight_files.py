"""Weight files of a checkpoint, and an error for each kind of folder without such files."""

import json
import re
from collections.abc import Iterable
from pathlib import Path, PurePath

import gguf

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

COUNT = r"(n|num|encoder|decoder)_(\w+_)?(layers?|experts)|.*\.(block|expert)_count"
LAYER_COUNTS, MOST_LAYERS = re.compile(COUNT), 4096  # a model of 10**9 layers is never built
LEAST = {"num_hidden_layers": 1}


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


def check_stated(path: Path) -> None:
    """Raise BadCheckpoint for MLX's own quantization, or an impossible number of layers."""
    if path.is_file():
        fields = gguf.GGUFReader(str(path)).fields
        stated = {key: fields[key].contents() for key in fields if LAYER_COUNTS.fullmatch(key)}
    else:
        stated = json.loads((path / "config.json").read_text("utf-8"))
    bits = stated.get("quantization") or stated.get("quantization_config")
    parts = [stated, *(part for part in stated.values() if isinstance(part, dict))]
    counts = [(key, x[key]) for x in parts for key in filter(LAYER_COUNTS.fullmatch, x)]
    numbers = [(key, x) for key, x in counts if isinstance(x, int)]
    odd = [f"{k} {x:,}" for k, x in numbers if not LEAST.get(k, x) <= x <= MOST_LAYERS]
    what = seen = ""
    if isinstance(bits, dict) and "bits" in bits and "quant_method" not in bits:
        what = f"{path} has weights in {bits['bits']} bits, in the format of MLX."
        hint = "the model before its conversion by MLX, or mlx_lm.convert --dequantize"
    elif odd:
        what, hint = f"The configuration of {path} is impossible.", "the one of its weights"
        seen = f"{odd[0]}, not 1 to {MOST_LAYERS:,}"
    if what:
        raise BadCheckpoint(what, seen=seen, hint=hint)
