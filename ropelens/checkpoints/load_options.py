"""The options of `load`, which are also options of commands. This file imports no torch."""

from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_type_hints

import typer

from ropelens.arguments import Bounds, check_value
from ropelens.errors import BadArgument

Dtype = Literal["float32", "float16", "bfloat16", "float64", "auto"]
Quantization = Literal["int8", "bnb-int8", "bnb-nf4"]


def option(
    metavar: str | None, words: str, *, name: str | None = None, **more: Any
) -> Any:
    """Describe an option of a command in the annotation of a parameter."""
    names = [name] if name else []
    return typer.Option(*names, metavar=metavar, help=words, **more)


def setting(default: Any, metavar: str | None, words: str, **more: Any) -> Any:
    """Describe a field of a dataclass that is an option of commands, as `option` does."""
    return field(default=default, metadata={"option": option(metavar, words, **more)})


class Checked:
    """A dataclass of options that raises `BadArgument` if a value does not fit its field."""

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for item in fields(self):  # type: ignore[arg-type]
            described = item.metadata["option"]
            check_value(
                f"The option {item.name}",
                getattr(self, item.name),
                hints[item.name],
                bounds=Bounds(described.min, described.max),
            )


@dataclass(frozen=True, kw_only=True)
class Loading(Checked):
    """The options of `load`, which documents them."""

    dtype: Dtype = setting(
        "float32",
        "T",
        "float32, float64, bfloat16, float16 or auto (bfloat16 on a GPU that supports it, "
        "float32 elsewhere).",
    )
    device: str = setting(
        "auto", "D", "cpu, cuda, cuda:1, or auto (cuda if there is one)."
    )
    device_map: Literal["auto"] | None = setting(
        None, "auto", "Instead of --device: use all GPUs, then main memory, then disk."
    )
    quantize: Quantization | None = setting(
        None,
        "Q",
        "Read weights in fewer bits: int8 (torchao), bnb-int8, bnb-nf4 (bitsandbytes).",
    )
    revision: str | None = setting(None, "R", "Branch, tag or commit of a Hub model.")
    trust_remote_code: bool = setting(
        False, None, "Run the code in the model's folder.", name="--trust-remote-code"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.device_map is not None and self.device != "auto":
            hint = "only device_map, which chooses the devices, or only device"
            raise BadArgument("Both a device and a device map are given.", hint=hint)
