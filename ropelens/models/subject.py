"""A model under study, whichever library runs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ropelens.errors import UnsupportedModel
from ropelens.models.door import AttentionEdit, HeadSilence, Observer
from ropelens.models.doorway import TransformersSubject
from ropelens.models.places import devices_of
from ropelens.models.wrappers import unwrapped

UNSTATED_CONTEXT = 1024
"""Positions, of a model whose configuration does not say how many it was made for."""


@runtime_checkable
class Subject(Protocol):
    """What ropelens asks of a model: run it, and show and change its attention calls.

    `model` is the transformers model, whose modules and configuration state the RoPE.
    """

    @property
    def model(self) -> PreTrainedModel: ...

    def forward(
        self,
        tokens: Int[Tensor, "sequence position"],
        positions: Int[Tensor, "sequence position"] | None = None,
        *,
        last: int = 0,
    ) -> Float[Tensor, "sequence some token"]:
        """Logits of whole sequences; positions 0, 1, 2, ... unless given.

        Who asks for those of the `last` positions gets them at the end, perhaps alone.
        """
        ...

    def logits(
        self,
        tokens: Int[Tensor, "sequence position"],
        *,
        at_once: int,
        chunk: int | None = None,
    ) -> Iterator[tuple[int, Float[Tensor, "sequence some token"]]]:
        """All logits in pieces of about `at_once` numbers, each with its first position.

        With `chunk` a transformers model runs so many tokens at a time, with a cache.
        """
        ...

    def observe(self, observer: Observer) -> AbstractContextManager[None]:
        """Show every attention call to `observer` while the block runs."""
        ...

    def edit(self, edit: AttentionEdit) -> AbstractContextManager[None]:
        """Pass every query and key through `edit` while the block runs."""
        ...

    def silence(self, silence: HeadSilence) -> AbstractContextManager[None]:
        """Let `silence` stand in for outputs of heads while the block runs."""
        ...


def as_subject(model: nn.Module) -> Subject:
    """The subject behind a transformers model, what wraps one, or a TransformerLens bridge.

    Raises `UnsupportedModel` for anything else, and for a model that predicts no tokens.
    """
    if not isinstance(model, nn.Module):
        raise UnsupportedModel(
            "A model that is loaded is needed here.",
            seen=repr(model)[:80],
            attempt="model, tokenizer = ropelens.load(NAME), and that model",
        )
    model = unwrapped(model)
    if isinstance(model, PreTrainedModel):
        _check_alike(model)
        if model.get_output_embeddings() is None:
            raise UnsupportedModel(
                f"{type(model).__name__} predicts no tokens.",
                seen="a model without output embeddings",
                attempt="load it with AutoModelForCausalLM, or with ropelens.load",
            )
        _check_devices(model)
        return TransformersSubject(model)
    if type(model).__name__ == "TransformerBridge":
        from ropelens.models.bridge import BridgeSubject

        return BridgeSubject(model)
    raise UnsupportedModel(
        f"{type(model).__name__} is not a model that ropelens can run.",
        attempt=_inside(model)
        or "pass a transformers model or a TransformerLens TransformerBridge",
    )


def _check_devices(model: PreTrainedModel) -> None:
    """Refuse a model with a part where nothing can be summed, or without weights."""
    for device in devices_of(model):
        if device.type == "meta":
            raise UnsupportedModel(
                f"{type(model).__name__} has no weights to compute with.",
                seen="weights on the device meta, and no hook of accelerate that brings them",
                attempt='load it with ropelens.load, or from_pretrained(device_map="auto")',
            )
        if device.type not in ("cpu", "cuda"):  # sums are in float64, which others lack
            raise UnsupportedModel(
                f"{type(model).__name__} is on a device that ropelens does not run on.",
                seen=str(device),
                attempt='model.to("cpu") or model.to("cuda")',
            )


def _check_alike(model: PreTrainedModel) -> None:
    """Refuse a model whose layers have different numbers of heads (Dots 3)."""
    try:
        _ = model.config.get_text_config().num_attention_heads
    except AttributeError:
        return  # no heads, no attention: said where it is looked for
    except RuntimeError as error:  # transformers': the attribute differs by layer
        raise UnsupportedModel(
            f"Layers of {type(model).__name__} have different numbers of heads.",
            means="results are arrays over layers and heads",
            attempt="a model whose layers are alike",
        ) from error


def _inside(model: nn.Module) -> str:
    """What to pass in the place of a model that is no transformers model but holds one."""
    held = [name for name, m in model.named_modules() if isinstance(m, PreTrainedModel)]
    return f"pass the transformers model in it: its attribute {held[0]}" if held else ""


def stated_context(config: PreTrainedConfig) -> int | None:
    """Positions that a model's configuration was made for; None where it does not say."""
    facts = config.get_text_config().to_dict()
    length = facts.get("max_position_embeddings") or facts.get("n_positions")
    return int(length) if length else None


def trained_context(model: PreTrainedModel) -> int:
    """The stated context; without one `UNSTATED_CONTEXT`."""
    return stated_context(model.config) or UNSTATED_CONTEXT


def check_layers(model: PreTrainedModel, seen: set[int]) -> None:
    """Refuse a model of which some layer never showed its attention."""
    expected = model.config.get_text_config().num_hidden_layers
    missing = sorted(set(range(expected)) - seen)
    if missing:
        raise UnsupportedModel(
            f"{type(model).__name__} hides its attention.",
            seen=f"{expected - len(missing)} of {expected} layers showed their queries and "
            f"keys; the first that did not is layer {missing[0]}",
            means="the model computes attention in code of its own, or has layers without it",
            attempt="a model of a family that uses transformers' attention interface "
            "(Llama, Qwen, Gemma, Mistral, GPT-NeoX, Phi, OLMo and most others)",
        )
