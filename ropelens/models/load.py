"""`load`: the name of a checkpoint becomes a model that can be measured, or a clear error."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ropelens.errors import BadArgument, BadCheckpoint, public, words_of
from ropelens.models import checks
from ropelens.models.checkpoint import (
    Checkpoint,
    count_numbers,
    locate,
    quiet_transformers,
    read_config,
    read_tokenizer,
    weight_files,
)
from ropelens.models.device import free_bytes, room_for_weights
from ropelens.models.loading import QUANTIZATIONS, DeviceMap, Loading, quantization_config


@public
def load(
    name: str | Path,
    *,
    dtype: str = "float32",
    device: str = "auto",
    device_map: DeviceMap | None = None,
    quantize: str | None = None,
    revision: str | None = None,
    local_files_only: bool = False,
    trust_remote_code: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """A causal language model and its tokenizer, ready to be measured.

    `name` is a local folder, "bundled", "bundled:NAME", or a Hub id at `revision`. Only
    safetensors are read, never a pickle. The tokenizer is None where the checkpoint has none;
    the model then takes token ids, not text.

    `dtype` is float32 by default on every device, so that a measurement does not depend on
    the machine; "saved" is that of the files, "auto" is bfloat16 on a GPU that computes in
    it, else float32. `device` "auto" is CUDA where there is one.
    `device_map` in its place spreads a large model: "auto" over the GPUs, then main memory,
    then disk; or a device, "cpu" or "disk" for each part of the model, as accelerate takes it.
    `quantize` reads weights into fewer bits: "int8" (torchao), "bnb-int8" or "bnb-nf4"
    (bitsandbytes). The model is in evaluation mode and its weights take no gradients. The
    random state of torch does not change.

    Raises BadCheckpoint for files or weights that are missing or broken, UnsupportedModel
    for a model that is not a causal language model, BadArgument for the other arguments.
    Warns where the checkpoint holds more than the model uses, or its config sets something
    that has no effect.
    """
    loading = Loading(
        dtype=dtype,
        device=device,
        device_map=device_map,
        quantize=quantize,
        revision=revision,
        local_files_only=local_files_only,
        trust_remote_code=trust_remote_code,
    )
    opened = open_checkpoint(name, loading)
    return opened.read(), opened.tokenizer


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A checkpoint before its weights are read: what it is, and where they will go.

    The files hold `parameters` numbers in `file_bytes`.
    """

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
            return self.parameters * QUANTIZATIONS[self.loading.quantize][1] // 8
        if self.loading.dtype == "saved" or is_quantized(self.config):
            return self.file_bytes
        return self.parameters * self.torch_dtype.itemsize

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the model; for "saved" that of its config."""
        name = self.loading.dtype
        if name == "auto":
            on_gpu = self.devices[0].type == "cuda" and torch.cuda.is_bf16_supported(False)
            return torch.bfloat16 if on_gpu else torch.float32
        saved: Any = self.config.dtype or torch.float32
        return saved if name == "saved" else getattr(torch, name)

    def read(self) -> PreTrainedModel:
        """The model, checked; raises as `load` does."""
        size, free = self.weight_bytes, free_bytes(self.devices[0])
        if self.loading.device_map is None and size > free:
            raise self._too_large(
                f"{size / 1e9:.1f} GB of weights, {free / 1e9:.1f} GB free on {self.devices[0]}"
            )
        quantized = is_quantized(self.config)  # which reading may change
        with quiet_transformers():
            model = self._from_pretrained()
            if quantized and not is_quantized(model.config):  # some weights are bfloat16 still
                for parameter in model.parameters():
                    parameter.data = parameter.data.to(self.torch_dtype)
            model.config._name_or_path = self.checkpoint.name
            model.eval().requires_grad_(False)
            checks.check_finite(model)
            checks.check_causal(model)
        checks.warn_of_idle_rotary_factor(model)
        return model

    def _from_pretrained(self) -> PreTrainedModel:
        loading, path = self.loading, self.checkpoint.path
        options: dict[str, Any] = {"device_map": loading.device_map or {"": self.devices[0]}}
        if loading.device_map == "auto":
            options["max_memory"] = room_for_weights(self.devices)
        if loading.quantize is not None:
            options["quantization_config"] = quantization_config(loading.quantize)
        auto: Any = AutoModelForCausalLM  # whose types know one model of what it returns
        try:
            model, weights = auto.from_pretrained(
                path,
                config=self.config,
                dtype="auto" if loading.dtype == "saved" else self.torch_dtype,
                trust_remote_code=loading.trust_remote_code,
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # check_loading names them
                **options,
            )
        except torch.OutOfMemoryError as error:
            raise self._too_large(words_of(error, kind=True)) from error
        except Exception as error:  # the classes of models raise errors of every kind
            raise BadCheckpoint(
                f"transformers cannot load the model in {path}.",
                seen=words_of(error, kind=True),
            ) from error
        checks.check_loading(model, weights)
        return model

    def _too_large(self, seen: str) -> BadArgument:
        return BadArgument(
            f"The model in {self.checkpoint.path} does not fit into the memory of the device.",
            seen=seen,
            attempt="dtype bfloat16, another device, or device map auto",
        )


def open_checkpoint(name: str | Path, loading: Loading) -> Opened:
    """The checkpoint that `load` loads, before its weights; raises as `load` does."""
    devices = loading.devices()
    with quiet_transformers():
        checkpoint = locate(str(name), loading)
        config = read_config(checkpoint.path, loading)
        files = weight_files(checkpoint.path)
        parameters = count_numbers(files)
        tokenizer = read_tokenizer(checkpoint.path, loading)
    if loading.quantize is not None and is_quantized(config):
        raise BadArgument(f"The weights of {name} are quantized already.")
    return Opened(
        checkpoint=checkpoint,
        loading=loading,
        devices=devices,
        config=config,
        tokenizer=tokenizer,
        parameters=parameters,
        file_bytes=sum(file.stat().st_size for file in files),
    )


def is_quantized(config: PreTrainedConfig) -> bool:
    """Whether a checkpoint's weights are saved in fewer bits."""
    return bool(config.to_dict().get("quantization_config"))
