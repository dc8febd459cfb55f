"""The mean query and key of every plane: what is left of a plane that forgets its tokens."""

from __future__ import annotations

import torch
import xarray as xr
from jaxtyping import Int
from torch import Tensor, nn

from ropelens.measure.batches import collect
from ropelens.measure.tokens import as_corpus
from ropelens.models.subject import as_subject
from ropelens.statistics.layer import LayerMeans
from ropelens.statistics.ragged import stack
from ropelens.statistics.variables import named


def plane_means(
    model: nn.Module,
    tokens: Int[Tensor, "sequence position"],
    *,
    lengths: Int[Tensor, " sequence"] | None = None,
) -> xr.Dataset:
    """Mean query and key of every plane over `tokens`, with their rotation removed.

    `tokens` are padded on the right; of sequence s the first `lengths[s]` count. Returns
    `q_mean` (layer, head, frequency, part) and `k_mean` (layer, kv_head, frequency, part) in
    model units; `part` 0 and 1 are a plane's two coordinates. Its length over the mean
    length is the coherence of a profile. For `mean_ablate`.

    Raises as `measure_rope` does, and `BadArgument` for tokens or lengths out of range.
    """
    subject = as_subject(model)
    text = as_corpus(subject.model, tokens, lengths)
    planes = subject.planes(text.context, alike=True)
    still = named("q_still", "k_still")
    sums = collect(subject, text, planes=planes, statistics=still)
    layers = [
        LayerMeans(sums.layers[layer], sums, plane, still) for layer, plane in enumerate(planes)
    ]
    means = {}
    for name, row in zip(("q_mean", "k_mean"), still, strict=True):
        parts = [
            torch.stack([layer[row.name][:, part] for part in _parts(layer)], dim=-1)
            for layer in layers
        ]
        dims = (*row.dims[:2], "frequency", "part")
        means[name] = xr.Variable(dims, stack(parts), row.attrs)
    return xr.Dataset(means)


def _parts(layer: LayerMeans) -> tuple[slice, slice]:
    """The coordinates of the planes: their real parts, and their imaginary parts."""
    return layer.planes.first, layer.planes.second
