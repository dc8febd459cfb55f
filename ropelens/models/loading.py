"""The options of `load`: dtype, device, quantization and revision, checked by name.

Commands make their options of the fields of `Loading`, so torch is not imported here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ropelens.errors import BadArgument

if TYPE_CHECKING:
    import torch

DeviceMap = str | Mapping[str, int | str]
"""Where the parts of a model go: "auto", or a device, "cpu" or "disk" for each part by name."""

DTYPES = ("float32", "float16", "bfloat16", "float64", "auto", "saved")
"""Dtypes to load a model in: "saved" is that of its files."""


QUANTIZATIONS = {
    "int8": ("torchao", 8),
    "bnb-int8": ("bitsandbytes", 8),
    "bnb-nf4": ("bitsandbytes", 4),
}
"""Formats to quantize weights to as they are read: the package that does it, bits a weight."""


def quantization_config(name: str) -> Any:
    """What transformers takes to quantize to one of `QUANTIZATIONS`."""
    from transformers import BitsAndBytesConfig, TorchAoConfig  # after the names are checked

    if name == "int8":
        from torchao.quantization import Int8WeightOnlyConfig

        return TorchAoConfig(Int8WeightOnlyConfig())
    if name == "bnb-int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")


def option(metavar: str | None, words: str, *, name: str | None = None, **more: Any) -> Any:
    """An option of a command, for the annotation of a field: `words` are its help."""
    return typer.Option(*[name] if name else [], metavar=metavar, help=words, **more)


@dataclass(frozen=True, kw_only=True)
class Loading:
    """The options of `load`, which explains them.

    Raises `BadArgument` for a name that does not exist, a package that is not installed, and
    a device beside a device map.
    """

    dtype: Annotated[
        str,
        option(
            "T",
            "float32, float64, bfloat16, float16; auto: bfloat16 on a GPU that computes in "
            "it, else float32; saved: as the model is saved.",
        ),
    ] = "float32"
    device: Annotated[str, option("D", "cpu, cuda, cuda:1; auto: cuda where there is one.")] = (
        "auto"
    )
    device_map: Annotated[
        DeviceMap | None,
        option(
            "auto",
            "Instead of --device: spread a large model over all GPUs, then main memory, "
            "then disk.",
            parser=str,
        ),
    ] = None
    quantize: Annotated[
        str | None,
        option(
            "Q",
            "Read the weights into fewer bits: int8 (torchao), bnb-int8 or bnb-nf4 "
            "(bitsandbytes).",
        ),
    ] = None
    revision: Annotated[
        str | None,
        option("R", "Branch, tag or commit of a Hub model."),
    ] = None
    local_files_only: Annotated[
        bool, option(None, "Never ask the Hub, use its cache.", name="--local-files-only")
    ] = False
    trust_remote_code: Annotated[
        bool, option(None, "Run code that comes with the model.", name="--trust-remote-code")
    ] = False

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
            package, _ = QUANTIZATIONS[self.quantize]
            if find_spec(package) is None:
                raise BadArgument(
                    f"Quantizing to {self.quantize} needs {package}: pip install {package}."
                )
        if self.device_map is not None and self.device != "auto":
            raise BadArgument("Both a device and a device map are given.")

    def devices(self) -> list[torch.device]:
        """The devices that the model will compute on, each tried; the first takes the tokens.

        Raises `BadArgument` for a device that does not exist or does not work here.
        """
        from ropelens.models.device import device_named, devices_in  # which import torch

        if self.device_map is None:
            return [device_named(self.device)]
        return devices_in(self.device_map)
