"""How far back heads find a key: by runs at real distances, and farther by turning their keys.

Random tokens come twice. On the second copy a head that acts on a match looks for the key after
the same token's first place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor

from ropelens.attention.call import AttentionCall
from ropelens.attention.variables import labelled, table
from ropelens.errors import BadArgument, Number, Positive, Whole, public
from ropelens.intervals import paired_interval
from ropelens.interventions.edit import stack_edits
from ropelens.interventions.tasks import doublings
from ropelens.interventions.variables import OWN_ROTATION
from ropelens.model.as_live_model import Model
from ropelens.profiles.induction import forget_length
from ropelens.profiles.measurement import Measurement
from ropelens.rope.planes import Planes
from ropelens.rope.select import ALL_HEADS
from ropelens.runtime.progress import ShowProgress, Stage, silent
from ropelens.text.rows import generator_of
from ropelens.text.tokenize import TextInput

COPIED = 48  # random tokens that come twice, where the context holds so many

DISTANCES = tuple(np.unique(np.geomspace(1, 1_000_000, 49).round()).tolist())
"""Tokens: 1 to 1,000,000, eight a decade."""

REACH = table("""
found_share (variant, layer, head, run_distance) 1: share of rows that find the key after the
    token's first place, so many tokens back
found_by_draw (variant, layer, head, run_distance, draw) 1: the same, by draw of random tokens
found_low (variant, layer, head, run_distance) 1: lower end of its 95 % interval over draws
found_high (variant, layer, head, run_distance) 1: upper end of its 95 % interval over draws
foretold_share (variant, layer, head, run_distance) 1: the same, as the run at the distance
    before says, its key turned to this distance
