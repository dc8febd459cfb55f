"""The reach of heads: do they still find the key they picked when it stands farther away?

From queries and keys without their rotation any pair can be scored at any distance, also
at distances that were not run, under the model's own rotation and under that of any variant.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float
from torch import Tensor

from ropelens.edit.rope import Layer, ModelEdit, placed, stack_edits
from ropelens.errors import BadArgument, Count, Number, Positive, Whole, public
from ropelens.files.progress import ShowProgress, silent
from ropelens.measure.capture import look
from ropelens.measure.copied import find_copies, run_distances, tokens_copied
from ropelens.measure.measurement import Batch, Lengths, Measurement, Tokens
from ropelens.models.subject import Model, Subject
from ropelens.rope.planes import Planes
from ropelens.rope.select import ALL_HEADS
from ropelens.rope.turn import horizons, lowest_scores, moved_scores
from ropelens.statistics.call import AttentionCall
from ropelens.statistics.corpus import Documents
from ropelens.statistics.intervals import ENOUGH_DOCUMENTS
from ropelens.statistics.picked import PickedSums, Rotation, sum_picked
from ropelens.statistics.rows import HowMany
from ropelens.statistics.variables import OWN, REACH, REACH_INDICES, described, labelled

VARIANTS = (OWN, "p-rope:0.75", "p-rope:0.5", "p-rope:0.25", "p-rope-reversed:0.75", "nope")
"""Variants that every family can express: planes go on as they are, or stop."""

DISTANCES = (0, *np.unique(np.geomspace(1, 1_000_000, 49).round()).tolist())
"""Tokens: 0 and 1 to 1,000,000, eight a decade."""

INTERVAL = (2.5, 97.5)
"""Ends of the interval of a horizon, in percent."""


@public
def reach(
    model: Model,
    tokens: Tokens,
    *,
    lengths: Lengths | None = None,
    documents: Documents | None = None,
    heads: str = ALL_HEADS,
    variants: Sequence[str] = VARIANTS,
    distances: Sequence[Number] | np.ndarray = DISTANCES,
    runs: Sequence[str] = (OWN,),
    copies: Sequence[int] | None = None,
    draws: Positive = 4,
    rows: HowMany = 64,
    resamples: Count = 200,
    seed: Whole = 0,
    progress: ShowProgress | None = None,
) -> xr.Dataset:
    """How far back heads find a key: measured at real distances, then extrapolated.

    Measured, under each variant of `runs`: random tokens come twice, `copies` tokens
    apart (by default doublings, as far as the context that the model was trained for), with
    the text between, `draws` times. `found_share` (run, layer, head, run_distance) is the share
    of rows of the second copy in which the key after the same token's first place scores above
    all others but the first; `found_low` and `found_high` are its 95 % interval over draws.
    `foretold_share` is what the run at the distance before says of it: its queries and keys,
    the right key turned to this distance. Where the two agree, `extrapolated_share`, what the
    farthest run says of the `distances` beyond it, may be believed. Heads that act on no match
    find no copy at any distance.

    Extrapolated from the text, under `variants`, at distances never run: in each of `rows` rows
    of a sequence (so many drawn with `seed`, "all", or "auto" as for `profile`) a head's picked
    key is the one with the largest score but for position 0 and the row itself. Rows with fewer
    than two such keys, or in which position 0 scores higher, are left out. Moved to distance d
    it scores s Re sum_f q~_f conj(k~_f) exp(i v_f d) (Su et al. 2021, arXiv 2104.09864, eq.
    16), while the others stay where they are; v_f is the frequency of plane f under the
    variant. "own" is the model's own rotation as measured; the others are names of
    docs/variants.md put to the model as `edit_rope` would, but for the queries and keys, which
    stay those of the model as it is: what a head asks for may change where it stands farther
    back, which only a run shows. Variants that change with the length are those of a sequence
    that holds the farthest distance. `heads` is a list such as "1.3,2.*".

    Returns a dataset over variant, layer, head and distance (tokens), in nats before a
    soft-cap. `horizon` is where the mean moved score first falls to the mean of the others:
    every whole distance up to the farthest is tried, and the root in the token before found by
    bisection. It is 0 where the score is above that level nowhere in the context that was run,
    and infinite where none was found. Where `lowest_score` is above `others_level` there is
    none at any distance, for planes that stand still cannot lose (Barbero et al. 2024, arXiv
    2410.06205, on why to stop some). Its interval is the percentile bootstrap over groups of
    sequences, by `documents` as for `profile` (`resamples`; NaN with fewer than eight, of which
    too few samples can be drawn). `win_share` counts rows in which the key beats all others;
    `unmoved_win_share` says what the variant alone leaves of that, before any distance. Heads
    that are not among `heads` are NaN.

    Raises `UnsupportedModel` for a variant that the family cannot express, and otherwise as
    `profile` does.
    """
    measurement = Measurement.of(
        model, tokens, lengths, documents=documents, rows=rows, seed=seed
    )
    subject, text = measurement.subject, measurement.text
    planes = subject.planes(text.context, alike=True)
    chosen = [mask.nonzero().flatten() for mask in subject.heads_of(heads)]
    rotations = _rotations(subject, planes, variants, length=int(max(distances)) + 1)
    at = torch.from_numpy(np.array(distances, dtype=np.float64))
    sums = _score(measurement, chosen, rotations, at, progress or silent)
    apart = run_distances(subject.context, copies)
    found = _run(measurement, chosen, runs, apart, at, draws, progress or silent)
    sizes = {
        "variant": len(variants),
        "run": len(runs),
        "run_distance": len(apart),
        "layer": subject.layers,
        "head": subject.heads,
        "frequency": max(layer.terms for layer in planes),
        "distance": len(at),
    }
    unknown = {
        row.name: np.full([sizes[dim] for dim in row.dims], np.nan)
        for row in (*REACH, *REACH_INDICES)
        if row.name not in ("distance", "run_distance")
    }
    unknown |= {name: np.stack([of_run[name] for of_run in found]) for name in found[0]}
    names = np.array(variants, dtype=object)
    indices = {"layer": range(subject.layers), "head": range(subject.heads)}
    dataset = xr.Dataset(
        labelled(unknown, (*REACH, *REACH_INDICES)),
        coords={
            "variant": names,
            "run": np.array(runs, dtype=object),
            **indices,
            "distance": at.numpy(),
            "run_distance": np.array(apart),
        },
    )
    resampled = _draws(int(text.group.max()) + 1, resamples, measurement.seed)
    for layer, of_layer in enumerate(rotations):
        numbers: dict[str, Tensor] = {
            "variant_inv_freq": torch.stack([one.inv_freq for one in of_layer]),
            "variant_gain": torch.stack([one.gain for one in of_layer]),
        }
        if layer in sums:
            numbers |= _numbers(sums[layer], of_layer, resampled, at, within=text.context)
        place = {
            "layer": layer,
            "head": chosen[layer].numpy(),
            "frequency": slice(len(of_layer[0].inv_freq)),
        }
        for name, values in numbers.items():
            array = dataset[name]
            array[{dim: index for dim, index in place.items() if dim in array.dims}] = values
    dataset.attrs = {"kind": "reach"} | measurement.facts | {"resamples": resamples}
    return described(dataset, REACH_INDICES)


def _rotations(
    subject: Subject, planes: Sequence[Planes], variants: Sequence[str], *, length: int
) -> list[list[Rotation]]:
    """How each layer rotates under each of the variants, in a sequence of this length."""
    if subject.open_edit is not None and [*variants] != [OWN]:
        raise BadArgument(
            "Variants are put to a model as it is, not to an edited one.",
            attempt=f'outside edit_rope, or variants=["{OWN}"] for the edited rotation',
        )
    edits = [
        ModelEdit(subject, planes, () if name == OWN else (placed(subject, name),))
        for name in variants
    ]
    return [
        [Rotation.of(edit.sides(Layer(*layer, length))[0], layer[1]) for edit in edits]
        for layer in enumerate(planes)
    ]


def _run(
    measurement: Measurement,
    chosen: Sequence[Tensor],
    runs: Sequence[str],
    apart: Sequence[int],
    distances: Float[Tensor, " distance"],
    draws: int,
    show: ShowProgress,
) -> list[dict[str, np.ndarray]]:
    """What `find_copies` says of the model under each variant."""
    subject = measurement.subject
    found = []
    tokens = sum(1 + distance + tokens_copied(subject.context) for distance in apart)
    with show("running copies", total=len(runs) * draws * tokens, unit="tokens") as step:
        for name in runs:
            edits = [] if name == OWN else [name]
            with subject.edit(stack_edits(subject, edits)) if edits else nullcontext():
                turned = subject.planes(alike=True)
                of_run = find_copies(
                    measurement,
                    chosen,
                    turned,
                    distances=apart,
                    beyond=distances,
                    draws=draws,
                    progress=step,
                )
            found.append(of_run)
    return found


def _score(
    measurement: Measurement,
    chosen: Sequence[Tensor],
    rotations: Sequence[list[Rotation]],
    distances: Float[Tensor, " distance"],
    show: ShowProgress,
) -> dict[int, PickedSums]:
    """The sums of each layer of which heads are `chosen`, over all batches."""
    subject, text = measurement.subject, measurement.text
    planes = subject.planes(text.context)
    sums: dict[int, PickedSums] = {}
    with show("scoring", total=int(text.lengths.sum()), unit="tokens") as step:
        for batch in measurement.batches():

            def see(call: AttentionCall, batch: Batch = batch) -> None:
                layer = call.layer
                if not len(chosen[layer]):
                    return
                part = sum_picked(
                    call,
                    batch.rows,
                    planes[layer],
                    heads=chosen[layer],
                    rotations=rotations[layer],
                    distances=distances,
                    group=batch.text.group,
                    groups=int(text.group.max()) + 1,
                )
                sums[layer] = sums[layer] + part if layer in sums else part

            look(subject, batch.text.tokens, see)
            step(int(batch.text.lengths.sum()))
    return sums


def _draws(groups: int, resamples: int, seed: int) -> Float[Tensor, "resample group"]:
    """How often each group of sequences is drawn: once each first, then by the bootstrap."""
    count = resamples if groups >= ENOUGH_DOCUMENTS else 0
    drawn = np.random.default_rng(seed % 2**64).multinomial(
        groups, np.full(groups, 1 / groups), size=count
    )
    return torch.from_numpy(np.concatenate([np.ones((1, groups)), drawn]))


def _numbers(
    sums: PickedSums,
    rotations: Sequence[Rotation],
    draws: Float[Tensor, "resample group"],
    distances: Float[Tensor, " distance"],
    *,
    within: int,
) -> dict[str, Tensor]:
    """The variables of `REACH` of one layer's chosen heads.

    Means are over rows; the first resample is all sequences, once each.
    """
    weight = draws @ sums.weight  # [resample, head]
    if not sums.rows.any():
        raise BadArgument(
            "No row has two keys to choose from.",
            seen="sequences of 3 tokens or fewer, or a sliding window of 2",
        )
    share = draws[..., None] / weight[:, None]  # NaN: no row of the head in the resample

    def mean(x: Tensor) -> Tensor:
        return torch.einsum("rgh,gh...->rh...", share.to(x.dtype), x)

    product, levels = mean(sums.product), mean(sums.level)
    parts: list[dict[str, Tensor]] = []
    for index, rotation in enumerate(rotations):
        turned, inv_freq = product * rotation.gain, rotation.inv_freq
        level = levels[..., index]
        horizon = horizons(
            turned.flatten(0, 1),
            inv_freq,
            level.flatten(),
            within=within,
            farthest=int(distances.max()),
        ).view(level.shape)
        horizon = horizon.where(weight > 0, torch.nan)
        ends = np.full((2, *level.shape[1:]), np.nan)
        if len(horizon) > 1:  # resampled values themselves, for some are infinite
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "All-NaN")  # heads that pick no key
                ends = np.nanpercentile(horizon[1:], INTERVAL, axis=0, method="inverted_cdf")
        parts.append(
            {
                "moved_score": moved_scores(turned[0], inv_freq, distances),
                "others_level": level[0],
                "lowest_score": lowest_scores(turned[0], inv_freq),
                "horizon": horizon[0],
                "horizon_low": torch.from_numpy(ends[0]),
                "horizon_high": torch.from_numpy(ends[1]),
            }
        )
    return {
        **{name: torch.stack([part[name] for part in parts]) for name in parts[0]},
        "win_share": (sums.wins.sum(0) / sums.weight.sum(0)[:, None, None]).transpose(0, 1),
        "unmoved_win_share": (sums.kept.sum(0) / sums.weight.sum(0)[:, None]).T,
        "acting_share": sums.weight.sum(0) / sums.rows.sum(),
        "picked_distance": mean(sums.distance)[0],
        "product_real": product[0].real,
        "product_imag": product[0].imag,
    }
