"""`load`: the name of a checkpoint becomes a model that can be measured, or a clear error."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.quantizers import AutoHfQuantizer

from ropelens.errors import BadArgument, BadCheckpoint, public, words_of
from ropelens.models import checks
from ropelens.models.checkpoint import (
    Checkpoint,
    locate,
    quiet_transformers,
    read_config,
    read_tokenizer,
    tensor_sizes,
    weight_files,
)
from ropelens.models.device import WORTH_IT, bf16_speed
from ropelens.models.loading import QUANTIZATIONS, DeviceMap, Loading, quantization_config
from ropelens.models.memory import free_bytes, room_for_weights
from ropelens.models.processes import gather


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
    the machine; "saved" is that of the files, "auto" is bfloat16 where a short measurement
    finds it 1.5 times as fast as float32. `device` "auto" is CUDA where there is one.
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

    `loading.dtype` is "saved" or the name of a dtype; where it was "auto", `bf16_speed` says
    how many times as fast as float32 bfloat16 is here. The files hold `file_bytes`, the model
    has `parameters` numbers. `dequantizes`: the files hold weights in fewer bits, which
    become plain numbers as they are read.
    """

    checkpoint: Checkpoint
    loading: Loading
    devices: list[torch.device]
    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase | None
    parameters: int
    file_bytes: int
    dequantizes: bool
    bf16_speed: float | None

    @property
    def weight_bytes(self) -> int:
        """About how many bytes the weights will take."""
        if self.loading.quantize is not None:
            return self.parameters * QUANTIZATIONS[self.loading.quantize][1] // 8
        as_saved = self.loading.dtype == "saved" or is_quantized(self.config)
        if as_saved and not self.dequantizes:
            return self.file_bytes
        return self.parameters * self.torch_dtype.itemsize

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the model; for "saved" that of its config."""
        saved: Any = self.config.dtype or torch.float32
        return saved if self.loading.dtype == "saved" else getattr(torch, self.loading.dtype)

    def read(self) -> PreTrainedModel:
        """The model, checked; raises as `load` does."""
        size, free = self.weight_bytes, free_bytes(self.devices[0])
        if self.loading.device_map is None and size > free:
            raise self._too_large(
                f"{size / 1e9:.1f} GB of weights, {free / 1e9:.1f} GB free on {self.devices[0]}"
            )
        with quiet_transformers():
            model = self._from_pretrained()
            if self.dequantizes:  # transformers leaves some weights in bfloat16
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
                dtype="auto" if loading.dtype == "saved" else loading.dtype,
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
            attempt="a smaller dtype (bfloat16), another device, or device map auto, which "
            "puts on disk what memory does not hold",
        )


def open_checkpoint(name: str | Path, loading: Loading) -> Opened:
    """The checkpoint that `load` loads, before its weights; raises as `load` does."""
    devices = loading.devices()
    with quiet_transformers():
        checkpoint = locate(str(name), loading)
        config = read_config(checkpoint.path, loading)
        files = weight_files(checkpoint.path)
        sizes = tensor_sizes(files)
        checks.check_extent(config, sizes)
        tokenizer = read_tokenizer(checkpoint.path, loading)
        plain = _plain_numbers(config, devices[0], loading)
    if loading.quantize is not None and is_quantized(config):
        raise BadArgument(
            f"The weights of {name} are quantized already.", attempt="leave quantize out"
        )
    speed = None
    if loading.dtype == "auto":
        speed = gather(bf16_speed(devices[0]))[0]  # the first's, so that all take one dtype
        loading = replace(loading, dtype="bfloat16" if speed >= WORTH_IT else "float32")
    return Opened(
        checkpoint=checkpoint,
        loading=loading,
        devices=devices,
        config=config,
        tokenizer=tokenizer,
        parameters=plain or sum(sizes),
        file_bytes=sum(file.stat().st_size for file in files),
        dequantizes=plain is not None,
        bf16_speed=speed,
    )


def is_quantized(config: PreTrainedConfig) -> bool:
    """Whether a checkpoint's weights are saved in fewer bits."""
    return bool(config.to_dict().get("quantization_config"))


def _plain_numbers(
    config: PreTrainedConfig, device: torch.device, loading: Loading
) -> int | None:
    """How many numbers a quantized checkpoint becomes as it is read; None where it stays one.

    transformers reads fp8 and mxfp4 into plain numbers, which take several times the bytes of
    the files, where `device` cannot compute with them.
    """
    if not is_quantized(config):
        return None
    try:
        stated = config.to_dict()["quantization_config"]
        quantizer = AutoHfQuantizer.from_config(stated, pre_quantized=True)
        quantizer.validate_environment(device_map={"": device})
        if not getattr(quantizer.quantization_config, "dequantize", False):
            return None
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config, trust_remote_code=loading.trust_remote_code
            )
    except Exception:  # reading the weights says what is wrong
        return None
    return int(model.num_parameters())
