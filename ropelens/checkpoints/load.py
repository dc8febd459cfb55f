"""Reading of a checkpoint for `load`, with checks that transformers does not make."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ropelens.checkpoints.causal import check_causal
from ropelens.checkpoints.config import auto_class, read_config, source_of
from ropelens.checkpoints.files import (
    adapter_weights,
    refuse_truncated,
    weight_files,
)
from ropelens.checkpoints.load_options import Loading, Quantization
from ropelens.checkpoints.locate import Checkpoint, locate
from ropelens.checkpoints.optional_packages import BITSANDBYTES, PEFT, TORCHAO
from ropelens.checkpoints.quiet import quick_gguf, quiet_transformers
from ropelens.checkpoints.tokenizer import read_tokenizer
from ropelens.checkpoints.weight_checks import (
    check_head,
    check_scales,
    check_weights,
    require_floats,
    require_numbers,
)
from ropelens.compatibility import (
    adapters_ignored,
    load_adapter,
    without_quantization,
)
from ropelens.errors import BadArgument, explained
from ropelens.runtime.devices import device_named, free_bytes, room_for_weights

# Bytes that each weight of a GGUF tensor takes while it is decoded: three copies in float32
DECODED = 12


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A checkpoint whose weights are not read yet.

    `parameters` is the number of all weights, and `largest_tensor` is the number of weights in
    the largest tensor.
    """

    checkpoint: Checkpoint
    loading: Loading
    devices: list[torch.device]  # the first one takes the tokens
    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase | None
    parameters: int
    largest_tensor: int
    file_bytes: int

    @property
    def weight_bytes(self) -> int:
        """Estimated memory for the weights after they are read, in bytes."""
        if self.loading.quantize == "bnb-nf4":
            return self.parameters // 2
        if self.loading.quantize is not None:
            return self.parameters
        if _is_quantized(self.config):
            return self.file_bytes
        return self.parameters * self.torch_dtype.itemsize

    @property
    def required_bytes(self) -> int:
        """Estimated memory without which the weights cannot be read, in bytes."""
        if self.devices[0].type == "cpu" and self.checkpoint.path.is_file():
            return max(self.weight_bytes, DECODED * self.largest_tensor)
        return self.weight_bytes

    @property
    def loading_bytes(self) -> int:
        """Estimated largest memory while the weights are read, in bytes.

        In main memory, it includes the files, which are mapped until all weights are read. The
        system can drop them if memory is short. Only weights that keep the dtype of their file
        stay in the mapped file.
        """
        if self.devices[0].type != "cpu" or self._keeps_dtype:
            return self.required_bytes
        return self.file_bytes + self.required_bytes

    @property
    def _keeps_dtype(self) -> bool:
        """Whether the weights have the dtype that the configuration states for the file."""
        if self.checkpoint.path.is_file():
            return False
        if _is_quantized(self.config):
            return True
        stated = self.config.dtype
        return self.loading.quantize is None and stated == self.torch_dtype

    @property
    def stays_quantized(self) -> bool:
        """Whether the weights are in few bits after they are read; GGUF files are decoded."""
        return self.checkpoint.path.is_dir() and _is_quantized(self.config)

    @property
    def memory_remedy(self) -> str:
        """Remedies if the weights do not fit into memory."""
        others = "another device, or device_map auto"
        in_bfloat16 = replace(self, loading=replace(self.loading, dtype="bfloat16"))
        is_smaller = in_bfloat16.required_bytes < self.required_bytes
        if is_smaller and in_bfloat16.required_bytes <= free_bytes(self.devices[0]):
            return f'--dtype bfloat16 (in Python dtype="bfloat16"), {others}'
        return others

    @property
    def torch_dtype(self) -> torch.dtype:
        if self.loading.dtype != "auto":
            return getattr(torch, self.loading.dtype)
        if self.devices[0].type != "cuda":
            return torch.float32
        if torch.cuda.is_available() and not torch.cuda.is_bf16_supported(False):
            return torch.float32
        return torch.bfloat16

    def read(self) -> PreTrainedModel:
        """Read and check the model; raises the errors of `load`."""
        self._check_memory()
        quantized = _is_quantized(self.config)  # reading may change the configuration
        # Buffers without a device are made on the CPU, not on the default device.
        on_cpu = torch.device("cpu")
        with quiet_transformers(), quick_gguf(self.checkpoint.path), on_cpu:
            model = self._from_pretrained()
            if quantized and not _is_quantized(model.config):  # some stayed bfloat16
                for parameter in model.parameters():
                    parameter.data = parameter.data.to(self.torch_dtype)
            model.config._name_or_path = self.checkpoint.name
            model.eval().requires_grad_(False)
            check_causal(model)
        return model

    def _check_memory(self) -> None:
        if self.loading.device_map is not None:
            return
        device = self.devices[0]
        needed = self.required_bytes
        free = free_bytes(device)
        if needed > free:
            what = f"{self.checkpoint.name} does not fit into the memory of {device}."
            seen = f"reading its weights in {self.torch_dtype} takes {needed / 1e9:.1f} GB, "
            seen += f"and {free / 1e9:.1f} GB are free"
            raise BadArgument(what, seen=seen, hint=self.memory_remedy)

    def _from_pretrained(self) -> PreTrainedModel:
        path = self.checkpoint.path
        loading = self.loading
        max_memory = None
        if loading.device_map is not None:
            max_memory = room_for_weights(self.devices)
        saved_as = [*(self.config.architectures or ())]  # loading may change it
        what = f"transformers cannot load the model in {path}."
        with explained(what), adapters_ignored():
            if path.is_dir() and not _is_quantized(self.config):
                require_floats(weight_files(path))
            model, report = auto_class(self.config).from_pretrained(
                config=self.config,
                dtype=self.torch_dtype,
                device_map=loading.device_map or {"": self.devices[0]},
                max_memory=max_memory,
                quantization_config=_quantization_config(loading.quantize),
                use_safetensors=True if path.is_dir() else None,
                # Adapters are added below; transformers then reports only their weights.
                adapter_kwargs={"subfolder": "none"} if path.is_dir() else None,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # check_weights reports them
                **source_of(path, loading),
            )
        if path.is_dir():
            check_scales(weight_files(path), report["unexpected_keys"])
        check_head(model, report["missing_keys"], saved_as)
        check_weights(type(model).__name__, report)
        adapter = self.checkpoint.adapter
        if adapter is not None:
            with explained(f"transformers cannot load the adapter in {adapter}."):
                require_numbers("the adapter", adapter_weights(adapter))
                added = load_adapter(model, str(adapter), dtype=self.torch_dtype)
            check_weights(f"the adapter in {adapter}", added.to_dict())
        if path.is_file():
            without_quantization(model)
        return model


