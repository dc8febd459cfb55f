"""Refusal of transformers' continuous batching for a model in a block.

It runs in a thread of its own, which does not belong to the block, with a cache that does not
show the sequences and keys of a row. The refusal is raised in the thread that asks for it.
"""

from collections.abc import Callable
from functools import wraps
from operator import attrgetter
from typing import Any

from torch import nn
from transformers.generation.continuous_batching import (
    ContinuousBatchingManager,
    ContinuousMixin,
)

from ropelens.errors import UnsupportedModel
from ropelens.model.hook_blocks import hooks_of

PAGED = "paged|eager"  # the attention of a model whose manager runs


def refuse_continuous_batching() -> None:
    """Check the functions through which users start a manager or send it requests."""
    mixin: Any = ContinuousMixin
    mixin.init_continuous_batching = _outside_blocks(
        mixin.init_continuous_batching, model_of=lambda model: model
    )
    manager: Any = ContinuousBatchingManager
    model_of = attrgetter("model")
    manager.start = _outside_blocks(manager.start, model_of=model_of)
    manager.warmup = _outside_blocks(manager.warmup, model_of=model_of)
    manager.add_request = _outside_blocks(manager.add_request, model_of=model_of)


def _outside_blocks(
    method: Callable[..., Any], *, model_of: Callable[[Any], nn.Module]
) -> Callable[..., Any]:
    """`method`, which raises `UnsupportedModel` if the model of its object is in a block."""

    @wraps(method)
    def checked(self: Any, *arguments: Any, **options: Any) -> Any:
        if hooks_of(model_of(self)) is not None:
            raise UnsupportedModel(
                "A model in a block of ropelens cannot use continuous batching.",
                seen=f"{method.__name__} of {type(self).__name__}",
                hint="model.generate in the block, or generate_batch outside of it",
            )
        return method(self, *arguments, **options)

    return checked
