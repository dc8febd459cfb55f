"""Folders from which transformers loads no model: the cause that is seen, and a remedy."""

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ropelens.errors import BadCheckpoint

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
PICKLE = "pytorch_model.bin"
STATES = re.compile(r"(optimizer|scheduler|scaler|rng_state.*|training_args)\.\w+")
"""Pickles without weights, which a training saves next to them."""

NO_PICKLES = "ropelens does not read pickles (.bin, .pt), because they can run any code"
SAVE_AGAIN = "CLASS.from_pretrained(OLD).save_pretrained(NEW_FOLDER)"
SHOWN = 3  # names in a message


def folder_without_weights(folder: Path) -> BadCheckpoint:
    """The error for a folder that has neither `SINGLE` nor `INDEX`."""
    fault = _first_fault(folder, (*PARTS, *OTHER_FILES, _several_models))
    if fault is not None:
        return fault
    what = f"{folder} has no weights."
    seen = f"neither {SINGLE} nor {INDEX}"
    return BadCheckpoint(what, seen=seen, hint="download all files of the model")


def folder_without_config(folder: Path) -> BadCheckpoint | None:
    """The error for a folder without `CONFIG`, if it shows where the model is."""
    return _first_fault(folder, (*PARTS, _several_gguf_files, _several_models))


FindFault = Callable[[Path], BadCheckpoint | None]


def _first_fault(folder: Path, finders: tuple[FindFault, ...]) -> BadCheckpoint | None:
    for find in finders:
        fault = find(folder)
        if fault is not None:
            return fault
    return None


def _hub_cache(folder: Path) -> BadCheckpoint | None:
    """A folder of the cache of the Hub, above the files of a commit."""
    models = sorted(folder.glob("models--*"))
    if models:
        names = _first_names([_hub_id(model) for model in models])
        what = f"{folder} is the cache of the Hub, and no model."
        return BadCheckpoint(what, seen=f"the models {names}", hint=_hub_id(models[0]))
    model = folder.parent if folder.name == "snapshots" else folder
    if not model.name.startswith("models--"):
        return None
    what = (
        f"{folder} is a folder of the cache of the Hub, above the files of the model."
    )
    snapshot = _snapshot(model)
    if snapshot is None:
        return BadCheckpoint(what, seen="no config.json in it", hint=_hub_id(model))
    hint = f"{snapshot}, or {_hub_id(model)}"
    return BadCheckpoint(what, hint=hint)


def _hub_id(model: Path) -> str:
    """The id of a model, such as acme/tiny for the folder models--acme--tiny."""
    return model.name.removeprefix("models--").replace("--", "/")


def _snapshot(model: Path) -> Path | None:
    """The files in the cache of the branch main, or otherwise of the newest commit."""
    main = model / "refs" / "main"
    if main.is_file():
        commit = model / "snapshots" / main.read_text("utf-8").strip()
        if (commit / CONFIG).exists():
            return commit
    configs = list(model.glob(f"snapshots/*/{CONFIG}"))
    if not configs:
        return None
    newest = max(configs, key=lambda config: config.parent.stat().st_mtime)
    return newest.parent


def _unfinished_download(folder: Path) -> BadCheckpoint | None:
    """Links to files that do not exist, or parts of a download."""
    for file in sorted(folder.iterdir()):
        if file.is_symlink() and not file.exists():
            what = f"{file} is a link to a file that does not exist."
            seen = f"the link to {file.readlink()}"
            return BadCheckpoint(what, seen=seen, hint="download the model again")
    parts = sorted(folder.glob(".cache/huggingface/download/**/*.incomplete"))
    if parts:
        what = f"The download into {folder} did not finish."
        return BadCheckpoint(what, seen=str(parts[0]), hint="the same download again")
    return None


def _training_checkpoints(folder: Path) -> BadCheckpoint | None:
    """The folder of a training, whose checkpoints are folders such as checkpoint-500."""
    by_step: dict[int, Path] = {}
    for path in folder.glob("checkpoint-*"):
        match = re.fullmatch(r"checkpoint-(\d+)", path.name)
        if match is not None and path.is_dir():
            by_step[int(match[1])] = path
    if not by_step:
        return None
    names = [by_step[step].name for step in sorted(by_step)]
    newest = by_step[max(by_step)]
    what = f"{folder} has checkpoints of a training, but no model."
    seen = _first_names(names, last=True)
    return BadCheckpoint(what, seen=seen, hint=f"{newest}, the newest checkpoint")


def _deepspeed(folder: Path) -> BadCheckpoint | None:
    """A checkpoint of DeepSpeed, in which each process saved a part."""
    patterns = ("*_model_states.pt", "global_step*/*_model_states.pt")
    parts = _files_of(folder, patterns)
    script = folder / "zero_to_fp32.py"
    if not parts and not script.is_file():
        return None
    place = folder.parent if folder.name.startswith("global_step") else folder
    what = f"{folder} has the weights in the parts that processes of DeepSpeed saved."
    seen = _first_names([part.name for part in parts] or [script.name])
    hint = (
        f"python zero_to_fp32.py . . --safe_serialization in {place}, where deepspeed "
    )
    hint += f"is installed; then {_with_config(place)}"
    return BadCheckpoint(what, seen=seen, hint=hint)


