"""The vectors, scores and outputs of one query head in one attention call."""

from collections.abc import Mapping

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ropelens.attention.call import AttentionCall, attention_map
from ropelens.attention.formulas import contrasts
from ropelens.rope.planes import Planes, unrotate


class CapturedHead:
    """One query head of a call with one sequence; it writes the variables of `CAPTURE`."""

    def __init__(self, call: AttentionCall, head: int, planes: Planes) -> None:
        self.call = call.of_heads(torch.tensor([head], dtype=torch.long, device="cpu"))
        self.planes = planes
        self.attention = attention_map(self.call)[0, 0]
        self.query = self.call.query[0, 0].to(self.attention.dtype)
        self.key = self.call.key[0, 0].to(self.attention.dtype)
        self.hidden = ~self.call.visibility.sees()[0].to(self.query.device)

    def write_vectors(self, arrays: Mapping[str, Tensor]) -> None:
        """Write the query and the key by plane, and the rotation of the planes."""
        self.write_side("q", self.query, arrays)
        self.write_side("k", self.key, arrays)
        terms = self.planes.terms
        arrays["inv_freq"][:terms] = self.planes.term_inv_freq
        arrays["wavelength"][:terms] = self.planes.wavelength
        arrays["scale"].fill_(self.call.scale)

    def write_side(
        self,
        side: str,
        x: Float[Tensor, "position coordinate"],
        arrays: Mapping[str, Tensor],
    ) -> None:
        """Write the length in each plane, and the vector without its rotation."""
        planes = self.planes
        arrays[f"{side}_norm"][:, : planes.terms] = planes.norms(x)
        still = unrotate(x, torch.arange(len(x), device="cpu"), planes)
        by_plane = arrays[f"{side}_still"][:, : len(planes.inv_freq)]
        by_plane[..., 0] = still[:, planes.first]
        by_plane[..., 1] = still[:, planes.second]

    def write_scores(
        self, arrays: Mapping[str, Tensor], *, runner_up: int | None
    ) -> None:
        """Write the scores, the contribution of each plane to them, and the attention."""
        term_of = self.planes.term_of
        arrays["score"].copy_(self.scores_of(term_of >= 0))
        contributions = arrays["contribution"]
        for term in range(self.planes.terms):
            contributions[term].copy_(self.scores_of(term_of == term))
        arrays["attention"].copy_(self.attention)
        contrast = contrasts(contributions, arrays["attention"], runner_up=runner_up)
        arrays["contrast"].copy_(contrast)

    def scores_of(
        self, coordinates: Bool[Tensor, " coordinate"]
    ) -> Float[Tensor, "query key"]:
        """Part of these coordinates in each score; NaN if the query does not see the key."""
        query = self.query[:, coordinates]
        key = self.key[:, coordinates]
        scores = self.call.scale * query @ key.mT
        return scores.masked_fill(self.hidden, torch.nan)

    def write_outputs(
        self,
        arrays: Mapping[str, Tensor],
        projection: Float[Tensor, "hidden feature"],
        directions: Float[Tensor, "answer query hidden"] | None,
    ) -> None:
        """Write the lengths of v, v W_O and A v W_O, and their parts in the directions."""
        attention = self.attention
        value = self.call.value[0, 0].to(attention)
        written = value @ projection.to(attention).mT
        output = attention @ written
        arrays["value_norm"].copy_(torch.linalg.vector_norm(value, dim=-1))
        arrays["write_norm"].copy_(torch.linalg.vector_norm(written, dim=-1))
        arrays["written_norm"].copy_(torch.linalg.vector_norm(output, dim=-1))
        if directions is None:
            return
        for index, direction in enumerate(directions):
            along = direction.to(attention) @ written.mT
            arrays["logit"][index].copy_(attention * along)
