"""Identity of a model: two models with the same identity compute the same function."""

import hashlib
import json
from collections.abc import Iterator

import torch
from accelerate.utils import align_module_device
from torch import Tensor, nn

from ropelens.checkpoints.files import loaded_files, sha256_of
from ropelens.checkpoints.load import Opened

SETTINGS = (
    "_active_adapter",
    "_disable_adapters",
    "is_causal",
    "merged_adapters",
    "scaling",
)
"""Attributes of modules that change outputs, next to tensors and floats."""
NOT_USED = (
    "_name_or_path",
    "_commit_hash",
    "transformers_version",
)  # in a configuration


def identity(model: Opened | nn.Module) -> str:
    """Hash of what determines the outputs of a model.

    For a checkpoint, this is "files:" and a hash of the files that `load` reads, the dtype and
    the quantization. For a live model, it is "live:" and a hash of the classes of its modules,
    its configuration, adapters, parameters and buffers, but not of hooks.
    """
    if isinstance(model, Opened):
        files = loaded_files(model.checkpoint, model.loading)
        facts = sorted((file.name, sha256_of(file)) for file in files)
        facts += [
            ("dtype", str(model.torch_dtype)),
            ("quantize", str(model.loading.quantize)),
        ]
        kind = "files"
    else:
        kind, facts = "live", [*_live_facts(model)]
    listing = "".join(f"{fact}  {name}\n" for name, fact in facts)
    return f"{kind}:{hashlib.sha256(listing.encode('utf-8', 'backslashreplace')).hexdigest()}"


@torch.no_grad()
def _live_facts(model: nn.Module) -> Iterator[tuple[str, str]]:
    config = json.loads(model.config.to_json_string(use_diff=False))  # type: ignore[operator,union-attr]
    used = {name: value for name, value in config.items() if name not in NOT_USED}
    yield "config", json.dumps(used, sort_keys=True)
    for path, module in model.named_modules():
        yield path, f"{type(module).__module__}.{type(module).__qualname__}"
        for name, value in sorted(vars(module).items()):
            if isinstance(value, float) or name in SETTINGS:
                yield f"{path}.{name}", str(value)
        with align_module_device(
            module
        ):  # offloaded weights are read one module at a time
            tensors = [
                *module.named_parameters("", False),
                *module.named_buffers("", False),
            ]
            for name, tensor in tensors:
                yield f"{path}.{name}", checksum(tensor)


def checksum(tensor: Tensor) -> str:
    """SHA-256 of the dtype, the shape and all bits of a tensor."""
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    parts = dict(
        vars(tensor)
    )  # bitsandbytes stores scales as attributes of a parameter
    if (state := parts.pop("quant_state", None)) is not None:
        parts |= state.as_dict(packed=True)
    if hasattr(tensor, "__tensor_flatten__"):  # torchao stores numbers and scales
        parts |= {
            name: getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]
        }
    for name, part in sorted(parts.items()):
        if isinstance(part, Tensor):
            digest.update(f"{name} {checksum(part)}".encode())
    if hasattr(tensor, "__tensor_flatten__") or not tensor.numel():
        return digest.hexdigest()
    numbers = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    digest.update(numbers.numpy().tobytes())
    return digest.hexdigest()
