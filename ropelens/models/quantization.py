"""Weights in fewer bits: a name becomes what transformers quantizes by, or an error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from ropelens.errors import BadArgument

if TYPE_CHECKING:  # a name is refused before what imports it
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class Quantization:
    """Which `package` holds a weight in how many `bits`, and the config that asks for it."""

    package: str
    bits: int
    config: Callable[[], Any]


def _torchao_int8() -> Any:
    from torchao.quantization import Int8WeightOnlyConfig  # which few have
    from transformers import TorchAoConfig

    return TorchAoConfig(Int8WeightOnlyConfig())


def _bitsandbytes(**options: Any) -> Any:
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(**options)


QUANTIZATIONS = {
    "int8": Quantization("torchao", 8, _torchao_int8),
    "bnb-int8": Quantization("bitsandbytes", 8, partial(_bitsandbytes, load_in_8bit=True)),
    "bnb-nf4": Quantization(
        "bitsandbytes",
        4,
        partial(_bitsandbytes, load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    ),
}
"""What weights may be quantized to as they are read; the rest computes in the model's dtype."""


def check_quantize(name: str | None) -> None:
    """Raise `BadArgument` for what is not in `QUANTIZATIONS`, or whose package is missing."""
    if name is None:
        return
    if name not in tuple(QUANTIZATIONS):  # which what cannot be hashed may be looked for in
        raise BadArgument(
            f"Weights are not quantized to {name!r}.",
            attempt=f"one of {', '.join(QUANTIZATIONS)}",
        )
    package = QUANTIZATIONS[name].package
    if find_spec(package) is None:
        raise BadArgument(
            f"Quantizing to {name} needs {package}, which is not installed.",
            attempt=f"pip install {package}, or a checkpoint in bfloat16",
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
    from transformers import AutoModelForCausalLM
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
