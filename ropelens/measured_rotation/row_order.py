"""Check of the order of the rows of q and k after a conversion.

Files of Meta and GGUF files pair the coordinates 2j and 2j + 1 of a head. transformers pairs j
and j + size / 2 in most families.
"""

import math
import warnings
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ropelens.errors import RopelensError
from ropelens.intervals import paired_interval
from ropelens.measured_rotation.model_layers import measure_layers
from ropelens.measured_rotation.read import LayerRotation
from ropelens.model.intervention import HeadInputs, Intervention
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


@dataclass(frozen=True)
class PermutedRows(Intervention):
    """Permute the coordinates of queries and keys before RoPE.

    The first row of the batch stays unchanged, and each further row gets one of `ORDERS`.
    """

    layers: list[LayerRotation]

    def change_input(self, inputs: HeadInputs) -> Float[Tensor, "batch head slot _"]:
        x = inputs.vectors
        planes = self.layers[inputs.layer].planes
        if inputs.name == "value" or not planes.rotary_dim:
            return x
        position = positions_by_plane(inputs.positions, planes).to(x.device)
        angle = position[:, None] * planes.inv_freq.double().to(x.device)
        unrotated = rotate_by(x, -angle, planes)
        rotated = torch.arange(planes.offset, planes.offset + planes.rotary_dim)
        for row, shape in enumerate(ORDERS, start=1):
            order = rotated.view(shape).mT.flatten()
            unrotated[row, ..., rotated] = unrotated[row, ..., order]
        permuted = x.clone()
        permuted[1:] = rotate_by(unrotated, angle, planes)[1:]
        return permuted


def order_losses(
    live: LiveModel, tokens: Int[Tensor, " position"]
) -> Float[np.ndarray, "order token"]:
    """Loss of each token in nats with the rows unchanged, and in the two other orders.

    Instead of rows, queries and keys before RoPE are permuted, which gives the same scores.
    """
    batch = tokens.expand(1 + len(ORDERS), -1)
    lengths = torch.tensor([len(tokens)] * len(batch))
    permuted = PermutedRows(measure_layers(live))
    with live.without_hooks(), live.intervene(permuted):
        losses = live.losses(batch, lengths)
    return losses[:, 1:].numpy()


@dataclass(frozen=True)
class RowOrder:
    """Whether the rows of q and k are in the wrong order, and a sentence; "" if unknown."""

    wrong: bool
    sentence: str


def check_row_order(live: LiveModel) -> RowOrder:
    """Compare losses on a short story.

    The order is wrong if another order predicts the story better than this order (the paired
    95 % interval over tokens is above 0), and better than chance.
    """
    unknown = RowOrder(wrong=False, sentence="")
    try:
        tokens = prompt_tokens(STORY, live.tokenizer)[: live.context]
        if len(tokens) < 3 or tokens.max() >= live.vocabulary:
            return unknown
        losses = order_losses(live, tokens)
    except RopelensError:
        return unknown
    as_is = losses[0]
    other = min(losses[1:], key=np.mean)
    _, low, high = paired_interval(as_is - other)
    better_than_chance = other.mean() < math.log(live.vocabulary) - KNOWLEDGE
    wrong = bool(low > 0 and better_than_chance)
    order = "in an order that hardly affects the loss"
    if wrong:
        order = "in the wrong order: they were permuted twice or not at all"
    elif high < 0:
        order = "in the right order"
    means = f"{as_is.mean():.2f} nats/token, permuted {other.mean():.2f}"
    sentence = f"The rows of q and k are {order}: loss on a short story {means}."
    return RowOrder(wrong, sentence)


def warn_of_row_order(live: LiveModel, *, stacklevel: int = 2) -> None:
    """Warn if the rows of q and k are in the wrong order."""
    order = check_row_order(live)
    if order.wrong:
        warnings.warn(order.sentence, stacklevel=stacklevel + 1)
