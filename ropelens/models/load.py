"""`load`: the name of a checkpoint becomes a model that can be measured, or a clear error."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ropelens.errors import BadArgument, BadCheckpoint, UnsupportedModel, public, words_of
from ropelens.models import checks, llama2c
from ropelens.models.checkpoint import (
    PICKLE_SUFFIXES,
    Checkpoint,
    count_numbers,
    locate,
    pickle_refused,
    read_config,
    weight_files,
)
from ropelens.models.device import WORTH_IT, DeviceMap, bf16_speed, devices_in, free_bytes
from ropelens.models.loading import QUANTIZATIONS, Loading
from ropelens.models.memory import room_for_weights
from ropelens.models.processes import gather
from ropelens.models.quiet import quiet_transformers
from ropelens.models.tokenizer import read_tokenizer

DEFAULT = Loading()


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

    `name`: a local folder, a llama2.c `.bin` file, "bundled", "bundled:NAME", or a Hub id
    at `revision`. Only safetensors are read, never a pickle. The tokenizer is None where
    the checkpoint has none; text then cannot be used, token ids can.

    `dtype`: float32 on every device unless said otherwise, so that a measurement does not
    depend on the machine; "saved" keeps the checkpoint's own, "auto" takes bfloat16 where a
    short measurement finds it 1.5 times as fast as float32. `device`: "auto" takes CUDA
    where there is one. `device_map` in its place spreads a model that no one device holds:
    "auto" over the GPUs, then main memory, then disk; or a device, "cpu" or "disk" for each
    part of the model, as accelerate takes it. `quantize` reads weights into fewer bits: "int8"
    (torchao), "bnb-int8" or "bnb-nf4" (bitsandbytes). The model is in evaluation mode, its
    weights take no gradients, and the random state of torch is left as it was.

    Raises BadCheckpoint for files or weights that are missing or broken, UnsupportedModel
    for what is no causal language model, BadArgument for the other arguments. Warns where
    the checkpoint holds more than the model uses, or its config sets what has no effect.
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


@dataclass(frozen=True)
class Opened:
    """A checkpoint whose weights are not read yet: what it is, and where they will go.

    `parameters` is how many numbers its files of `file_bytes` hold; `state` are those of a
    llama2.c file. `dtype` is that of the model or "saved"; where "auto" was asked for,
    `bf16_speed` says how many times as fast as float32 bfloat16 is here. `device` is the first
    of the `devices` that a `device_map` spreads the model over. `dequantizes`: the files hold
    weights in fewer bits, which become `parameters` plain numbers as they are read.
    """

    checkpoint: Checkpoint
    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase | None
    parameters: int
    file_bytes: int
    dtype: str
    device: torch.device
    trust_remote_code: bool = False
    state: dict[str, Tensor] | None = None
    bf16_speed: float | None = None
    device_map: DeviceMap | None = None
    quantize: str | None = None
    dequantizes: bool = False

    @property
    def devices(self) -> list[torch.device]:
        """Every device that a part of the model will compute on."""
        return [self.device] if self.device_map is None else devices_in(self.device_map)

    @property
    def weight_bytes(self) -> int:
        """About how many bytes the weights will take."""
        if self.quantize is not None:
            return self.parameters * QUANTIZATIONS[self.quantize].bits // 8
        kept = self.dtype == "saved" or is_quantized(self.config)
        if kept and not self.dequantizes:
            return self.file_bytes
        return self.parameters * self.torch_dtype.itemsize

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as torch has it; of "saved" what the config states."""
        saved: Any = self.config.dtype or torch.float32
        return saved if self.dtype == "saved" else getattr(torch, self.dtype)

    def read(self) -> PreTrainedModel:
        """The model, checked; raises as `load` does."""
        path = self.checkpoint.path
        if self.device_map is None and self.state is None:
            _check_room(path, self.weight_bytes, self.device)
        arguments: dict[str, Any] = {
            "dtype": "auto" if self.dtype == "saved" else self.dtype,  # as transformers says
            "device_map": {"": self.device} if self.device_map is None else self.device_map,
            "config": self.config,
        }
        if self.device_map == "auto":
            arguments["max_memory"] = room_for_weights(self.devices)
        if self.quantize is not None:
            arguments["quantization_config"] = QUANTIZATIONS[self.quantize].config()
        with quiet_transformers():
            if self.state is not None:
                model = _build(LlamaForCausalLM, path, None, state_dict=self.state, **arguments)
            else:
                model = _build(
                    AutoModelForCausalLM,
                    path,
                    path,
                    trust_remote_code=self.trust_remote_code,
                    use_safetensors=True,
                    local_files_only=True,
                    ignore_mismatched_sizes=True,  # check_loading refuses them by name
                    **arguments,
                )
            if self.dequantizes:  # some become bfloat16, whatever the others are
                for parameter in model.parameters():
                    parameter.data = parameter.data.to(self.torch_dtype)
            model.config._name_or_path = self.checkpoint.name
            model.eval().requires_grad_(False)
            checks.check_finite(model)
            checks.check_causal(model)
        checks.warn_of_idle_rotary_factor(model)
        return model


