"""Reach of heads: the distances at which heads find the key after an earlier occurrence."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from ropelens.interventions.rotation_edit import place_edits
from ropelens.interventions.variables import OWN_ROTATION
from ropelens.profiles.measurement import Measured, Measurement
from ropelens.profiles.tasks import doublings
from ropelens.rope.planes import Planes
from ropelens.rope.select import ALL_HEADS, heads_by_layer
from ropelens.runtime.progress import ProgressOption, Stage, display_of
from ropelens.schema.reach import REACH
from ropelens.schema.rows import labelled
from ropelens.text.rows import generator_of
from ropelens.text.text import Text
from ropelens.text.tokenize import TextInput

COPIED = 48  # random tokens that are repeated, if the context is long enough

DISTANCES = tuple(  # 8 per decade
    np.unique(np.geomspace(1, 1_000_000, 49).round()).tolist()
)


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
    layer_types = measurement.rotation.kind_names
    copied = max(2, min(copied, (live.context - 1) // 3))
    run_distances = _run_distances(copies, copied=copied, context=live.context)
    beyond = [float(distance) for distance in distances]
    experiment = CopyExperiment(
        measurement=measurement,
        heads=[
            of_layer.nonzero().flatten()
            for of_layer in heads_by_layer(heads, live.attending_heads, layer_types)
        ],
        copied=copied,
        run_distances=run_distances,
        further=np.array([d for d in beyond if d > run_distances[-1]]),
        draws=draws,
    )
    measurement.rotation.planes(alike=True)  # refuses layers whose heads differ
    longest = two_copies(measurement, run_distances[-1], copied, draw=0)
    live.check_observation_is_exact(Text(longest))
    runs = []
    total = len(variants) * experiment.tokens
    with display_of(progress)(Stage("running copies", total)) as step:
        for variant in variants:
            if variant == OWN_ROTATION:
                runs.append(experiment.run(step))
                continue
            with live.intervene(place_edits(measurement.rotation, [variant])):
                runs.append(experiment.run(step))
    values = {name: np.stack([run[name] for run in runs]) for name in runs[0]}
    coords: dict[str, Any] = labelled(
        {"distance": experiment.further, "run_distance": np.array(run_distances)}, REACH
    )
    coords["layer"] = range(live.layers)
    coords["head"] = range(live.heads)
    coords["variant"] = np.array(variants, dtype=object)
    dataset = xr.Dataset(labelled(values, REACH), coords)
    attrs = {"kind": "reach", "copied": copied} | measurement.result_attributes()
    return dataset.assign_attrs(attrs)


def _run_distances(
    copies: Sequence[int] | None, *, copied: int, context: int
) -> list[int]:
    """Distances of the copies of runs, ascending; doublings up to the `context` for None."""
    farthest = context - 1 - copied
    distances = sorted(doublings(copied, farthest) if copies is None else copies)
    if not distances or not copied <= distances[0] <= distances[-1] <= farthest:
        raise BadArgument(
            "Copies must lie in the context that the model was trained for.",
            seen=f"distances {distances}",
            hint=f"copies from {copied} to {farthest} tokens",
        )
    return distances


@dataclass(frozen=True)
class CopyExperiment:
    """Runs of sequences with two copies of random tokens, at several distances.

    `heads` are the measured heads of each layer. `further` are distances beyond the farthest
    run, for which it predicts the share that is found.
    """

    measurement: Measurement
    heads: Sequence[Int[Tensor, " _"]]
    copied: int
    run_distances: Sequence[int]
    further: Float[np.ndarray, " distance"]
    draws: int

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        lengths = [1 + distance + self.copied for distance in self.run_distances]
        return self.draws * sum(lengths)

    def run(self, progress: Callable[[int], None]) -> dict[str, np.ndarray]:
        """The variables of `REACH` as [layer, head, ...], under the open edit."""
        live = self.measurement.live
        shape = (self.draws, live.layers, live.heads)
        share = np.full((*shape, len(self.run_distances)), np.nan)
        foretold = np.full_like(share, np.nan)
        extrapolated = np.full((*shape, len(self.further)), np.nan)
        for index, distance in enumerate(self.run_distances):
            further = self.further
            predicted = extrapolated
            if index + 1 < len(self.run_distances):
                further = np.array([float(self.run_distances[index + 1])])
                predicted = foretold[..., index + 1 : index + 2]
            for draw in range(self.draws):
                shares = self._shares(distance, torch.from_numpy(further), draw)
                for layer, of_layer in shares.items():
                    heads: Any = (draw, layer, self.heads[layer].numpy())
                    share[*heads, index] = of_layer[:, 0]
                    predicted[heads] = of_layer[:, 1:]
                progress(1 + distance + self.copied)
        foretold[np.isnan(share)] = np.nan  # the mask of the run hides the key
        mean, low, high = np.apply_along_axis(paired_interval, 0, share)
        return {
            "found_by_draw": np.moveaxis(share, 0, -1),
            "found_share": mean,
            "found_low": low.clip(0, 1),
            "found_high": high.clip(0, 1),
            "foretold_share": foretold.mean(0),
            "extrapolated_share": extrapolated.mean(0),
        }

    def _shares(
        self, distance: int, further: Float[Tensor, " n"], draw: int
    ) -> dict[int, Float[Tensor, "head 1+n"]]:
        """Shares of the measured heads by layer; see `share_found`."""
        live = self.measurement.live
        tokens = two_copies(self.measurement, distance, self.copied, draw)

        def shares_of(call: AttentionCall) -> Tensor:
            planes = self.measurement.rotation.planes_of(call)
            of_heads = call.of_heads(self.heads[call.layer])
            return share_found(of_heads, planes, self.copied, distance, further)

        live.forget_length()
        return live.record_calls(tokens, shares_of)


def two_copies(
    measurement: Measurement, distance: int, copied: int, draw: int
) -> Int[Tensor, "1 position"]:
    """First token of the text, random tokens, text, and the copies `distance` tokens later."""
    text = measurement.text
    generator = generator_of(measurement.seed, distance, draw)
    permutation = torch.randperm(
        measurement.live.vocabulary, generator=generator, device="cpu"
    )
    once = permutation[torch.arange(copied, device="cpu") % len(permutation)]
    stream = text.ids.cpu()[:, 1:][text.real[:, 1:]]
    between = distance - copied
    most = max(1, len(stream) - between)
    begin = int(torch.randint(most, (), generator=generator, device="cpu"))
    filler = stream[(begin + torch.arange(between, device="cpu")) % len(stream)]
    first = torch.tensor([text.first_token], dtype=torch.long, device="cpu")
    return torch.cat([first, once, filler, once])[None]


def share_found(
    call: AttentionCall,
    planes: Planes,
    copied: int,
    distance: int,
    further: Float[Tensor, " n"],
) -> Float[Tensor, "head 1+n"]:
    """Share of rows in which the right key has the highest score, in place and turned."""
    last = call.query.shape[2] - 1  # no token follows its second occurrence
    row = torch.arange(last + 1 - copied, last, device="cpu")
    right = (row - distance + 1).to(call.key.device)
    query = call.query[0][:, row].float() * call.scale
    key = call.key[0].float()
    seen = call.visibility.at(row[None]).sees()[0].to(key.device)
    sees_right = seen.gather(1, right[:, None])[:, 0]
    seen[:, 0] = False
    seen[torch.arange(len(row), device="cpu"), row] = False
    scores = query @ key.mT
    right_key = right.expand(len(query), -1)[..., None]
    best_other = (
        scores.masked_fill(~seen, -torch.inf).scatter(2, right_key, -torch.inf).amax(-1)
    )
    products = planes.products(query, key[:, right])
    turned = planes.moved_scores(products, further - distance)
    of_right = torch.cat([scores.gather(2, right_key), turned], dim=-1)
    wins = (of_right > best_other[..., None])[:, sees_right]
    shares = wins.double().mean(1).cpu()
    if call.window is not None:
        shares[:, 1:].masked_fill_((further > call.window).cpu(), torch.nan)
    return shares
