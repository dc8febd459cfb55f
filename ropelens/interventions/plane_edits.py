"""Edits of planes: the chosen planes of heads get a new frequency, a gain or a factor."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch
import xarray as xr
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad

from ropelens.errors import BadArgument
from ropelens.measured_rotation.stated import shape_of
from ropelens.model.live_model import LiveModel
from ropelens.rope.planes import Planes
from ropelens.rope.select import ALL_HEADS, Selection
from ropelens.rope.turn import TargetRotation
from ropelens.rope.variant_config import frequencies
from ropelens.rope.variants import Variant


@dataclass(frozen=True)
class HeadRotations:
    """How the heads of a layer rotate under edits, in a call of `length` tokens.

    `planes` are the planes without edits. `attending` marks the heads that attend, and the
    other tensors have a row for each of these heads: the frequency of each plane (rad/token),
    the gain of queries and keys, and the factor on each term of the scores. `query_scale` is a
    further factor on all scores.
    """

    layer: int
    length: int
    planes: Planes
    attending: Bool[Tensor, " any_head"]
    inv_freq: Float[Tensor, "head frequency"]
    gain: Float[Tensor, "head term"]
    factor: Float[Tensor, "head term"]
    query_scale: float = 1.0

    @classmethod
    def unedited(
        cls, layer: int, length: int, planes: Planes, attending: Bool[Tensor, " head"]
    ) -> "HeadRotations":
        """The rotations of the heads of a layer before the first edit."""
        heads = int(attending.sum())
        inv_freq = planes.inv_freq.float().expand(heads, -1)
        ones = torch.ones(heads, planes.terms, dtype=torch.float32, device="cpu")
        return cls(layer, length, planes, attending, inv_freq, gain=ones, factor=ones)

    @property
    def of_queries(self) -> TargetRotation:
        """The rotation of the queries, with all factors on scores."""
        gain = self.gain * self.factor * self.query_scale
        return TargetRotation(self.inv_freq, gain)

    @property
    def of_keys(self) -> TargetRotation:
        return TargetRotation(self.inv_freq, self.gain)

    def rotate_at(
        self,
        inv_freq: Float[Tensor, " given"],
        chosen: Bool[Tensor, "head frequency"],
    ) -> "HeadRotations":
        """The chosen planes rotate at `inv_freq`, in the direction of the model."""
        count = len(self.planes.inv_freq)
        if len(inv_freq) != count:
            seen = f"{len(inv_freq)} frequencies; layer {self.layer} has {count} planes"
            raise BadArgument(
                "A new rotation needs a frequency for every plane.", seen=seen
            )
        backward = self.planes.inv_freq.sum() < 0
        signed = -inv_freq if backward else inv_freq
        return replace(
            self, inv_freq=torch.where(chosen, signed.float(), self.inv_freq)
        )

    def with_gain(
        self, gain: float, chosen: Bool[Tensor, "head frequency"]
    ) -> "HeadRotations":
        """Queries and keys of the chosen planes get a gain, instead of an earlier gain."""
        unrotated = self.planes.terms - chosen.shape[1]
        chosen_terms = pad(chosen, (0, unrotated))
        return replace(self, gain=torch.where(chosen_terms, gain, self.gain))


@dataclass(frozen=True, kw_only=True, eq=False)
class Edit(ABC):
    """A change of chosen planes (`select`) of some heads, such as "3.5,4.*".

    Planes are chosen by their frequencies without edits.
    """

    select: Selection
    heads: str = ALL_HEADS

    def apply(
        self, rotations: HeadRotations, heads: Bool[Tensor, " head"]
    ) -> HeadRotations:
        """The rotations of a layer after this edit of the marked `heads` that attend."""
        chosen = heads[:, None] & self.select(rotations.planes)
        if not chosen.any():
            return rotations
        return self.change(rotations, chosen)

    @abstractmethod
    def change(
        self, rotations: HeadRotations, chosen: Bool[Tensor, "head frequency"]
    ) -> HeadRotations:
        """The rotations of a layer after a change of the chosen planes, at least one."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Stop(Edit):
    """The planes stop rotating; see `stop`."""

    def change(
        self, rotations: HeadRotations, chosen: Bool[Tensor, "head frequency"]
    ) -> HeadRotations:
        inv_freq = rotations.inv_freq.masked_fill(chosen, 0)
        return replace(rotations, inv_freq=inv_freq)


@dataclass(frozen=True, kw_only=True, eq=False)
class Scale(Edit):
    """The terms of the planes in the scores are multiplied by a number; see `scale`."""

    by: float
    keep_length: xr.Dataset | None = None  # a profile

    def change(
        self, rotations: HeadRotations, chosen: Bool[Tensor, "head frequency"]
    ) -> HeadRotations:
        planes = rotations.planes
        scaled = pad(self.select(planes), (0, planes.terms - len(planes.inv_freq)))
        ones = torch.ones(scaled.shape, dtype=torch.float32, device=scaled.device)
        factor = ones.masked_fill(scaled, self.by)
        if self.keep_length is not None:
            lengths = self._lengths(self.keep_length, rotations)
            change = lengths.norm(dim=1) / (lengths * factor).norm(dim=1)
            factor = factor * change.nan_to_num(1, 1)[:, None]
            factor = factor.float()[rotations.attending]
        in_head = chosen.any(1, keepdim=True)
        return replace(
            rotations,
            factor=torch.where(in_head, rotations.factor * factor, rotations.factor),
        )

    @staticmethod
    def _lengths(
        profile: xr.Dataset, rotations: HeadRotations
    ) -> Float[Tensor, "any_head term"]:
        """Length of the coefficient of each term, `q_norm` * `k_norm` of the profile."""
        norms = profile.isel(
            layer=rotations.layer, frequency=slice(rotations.planes.terms)
        )
        query = norms["q_norm"].values
        key = norms["k_norm"].values
        key_of_query = key.repeat(len(query) // len(key), axis=0)
        return torch.from_numpy(query * key_of_query)


@dataclass(frozen=True, kw_only=True, eq=False)
class Rescale(Edit):
    """The planes rotate at `inv_freq` (rad/token), with a gain; see `rescale`."""

    inv_freq: Float[Tensor, " frequency"]
    gain: float

    def change(
        self, rotations: HeadRotations, chosen: Bool[Tensor, "head frequency"]
    ) -> HeadRotations:
        return rotations.rotate_at(self.inv_freq, chosen).with_gain(self.gain, chosen)


@dataclass(frozen=True, kw_only=True, eq=False)
class VariantEdit(Edit):
    """A model rotates as a RoPE variant, from its own base and context.

    `model_factor` is the attention factor of the model; None if a norm cancels it. Scores are
    multiplied by `query_scale`.
    """

    variant: Variant
    live: LiveModel
    model_factor: float | None
    query_scale: float

    def apply(
        self, rotations: HeadRotations, heads: Bool[Tensor, " head"]
    ) -> HeadRotations:
        edited = super().apply(rotations, heads)
        if self.query_scale == 1:
            return edited
        return replace(edited, query_scale=self.query_scale)

    def change(
        self, rotations: HeadRotations, chosen: Bool[Tensor, "head frequency"]
    ) -> HeadRotations:
        shape = shape_of(
            self.live,
            rotations.layer,
            rotary_dim=rotations.planes.rotary_dim,
            length=rotations.length,
        )
        inv_freq, factor = frequencies(self.variant, shape)
        gain = factor / self.model_factor if self.model_factor else 1.0
        return rotations.rotate_at(inv_freq, chosen).with_gain(gain, chosen)
