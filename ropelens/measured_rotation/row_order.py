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
from ropelens.intervals import Interval, paired_interval
from ropelens.measured_rotation.model_layers import measure_layers
from ropelens.measured_rotation.read import LayerRotation
from ropelens.measured_rotation.single_tokens import BRIEF
from ropelens.model.intervention import HeadInputs, Intervention
from ropelens.model.live_model import LiveModel
from ropelens.rope.turn import rotate_by
from ropelens.text.tokenize import prompt_tokens

STORY = """The old man lived by the sea. Every morning he walked along the beach, and every \
evening he sat by the fire and read the same book. One day a boy came to his door. "Who are \
you?" the old man asked. "I am the son of the man who sold you this house," the boy said, "and \
I have come to ask you for a favour." The old man thought about it for a while, and then he \
asked the boy to come in and sit by the fire."""

ORDERS = ((-1, 2), (2, -1))  # shapes of the coordinates, before they are transposed
KNOWLEDGE = 0.1  # nats/token by which a right order predicts better than chance
FEW_TOKENS = 32  # of the story, on which `load` looks for a doubt


@dataclass(frozen=True)
class PermutedRows(Intervention):
    """Permute the coordinates of queries and keys before RoPE.

    Each row of the batch gets one of `ORDERS`. A token of M-RoPE has the same position on all
    axes, because the input is a text.
    """

    layers: list[LayerRotation]

    def change_input(self, inputs: HeadInputs) -> Float[Tensor, "batch head slot _"]:
        x = inputs.vectors
        planes = self.layers[inputs.layer].planes
        if inputs.name == "value" or not planes.rotary_dim:
            return x
        positions = inputs.positions
        if positions.ndim == 3:
            positions = positions[..., 0]
        angle = positions[:, None, :, None].to(x.device) * planes.inv_freq.double().to(
            x.device
        )
        unrotated = rotate_by(x, -angle, planes)
        rotated = torch.arange(
            planes.offset, planes.offset + planes.rotary_dim, device="cpu"
        )
        for row, shape in enumerate(ORDERS):
            order = rotated.view(shape).mT.flatten()
            unrotated[row, ..., rotated] = unrotated[row, ..., order]
        return rotate_by(unrotated, angle, planes)


@dataclass(frozen=True)
class OrderLosses:
    """Loss of each token in nats in the present order of rows, and in two other orders."""

    present: Float[np.ndarray, " token"]
    others: Float[np.ndarray, "order token"]
    chance: float  # loss of a model that knows nothing, in nats/token

    @property
    def best_other(self) -> Float[np.ndarray, " token"]:
        """The losses of the better one among the other orders."""
        return min(self.others, key=np.mean)

    @property
    def excess(self) -> Interval:
        """The paired 95 % interval of `present` minus `best_other`, in nats/token."""
        _, low, high = paired_interval(self.present - self.best_other)
        return Interval(low, high)

    @property
    def other_predicts(self) -> bool:
        """Whether `best_other` predicts better than chance."""
        return bool(self.best_other.mean() < self.chance - KNOWLEDGE)


def order_losses(
    live: LiveModel, tokens: Int[Tensor, " position"], layers: list[LayerRotation]
) -> OrderLosses:
    """Losses in each order, of a model whose layers rotate so.

    Instead of rows, queries and keys before RoPE are permuted, which gives the same scores.
    """
    others = tokens.expand(len(ORDERS), -1)
    lengths = torch.full((len(ORDERS),), len(tokens), dtype=torch.long, device="cpu")
    with live.without_hooks():
        present = live.losses(tokens[None], lengths[:1])
        with live.intervene(PermutedRows(layers)):
            permuted = live.losses(others, lengths)
    return OrderLosses(
        present=present[0, 1:].numpy(),
        others=permuted[:, 1:].numpy(),
        chance=math.log(live.vocabulary),
    )


def story_tokens(live: LiveModel) -> Int[Tensor, " position"]:
    """Tokens of the story; no tokens without a tokenizer that fits the model."""
    if live.tokenizer is None:
        return torch.zeros(0, dtype=torch.long, device="cpu")
    tokens = prompt_tokens(STORY, live.tokenizer)[: live.context]
    if len(tokens) < 3 or tokens.max() >= live.vocabulary:
        return tokens[:0]
    return tokens


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
        tokens = story_tokens(live)
        if not len(tokens):
            return unknown
        losses = order_losses(live, tokens, measure_layers(live))
    except RopelensError:
        return unknown
    excess = losses.excess
    wrong = excess.low > 0 and losses.other_predicts
    order = "in an order that hardly affects the loss"
    if wrong:
        order = "in the wrong order: they were permuted twice or not at all"
    elif excess.high < 0:
        order = "in the right order"
    present = f"{losses.present.mean():.2f} nats/token"
    other = f"permuted {losses.best_other.mean():.2f}"
    sentence = (
        f"The rows of q and k are {order}: loss on a short story {present}, {other}."
    )
    return RowOrder(wrong, sentence)


def needs_row_check(live: LiveModel) -> bool:
    """Whether three passes over at most 64 tokens leave a doubt about the order of the rows.

    They leave no doubt if the present order predicts the first tokens of the story better than
    the other orders (the paired 95 % interval is below 0), if the other orders do not predict
    better than chance, or if no layer rotates. They leave one if they do not suffice to measure
    the rotation. The model must just have been loaded, because RoPE that depends on the length
    then has the rotation of a short sequence.
    """
    tokens = story_tokens(live)[:FEW_TOKENS]
    if not len(tokens):
        return False
    try:
        layers = measure_layers(live, settings=BRIEF)
        if not any(layer.planes.inv_freq.any() for layer in layers):
            return False
        losses = order_losses(live, tokens, layers)
    except RopelensError:
        return True
    return losses.other_predicts and losses.excess.high >= 0


def warn_of_row_order(live: LiveModel, *, stacklevel: int = 2) -> None:
    """Warn if the rows of q and k are in the wrong order.

    `check_row_order` runs only if `needs_row_check`, because `load` should be fast.
    """
    if not needs_row_check(live):
        return
    order = check_row_order(live)
    if order.wrong:
        warnings.warn(order.sentence, stacklevel=stacklevel + 1)
