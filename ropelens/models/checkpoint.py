"""Where a checkpoint lies, and whether its files are whole.

No weights are read here: names become a folder or a llama2.c file on this machine, and
what is broken about the files is said before anything long starts.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path, PurePath

from huggingface_hub import snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError, safe_open

from ropelens.errors import BadArgument, BadCheckpoint, words_of
from ropelens.models.paths import MODELS_WITHIN, at_home, check_utf8

HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken", "*.py"]
# Below the top folder lie conversions (onnx/, original/, ...) that nothing here reads.
HUB_FILES_LEFT_OUT = ["*/*", "consolidated*.safetensors"]
PICKLE_SUFFIXES = {".bin", ".pt", ".pth", ".ckpt", ".pkl"}
LFS_POINTER = b"version https://git-lfs"
UNREADABLE = (
    *(OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError),
    *(KeyError, TypeError, AttributeError),
)
"""What reading an index of another form raises."""
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on this machine.

    `name` is what the user called it, `path` a folder or a llama2.c file, `revision` the
    commit of a Hub id and "" for everything else.
    """

    name: str
    path: Path
    revision: str


def locate(
    name: str, *, revision: str | None = None, local_files_only: bool = False
) -> Checkpoint:
    """The checkpoint called `name`, fetched from the Hub where it is not on this machine.

    `name`: a local folder, a llama2.c `.bin` file, "bundled", "bundled:NAME" or a Hub id.
    What exists on disk wins over a Hub id of the same name. Of a Hub id only what is
    needed is fetched, and never a pickle; `local_files_only` (or HF_HUB_OFFLINE=1) keeps
    to what the Hub's cache holds.

    Raises BadCheckpoint where there is nothing of that name, BadArgument for a `revision`
    of something that has none.
    """
    if name == "bundled" or name.startswith("bundled:"):
        path = _bundled(name)
        return _local(f"bundled:{path.name}", path, revision)
    path = at_home(name)
    try:
        there = path.exists()
    except OSError as error:  # a name longer than any file's, a folder that may not be read
        raise BadCheckpoint(
            f"There is no checkpoint to be read at {name:.80}.",
            seen=error.strerror or str(error),
        ) from error
    if there:
        return _local(name, path, revision)
    if not HUB_ID.fullmatch(name) or path.suffix in PICKLE_SUFFIXES | {".safetensors"}:
        raise BadCheckpoint(
            f"There is no checkpoint at {name}.",
            seen="no file or folder of that name, and it cannot be a Hub id",
            attempt="pass a folder with config.json and model.safetensors, or a Hub id",
        )
    folder = _from_hub(name, revision, local_files_only)
    return Checkpoint(name=name, path=folder, revision=folder.name)


