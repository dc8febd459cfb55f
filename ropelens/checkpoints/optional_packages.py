"""Packages that only some models and options need. This file does not import them."""

import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from ropelens.errors import BadArgument


@dataclass(frozen=True)
class OptionalPackage:
    """A package, and what pip installs."""

    name: str
    requirement: str

    def require(self, what: str) -> None:
        """Raise BadArgument if the package is not installed; `what` states who needs it."""
        try:
            version(self.name)
        except PackageNotFoundError:
            raise BadArgument(
                what,
                seen=f"{self.name} is not installed in {sys.prefix}",
                hint=f"pip install {self.requirement}",
            ) from None


GGUF = OptionalPackage("gguf", '"ropelens[gguf]"')
TRANSFORMER_LENS = OptionalPackage("transformer-lens", '"ropelens[transformer-lens]"')
PEFT = OptionalPackage("peft", "peft")
TORCHAO = OptionalPackage("torchao", "torchao")
BITSANDBYTES = OptionalPackage("bitsandbytes", "bitsandbytes")
