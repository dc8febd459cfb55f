"""Bins of positions and classes of tokens, by which an evaluation splits the losses."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ropelens.profiles.token_sets import CLASSES, ids_of
from ropelens.text.prompts import TokenNames
from ropelens.text.rows import Ids
from ropelens.text.text import Text


@dataclass(frozen=True)
class TokenSplit:
    """Bins of positions (`edges`) and `classes` of tokens (ids) that split the losses."""

    edges: Int[Tensor, " edge"]
    classes: Mapping[str, Int[Tensor, " id"]]

    @classmethod
    def plan(
        cls, text: Text, *, trained: int | None, tokenizer: TokenNames | None
    ) -> "TokenSplit":
        """Two bins per octave, with a further edge at the trained context."""
        context = text.context
        halves = range(2 * context.bit_length() + 1)
        edges = {round(2 ** (half / 2)) for half in halves}
        edges.add(trained or context)
        inner = sorted(edge for edge in edges if edge < context)
        classes = {}
        if tokenizer is not None:
            for name in CLASSES:
                classes[name] = ids_of(text.ids, name, tokenizer)
        stop = torch.tensor([*inner, context], dtype=torch.long, device="cpu")
        return cls(stop, classes)

    @property
    def bins(self) -> int:
        return len(self.edges) - 1

    def sets(self, ids: Ids) -> Bool[Tensor, "sequence set position"]:
        """All tokens, and the tokens of each class."""
        ids = ids.cpu()
        sets = [torch.ones_like(ids, dtype=torch.bool)]
        for ids_of_class in self.classes.values():
            sets.append(torch.isin(ids, ids_of_class))
        return torch.stack(sets, dim=1)

    def predicted(self, text: Text) -> Bool[Tensor, "sequence split position"]:
        """Predicted tokens that occurred before in their sequence, then those in each class."""
        classes = self.sets(text.ids)[:, 1:] & text.predicted[:, None]
        return torch.cat([text.seen_before[:, None], classes], dim=1)
