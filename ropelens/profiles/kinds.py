"""Kinds of layers in saved results. Figures use this file without torch."""

from collections.abc import Sequence
from dataclasses import dataclass

import xarray as xr

KIND_COORDINATES = ("layer_type", "reach", "base", "scaling")


def layers_by_kind(results: xr.Dataset) -> dict[str, list[int]]:
    """The layers of each kind; all layers are "full" in results without kinds of layers."""
    if (
        "reach" not in results.coords
    ):  # in older results, layer_type has another meaning
        return {"full": list(range(results.sizes["layer"]))}
    layers: dict[str, list[int]] = {}
    for layer, kind in enumerate(results["layer_type"].values):
        layers.setdefault(str(kind), []).append(layer)
    return layers


@dataclass(frozen=True)
class Reach:
    """The farthest that layers see: a window or chunk, or the context. `length` in tokens."""

    name: str
    length: int


def window_of(results: xr.Dataset, layers: Sequence[int]) -> Reach | None:
    """The window or chunk of layers of one kind, if they have one."""
    if "reach" not in results.coords:
        return None
    kind = str(results["layer_type"].values[layers[0]]).partition("-")[0]
    length = int(results["reach"][layers[0]])
    if kind == "sliding":
        return Reach("window", length)
    if kind == "chunked":
        return Reach("chunk", length)
    return None
