"""The options of `load`, by name.

Commands make their options of the fields of `Loading`, so torch is not imported here.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_type_hints

import typer
from beartype.door import is_bearable

from ropelens.errors import BadArgument

Dtype = Literal["float32", "float16", "bfloat16", "float64", "auto"]

Quantization = Literal["int8", "bnb-int8", "bnb-nf4"]
"""Formats that weights are quantized to as they are read."""


def option(metavar: str | None, words: str, *, name: str | None = None, **more: Any) -> Any:
    """An option of a command, for the annotation of a field: `words` are its help."""
    return typer.Option(*[name] if name else [], metavar=metavar, help=words, **more)


class Checked:
    """A dataclass of options: `BadArgument` for a value that a field's annotation excludes."""

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self), include_extras=True).items():
            value, info = getattr(self, name), hint.__metadata__[0]
            least, most = (
                sign * math.inf if bound is None else bound
                for sign, bound in ((-1, info.min), (1, info.max))
            )
            is_number = isinstance(value, (int, float))
            fits = not is_number or (least <= value <= most and abs(value) < math.inf)
            if not (fits and is_bearable(value, hint)):
                kind = re.sub(r"<class '|'>|\b[a-z_.]+\.(?=[A-Z])", "", str(hint.__origin__))
                kind += f", at least {info.min}" * (info.min is not None)
                kind += f", at most {info.max}" * (info.max is not None)
                raise BadArgument(f"The option {name} cannot be {value!r}."[:80], hint=kind)


@dataclass(frozen=True, kw_only=True)
class Loading(Checked):
    """The options of `load`, which explains them; `BadArgument` for two kinds of device."""

    dtype: Annotated[
        Dtype,
        option(
            "T",
            "float32, float64, bfloat16, float16; auto: bfloat16 on a GPU that computes in "
            "it, else float32.",
        ),
    ] = "float32"
    device: Annotated[str, option("D", "cpu, cuda, cuda:1; auto: cuda, else cpu.")] = "auto"
    device_map: Annotated[
        Literal["auto"] | None,
        option("auto", "Instead of --device: over all GPUs, then main memory, then disk."),
    ] = None
    quantize: Annotated[
        Quantization | None,
        option("Q", "Weights in fewer bits: int8 (torchao), bnb-int8, bnb-nf4 (bitsandbytes)."),
    ] = None
    revision: Annotated[str | None, option("R", "Branch, tag or commit of a Hub model.")] = None
    trust_remote_code: Annotated[
        bool, option(None, "Run code that comes with the model.", name="--trust-remote-code")
    ] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.device_map is not None and self.device != "auto":
            raise BadArgument("Both a device and a device map are given.")
