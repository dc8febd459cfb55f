"""The options of `load`, by name.

The commands build their options from the fields of `Loading`, so this file imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_type_hints

import typer

from ropelens.errors import BadArgument, check_value

Dtype = Literal["float32", "float16", "bfloat16", "float64", "auto"]

Quantization = Literal["int8", "bnb-int8", "bnb-nf4"]
"""Formats to which weights are quantized while they are read."""


def option(metavar: str | None, words: str, *, name: str | None = None, **more: Any) -> Any:
    """Describe an option of a command, in the annotation of a field; `words` is its help."""
    return typer.Option(*[name] if name else [], metavar=metavar, help=words, **more)


class Checked:
    """A dataclass of options that raises `BadArgument` if a value does not fit its field."""

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self), include_extras=True).items():
            info, value = hint.__metadata__[0], getattr(self, name)
            bounds = info.min, info.max
            check_value(f"The option {name}", value, hint.__origin__, bounds=bounds)


@dataclass(frozen=True, kw_only=True)
class Loading(Checked):
    """The options of `load`, which documents them.

    Raises `BadArgument` if both `device` and `device_map` are set.
    """

    dtype: Annotated[
        Dtype,
        option(
            "T",
            "float32, float64, bfloat16, float16 or auto (bfloat16 on a GPU that supports it, "
            "float32 elsewhere).",
        ),
    ] = "float32"
    device: Annotated[
        str, option("D", "cpu, cuda, cuda:1, or auto (cuda if there is one).")
    ] = "auto"
    device_map: Annotated[
        Literal["auto"] | None,
        option("auto", "Instead of --device: use all GPUs, then main memory, then disk."),
    ] = None
    quantize: Annotated[
        Quantization | None,
        option(
            "Q", "Read weights in fewer bits: int8 (torchao), bnb-int8, bnb-nf4 (bitsandbytes)."
        ),
    ] = None
    revision: Annotated[str | None, option("R", "Branch, tag or commit of a Hub model.")] = None
    trust_remote_code: Annotated[
        bool, option(None, "Run the code in the model's folder.", name="--trust-remote-code")
    ] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.device_map is not None and self.device != "auto":
            raise BadArgument(
                "Both a device and a device map are given.",
                hint="only device_map, which chooses the devices, or only device",
            )
