"""Identity of a model: two models with the same identity compute the same function."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate.utils import align_module_device
from torch import Tensor, nn

from ropelens.checkpoints.files import TOKENIZER_FILES, sha256_of, weight_files
from ropelens.checkpoints.load import Opened

READ_FILES = (
    "config.json",
    "*.safetensors.index.json",
    "adapter_*",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    *TOKENIZER_FILES,
)
"""Files that `load` reads next to the weights, without templates of chats."""
SETTINGS = (
    "_active_adapter",
    "_disable_adapters",
    "is_causal",
    "merged_adapters",
    "scaling",
)
"""Attributes of modules that change outputs, next to tensors and floats."""
NOT_USED = ("_name_or_path", "_commit_hash", "transformers_version")
"""Keys of a configuration that do not change outputs."""


@dataclass(frozen=True, order=True)
class Property:
    """One property that changes the outputs of a model, such as a file and its hash."""

    name: str
    value: str


def identity(model: Opened | nn.Module) -> str:
    """Hash of what determines the outputs of a model.

    For a checkpoint, this is "files:" and a hash of the files that `load` reads, the dtype and
    the quantization. For a live model, it is "live:" and a hash of the classes of its modules,
    its configuration, adapters, parameters and buffers, but not of hooks.
    """
    if isinstance(model, Opened):
        return f"files:{_hash_of(_file_properties(model))}"
    return f"live:{_hash_of(_live_properties(model))}"


def _hash_of(properties: Iterator[Property]) -> str:
    lines = [f"{item.value}  {item.name}\n" for item in properties]
    listing = "".join(lines).encode("utf-8", "backslashreplace")
    return hashlib.sha256(listing).hexdigest()


def _file_properties(opened: Opened) -> Iterator[Property]:
    hashes = [Property(file.name, sha256_of(file)) for file in _read_files(opened)]
    yield from sorted(hashes)
    yield Property("dtype", str(opened.torch_dtype))
    yield Property("quantize", str(opened.loading.quantize))


def _read_files(opened: Opened) -> set[Path]:
    """The files that `load` reads, except notes for generating text and templates of chats."""
    patterns = [*READ_FILES]
    if opened.loading.trust_remote_code:
        patterns.append("*.py")
    checkpoint = opened.checkpoint
    files = set(weight_files(checkpoint.path))
    for folder in (checkpoint.path, checkpoint.adapter):
        if folder is None or not folder.is_dir():
            continue
        for pattern in patterns:
            files.update(file for file in folder.glob(pattern) if file.is_file())
    return files


@torch.no_grad()
def _live_properties(model: nn.Module) -> Iterator[Property]:
    config = json.loads(model.config.to_json_string(use_diff=False))  # type: ignore[operator,union-attr]
    used = {name: value for name, value in config.items() if name not in NOT_USED}
    yield Property("config", json.dumps(used, sort_keys=True))
    for path, module in model.named_modules():
        yield from module_properties(path, module)
        with align_module_device(module):  # offloaded weights are read one by one
            parameters = module.named_parameters(recurse=False)
            for name, tensor in [*parameters, *module.named_buffers(recurse=False)]:
                yield Property(f"{path}.{name}", checksum(tensor))


def module_properties(path: str, module: nn.Module) -> Iterator[Property]:
    """The class of the module called `path`, and its attributes that change outputs."""
    cls = type(module)
    yield Property(path, f"{cls.__module__}.{cls.__qualname__}")
    for name, value in sorted(vars(module).items()):
        if isinstance(value, float) or name in SETTINGS:
            yield Property(f"{path}.{name}", str(value))


def checksum(tensor: Tensor) -> str:
    """SHA-256 of the dtype, the shape and all bits of a tensor."""
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    for name, part in sorted(_parts_of(tensor).items()):
        if isinstance(part, Tensor):
            digest.update(f"{name} {checksum(part)}".encode())
    if hasattr(tensor, "__tensor_flatten__") or not tensor.numel():
        return digest.hexdigest()
    numbers = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    digest.update(numbers.numpy().tobytes())
    return digest.hexdigest()


def _parts_of(tensor: Tensor) -> dict[str, object]:
    """What a quantized tensor consists of, such as numbers and scales."""
    parts = dict(vars(tensor))  # bitsandbytes stores scales as attributes
    state = parts.pop("quant_state", None)
    if state is not None:
        parts.update(state.as_dict(packed=True))
    if hasattr(tensor, "__tensor_flatten__"):  # torchao
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            parts[name] = getattr(tensor, name)
    return parts