def read_config(folder: Path) -> dict[str, object]:
    """`config.json` of a checkpoint's folder, as it was written.

    Raises BadCheckpoint where the file is missing, not JSON, or names no model type; also
    where the folder holds a pipe or a device, which never ends when it is read.
    """
    for entry in folder.iterdir():
        if entry.exists() and not (entry.is_file() or entry.is_dir()):
            raise BadCheckpoint(f"{entry} is a pipe or a device, not a file.")
    path = folder / "config.json"
    if not path.is_file():
        if (folder / "adapter_config.json").is_file():
            raise BadCheckpoint(
                f"{folder} holds an adapter, not a model.",
                seen="adapter_config.json and no config.json",
                attempt="merge it into its base model (peft: merge_and_unload) and save that",
            )
        if within := [name for name in MODELS_WITHIN if any(folder.glob(name))]:
            raise BadCheckpoint(
                f"{folder} is no model: it holds a study, or a run that is not finished.",
                attempt=f"one of the folders {folder / within[0]}",
            )
        raise BadCheckpoint(
            f"{folder} has no config.json.",
            seen=f"the folder holds {_names(folder)}",
            attempt="pass the folder that save_pretrained wrote; a llama2.c checkpoint is "
            "passed as its .bin file",
        )
    if (folder / "adapter_config.json").exists():
        raise BadCheckpoint(
            f"{folder} holds an adapter beside its model.",
            means="transformers adds it to the weights where peft is installed, elsewhere not",
            attempt="merge it (peft: merge_and_unload) and save that, or move "
            "adapter_config.json away",
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise BadCheckpoint(f"{path} is not readable JSON.", seen=str(error)) from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise BadCheckpoint(
            f"{path} does not say what model it belongs to.",
            seen='no "model_type" in it that is a name',
            attempt="use the config.json that save_pretrained wrote for this model",
        )
    classes = config.get("architectures")
    named = isinstance(classes, list) and all(isinstance(name, str) for name in classes)
    if classes is not None and not named:
        raise BadCheckpoint(
            f'"architectures" in {path} is no list of names.', seen=repr(classes)[:100]
        )
    return config


def weight_files(folder: Path, *, config: dict[str, object] | None = None) -> list[Path]:
    """The safetensors files of a checkpoint, each opened once to see that it is whole.

    `config` may name another weight file (`transformers_weights`). Raises BadCheckpoint for
    a missing shard, a truncated or damaged file, and a checkpoint in another format.
    """
    names = ["model.safetensors", "model.safetensors.index.json"]
    if config is not None and "transformers_weights" in config:
        names = [_within(folder / "config.json", config["transformers_weights"])]
    found = [folder / name for name in names if (folder / name).is_file()]
    if not found:
        raise _not_safetensors(folder)
    files = [found[0]] if found[0].suffix == ".safetensors" else _shards(found[0])
    for file in files:
        _check_safetensors(file)
    return files


def count_numbers(files: list[Path]) -> list[int]:
    """How many numbers each tensor of safetensors files holds, by their headers."""
    counts = []
    for file in files:
        with safe_open(file, framework="pt") as opened:
            shapes = (opened.get_slice(name).get_shape() for name in opened.keys())  # noqa: SIM118 (no dict)
            counts += [math.prod(shape) for shape in shapes]
    return counts


def fingerprint(path: str | Path) -> str:
    """sha256, in hex, of a file or of the safetensors files that a checkpoint is loaded from.

    Of one file it is what `sha256sum` gives; of several, that of the listing that
    `sha256sum FILE...` prints. Others in the folder of a checkpoint do not count. Raises
    BadCheckpoint for a folder that is none.
    """
    path = Path(path)
    files = weight_files(path, config=read_config(path)) if path.is_dir() else [path]
    digests = []
    for file in files:
        with file.open("rb") as stream:
            digests.append(hashlib.file_digest(stream, "sha256").hexdigest())
    if len(files) == 1:
        return digests[0]
    names = [str(file.relative_to(path)) for file in files]
    listing = "".join(f"{d}  {name}\n" for d, name in zip(digests, names, strict=True))
    return hashlib.sha256(listing.encode("utf-8", "surrogateescape")).hexdigest()


def pickle_refused(path: Path) -> BadCheckpoint:
    """The error for a checkpoint that only unpickling would read."""
    return BadCheckpoint(
        f"{path} is a pickle, which ropelens never loads.",
        means="reading a pickle can run any code that its author put in",
        attempt="if you trust the author, convert once: AutoModelForCausalLM.from_pretrained("
        "FOLDER, use_safetensors=False).save_pretrained(NEW_FOLDER), then pass NEW_FOLDER",
    )


def _local(name: str, path: Path, revision: str | None) -> Checkpoint:
    if revision is not None:
        raise BadArgument(
            f"{name} has no revision {revision}.",
            means="only models on the Hub have revisions; this one is on this machine",
            attempt="leave the revision out",
        )
    check_utf8(path)
    return Checkpoint(name=name, path=path, revision="")


def _bundled(name: str) -> Path:
    from ropelens.models.bundled import (
        bundled_path,  # late: only this name needs what is bundled
    )

    _, colon, which = name.partition(":")
    return Path(bundled_path(which) if colon else bundled_path())


def _from_hub(name: str, revision: str | None, local_files_only: bool) -> Path:
    try:
        return Path(
            snapshot_download(
                name,
                revision=revision,
                local_files_only=local_files_only,
                allow_patterns=HUB_FILES,
                ignore_patterns=HUB_FILES_LEFT_OUT,
            )
        )
    except HFValidationError as error:
        reason: Exception = error
    except OSError as error:  # every error of the Hub and of the network is one
        # The cache may hold all that a model needs without holding every listed file.
        cached = try_to_load_from_cache(name, "config.json", revision=revision)
        if isinstance(cached, str):
            return Path(cached).parent
        reason = error
    where = f"{name} at revision {revision}" if revision else name
    raise BadCheckpoint(
        f"There is no checkpoint called {where}.",
        seen="no folder of that name here; " + words_of(reason),
        attempt="check the spelling; a model of the Hub that is not in the cache needs the "
        "network (and HF_HUB_OFFLINE unset), a gated one `hf auth login`",
    ) from reason


def _shards(index: Path) -> list[Path]:
    try:
        written = json.loads(index.read_text(encoding="utf-8"))
        shards = sorted({_within(index, shard) for shard in written["weight_map"].values()})
        missing = [shard for shard in shards if not (index.parent / shard).is_file()]
    except UNREADABLE as error:
        raise _no_index(index, words_of(error, kind=True)) from error
    if not shards:
        raise _no_index(index, "it names no file")
    if missing:
        raise BadCheckpoint(
            f"{len(missing)} of {len(shards)} weight files are missing from {index.parent}.",
            seen=f"{index.name} names {missing[0]}, which is not there",
            attempt="fetch or copy the checkpoint again",
        )
    return [index.parent / shard for shard in shards]


def _no_index(index: Path, seen: str) -> BadCheckpoint:
    return BadCheckpoint(f"{index} is not an index of safetensors files.", seen=seen)


def _within(by: Path, name: object) -> str:
    """`name`, a weight file that the file `by` names; refused outside the folder of `by`."""
    if not isinstance(name, str) or not name:
        raise BadCheckpoint(f"{by} names a weight file by no name.", seen=repr(name)[:100])
    path = PurePath(name)
    if path.is_absolute() or ".." in path.parts:
        raise BadCheckpoint(
            f"{by} names weights outside its folder, which are not read.",
            seen=name[:200],
            attempt="put the file beside it",
        )
    return name


def _check_safetensors(file: Path) -> None:
    with file.open("rb") as stream:
        if stream.read(len(LFS_POINTER)) == LFS_POINTER:
            raise BadCheckpoint(
                f"{file} is a pointer of git-lfs, not the weights.",
                attempt="run `git lfs pull` in its folder",
            )
    try:
        with safe_open(file, framework="pt"):
            return
    except SafetensorError as error:
        raise BadCheckpoint(
            f"{file} is truncated or damaged.",
            seen=f"{file.stat().st_size:,} bytes; {error}",
            attempt="fetch or copy the checkpoint again",
        ) from error


def _not_safetensors(folder: Path) -> BadCheckpoint:
    pickles = sorted(p for p in folder.iterdir() if p.suffix in PICKLE_SUFFIXES)
    if pickles:
        return pickle_refused(pickles[0])
    return BadCheckpoint(
        f"{folder} has no weights that ropelens reads.",
        seen=f"no model.safetensors and no index of shards; it holds {_names(folder)}",
        attempt="save the model with save_pretrained, which writes safetensors",
    )


def _names(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir())
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "") if names else "nothing"