extrapolated_share (variant, layer, head, distance) 1: the same, as the farthest run says
distance (distance) token: distance that the key is turned to, beyond the farthest run
run_distance (run_distance) token: distance between the copies that were run
""")


@public
def reach(
    model: Model,
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
    progress: ShowProgress | None = None,
) -> xr.Dataset:
    """How far back heads find a key: run at real distances, then extrapolated.

    `copied` random tokens come twice (fewer where the context is short), `copies` tokens apart
    (by default doublings, as far as the context that the model was trained for), with `tokens`
    between, `draws` times with `seed`. Three are a needle: two ask for the third. The model
    runs as it is ("own"), or under each of `variants`, names of docs/variants.md. Returns a
    dataset over variant, layer and head:

    - `found_share` (run_distance): share of rows of the second copy in which the key after the
      same token's first place scores above all others but position 0 and the row's own;
      `found_low` and `found_high` are its 95 % interval over draws (`found_by_draw`).
    - `foretold_share` (run_distance): what the run at the distance before says of it: its
      queries and keys, the right key turned to this distance (Su et al. 2021, arXiv 2104.09864,
      eq. 16). Where it agrees with `found_share`, `extrapolated_share` may be believed.
    - `extrapolated_share` (distance): what the farthest run says of `distances` beyond it. What
      a head asks for may change where it stands farther back, which only a run shows.

    `heads` is a list such as "1.3,2.*"; others are NaN. Heads that act on no match find no copy
    at any distance. Raises `BadArgument` for copies that overlap or reach out of the context,
    `UnsupportedModel` for a variant that the family cannot express, and what `profile` raises.
    """
    return find_copies(
        Measurement.of(model, text, tokenizer=tokenizer, seed=seed),
        heads=heads,
        variants=variants,
        copied=copied,
        copies=copies,
        distances=distances,
        draws=draws,
        progress=progress,
    )


def find_copies(
    measurement: Measurement,
    *,
    heads: str = ALL_HEADS,
    variants: Sequence[str] = (OWN_ROTATION,),
    copied: int = COPIED,
    copies: Sequence[int] | None = None,
    distances: Sequence[float] | np.ndarray = DISTANCES,
    draws: int = 4,
    progress: ShowProgress | None = None,
) -> xr.Dataset:
    """Return the reach of heads in a measurement; `reach` explains the arguments."""
    live = measurement.live
    variants = variants or (OWN_ROTATION,)
    chosen = [mask.nonzero().flatten() for mask in live.heads_of(heads)]
    copied = max(2, min(copied, (live.context - 1) // 3))
    farthest = live.context - 1 - copied
    apart = sorted(doublings(copied, farthest) if copies is None else copies)
    if not apart or not copied <= apart[0] <= apart[-1] <= farthest:
        raise BadArgument(
            "Copies must lie in the context that the model was trained for.",
            seen=f"distances {apart}; {copied} to {farthest} fit",
        )
    far = np.array([float(d) for d in distances if d > apart[-1]])
    measurement.rotation.planes(alike=True)  # or refused
    live.check_observation_is_exact(two_copies(measurement, apart[-1], copied, draw=0))
    total = len(variants) * draws * sum(1 + distance + copied for distance in apart)
    runs = []
    with (progress or silent)(Stage("running copies", total)) as step:
        for name in variants:
            edit = stack_edits(measurement.rotation, [] if name == OWN_ROTATION else [name])
            with nullcontext() if name == OWN_ROTATION else live.edit(edit):
                runs.append(_run(measurement, chosen, copied, apart, far, draws, step))
    values = {name: np.stack([run[name] for run in runs]) for name in runs[0]}
    indices = {"distance": far, "run_distance": np.array(apart)}
    coords: dict[str, Any] = {"layer": range(live.layers), "head": range(live.heads)}
    coords |= labelled(indices, REACH) | {"variant": np.array(variants, dtype=object)}
    dataset = xr.Dataset(labelled(values, REACH), coords)
    return dataset.assign_attrs({"kind": "reach", "copied": copied} | measurement.facts)


def _run(
    measurement: Measurement,
    chosen: Sequence[Int[Tensor, " _"]],
    copied: int,
    apart: Sequence[int],
    far: Float[np.ndarray, " distance"],
    draws: int,
    progress: Callable[[int], None],
) -> dict[str, np.ndarray]:
    """The variables of `REACH`, [layer, head, ...], as the model rotates now."""
    live = measurement.live
    shape = (draws, live.layers, live.heads, len(apart))
    share, foretold = np.full(shape, np.nan), np.full(shape, np.nan)
    extrapolated = np.full((*shape[:3], len(far)), np.nan)
    for at, distance in enumerate(apart):
        last = at + 1 == len(apart)
        further = torch.from_numpy(far) if last else torch.tensor([float(apart[at + 1])])
        beyond = extrapolated if last else foretold[..., at + 1 : at + 2]
        for draw in range(draws):
            tokens = two_copies(measurement, distance, copied, draw)

            def see(call: AttentionCall, there: int = distance, to: Tensor = further) -> Tensor:
                turning = measurement.rotation.planes_of(call)
                return share_found(
                    call.of_heads(chosen[call.layer]), turning, copied, there, to
                )

            forget_length(live)
            for layer, shares in live.record_calls(tokens, see).items():
                place: Any = (draw, layer, chosen[layer].numpy())
                share[*place, at] = shares[:, 0]
                beyond[place] = shares[:, 1:]
            progress(tokens.numel())
    mean, low, high = np.apply_along_axis(paired_interval, 0, share)
    return {
        "found_by_draw": np.moveaxis(share, 0, -1),
        "found_share": mean,
        "found_low": low.clip(0, 1),
        "found_high": high.clip(0, 1),
        "foretold_share": foretold.mean(0),
        "extrapolated_share": extrapolated.mean(0),
    }


def two_copies(
    measurement: Measurement, distance: int, copied: int, draw: int
) -> Int[Tensor, "1 position"]:
    """The text's first token, random tokens, text, the random tokens `distance` later."""
    text, generator = measurement.text, generator_of(measurement.seed, distance, draw)
    once = torch.randperm(measurement.live.vocabulary, generator=generator)
    once = once[torch.arange(copied) % len(once)]
    stream, between = text.ids.cpu()[:, 1:][text.real[:, 1:]], distance - copied
    begin = int(torch.randint(max(1, len(stream) - between), (), generator=generator))
    filler = stream[(begin + torch.arange(between)) % len(stream)]
    first = torch.tensor([measurement.first_token])
    return torch.cat([first, once, filler, once])[None]


def share_found(
    call: AttentionCall,
    planes: Planes,
    copied: int,
    distance: int,
    further: Float[Tensor, " further"],
) -> Float[Tensor, "head 1+further"]:
    """Share of the second copy's rows in which the right key wins, as it stands and turned.

    NaN where no row sees the right key.
    """
    length = call.query.shape[2]
    row = torch.arange(length - copied, length - 1)
    right = (row - distance + 1).to(call.key.device)
    query, key = call.query[0][:, row].float() * call.scale, call.key[0].float()
    seen = call.visibility.at(row[None]).sees()[0].to(key.device)
    visible = seen.gather(1, right[:, None])[:, 0]
    seen[:, 0] = False
    seen[torch.arange(len(row)), row] = False
    scores = query @ key.mT
    own = right.expand(len(query), -1)[..., None]
    best = scores.masked_fill(~seen, -torch.inf).scatter(2, own, -torch.inf).amax(-1)
    moved = planes.moved_scores(planes.products(query, key[:, right]), further - distance)
    wins = torch.cat([scores.gather(2, own), moved], dim=-1) > best[..., None]
    return wins[:, visible].double().mean(1).cpu()
