"""Finding a checkpoint by its name: a folder, a GGUF file, a bundled one, or on the Hub."""

from dataclasses import dataclass, replace
from pathlib import Path

from huggingface_hub import snapshot_download

from ropelens.checkpoints.files import read_settings
from ropelens.checkpoints.load_options import Loading
from ropelens.checkpoints.local import is_bundled, local_path
from ropelens.checkpoints.unread_folders import INDEX, SINGLE
from ropelens.errors import BadArgument, explained

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

WHERE = (
    "a folder, a GGUF file (pass text with --text), or a Hub id; downloads need the "
    "network, with HF_HUB_OFFLINE unset, and `hf auth login` for a gated model"
)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in a folder or GGUF file."""

    name: str
    path: Path
    revision: str  # the commit if it is from the Hub
    adapter: Path | None = None  # folder of an adapter that is added to the model


def locate(name: str, loading: Loading) -> Checkpoint:
    """Find the checkpoint `name`; an adapter without a model names its model."""
    checkpoint = _find(name, loading)
    folder = checkpoint.path
    adapter_config = folder / "adapter_config.json"
    if not adapter_config.is_file():
        return checkpoint
    if (folder / SINGLE).is_file() or (folder / INDEX).is_file():
        return replace(checkpoint, adapter=folder)
    what = f"The adapter in {folder} cannot be read."
    with explained(what, "download its files again"):
        base = str(read_settings(adapter_config)["base_model_name_or_path"])
    without_revision = replace(loading, revision=None)
    model = _find(base, without_revision, role=f", the model of {folder}")
    return replace(checkpoint, path=model.path, adapter=folder)


def _find(name: str, loading: Loading, role: str = "") -> Checkpoint:
    """Find a checkpoint without adapters; the error states its `role`."""
    path = local_path(name)
    if path is None:
        return _fetch(name, loading.revision, role)
    if loading.revision is not None:
        what = f"{name} has no revision {loading.revision}, because it is a local checkpoint."
        raise BadArgument(what, hint="no revision, or the id of a model on the Hub")
    shown = f"bundled:{path.name}" if is_bundled(name) else name
    return Checkpoint(name=shown, path=path, revision="")


def _fetch(name: str, revision: str | None, role: str) -> Checkpoint:
    """Download a checkpoint of the Hub, except the files that are in the cache."""
    shown = f"{name:.80} at revision {revision}" if revision else f"{name:.80}"
    hint = f"base_model_name_or_path in adapter_config.json: {WHERE}" if role else WHERE
    with explained(f"No checkpoint and no folder is called {shown}{role}.", hint):
        folder = snapshot_download(
            name,
            revision=revision,
            allow_patterns=FETCHED,
            ignore_patterns=NOT_FETCHED,
        )
    return Checkpoint(name=name, path=Path(folder), revision=Path(folder).name)
