"""Kinds of layers in saved results. Figures use this file without torch."""

from collections.abc import Sequence

import xarray as xr

KIND_COORDINATES = ("layer_type", "reach", "base", "scaling")


def layers_by_kind(results: xr.Dataset) -> dict[str, list[int]]:
    """The layers of each kind; all layers are "full" in results without kinds of layers."""
    layers: dict[str, list[int]] = {}
    known = (
        "reach" in results.coords
    )  # in older results, layer_type has another meaning
    for layer in range(results.sizes["layer"]):
        kind = str(results["layer_type"].values[layer]) if known else "full"
        layers.setdefault(kind, []).append(layer)
    return layers


def window_of(results: xr.Dataset, layers: Sequence[int]) -> tuple[str, int] | None:
    """ "window" or "chunk" of layers of one kind and its length (tokens), if they have one."""
    if "reach" not in results.coords:
        return None
    kind = str(results["layer_type"].values[layers[0]]).partition("-")[0]
    name = {"sliding": "window", "chunked": "chunk"}.get(kind)
    return None if name is None else (name, int(results["reach"][layers[0]]))
