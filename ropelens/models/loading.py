"""The options of `load`: dtype, device, quantization and revision, checked by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

from ropelens.errors import BadArgument
from ropelens.models.device import DeviceMap, device_named, devices_in

DTYPES = ("float32", "float16", "bfloat16", "float64", "auto", "saved")
"""Dtypes to load a model in: "auto" is the faster one here, "saved" that of its files."""


@dataclass(frozen=True)
class Quantization:
    """The `package` that stores a weight in `bits` bits, and the config that asks for it."""

    package: str
    bits: int
    config: Callable[[], Any]


def _torchao_int8() -> Any:
    from torchao.quantization import Int8WeightOnlyConfig  # not installed everywhere
    from transformers import TorchAoConfig

    return TorchAoConfig(Int8WeightOnlyConfig())


def _bitsandbytes(**options: Any) -> Any:
    from transformers import BitsAndBytesConfig  # after the names are checked

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
"""Formats to quantize weights to while they are read; activations stay in the model's dtype."""


@dataclass(frozen=True, kw_only=True)
class Loading:
    """The options of `load`, which explains them.

    Raises `BadArgument` for a name that does not exist, a package that is not installed, and
    a device beside a device map.
    """

    dtype: str = "float32"
    device: str = "auto"
    device_map: DeviceMap | None = None
    quantize: str | None = None
    revision: str | None = None
    local_files_only: bool = False
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise BadArgument(
                f"There is no dtype {self.dtype!r}.", attempt=f"one of {', '.join(DTYPES)}"
            )
        if self.quantize is not None:
            if self.quantize not in QUANTIZATIONS:
                raise BadArgument(
                    f"Weights are not quantized to {self.quantize!r}.",
                    attempt=f"one of {', '.join(QUANTIZATIONS)}",
                )
            package = QUANTIZATIONS[self.quantize].package
            if find_spec(package) is None:
                raise BadArgument(
                    f"Quantizing to {self.quantize} needs {package}, which is not installed.",
                    attempt=f"pip install {package}, or a checkpoint in bfloat16",
                )
        if self.device_map is not None and self.device != "auto":
            raise BadArgument(
                "Both a device and a device map are given.",
                attempt="one of device and device_map",
            )

    def devices(self) -> list[torch.device]:
        """The devices that the model will compute on, each tried; the first takes the tokens.

        Raises `BadArgument` for a device that does not exist or does not work here.
        """
        if self.device_map is None:
            return [device_named(self.device)]
        return devices_in(self.device_map)
