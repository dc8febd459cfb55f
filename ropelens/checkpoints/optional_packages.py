"""Packages that only some models and options need. This file does not import them."""

import sys
from dataclasses import dataclass
from importlib.util import find_spec

from ropelens.errors import BadArgument


@dataclass(frozen=True)
class OptionalPackage:
    """A package, the name under which Python imports it, and what pip installs."""

    name: str
    module: str
    requirement: str

    def require(self, what: str) -> None:
        """Raise BadArgument if the package is not installed; `what` states who needs it."""
        if find_spec(self.module) is not None:
            return
        raise BadArgument(
            what,
            seen=f"{self.name} is not installed in {sys.prefix}",
            hint=f"pip install {self.requirement}",
        )


GGUF = OptionalPackage("gguf", "gguf", '"ropelens[gguf]"')
TRANSFORMER_LENS = OptionalPackage(
    "transformer-lens", "transformer_lens", '"ropelens[transformer-lens]"'
)
PEFT = OptionalPackage("peft", "peft", "peft")
TORCHAO = OptionalPackage("torchao", "torchao", "torchao")
BITSANDBYTES = OptionalPackage("bitsandbytes", "bitsandbytes", "bitsandbytes")
