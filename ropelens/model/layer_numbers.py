"""The numbers of layers in a model whose layers were removed, moved or copied."""

from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedModel

from ropelens.errors import UnsupportedModel


def require_layer_numbers(model: PreTrainedModel) -> None:
    """Refuse a model whose layers have the numbers of other places.

    Attention modules have a number `layer_idx`, by which results name their layer and a
    cache finds its keys. It does not change if a user moves, removes or copies layers.
    """
    for name, layers in _lists_of_layers(model):
        for place, layer in enumerate(layers):
            numbers = _numbers(layer)
            if numbers and place not in numbers:
                raise UnsupportedModel(
                    f"Layers of {type(model).__name__} have the numbers of other places.",
                    seen=f"layer_idx {min(numbers)} in model.{name}[{place}]",
                    means="results and a key-value cache take one layer for another",
                    hint=_renumber(name, layer),
                )


def _lists_of_layers(model: PreTrainedModel) -> Iterator[tuple[str, nn.ModuleList]]:
    """Lists of modules of the language model that are in no other list.

    A list that holds a module twice is left out: this module cannot have two numbers.
    """
    inside = {*model.get_decoder().modules()}
    outer = "."  # no name begins with it
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not name.startswith(outer):
            outer = f"{name}."
            if module in inside and len({*module}) == len(module):
                yield name, module


def _numbers(layer: nn.Module) -> set[int]:
    """The numbers of the modules of a layer, without the -1 of shared modules (Zamba 2)."""
    numbers = {vars(module).get("layer_idx") for module in layer.modules()}
    return {number for number in numbers if isinstance(number, int) and number >= 0}


def _renumber(name: str, layer: nn.Module) -> str:
    """A line of Python that gives each layer the number of its place."""
    assigned = ""
    for inner, module in layer.named_modules():
        if "layer_idx" in vars(module):
            owner = f"layer.{inner}".removesuffix(".")
            assigned += f"{owner}.layer_idx = "
    return f"for place, layer in enumerate(model.{name}): {assigned}place"
