"""The live model of each kind of model that public functions accept."""

from typing import Any, Protocol, runtime_checkable

from torch import nn
from transformers import PreTrainedModel

from ropelens.arguments import IN_WORDS
from ropelens.errors import UnsupportedModel, explained
from ropelens.model.bridge import BridgeModel
from ropelens.model.live_model import LiveModel
from ropelens.runtime.devices import devices_of


@runtime_checkable
class Traced(Protocol):
    """A model of nnsight or nnterp, which contains a module but is not one."""

    _module: nn.Module


Model = nn.Module | LiveModel | Traced
"""Models that public functions accept; see `as_live_model`."""
IN_WORDS[Model] = (
    "a loaded model: model, tokenizer = ropelens.load(NAME); or the _module of an "
)
IN_WORDS[Model] += "nnsight or nnterp model"


def as_live_model(model: Model, tokenizer: Any = None) -> LiveModel:
    """Live model for a transformers model, a wrapper around one, or a `TransformerBridge`."""
    if isinstance(model, LiveModel):
        return model
    model = unwrapped(model)
    class_name = type(model).__name__
    if class_name == "TransformerBridge":
        return BridgeModel(model, tokenizer)
    fault = ""
    if not isinstance(model, PreTrainedModel) or model.get_output_embeddings() is None:
        fault = "not a model that ropelens can run"
    elif model.config.is_encoder_decoder:
        fault = "an encoder-decoder: the decoder also attends to another text"
    elif away := [x for x in devices_of(model) if x.type not in ("cpu", "cuda")]:
        fault = (
            f"on {away[0]}, where ropelens does not run"  # no float64, or no weights
        )
    if fault:
        hint = "a decoder-only model from ropelens.load or AutoModelForCausalLM, or a bridge"
        raise UnsupportedModel(f"{class_name} is {fault}.", hint=hint)
    unequal = f"Layers of {class_name} have different numbers of heads."
    with explained(
        unequal, error=UnsupportedModel
    ):  # an error of transformers (Dots 3)
        return LiveModel(model, tokenizer)  # type: ignore[arg-type]


def unwrapped(model: nn.Module | Traced) -> nn.Module:
    """Model inside wrappers of torch.compile, DataParallel, peft or nnsight, with adapters."""
    if not isinstance(model, nn.Module):
        return unwrapped(model._module)
    for name in (
        "_orig_mod",
        "module",
    ):  # torch.compile; DataParallel and similar wrappers
        if name in model._modules:
            return unwrapped(getattr(model, name))
    if not hasattr(model, "get_base_model"):
        return model
    adapters: Any = model.peft_config
    if any(adapter.is_prompt_learning for adapter in adapters.values()):
        what = f"{type(model).__name__} puts trained tokens before its input."
        hint = "pass model.get_base_model(), the model without these tokens"
        raise UnsupportedModel(what, hint=hint)
    return unwrapped(model.get_base_model())  # type: ignore[operator]
