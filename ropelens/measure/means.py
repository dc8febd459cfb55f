"""The mean query and key of every plane: what is left of a plane that forgets its tokens."""

from __future__ import annotations

import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor, nn

from ropelens.measure.batches import TOKENS_PER_BATCH
from ropelens.models.doorway import device_of
from ropelens.models.rotation import read_layers
from ropelens.models.subject import as_subject, check_layers
from ropelens.rope.planes import Planes, unrotate
from ropelens.statistics.call import AttentionCall
from ropelens.statistics.ragged import stack


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
    length is the coherence of a profile. For `mean_ablate`. Raises as `measure_rope` does.
    """
    subject = as_subject(model)
    lengths = torch.full((len(tokens),), tokens.shape[1]) if lengths is None else lengths
    planes = [layer.planes for layer in read_layers(subject, context=int(lengths.max()))]
    sums: dict[str, dict[int, Tensor]] = {"q_mean": {}, "k_mean": {}}
    size = max(1, TOKENS_PER_BATCH[device_of(subject.model).type] // tokens.shape[1])
    for begin in range(0, len(tokens), size):
        length = lengths[begin : begin + size, None]
        counts = torch.arange(tokens.shape[1]) < length

        def add(call: AttentionCall, counts: Tensor = counts) -> None:
            for name, x in (("q_mean", call.query), ("k_mean", call.key)):
                sums[name][call.layer] = sums[name].get(call.layer, 0) + _sum(
                    x, planes[call.layer], counts
                )

        with torch.no_grad(), subject.observe(add):
            subject.forward(tokens[begin : begin + size])
    check_layers(subject.model, set(sums["q_mean"]))
    total = float(lengths.sum())
    heads = {"q_mean": "head", "k_mean": "kv_head"}
    means = xr.Dataset(
        {
            name: (
                ("layer", heads[name], "frequency", "part"),
                stack(layers[layer] / total for layer in sorted(layers)),
            )
            for name, layers in sums.items()
        }
    )
    for name, what in (("q_mean", "query"), ("k_mean", "key")):
        described = {"long_name": f"mean {what} without rotation", "units": "model units"}
        means[name].attrs = described
    return means


def _sum(
    x: Float[Tensor, "sequence head position coordinate"],
    planes: Planes,
    counts: Tensor,
) -> Float[Tensor, "head frequency 2"]:
    """Sum over the tokens that count of every plane's two coordinates, rotation removed."""
    x = unrotate(x, torch.arange(x.shape[2]), planes).double()
    x = (x * counts.to(x.device)[:, None, :, None]).sum(dim=(0, 2))
    return torch.stack([x[..., planes.first], x[..., planes.second]], dim=-1)
