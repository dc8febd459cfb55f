"""Reading of a checkpoint for `load`, with checks that transformers does not make."""

import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ropelens import noise
from ropelens.checkpoints import files
from ropelens.checkpoints.load_options import Loading, Quantization
from ropelens.config_facts import stated_context
from ropelens.errors import BadArgument, BadCheckpoint, UnsupportedModel, explained
from ropelens.runtime.devices import (
    device_named,
    device_of,
    free_bytes,
    room_for_weights,
)

WEIGHT_SCALE = re.compile(r"\.(weight[._]scale\w*|q?scale_weight|scales?(_inv)?)$")


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A checkpoint whose weights are not read yet. `parameters` is the number of weights."""

    checkpoint: files.Checkpoint
    loading: Loading
    devices: list[torch.device]
    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase | None
    parameters: int
    file_bytes: int

    @property
    def weight_bytes(self) -> int:
        """Estimated memory for the weights, in bytes."""
        if self.loading.quantize is not None:
            return self.parameters // (2 if self.loading.quantize == "bnb-nf4" else 1)
        size = self.parameters * self.torch_dtype.itemsize
        if self.checkpoint.path.is_file():
            return 2 * size  # transformers stores GGUF weights twice while reading
        return self.file_bytes if _is_quantized(self.config) else size

    @property
    def torch_dtype(self) -> torch.dtype:
        if self.loading.dtype == "auto":
            on_gpu = self.devices[0].type == "cuda"
            lacks = torch.cuda.is_available() and not torch.cuda.is_bf16_supported(
                False
            )
            return torch.bfloat16 if on_gpu and not lacks else torch.float32
        return getattr(torch, self.loading.dtype)

    def read(self) -> PreTrainedModel:
        """Read and check the model; raises the errors of `load`."""
        size, free = self.weight_bytes, free_bytes(self.devices[0])
        if self.loading.device_map is None and size > free:
            what = f"{self.checkpoint.name} does not fit into the memory of {self.devices[0]}."
            seen = f"{size / 1e9:.1f} GB of weights, {free / 1e9:.1f} GB free"
            hint = "dtype bfloat16, another device, or device_map auto"
            raise BadArgument(what, seen=seen, hint=hint)
        quantized = _is_quantized(self.config)  # reading may change the configuration
        with files.quiet_transformers():
            model = self._from_pretrained()
            if quantized and not _is_quantized(model.config):  # some stayed bfloat16
                for parameter in model.parameters():
                    parameter.data = parameter.data.to(self.torch_dtype)
            model.config._name_or_path = self.checkpoint.name
            model.eval().requires_grad_(False)
            check_causal(model)
        return model

    def _from_pretrained(self) -> PreTrainedModel:
        loading, path = self.loading, self.checkpoint.path
        options = files.source_of(path, loading)
        options["device_map"] = loading.device_map or {"": self.devices[0]}
        if path.is_dir():
            options["use_safetensors"] = True
            # Adapters are added below, because transformers then reports only their weights.
            options["adapter_kwargs"] = {"subfolder": "none"}
        if loading.device_map is not None:
            options["max_memory"] = room_for_weights(self.devices)
        with explained(f"transformers cannot load the model in {path}."):
            if not (path.is_file() or _is_quantized(self.config)):
                _require_floats(files.weight_files(path))
            if loading.quantize is not None:
                options["quantization_config"] = _quantization_config(loading.quantize)
            model, weights = files.auto_class(self.config).from_pretrained(
                config=self.config,
                dtype=self.torch_dtype,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # _check_weights reports them
                **options,
            )
        if path.is_dir():
            _check_scales(files.weight_files(path), weights["unexpected_keys"])
        _check_weights(type(model).__name__, weights)
        if (adapter := self.checkpoint.adapter) is not None:
            with explained(f"transformers cannot load the adapter in {adapter}."):
                files.refuse_pointers(
                    [adapter / "adapter_model.safetensors"]
                )  # no pickle
                weights = model.load_adapter(str(adapter), dtype=self.torch_dtype)
            _check_weights(f"the adapter in {adapter}", weights.to_dict())
        if path.is_file():  # the weights are floats now
            del model.config.quantization_config, model.hf_quantizer
        return model


def open_checkpoint(name: str | Path, loading: Loading, *, used: bool = True) -> Opened:
    """Open a checkpoint without its weights; if it is not `used`, a GPU may be missing."""
    devices = [
        device_named(loading.device, used=used)
    ]  # the first one takes the tokens
    if loading.device_map is not None:
        gpus = range(torch.cuda.device_count())
        devices = [torch.device("cuda", gpu) for gpu in gpus] or [torch.device("cpu")]
    with files.quiet_transformers():
        checkpoint = files.locate(str(name), loading)
        folders = [checkpoint.adapter or checkpoint.path, checkpoint.path]
        tokenizers = (files.read_tokenizer(folder, loading) for folder in folders)
        config, parameters = files.read_config(checkpoint.path, loading)
        return Opened(
            checkpoint=checkpoint,
            loading=loading,
            devices=devices,
            config=config,
            parameters=parameters,
            file_bytes=sum(
                file.stat().st_size for file in files.weight_files(checkpoint.path)
            ),
            tokenizer=next((tokenizer for tokenizer in tokenizers if tokenizer), None),
        )


def _is_quantized(config: PreTrainedConfig) -> bool:
    return bool(config.to_dict().get("quantization_config"))


def _quantization_config(name: Quantization) -> Any:
    from transformers import BitsAndBytesConfig, TorchAoConfig

    if name == "int8":
        from torchao.quantization import Int8WeightOnlyConfig

        return TorchAoConfig(Int8WeightOnlyConfig())
    return BitsAndBytesConfig(
        name == "bnb-int8", name == "bnb-nf4", bnb_4bit_quant_type="nf4"
    )


def _require_floats(paths: Iterable[Path]) -> None:
    """Raise ValueError for integers, which transformers would use as weights."""
    for file in paths:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                dtype = tensors.get_slice(name).get_dtype()
                if name.endswith(".weight") and dtype.startswith(("I", "U")):
                    raise ValueError(
                        f"{name} is {dtype} without a quantization in config.json"
                    )


def _check_scales(paths: Iterable[Path], unused: set[str]) -> None:
    """Raise BadCheckpoint if the model uses weights without their scales, which are not 1."""
    scales = {name for name in unused if WEIGHT_SCALE.search(name)}
    scales -= {name for name in scales if WEIGHT_SCALE.sub(".weight", name) in unused}
    for file in paths if scales else ():
        with safe_open(file, framework="pt") as tensors:
            for name in scales & set(tensors.keys()):
                scales -= (
                    {name} if (tensors.get_tensor(name).float() == 1).all() else set()
                )
    if scales:
        what = "Weights in few bits are wrong, because nothing multiplies them by their scales."
        seen = (
            f"{len(scales)} scales that the model does not use: {_first_names(scales)}"
        )
        hint = "the model in bfloat16, or with weights that transformers scales"
        raise BadCheckpoint(what, seen=seen, hint=hint)


def _check_weights(name: str, weights: dict[str, set]) -> None:
    """Raise BadCheckpoint if the model lacks weights, and warn about unused tensors."""
    missing = weights["missing_keys"] | {
        name for name, *_ in weights["mismatched_keys"]
    }
    if missing:
        seen = f"{len(missing)} missing or with another shape: {_first_names(missing)}"
        means = "transformers would use random numbers instead"
        raise BadCheckpoint(
            f"The checkpoint lacks weights of {name}.", seen=seen, means=means
        )
    if unused := weights["unexpected_keys"]:
        words = f"{name} does not use {len(unused)} tensors of its file: {_first_names(unused)}"
        warnings.warn(words, stacklevel=6)  # the caller of load


def _first_names(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:3]) + ", ..." * (len(ordered) > 3)


@torch.no_grad()
def check_causal(model: PreTrainedModel) -> None:
    """Raise UnsupportedModel if other last tokens change the logits of earlier positions."""
    name, vocabulary = type(model).__name__, model.config.get_text_config().vocab_size
    ids = noise.noise_tokens(
        vocabulary, stated_context(model.config) or noise.NOISE_TOKENS
    )
    run = lambda ids: model(input_ids=ids.to(device_of(model)), use_cache=False).logits  # noqa: E731
    with explained(
        f"{name} does not run in {model.dtype} on token ids.",
        hint="another dtype (float32 or bfloat16), or another checkpoint",
    ):
        logits = run(ids)
        if not torch.isfinite(logits).all():
            raise ValueError("some logits are NaN or infinite")
    common = logits[:, : noise.common_tokens(ids.shape[1])].split(1)
    pairs = [noise.logit_change(one, other) for one, other in combinations(common, 2)]
    # The median, because rounding may send a token of one sequence to another expert.
    change = torch.cat(pairs).median(0).values.max()
    once = lambda part: logits if part is ids else run(part)  # noqa: E731
    eps, of_runs = torch.finfo(model.dtype).eps, noise.run_noise(once, ids)
    if change > noise.allowed_residual(of_runs, eps):
        seen = (
            f"other last tokens change earlier logits by {float(change):.2g} of their "
        )
        seen += f"spread over the vocabulary; equal runs differ by {of_runs:.2g}"
        hint = "a decoder-only model, such as a Llama"
        raise UnsupportedModel(
            f"{name} is not a causal language model.", seen=seen, hint=hint
        )
