"""Queries, keys, masks and attention weights of every layer, recorded from transformers.

The function `eager_attention_forward` in the module of the model is replaced while a sequence
runs.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

Floats = NDArray[np.float64]

Sees = Callable[[Tensor, Tensor], Tensor]
MASKS: dict[str, Sees] = {
    "a hole": lambda i, j: (j <= i) & ~((j >= 3) & (j < 6) & (i > 8)),
    "a prefix": lambda i, j: (j <= i) | ((j < 7) & (i < 7)),
    "sinks and a window": lambda i, j: (j <= i) & ((j < 2) | (i - j < 6)),
    "a choice": lambda i, j: (j <= i) & ((i + j) % 3 == 0) | (j == i // 2),
}
"""Whether row i sees key j, for masks that are not an interval up to the row's own key."""


def with_mask(model: PreTrainedModel, sees: Sees) -> PreTrainedModel:
    def give(
        _: Any, arguments: Any, options: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        tokens = options["input_ids"] if "input_ids" in options else arguments[0]
        rows, length = tokens.shape
        seen = sees(torch.arange(length)[:, None], torch.arange(length))
        mask = torch.zeros(length, length, dtype=model.dtype)
        mask = mask.masked_fill(~seen, torch.finfo(model.dtype).min)
        return arguments, options | {"attention_mask": mask.expand(rows, 1, -1, -1)}

    model.base_model.register_forward_pre_hook(give, with_kwargs=True)
    return model


@dataclass(frozen=True)
class LayerRotation:
    """The planes of one layer that rotate.

    - pairs [plane, 2]: the two coordinates of each
    - inv_freq [plane]: radians per token; negative if clockwise
    - head_dim: number of coordinates of a head, also of unrotated coordinates
    """

    pairs: NDArray[np.int64]
    inv_freq: Floats
    head_dim: int

    @property
    def rest(self) -> NDArray[np.int64]:
        return np.setdiff1d(np.arange(self.head_dim), self.pairs)

    def unrotate(self, x: Tensor) -> Tensor:
        """`x` [head, position, coordinate] without its rotation, by angles of float32."""
        position = torch.arange(x.shape[1], dtype=torch.float32)
        angle = position[:, None] * torch.from_numpy(self.inv_freq).float()
        first, second = torch.from_numpy(self.pairs).unbind(-1)
        planes = torch.complex(x[..., first], x[..., second])
        planes = planes * torch.exp(-1j * angle.double())
        result = x.clone()
        result[..., first] = planes.real
        result[..., second] = planes.imag
        return result

    def parts(self) -> list[NDArray[np.int64]]:
        return [*self.pairs, self.rest]


@dataclass(frozen=True)
class AttentionCall:
    query: Tensor  # [head, position, coordinate], rotated
    key: Tensor  # [kv_head, position, coordinate], rotated
    value: Tensor  # [kv_head, position, coordinate]
    visible: Tensor  # [position, position], bool
    scale: float
    softcap: float | None
    attention: Tensor  # [head, position, position]; sums to less than 1 with a sink


@contextmanager
def recorded_attention(model: PreTrainedModel) -> Iterator[dict[int, dict[str, Any]]]:
    modelling = sys.modules[type(model).__module__]
    original: Callable[..., Any] = modelling.eager_attention_forward
    calls: dict[int, dict[str, Any]] = {}

    def recorded(module, query, key, value, attention_mask, **kwargs):
        assert module.layer_idx not in calls, "one call a layer"
        calls[module.layer_idx] = {
            "query": query,
            "key": key,
            "value": value,
            "mask": attention_mask,
            "scale": kwargs["scaling"],
            "softcap": kwargs.get("softcap"),
        }
        return original(module, query, key, value, attention_mask, **kwargs)

    modelling.eager_attention_forward = recorded
    try:
        yield calls
    finally:
        modelling.eager_attention_forward = original


@torch.no_grad()
def attention_calls(
    model: nn.Module, tokens: Tensor
) -> tuple[list[AttentionCall], Tensor]:
    with recorded_attention(model) as calls:
        out = model(tokens[None], output_attentions=True, use_cache=False)
    layers = list(range(model.config.num_hidden_layers))
    assert sorted(calls) == layers, "a layer was silent"
    result = []
    for layer, call in sorted(calls.items()):
        mask = call["mask"][0, 0]
        visible = mask if mask.dtype == torch.bool else mask > -1
        of_layer = AttentionCall(
            query=call["query"][0].double(),
            key=call["key"][0].double(),
            value=call["value"][0].double(),
            visible=visible,
            scale=call["scale"],
            softcap=call["softcap"],
            attention=out.attentions[layer][0].double(),
        )
        result.append(of_layer)
    return result, out.logits[0].double()