def open_checkpoint(name: str | Path, loading: Loading = DEFAULT) -> Opened:
    """The checkpoint that `load` loads, up to its weights; errors are as there."""
    where = loading.devices()[0]
    with quiet_transformers():
        checkpoint = locate(
            str(name),
            revision=loading.revision,
            local_files_only=loading.local_files_only,
        )
        read = _open_folder if checkpoint.path.is_dir() else _open_file
        config, tokenizer, parameters, file_bytes, state = read(
            checkpoint.path, loading.trust_remote_code
        )
    dtype, speed = loading.dtype, None
    if dtype == "auto":
        speed = gather(bf16_speed(where))[0]  # the same for all
        dtype = "bfloat16" if speed >= WORTH_IT else "float32"
    if loading.quantize is not None and is_quantized(config):
        raise BadArgument(
            f"The weights of {name} are quantized already.", attempt="leave quantize out"
        )
    plain = None
    if is_quantized(config):
        with quiet_transformers():
            plain = dequantized_parameters(
                config, where, trust_remote_code=loading.trust_remote_code
            )
    return Opened(
        checkpoint=checkpoint,
        config=config,
        tokenizer=tokenizer,
        parameters=plain or parameters,
        dequantizes=plain is not None,
        file_bytes=file_bytes,
        dtype=dtype,
        device=where,
        trust_remote_code=loading.trust_remote_code,
        state=state,
        bf16_speed=speed,
        device_map=loading.device_map,
        quantize=loading.quantize,
    )


def is_quantized(config: PreTrainedConfig) -> bool:
    """Whether a checkpoint's weights are saved in fewer bits."""
    return bool(config.to_dict().get("quantization_config"))


def dequantized_parameters(
    config: PreTrainedConfig, device: torch.device, *, trust_remote_code: bool
) -> int | None:
    """How many numbers a quantized checkpoint becomes as it is read; None where it stays one.

    transformers reads fp8 and mxfp4 back into plain numbers, several times the bytes of the
    files, where `device` cannot compute with them.
    """
    from transformers.quantizers import AutoHfQuantizer  # which few need

    try:
        stated = config.to_dict()["quantization_config"]
        quantizer = AutoHfQuantizer.from_config(stated, pre_quantized=True)
        quantizer.validate_environment(device_map={"": device})
        if not getattr(quantizer.quantization_config, "dequantize", False):
            return None
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config, trust_remote_code=trust_remote_code
            )
    except Exception:  # whatever is wrong with it; reading it says so
        return None
    return int(model.num_parameters())


Parts = tuple[
    PreTrainedConfig, PreTrainedTokenizerBase | None, int, int, dict[str, Tensor] | None
]
"""Configuration, tokenizer, parameters, bytes of the files, and weights where they come too."""


def _open_folder(folder: Path, trust_remote_code: bool) -> Parts:
    written = read_config(folder)
    checks.check_model_type(written, trust_remote_code=trust_remote_code)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # whatever a wrong value makes its class raise
        raise BadCheckpoint(
            f"{folder / 'config.json'} is refused by transformers.",
            seen=words_of(error, kind=True),
        ) from error
    checks.check_architecture(config)
    checks.check_numbers(config)
    files = weight_files(folder, config=written)
    counts = count_numbers(files)
    checks.check_extent(config, counts)
    size = sum(file.stat().st_size for file in files)
    return config, read_tokenizer(folder, trust_remote_code), sum(counts), size, None


def _open_file(path: Path, _: bool) -> Parts:
    if path.suffix in PICKLE_SUFFIXES - {".bin"}:
        raise pickle_refused(path)
    if path.suffix != ".bin":
        raise BadCheckpoint(
            f"{path} is a file, and not one of llama2.c (.bin).",
            attempt=f"pass the folder that holds config.json and the weights: {path.parent}",
        )
    size = path.stat().st_size
    _check_room(path, size, torch.device("cpu"))
    config, state = llama2c.read_model(path)
    beside = llama2c.tokenizer_file(path, vocabulary=config.vocab_size)
    tokenizer = None
    if beside is not None:
        tokenizer = llama2c.read_tokenizer(beside, vocabulary=config.vocab_size)
    return config, tokenizer, sum(tensor.numel() for tensor in state.values()), size, state


def _build(family: Any, path: Path, source: Path | None, **arguments: Any) -> PreTrainedModel:
    """The checked model that transformers makes of `source` or the arguments, from `path`."""
    try:
        model, found = family.from_pretrained(source, output_loading_info=True, **arguments)
    except torch.OutOfMemoryError as error:
        raise _too_large(path, words_of(error, kind=True)) from error
    except ImportError as error:
        raise UnsupportedModel(
            f"The model in {path} needs a package that is not installed.",
            seen=words_of(error, kind=True),
        ) from error
    except Exception as error:  # the files' fault: nothing of ours runs inside
        raise BadCheckpoint(
            f"transformers cannot load the model in {path}.", seen=words_of(error, kind=True)
        ) from error
    checks.check_loading(model, found)
    return model


def _check_room(path: Path, size: int, device: torch.device) -> None:
    """Raise BadArgument where weights of `size` bytes are more than is free on the device."""
    if size > (free := free_bytes(device)):
        given, room = (f"{count / 1e9:.1f} GB" for count in (size, free))
        raise _too_large(path, f"{given} of weights, {room} free on {device}")


def _too_large(path: Path, seen: str) -> BadArgument:
    return BadArgument(
        f"The model in {path} does not fit into the memory of the device.",
        seen=seen,
        attempt="a smaller dtype (bfloat16), another device, or device map auto, which puts "
        "on disk what memory does not hold",
    )
