"""What a head's reach comes to: running sums become scores by distance, and horizons."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor

from ropelens.errors import BadArgument
from ropelens.rope.horizon import horizons, lowest_scores, moved_scores
from ropelens.rope.planes import Planes
from ropelens.statistics.picked import PickedSums, Rotation
from ropelens.statistics.ragged import stack

INTERVAL = (2.5, 97.5)
"""Ends of the interval of a horizon, in percent."""

DESCRIBED = {
    "moved_score": ("mean score of the picked key, moved to a distance", "nat"),
    "win_share": ("share of rows whose picked key, moved, scores above all others", "1"),
    "unmoved_win_share": (
        "share of rows whose picked key, where it stands, scores above all others",
        "1",
    ),
    "others_level": ("mean score of the other keys, at their own places", "nat"),
    "others_best": ("mean over rows of the best other key's score", "nat"),
    "lowest_score": ("what no distance takes the mean moved score below", "nat"),
    "horizon": ("distance at which the moved score falls to the level of the others", "token"),
    "horizon_low": ("lower end of the 95 % interval of the horizon", "token"),
    "horizon_high": ("upper end of the 95 % interval of the horizon", "token"),
    "best_horizon": ("distance at which the moved score falls to that of the best", "token"),
    "picked_distance": ("mean distance at which the picked key stands", "token"),
    "product_real": ("mean of s Re(q~ conj(k~)) of row and picked key", "nat"),
    "product_imag": ("mean of s Im(q~ conj(k~)) of row and picked key", "nat"),
    "variant_inv_freq": ("angular frequency under the variant", "rad/token"),
    "variant_gain": ("what the variant multiplies a term of a score with", "1"),
    "distance": ("distance that the picked key is moved to", "token"),
}

_BY_VARIANT = ("variant", "layer", "head")
_DIMS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("moved_score", "win_share"), (*_BY_VARIANT, "distance")),
    **dict.fromkeys(("unmoved_win_share", "others_level", "others_best"), _BY_VARIANT),
    **dict.fromkeys(("lowest_score", "horizon", "horizon_low", "horizon_high"), _BY_VARIANT),
    "best_horizon": _BY_VARIANT,
    "picked_distance": ("layer", "head"),
    **dict.fromkeys(("product_real", "product_imag"), ("layer", "head", "frequency")),
}
_TERMS: dict[str, Callable[[Rotation], Tensor]] = {
    "inv_freq": lambda rotation: rotation.inv_freq,
    "gain": lambda rotation: rotation.gain,
}


@dataclass(frozen=True)
class Plan:
    """What is asked: chosen heads of each layer, [layer][variant] rotations, the distances.

    `head_count` is that of a whole layer; `rows` and `seed` say which rows are sampled.
    """

    planes: list[Planes]
    head_count: int
    variants: tuple[str, ...]
    heads: list[Int[Tensor, " _"]]
    rotations: list[list[Rotation]]
    distances: Float[Tensor, " distance"]
    context: int
    rows: int | Literal["all"]
    seed: int

    @property
    def farthest(self) -> int:
        """The last whole distance at which a horizon is looked for."""
        return int(self.distances.max())


def summarize_layer(
    sums: PickedSums, plan: Plan, layer: int, draws: Float[Tensor, "resample group"]
) -> dict[str, Tensor]:
    """The numbers of one layer's chosen heads, [head, variant, ...]."""
    mean = _means(sums, draws)
    parts: list[dict[str, Tensor]] = []
    for index, rotation in enumerate(plan.rotations[layer]):
        product, inv_freq = mean["product"] * rotation.gain, rotation.inv_freq
        level, best = mean["level"][..., index], mean["best"][0, :, index]
        found = horizons(
            torch.cat([product.flatten(0, 1), product[0]]),
            inv_freq,
            torch.cat([level.flatten(), best]),
            within=plan.context,
            farthest=plan.farthest,
        )
        by_level = found[: level.numel()].view(level.shape)
        low, high = _interval(by_level[1:])
        parts.append(
            {
                "moved_score": moved_scores(product[0], inv_freq, plan.distances),
                "others_level": level[0],
                "others_best": best,
                "lowest_score": lowest_scores(product[0], inv_freq),
                "horizon": by_level[0],
                "horizon_low": low,
                "horizon_high": high,
                "best_horizon": found[level.numel() :],
            }
        )
    return {
        **{name: torch.stack([part[name] for part in parts], dim=1) for name in parts[0]},
        "win_share": sums.wins / sums.weight.sum(),
        "unmoved_win_share": sums.kept / sums.weight.sum(),
        "picked_distance": mean["distance"][0],
        "product_real": mean["product"][0].real,
        "product_imag": mean["product"][0].imag,
    }


def _means(sums: PickedSums, draws: Float[Tensor, "resample group"]) -> dict[str, Tensor]:
    """Means over rows [resample, head, ...]; the first resample is all sequences, once each."""
    weight = draws @ sums.weight
    if not weight[0] > 0:
        raise BadArgument(
            "No row has two keys to choose from.",
            seen="sequences of 3 tokens or fewer, or a sliding window of 2",
            attempt="longer sequences",
        )
    share = draws[weight > 0] / weight[weight > 0, None]
    named = {
        "distance": sums.distance,
        "product": sums.product,
        "level": sums.level,
        "best": sums.best,
    }
    return {
        name: torch.einsum("rg,g...->r...", share.to(values.dtype), values)
        for name, values in named.items()
    }


def _interval(
    resampled: Float[Tensor, "resample head"],
) -> tuple[Float[Tensor, " head"], Float[Tensor, " head"]]:
    """The percentiles of `INTERVAL`, themselves resampled values, for some are infinite."""
    if not len(resampled):
        nothing = torch.full(resampled.shape[1:], torch.nan, dtype=torch.float64)
        return nothing, nothing
    ends = np.percentile(resampled.numpy(), INTERVAL, axis=0, method="inverted_cdf")
    return torch.from_numpy(ends[0]), torch.from_numpy(ends[1])


def label_arrays(found: Mapping[int, dict[str, Tensor]], plan: Plan) -> xr.Dataset:
    """The numbers of every layer as one dataset; NaN for heads that were not chosen."""
    arrays = {name: (dims, _stacked(name, dims, found, plan)) for name, dims in _DIMS.items()}
    for name, of in _TERMS.items():
        by_layer = (torch.stack([of(r) for r in turned]) for turned in plan.rotations)
        values = np.moveaxis(stack(by_layer), 1, 0)
        arrays[f"variant_{name}"] = (("variant", "layer", "frequency"), values)
    dataset = xr.Dataset(
        arrays,
        coords={
            "variant": np.array(plan.variants, dtype=object),
            "layer": range(len(plan.planes)),
            "head": range(plan.head_count),
            "distance": plan.distances.numpy(),
        },
    )
    for name, (long_name, units) in DESCRIBED.items():
        dataset[name].attrs = {"long_name": long_name, "units": units}
    return dataset


def _stacked(
    name: str, dims: tuple[str, ...], found: Mapping[int, dict[str, Tensor]], plan: Plan
) -> np.ndarray:
    """One variable of all layers; heads in their places, the variant in front."""
    by_variant = "variant" in dims
    further = len(dims) - 2
    by_layer = []
    for layer, heads in enumerate(plan.heads):
        shape = found[layer][name].shape[1:] if layer in found else (0,) * further
        placed = torch.full((plan.head_count, *shape), torch.nan, dtype=torch.float64)
        if layer in found:
            placed[heads] = found[layer][name]
        by_layer.append(placed)
    values = stack(by_layer)
    return np.moveaxis(values, 2, 0) if by_variant else values