def open_checkpoint(name: str | Path, loading: Loading, *, used: bool = True) -> Opened:
    """Open a checkpoint without its weights; if it is not `used`, a GPU may be missing."""
    device = device_named(loading.device, used=used)
    with quiet_transformers():
        checkpoint = locate(str(name), loading)
    if used:
        _require_packages(checkpoint, loading)
    path = checkpoint.path
    with quiet_transformers(), quick_gguf(path):
        configured = read_config(path, loading)
        files = weight_files(path)
        refuse_truncated(files)
        tokenizer = None
        if checkpoint.adapter is not None:
            if used:
                refuse_truncated([adapter_weights(checkpoint.adapter)])
            tokenizer = read_tokenizer(checkpoint.adapter, loading)
        if tokenizer is None:
            tokenizer = read_tokenizer(path, loading)
        return Opened(
            checkpoint=checkpoint,
            loading=loading,
            devices=[device] if loading.device_map is None else _all_devices(),
            config=configured.config,
            parameters=configured.parameters,
            largest_tensor=configured.largest_tensor,
            file_bytes=sum(file.stat().st_size for file in files),
            tokenizer=tokenizer,
        )


def _require_packages(checkpoint: Checkpoint, loading: Loading) -> None:
    """Raise BadArgument if a package is missing that reads the weights or the adapter."""
    if checkpoint.adapter is not None:
        PEFT.require(
            f"{checkpoint.adapter} has an adapter, which the package peft reads."
        )
    quantize = loading.quantize
    if quantize == "int8":
        TORCHAO.require(f"quantize {quantize} needs the package torchao.")
    elif quantize is not None:
        BITSANDBYTES.require(f"quantize {quantize} needs the package bitsandbytes.")


def _all_devices() -> list[torch.device]:
    count = torch.cuda.device_count()
    gpus = [torch.device("cuda", number) for number in range(count)]
    return gpus or [torch.device("cpu")]


def _is_quantized(config: PreTrainedConfig) -> bool:
    return bool(config.to_dict().get("quantization_config"))


def _quantization_config(name: Quantization | None) -> Any:
    if name is None:
        return None
    from transformers import BitsAndBytesConfig, TorchAoConfig

    if name == "int8":
        from torchao.quantization import Int8WeightOnlyConfig

        return TorchAoConfig(Int8WeightOnlyConfig())
    return BitsAndBytesConfig(
        load_in_8bit=name == "bnb-int8",
        load_in_4bit=name == "bnb-nf4",
        bnb_4bit_quant_type="nf4",
    )
