"""Check of the order of the rows of q and k after a conversion.

Files of Meta and GGUF files pair the coordinates 2j and 2j + 1 of a head. transformers pairs j
and j + size / 2 in most families.
"""

import math
import warnings

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ropelens.errors import RopelensError
from ropelens.intervals import paired_interval
from ropelens.measured_rotation.probe import measure_layers
from ropelens.model.live_model import LiveModel
from ropelens.rope.turn import positions_by_plane, rotate_by
from ropelens.text.tokenize import prompt_tokens

STORY = """The old man lived by the sea. Every morning he walked along the beach, and every \
evening he sat by the fire and read the same book. One day a boy came to his door. "Who are \
you?" the old man asked. "I am the son of the man who sold you this house," the boy said, "and \
I have come to ask you for a favour." The old man thought about it for a while, and then he \
asked the boy to come in and sit by the fire."""

ORDERS = ((-1, 2), (2, -1))  # shapes of the coordinates, before they are transposed
KNOWLEDGE = 0.1  # nats/token by which a right order predicts better than chance


def order_losses(
    live: LiveModel, tokens: Int[Tensor, " position"]
) -> Float[np.ndarray, "order token"]:
    """Loss of each token in nats with the rows unchanged, and in the two other orders.

    Instead of rows, queries and keys before RoPE are permuted, which gives the same scores.
    """
    layers = measure_layers(live)

    def permute(
        layer: int, name: str, x: Tensor, _: Tensor, positions: Tensor
    ) -> Tensor:
        planes = layers[layer].planes
        if name == "value" or not planes.rotary_dim:
            return x
        inv_freq = planes.inv_freq.double().to(x.device)
        angle = positions_by_plane(positions, planes).to(x.device)[:, None] * inv_freq
        unrotated, x = rotate_by(x, -angle, planes), x.clone()
        coordinates = torch.arange(planes.offset, planes.offset + planes.rotary_dim)
        for row, order in enumerate(ORDERS, start=1):
            permuted = unrotated[row, ..., coordinates.view(order).mT.flatten()]
            unrotated[row, ..., coordinates] = permuted
        x[1:] = rotate_by(unrotated, angle, planes)[1:]
        return x

    rows = tokens.expand(1 + len(ORDERS), -1)
    with live.without_hooks(), live.patch(permute):
        losses = live.losses(rows, torch.tensor([len(tokens)] * len(rows)))
    return losses[:, 1:].numpy()


def check_row_order(live: LiveModel) -> tuple[bool, str]:
    """Compare losses on a short story; return whether the order is wrong, and a sentence.

    The order is wrong if another order predicts the story better than this order (the paired
    95 % interval over tokens is above 0), and better than chance. "" if it is unknown.
    """
    try:
        tokens = prompt_tokens(STORY, live.tokenizer)[: live.context]
        if len(tokens) < 3 or tokens.max() >= live.vocabulary:
            return False, ""
        losses = order_losses(live, tokens)
    except RopelensError:
        return False, ""
    as_is, other = losses[0], min(losses[1:], key=np.mean)
    _, low, high = paired_interval(as_is - other)
    knows = other.mean() < math.log(live.vocabulary) - KNOWLEDGE
    order = "in an order that hardly affects the loss"
    if wrong := bool(low > 0 and knows):
        order = "in the wrong order: they were permuted twice or not at all"
    elif high < 0:
        order = "in the right order"
    means = f"{as_is.mean():.2f} nats/token, permuted {other.mean():.2f}"
    return wrong, f"The rows of q and k are {order}: loss on a short story {means}."


def warn_of_row_order(live: LiveModel, *, stacklevel: int = 2) -> None:
    """Warn if the rows of q and k are in the wrong order."""
    wrong, sentence = check_row_order(live)
    if wrong:
        warnings.warn(sentence, stacklevel=stacklevel + 1)
