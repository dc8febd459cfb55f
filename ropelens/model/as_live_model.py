"""The live model of each kind of model that public functions accept."""

from typing import Any, NoReturn, Protocol, runtime_checkable

from torch import nn
from transformers import PreTrainedModel

from ropelens.arguments import IN_WORDS
from ropelens.compatibility import keeps_longest_rotation
from ropelens.config_facts import rope_types
from ropelens.errors import UnsupportedModel, explained
from ropelens.model.bridge import BridgeModel
from ropelens.model.layer_numbers import require_layer_numbers
from ropelens.model.live_model import LiveModel
from ropelens.model.whole_weights import require_whole_weights
from ropelens.runtime.devices import devices_of


@runtime_checkable
class Traced(Protocol):
    """A model of nnsight or nnterp, which contains a module but is not one."""

    _module: nn.Module


Model = nn.Module | LiveModel | Traced
"""Models that public functions accept; see `as_live_model`."""
IN_WORDS[Model] = (
    "a loaded model: model, tokenizer = ropelens.load(NAME); or the _module of an "
    "nnsight or nnterp model"
)

WRAPPED = ("_orig_mod", "module", "_fsdp_wrapped_module")
"""The module in the wrapper of torch.compile, of DataParallel and similar ones, and of FSDP."""


def as_live_model(model: Model, tokenizer: Any = None) -> LiveModel:
    """Live model for a transformers model, a wrapper around one, or a `TransformerBridge`."""
    if isinstance(model, LiveModel):
        return model
    if isinstance(model, nn.Module):
        require_whole_weights(model)
    model = unwrapped(model)
    class_name = type(model).__name__
    if class_name == "TransformerBridge":
        return BridgeModel(model, tokenizer)
    if not isinstance(model, PreTrainedModel) or model.get_output_embeddings() is None:
        _refuse_without_logits(model)
    if model.config.is_encoder_decoder:
        _refuse(model, "an encoder-decoder: the decoder also attends to another text")
    for device in devices_of(model):
        if device.type not in ("cpu", "cuda"):  # it has no float64, or no weights
            _refuse(model, f"on {device}, where ropelens does not run")
    if keeps_longest_rotation() and "dynamic" in rope_types(model.config):
        _refuse(
            model,
            "a model with RoPE of type dynamic, which this transformers cannot undo "
            "after a long text",
            hint="transformers 5.15 or newer",
        )
    require_layer_numbers(model)
    settings = model.config.get_text_config().to_dict()
    kinds = settings.get("layer_types") or ["sliding_attention"]
    if settings.get("sliding_window") == 0 and "sliding_attention" in kinds:
        _refuse(
            model,
            "a model with a window of 0 tokens, in which no query sees a key",
            hint="model.config.sliding_window = None for no window",
        )
    unequal = f"Layers of {class_name} have different numbers of heads."
    # An error of transformers (Dots 3).
    with explained(unequal, error=UnsupportedModel):
        return LiveModel(model, tokenizer)


ANY_MODEL = (
    "a decoder-only model from ropelens.load or AutoModelForCausalLM, or a bridge"
)


def _refuse_without_logits(model: nn.Module) -> NoReturn:
    """Refuse a model that predicts no tokens, and name the language model in it."""
    for name, module in model.named_modules():
        is_inside = module is not model and isinstance(module, PreTrainedModel)
        if is_inside and module.get_output_embeddings() is not None:
            raise UnsupportedModel(
                f"{type(model).__name__} is a module around a language model.",
                seen=f"{type(module).__name__} in its attribute .{name}",
                hint=f"pass model.{name}",
            )
    if not isinstance(model, PreTrainedModel):
        _refuse(model, "not a model that ropelens can run")
    raise UnsupportedModel(
        f"{type(model).__name__} is not a model that ropelens can run.",
        seen="no logits of tokens, as in base, reward and embedding models",
        hint="AutoModelForCausalLM.from_pretrained of the language model from which it "
        "was made",
    )


def _refuse(model: nn.Module, fault: str, *, hint: str = ANY_MODEL) -> NoReturn:
    raise UnsupportedModel(f"{type(model).__name__} is {fault}.", hint=hint)


def unwrapped(model: nn.Module | Traced) -> nn.Module:
    """Model inside wrappers of torch.compile, DataParallel, peft or nnsight, with adapters."""
    if not isinstance(model, nn.Module):
        return unwrapped(model._module)
    for name in WRAPPED:
        inner = model._modules.get(name)
        if inner is not None:
            return unwrapped(inner)
    if not hasattr(model, "get_base_model"):
        return model
    adapters: Any = model.peft_config
    if any(adapter.is_prompt_learning for adapter in adapters.values()):
        raise UnsupportedModel(
            f"{type(model).__name__} puts trained tokens before its input.",
            hint="pass model.get_base_model(), the model without these tokens",
        )
    return unwrapped(model.get_base_model())  # type: ignore[operator]
