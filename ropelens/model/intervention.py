"""Interventions: changes of some heads at the attention calls of a model."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from jaxtyping import Bool, Float, Int
from torch import Tensor

from ropelens.rope.planes import Planes

AttentionInput = Literal["query", "key", "value"]


@dataclass(frozen=True)
class HeadInputs:
    """Queries, keys or values (`name`) of an attention call, before an intervention.

    There are more slots than tokens if a static cache has empty slots. `tokens` are the indices
    of the tokens in their sequence. `positions` may be shifted by a constant in each sequence.
    """

    layer: int
    name: AttentionInput
    vectors: Float[Tensor, "batch head slot coordinate"]
    tokens: Int[Tensor, "_ token"]
    positions: Int[Tensor, "_ slot *axis"]

    @property
    def continued(self) -> bool:
        """Whether other tokens of a sequence precede these tokens, for example in a cache."""
        return bool(self.tokens[:, 0].any())


@dataclass(frozen=True)
class HeadOutputs:
    """Outputs of the heads of an attention call, before the output projection.

    `real` marks rows that are tokens instead of padding. `tokens` are the indices of the rows
    in their sequence.
    """

    layer: int
    output: Float[Tensor, "batch row head feature"]
    real: Bool[Tensor, "_ row"]
    tokens: Int[Tensor, "_ row"]


@dataclass(frozen=True)
class ReplacedOutputs:
    """An output for every head, which replaces the outputs of the marked `heads`."""

    heads: Bool[Tensor, " head"]
    output: Float[Tensor, "batch row head feature"]


class Intervention:
    """A change of the inputs or the outputs of heads at the attention calls of a model.

    The attention hook calls these methods for each layer, while the block of the intervention
    is open (`LiveModel.intervene`). A method that a subclass does not define changes nothing.
    """

    rotates: ClassVar[bool] = False
    """Whether it gives queries and keys another rotation.

    Such an intervention comes after all others, because it also rotates the vectors that they
    put in. It replaces an earlier one, whose edits it includes.
    """

    def change_input(self, inputs: HeadInputs) -> Float[Tensor, "batch _ slot _"]:
        """New vectors, with a head for each query head if heads of a group differ."""
        return inputs.vectors

    def replace_output(self, outputs: HeadOutputs) -> ReplacedOutputs | None:
        """Outputs instead of the outputs of the model; None replaces no head."""
        return None

    def planes(self, layer: int, unedited: Planes, *, length: int) -> Planes:
        """Planes in a call of `length` tokens, with one row per head if heads differ."""
        return unedited
