"""Reach of heads: the distances at which heads find the key after an earlier occurrence."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor

from ropelens.arguments import Number, Positive, Whole, public
from ropelens.attention.call import AttentionCall
from ropelens.errors import BadArgument
from ropelens.intervals import paired_interval
from ropelens.interventions.edit import stack_edits
from ropelens.interventions.variables import OWN_ROTATION
from ropelens.profiles.measurement import Measured, Measurement
from ropelens.profiles.tasks import doublings
from ropelens.rope.planes import Planes
from ropelens.rope.select import ALL_HEADS, heads_by_layer
from ropelens.runtime.progress import ProgressOption, Stage, display_of
from ropelens.schema import REACH, labelled
from ropelens.text.rows import generator_of
from ropelens.text.text import Text
from ropelens.text.tokenize import TextInput

COPIED = 48  # random tokens that are repeated, if the context is long enough

DISTANCES = tuple(
    np.unique(np.geomspace(1, 1_000_000, 49).round()).tolist()
)  # 8 per decade


@public
def reach(
    model: Measured,
    text: TextInput,
    *,
    tokenizer: Any = None,
    heads: str = ALL_HEADS,
    variants: Sequence[str] = (OWN_ROTATION,),
    copied: Positive = COPIED,
    copies: Sequence[int] | None = None,
    distances: Sequence[Number] | np.ndarray = DISTANCES,
    draws: Positive = 4,
    seed: Whole = 0,
    progress: ProgressOption = None,
) -> xr.Dataset:
    """Measure how far back heads find a key, and extrapolate to larger distances.

    A sequence consists of `copied` random tokens (fewer if the context is short), tokens of
    `text`, and the same random tokens again, `copies` tokens after the first copy (by default
    doublings, up to the trained context). It is drawn `draws` times with `seed`. With 3 copied
    tokens the copy is a needle: two tokens ask for the third. The model runs unmodified ("own")
    or under each of `variants`, names of docs/variants.md. Returns a dataset over variant,
    layer and head:

    - `found_share` (run_distance): share of rows of the second copy in which the key after the
      first occurrence of the token has the highest score, without position 0 and the row's own
      key. `found_low` and `found_high` are the 95 % interval over draws (`found_by_draw`).
    - `foretold_share` (run_distance): the share that the run at the previous distance predicts,
      from its queries and keys with the right key turned to this distance (Su et al. 2021,
      arXiv 2104.09864, eq. 16). If it agrees with `found_share`, `extrapolated_share` is
      credible. Both are NaN beyond the window of a layer.
    - `extrapolated_share` (distance): the prediction of the farthest run for the larger
      `distances`. The queries of a head may change with the distance, which only a run shows.

    Other heads than `heads`, such as "1.3,2.*", are NaN. Raises `BadArgument` for copies that
    overlap or exceed the context, `UnsupportedModel` for a variant that the model family cannot
    express, and the errors of `profile`.
    """
    measurement = Measurement.of(model, text, tokenizer=tokenizer, seed=seed)
    live = measurement.live
    variants = variants or (OWN_ROTATION,)
    chosen = [
        mask.nonzero().flatten()
        for mask in heads_by_layer(
            heads, live.attending_heads, measurement.rotation.kind_names
        )
    ]
    copied = max(2, min(copied, (live.context - 1) // 3))
    farthest = live.context - 1 - copied
    run_distances = sorted(doublings(copied, farthest) if copies is None else copies)
    if (
        not run_distances
        or not copied <= run_distances[0] <= run_distances[-1] <= farthest
    ):
        what = "Copies must lie in the context that the model was trained for."
        hint = f"copies from {copied} to {farthest} tokens"
        raise BadArgument(what, seen=f"distances {run_distances}", hint=hint)
    beyond = np.array([float(d) for d in distances if d > run_distances[-1]])
    measurement.rotation.planes(
        alike=True
    )  # raises an error if heads of a layer differ
    longest = two_copies(measurement, run_distances[-1], copied, draw=0)
    live.check_observation_is_exact(Text(longest))
    total = (
        len(variants) * draws * sum(1 + distance + copied for distance in run_distances)
    )
    runs, settings = [], (chosen, copied, run_distances, beyond, draws)
    with display_of(progress)(Stage("running copies", total)) as step:
        for name in variants:
            edit = stack_edits(
                measurement.rotation, [] if name == OWN_ROTATION else [name]
            )
            with nullcontext() if name == OWN_ROTATION else live.edit(edit):
                runs.append(_run_copies(measurement, *settings, step))
    values = {name: np.stack([run[name] for run in runs]) for name in runs[0]}
    indices = {"distance": beyond, "run_distance": np.array(run_distances)}
    coords: dict[str, Any] = {"layer": range(live.layers), "head": range(live.heads)}
    coords |= labelled(indices, REACH) | {"variant": np.array(variants, dtype=object)}
    dataset = xr.Dataset(labelled(values, REACH), coords)
    return dataset.assign_attrs(
        {"kind": "reach", "copied": copied} | measurement.attributes
    )


def _run_copies(
    measurement: Measurement,
    chosen: Sequence[Int[Tensor, " _"]],
    copied: int,
    run_distances: Sequence[int],
    beyond: Float[np.ndarray, " distance"],
    draws: int,
    progress: Callable[[int], None],
) -> dict[str, np.ndarray]:
    """The variables of `REACH` as [layer, head, ...], under the open edit."""
    live = measurement.live
    shape = (draws, live.layers, live.heads, len(run_distances))
    share, foretold = np.full(shape, np.nan), np.full(shape, np.nan)
    extrapolated = np.full((*shape[:3], len(beyond)), np.nan)
    for index, distance in enumerate(run_distances):
        further, predicted = torch.from_numpy(beyond), extrapolated
        if index + 1 < len(run_distances):
            further = torch.tensor([float(run_distances[index + 1])])
            predicted = foretold[..., index + 1 : index + 2]

        def see(
            call: AttentionCall, back: int = distance, to: Tensor = further
        ) -> Tensor:
            planes = measurement.rotation.planes_of(call)
            return share_found(
                call.of_heads(chosen[call.layer]), planes, copied, back, to
            )

        for draw in range(draws):
            tokens = two_copies(measurement, distance, copied, draw)
            live.forget_length()
            for layer, shares in live.record_calls(tokens, see).items():
                heads: Any = (draw, layer, chosen[layer].numpy())
                share[*heads, index] = shares[:, 0]
                predicted[heads] = shares[:, 1:]
            progress(tokens.numel())
    foretold[np.isnan(share)] = np.nan  # the mask of the run hides the key
    mean, low, high = np.apply_along_axis(paired_interval, 0, share)
    ends = {"found_low": low.clip(0, 1), "found_high": high.clip(0, 1)}
    extended = {
        "foretold_share": foretold.mean(0),
        "extrapolated_share": extrapolated.mean(0),
    }
    return (
        {"found_by_draw": np.moveaxis(share, 0, -1), "found_share": mean}
        | ends
        | extended
    )


def two_copies(
    measurement: Measurement, distance: int, copied: int, draw: int
) -> Int[Tensor, "1 position"]:
    """First token of the text, random tokens, text, and the copies `distance` tokens later."""
    text, generator = measurement.text, generator_of(measurement.seed, distance, draw)
    once = torch.randperm(measurement.live.vocabulary, generator=generator)
    once = once[torch.arange(copied) % len(once)]
    stream, between = text.ids.cpu()[:, 1:][text.real[:, 1:]], distance - copied
    begin = int(torch.randint(max(1, len(stream) - between), (), generator=generator))
    filler = stream[(begin + torch.arange(between)) % len(stream)]
    return torch.cat([torch.tensor([text.first_token]), once, filler, once])[None]


def share_found(
    call: AttentionCall,
    planes: Planes,
    copied: int,
    distance: int,
    further: Float[Tensor, " n"],
) -> Float[Tensor, "head 1+n"]:
    """Share of rows in which the right key has the highest score, in place and turned."""
    length = call.query.shape[2]
    row = torch.arange(length - copied, length - 1)
    right = (row - distance + 1).to(call.key.device)
    query, key = call.query[0][:, row].float() * call.scale, call.key[0].float()
    seen = call.visibility.at(row[None]).sees()[0].to(key.device)
    visible = seen.gather(1, right[:, None])[:, 0]
    seen[:, 0] = False
    seen[torch.arange(len(row)), row] = False
    scores = query @ key.mT
    right_key = right.expand(len(query), -1)[..., None]
    best = (
        scores.masked_fill(~seen, -torch.inf).scatter(2, right_key, -torch.inf).amax(-1)
    )
    turned = planes.moved_scores(
        planes.products(query, key[:, right]), further - distance
    )
    wins = torch.cat([scores.gather(2, right_key), turned], dim=-1) > best[..., None]
    shares = wins[:, visible].double().mean(1).cpu()
    if call.window is not None:
        shares[:, 1:].masked_fill_((further > call.window).cpu(), torch.nan)
    return shares