def _fsdp(folder: Path) -> BadCheckpoint | None:
    """A distributed checkpoint of torch, such as FSDP writes with sharded states."""
    parts = _files_of(folder, ("*.distcp", "*/*.distcp"))
    if not parts:
        return None
    folders = sorted({part.parent for part in parts})
    of_model = [path for path in folders if "optim" not in path.name] or folders
    source = of_model[0]
    place = folder
    if source == folder and (folder.parent / CONFIG).is_file():
        place = folder.parent
    what = f"{folder} has the weights in the parts that processes of FSDP saved."
    seen = _first_names([part.name for part in parts])
    command = shlex.join(["accelerate", "merge-weights", str(source), str(place)])
    hint = f"{command}; then {_with_config(place)}"
    return BadCheckpoint(what, seen=seen, hint=hint)


def _with_config(folder: Path) -> str:
    """The folder to pass after weights were written to `folder`."""
    if (folder / CONFIG).is_file():
        return str(folder)
    return (
        f"{folder}, with config.json and the tokenizer of the model before its training"
    )


def _adapter_alone(folder: Path) -> BadCheckpoint | None:
    """Weights of an adapter without its configuration."""
    if (folder / "adapter_config.json").is_file():
        return None
    adapters = _files_of(folder, ("adapter_model.*", "adapters.*"))
    if not adapters:
        return None
    what = f"{folder} has an adapter without adapter_config.json."
    hint = "the folder that save_pretrained of peft wrote, with both files"
    return BadCheckpoint(what, seen=adapters[0].name, hint=hint)


def _pickles(folder: Path) -> BadCheckpoint | None:
    """Weights in pickles."""
    pickles = []
    for file in _files_of(folder, ("*.bin", "*.pt", "*.pth", "*.ckpt")):
        if not STATES.fullmatch(file.name):
            pickles.append(file)
    if not pickles:
        return None
    hint = f"if you trust it, {SAVE_AGAIN}"
    if not _files_of(folder, (PICKLE, f"{PICKLE}.index.json")):
        # from_pretrained finds only this name.
        hint = (
            f"if you trust it, rename {pickles[0].name} to {PICKLE}; then {SAVE_AGAIN}"
        )
    what = f"{folder} has no {SINGLE}."
    seen = _first_names([file.name for file in pickles])
    return BadCheckpoint(what, seen=seen, means=NO_PICKLES, hint=hint)


def _several_models(folder: Path) -> BadCheckpoint | None:
    """A folder above folders with models."""
    models = [config.parent for config in sorted(folder.glob(f"*/{CONFIG}"))]
    if not models:
        return None
    what = f"{folder} has no model, but folders with models."
    seen = _first_names([model.name for model in models])
    return BadCheckpoint(
        what, seen=seen, hint=f"a folder with a model, such as {models[0]}"
    )


def _several_gguf_files(folder: Path) -> BadCheckpoint | None:
    """A folder of several GGUF files, such as the quantizations of a model, or its parts."""
    files = _files_of(folder, ("*.gguf",))
    if not files:
        return None
    what = f"{folder} has several GGUF files."
    seen = _first_names([file.name for file in files])
    return BadCheckpoint(what, seen=seen, hint=f"one of them, such as {files[0]}")


@dataclass(frozen=True)
class UnreadFiles:
    """Files that a folder without weights for transformers may have, the error and a remedy."""

    patterns: tuple[str, ...]
    fault: str
    hint: str

    def __call__(self, folder: Path) -> BadCheckpoint | None:
        files = _files_of(folder, self.patterns)
        if not files:
            return None
        seen = _first_names([file.name for file in files])
        what = f"{folder} {self.fault}."
        return BadCheckpoint(what, seen=seen, hint=self.hint)


PARTS: tuple[FindFault, ...] = (
    _hub_cache,
    _unfinished_download,
    _training_checkpoints,
    _deepspeed,
    _fsdp,
    _adapter_alone,
)
OTHER_FILES: tuple[FindFault, ...] = (
    UnreadFiles(
        patterns=("*-of-*.safetensors",),
        fault=f"has shards of weights, but no index {INDEX}",
        hint="download it",
    ),
    UnreadFiles(
        patterns=("*.safetensors",),
        fault=f"has weights, but neither {SINGLE} nor an index {INDEX}",
        hint="the files for transformers, which most repositories also have",
    ),
    UnreadFiles(
        patterns=("*.gguf",),
        fault=f"has no {SINGLE}",
        hint="one of its GGUF files instead of the folder",
    ),
    _pickles,
    UnreadFiles(
        patterns=("*.h5", "*.msgpack", "*.onnx"),
        fault="has weights only for TensorFlow, JAX or ONNX",
        hint="the files for PyTorch, which most repositories also have",
    ),
)


def _files_of(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    """The files that fit one of the patterns, in order."""
    files: set[Path] = set()
    for pattern in patterns:
        files.update(path for path in folder.glob(pattern) if path.is_file())
    return sorted(files)


def _first_names(names: list[str], *, last: bool = False) -> str:
    """The first `SHOWN` names, or the last."""
    if len(names) <= SHOWN:
        return ", ".join(names)
    if last:
        return f"..., {', '.join(names[-SHOWN:])}"
    return f"{', '.join(names[:SHOWN])}, ..."
