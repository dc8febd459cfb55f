"""`load`: the name of a checkpoint becomes a model that can be measured, or a clear error.

What transformers loads without a word is refused: weights that it would fill with random
numbers, models whose tokens see what comes after them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from transformers import (
    BitsAndBytesConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TorchAoConfig,
)

from ropelens.checkpoints.files import (
    Checkpoint,
    auto_class,
    locate,
    quiet_transformers,
    read_config,
    read_tokenizer,
    source_of,
    weight_files,
)
from ropelens.checkpoints.load_options import Dtype, Loading, Quantization
from ropelens.checkpoints.row_order import row_order
from ropelens.errors import BadArgument, BadCheckpoint, UnsupportedModel, explained, public
from ropelens.runtime.devices import device_named, device_of, free_bytes, room_for_weights


@public
def load(
    name: str | Path,
    *,
    dtype: Dtype = "float32",
    device: str = "auto",
    device_map: Literal["auto"] | None = None,
    quantize: Quantization | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """A causal language model and its tokenizer, ready to be measured.

    `name` is a local folder, a GGUF file, "bundled", "bundled:NAME", or a Hub id at `revision`.
    Only safetensors and GGUF are read, never a pickle. The tokenizer is None where the
    checkpoint has none; the model then takes token ids, not text. The model is in evaluation
    mode, and its weights take no gradients.

    `dtype` is float32 by default on every device, so that a measurement does not depend on
    the machine; "auto" is bfloat16 on a GPU that computes in it, else float32. `device` "auto"
    is CUDA where there is one. `device_map` "auto" in its place spreads a large model over the
    GPUs, then main memory, then disk. `quantize` reads weights into fewer bits: "int8"
    (torchao), "bnb-int8" or "bnb-nf4" (bitsandbytes).

    Raises BadCheckpoint for files or weights that are missing or broken, UnsupportedModel
    for a model that is not a causal language model, BadArgument for the other arguments.
    Warns where the checkpoint holds more than the model uses.
    """
    loading = Loading(
        dtype=dtype,
        device=device,
        device_map=device_map,
        quantize=quantize,
        revision=revision,
        trust_remote_code=trust_remote_code,
    )
    opened = open_checkpoint(name, loading)
    return opened.read(), opened.tokenizer


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A checkpoint before its weights are read; `parameters` numbers in `file_bytes`."""

    checkpoint: Checkpoint
    loading: Loading
    devices: list[torch.device]
    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase | None
    parameters: int
    file_bytes: int

    @property
    def weight_bytes(self) -> int:
        """About how many bytes the weights will take."""
        if self.loading.quantize is not None:
            return self.parameters // (2 if self.loading.quantize == "bnb-nf4" else 1)
        size = self.parameters * self.torch_dtype.itemsize
        if self.checkpoint.path.is_file():
            return 2 * size  # transformers holds the weights twice while it reads them
        return self.file_bytes if _is_quantized(self.config) else size

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the model."""
        if self.loading.dtype == "auto":
            on_gpu = self.devices[0].type == "cuda" and torch.cuda.is_bf16_supported(False)
            return torch.bfloat16 if on_gpu else torch.float32
        dtype: torch.dtype = getattr(torch, self.loading.dtype)
        return dtype

    def read(self) -> PreTrainedModel:
        """The model, checked; raises as `load` does."""
        size, free = self.weight_bytes, free_bytes(self.devices[0])
        if self.loading.device_map is None and size > free:
            raise BadArgument(
                f"{self.checkpoint.name} does not fit into the memory of {self.devices[0]}.",
                seen=f"{size / 1e9:.1f} GB of weights, {free / 1e9:.1f} GB free",
                hint="dtype bfloat16, another device, or device map auto",
            )
        quantized = _is_quantized(self.config)  # which reading may change
        with quiet_transformers():
            model = self._from_pretrained()
            if quantized and not _is_quantized(model.config):  # some weights are bfloat16 still
                for parameter in model.parameters():
                    parameter.data = parameter.data.to(self.torch_dtype)
            model.config._name_or_path = self.checkpoint.name
            model.eval().requires_grad_(False)
            _check_causal(model)
        if self.checkpoint.path.is_file() and self.tokenizer is not None:
            wrong, words = row_order(model, self.tokenizer) or (False, "")
            if wrong:
                warnings.warn(words, stacklevel=4)  # who called load
        return model

    def _from_pretrained(self) -> PreTrainedModel:
        loading, path = self.loading, self.checkpoint.path
        options = source_of(path, loading)
        options["device_map"] = loading.device_map or {"": self.devices[0]}
        if path.is_dir():
            options["use_safetensors"] = True
        if loading.device_map is not None:
            options["max_memory"] = room_for_weights(self.devices)
        with explained(f"transformers cannot load the model in {path}."):
            if not (path.is_file() or _is_quantized(self.config)):
                _require_floats(weight_files(path))
            if loading.quantize is not None:
                options["quantization_config"] = _quantization_config(loading.quantize)
            model, weights = auto_class(self.config).from_pretrained(
                config=self.config,
                dtype=self.torch_dtype,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # _check_weights names them
                **options,
            )
        _check_weights(type(model).__name__, weights)
        if path.is_file():  # in floats by now, and to be saved so
            del model.config.quantization_config, model.hf_quantizer
        return model


def open_checkpoint(name: str | Path, loading: Loading) -> Opened:
    """The checkpoint that `load` loads, before its weights; raises as `load` does."""
    devices = [device_named(loading.device)]  # tried; the first takes the tokens
    if loading.device_map is not None:
        gpus = range(torch.cuda.device_count())
        devices = [torch.device("cuda", gpu) for gpu in gpus] or [torch.device("cpu")]
    with quiet_transformers():
        checkpoint = locate(str(name), loading)
        config, parameters = read_config(checkpoint.path, loading)
        files = weight_files(checkpoint.path)
        return Opened(
            checkpoint=checkpoint,
            loading=loading,
            devices=devices,
            config=config,
            tokenizer=read_tokenizer(checkpoint.path, loading),
            parameters=parameters,
            file_bytes=sum(file.stat().st_size for file in files),
        )


def _is_quantized(config: PreTrainedConfig) -> bool:
    return bool(config.to_dict().get("quantization_config"))


def _quantization_config(name: Quantization) -> Any:
    """What transformers takes to quantize weights as it reads them."""
    if name != "int8":
        bits = {"load_in_8bit": True} if name == "bnb-int8" else {"load_in_4bit": True}
        return BitsAndBytesConfig(**bits, bnb_4bit_quant_type="nf4")
    from torchao.quantization import Int8WeightOnlyConfig

    return TorchAoConfig(Int8WeightOnlyConfig())


def _require_floats(files: Iterable[Path]) -> None:
    """Raise ValueError for integers, whose bits transformers would read as weights."""
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                dtype = tensors.get_slice(name).get_dtype()
                if name.endswith(".weight") and dtype.startswith(("I", "U")):
                    raise ValueError(f"{name} is {dtype}; config.json states no quantization")


def _check_weights(name: str, weights: dict[str, set]) -> None:
    """Raise BadCheckpoint for weights that the checkpoint does not give, warn of any left over.

    `weights` is what from_pretrained(output_loading_info=True) says.
    """
    missing = weights["missing_keys"] | {name for name, *_ in weights["mismatched_keys"]}
    if missing:
        raise BadCheckpoint(
            f"The checkpoint lacks weights of {name}, which would be random numbers.",
            seen=f"{len(missing)} missing or of another shape: {_some(missing)}",
        )
    if weights["unexpected_keys"]:
        warnings.warn(
            f"{name} has no place for some tensors of the checkpoint and leaves them out: "
            f"{len(weights['unexpected_keys'])}, {_some(weights['unexpected_keys'])}",
            stacklevel=6,  # who called load
        )


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:3]) + ", ..." * (len(ordered) > 3)


@torch.no_grad()
def _check_causal(model: PreTrainedModel) -> None:
    """Raise UnsupportedModel where a token changes what is predicted before it.

    Measured, because no config says it for all families. Changes are held against that of the
    last token's logits. Raises BadCheckpoint where the model does not run, or its logits are
    not finite.
    """
    length, vocabulary = 8, model.config.get_text_config().vocab_size
    tokens = torch.arange(length, device=device_of(model)) % vocabulary
    pair = torch.stack([tokens, tokens])
    pair[1, -1] = (pair[1, -1] + 1) % vocabulary
    with explained(
        f"{type(model).__name__} does not run in {model.dtype}, on tokens alone.",
        hint="another dtype (float32 or bfloat16), or another checkpoint",
    ):
        logits = model(input_ids=pair, use_cache=False).logits
        if not torch.isfinite(logits).all():
            raise ValueError("its logits are NaN or infinite")
    change = (logits[0] - logits[1]).abs().amax(-1)
    tolerance = max(1e-4, 4 * torch.finfo(model.dtype).eps)
    before, own = float(change[:-1].max()), float(change[-1])
    if before > tolerance * own:
        raise UnsupportedModel(
            f"{type(model).__name__} is not a causal language model.",
            seen=f"another last token changes the logits before it by {before:.2g}, its own by "
            f"{own:.2g}",
            hint="a decoder-only model, such as a Llama",
        )
