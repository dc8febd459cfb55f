"""The reach of heads: do they still find the key they picked when it stands farther away?

From queries and keys without their rotation any pair can be scored at any distance, also
at distances that were not run, under the model's own rotation and under that of any variant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor

from ropelens.edit.actions import Layer
from ropelens.edit.rope import as_edit
from ropelens.errors import BadArgument, Count, Number, Whole, public
from ropelens.files.progress import ShowProgress, silent
from ropelens.measure.batches import Batch, Progress, batches
from ropelens.measure.terms import OWN
from ropelens.measure.tokens import Lengths, Tokens, as_corpus, describe_run
from ropelens.models.subject import Model, Subject, as_subject
from ropelens.rope.horizon import horizons, lowest_scores, moved_scores
from ropelens.rope.planes import Planes
from ropelens.rope.select import ALL_HEADS, chosen_heads, heads_by_layer, parse_heads
from ropelens.rope.turn import Side
from ropelens.rope.variants import parse_variant
from ropelens.statistics.call import AttentionCall
from ropelens.statistics.corpus import Corpus, Documents
from ropelens.statistics.intervals import ENOUGH_DOCUMENTS
from ropelens.statistics.picked import PickedSums, Rotation, sum_picked
from ropelens.statistics.rows import HowMany, rows_for
from ropelens.statistics.variables import REACH, REACH_INDICES, described, labelled, stack

VARIANTS = (OWN, "p-rope:0.75", "p-rope:0.5", "p-rope:0.25", "p-rope-reversed:0.75", "nope")
"""Variants that every family can express: planes go on as they are, or stop."""

FARTHEST = 1_000_000
PER_DECADE = 8
LONGEST = 2**24
"""Every whole distance is tried, so the farthest costs time; positions are exact up to here."""

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
    distances: Sequence[Number] | np.ndarray | None = None,
    rows: HowMany = 64,
    resamples: Count = 200,
    seed: Whole = 0,
    progress: ShowProgress | None = None,
) -> xr.Dataset:
    """Score the keys that heads pick at distances never run, under variants of RoPE.

    One pass of the model as it is. In each of `rows` rows of a sequence (so many drawn with
    `seed`, "all", or "auto" as for `profile`) a head's picked key is the one with the largest
    score but for position 0 and the row itself; rows with fewer than two such keys are left
    out. Moved to distance d it scores s Re sum_f q~_f conj(k~_f) exp(i v_f d) (Su et al. 2021,
    arXiv 2104.09864, eq. 16), while the others stay where they are; v_f is the frequency of
    plane f under the variant. "own" is the model's own rotation as measured; the others are
    names of docs/variants.md put to the model as `edit_rope` would, but for the queries and
    keys, which stay those of the model as it is. Variants that change with the length are those
    of a sequence that holds the farthest distance. `heads` is a list such as "1.3,2.*".

    Returns a dataset over variant, layer, head and distance (tokens; by default 0 and 1 to
    1,000,000, 8 a decade), in nats before a soft-cap. `horizon` is where the mean moved score
    first falls to the mean of the others: every whole distance up to the farthest is tried,
    and the root in the token before found by bisection. It is 0 where the score is above
    that level nowhere in the context that was run, and infinite where none was found. Where
    `lowest_score` is above `others_level` there is none at any distance, for planes that
    stand still cannot lose (Barbero et al. 2024, arXiv 2410.06205, on why to stop some).
    Its interval is the percentile bootstrap over groups of sequences, by `documents` as for
    `profile` (`resamples`; NaN with fewer than eight, of which too few samples can be
    drawn). `best_horizon` is the same against the
    best other key. `win_share` counts rows in which the key beats all others;
    `unmoved_win_share` says what the variant alone leaves of that, before any distance. Heads
    that are not among `heads` are NaN.

    Raises `BadArgument` for heads, variants or distances that do not exist, and otherwise as
    `profile` does; `UnsupportedModel` for a variant that the family cannot express.
    """
    subject, show, seed = as_subject(model), progress or silent, int(seed)
    text = as_corpus(subject, tokens, lengths, documents=documents)
    planes = subject.planes(text.context, alike=True)
    shape = {"layers": subject.layers, "heads_of_layer": subject.heads}
    at = _distances(distances)
    names = (variants,) if isinstance(variants, str) else tuple(variants)
    plan = _Plan(
        planes=planes,
        head_count=subject.heads,
        variants=names,
        heads=[mask.nonzero().flatten() for mask in heads_by_layer(heads, **shape)],
        rotations=_rotations(subject, names, planes, length=int(at.max()) + 1),
        distances=at,
        context=text.context,
        rows=rows_for(rows, text.context),
        seed=seed,
    )
    draws = _draws(int(text.group.max()) + 1, resamples, seed)
    with show("scoring", total=int(text.lengths.sum()), unit="tokens") as step:
        sums = _collect(subject, text, plan, step)
    dataset = _labelled({n: _summarize(sums[n], plan, n, draws) for n in sums}, plan)
    facts = describe_run(subject, text, documents, rows=plan.rows, seed=seed)
    dataset.attrs = {"kind": "reach"} | facts | {"resamples": resamples}
    return dataset


@dataclass(frozen=True)
class _Plan:
    """Chosen heads of each layer, [layer][variant] rotations, and the distances.

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


def _distances(distances: Sequence[Number] | np.ndarray | None) -> Float[Tensor, " distance"]:
    """The distances asked for, or the default ones."""
    if distances is None:
        decades = round(np.log10(FARTHEST)) * PER_DECADE
        steps = np.unique(np.geomspace(1, FARTHEST, decades + 1).round())
        return torch.from_numpy(np.concatenate([[0.0], steps]))
    values = torch.from_numpy(np.array(distances, dtype=np.float64))
    wrong = [f"{d:g}" for d in values.tolist() if not 0 <= d <= LONGEST]
    if wrong or not len(values):
        raise BadArgument(
            f"Distances are numbers of tokens that a key stands back, from 0 to {LONGEST:,}.",
            seen=", ".join(wrong) or "none at all",
        )
    return values


def _rotations(
    subject: Subject, variants: tuple[str, ...], layers: list[Planes], *, length: int
) -> list[list[Rotation]]:
    """How each layer rotates under each variant, [layer][variant]."""
    if not variants or len(set(variants)) < len(variants):
        raise BadArgument(
            "Variants are named once each, at least one.", seen=", ".join(variants) or "none"
        )
    if subject.open_edit is not None and variants != (OWN,):
        raise BadArgument(
            "Variants are put to a model as it is, not to an edited one.",
            seen=", ".join(name for name in variants if name != OWN),
            attempt=f'outside edit_rope, or variants=("{OWN}",) for the edited rotation',
        )
    edits = [None if n == OWN else as_edit(parse_variant(n), subject) for n in variants]
    rotations = []
    for index, planes in enumerate(layers):
        about = Layer(index, planes, length=length)
        of_layer = []
        for edit in edits:
            side = Side.of(planes, heads=1)
            if edit is not None:
                rows = chosen_heads(parse_heads(edit.heads), layer=index, heads=1)
                here = rows[:, None] & edit.select(planes)
                side = edit.action(side, side, here, about)[0] if here.any() else side
            of_layer.append(Rotation.of(side, planes))
        rotations.append(of_layer)
    return rotations


def _collect(
    subject: Subject, text: Corpus, plan: _Plan, progress: Progress
) -> dict[int, PickedSums]:
    """The sums of every layer that has chosen heads, over all sequences."""
    sums: dict[int, PickedSums] = {}
    seen: set[int] = set()
    groups = int(text.group.max()) + 1
    for batch in batches(subject, text, rows=plan.rows, seed=plan.seed):

        def observe(call: AttentionCall, batch: Batch = batch) -> None:
            seen.add(call.layer)
            if not len(plan.heads[call.layer]):
                return
            part = sum_picked(
                call,
                batch.rows,
                plan.planes[call.layer],
                heads=plan.heads[call.layer],
                rotations=plan.rotations[call.layer],
                distances=plan.distances,
                group=batch.text.group,
                groups=groups,
            )
            sums[call.layer] = sums[call.layer] + part if call.layer in sums else part

        with torch.no_grad(), subject.observe(observe):
            subject.forward(batch.text.tokens, last=1)
        progress(int(batch.text.lengths.sum()))
    subject.check_layers(seen)
    return sums


def _draws(groups: int, resamples: int, seed: int) -> Float[Tensor, "resample group"]:
    """How often each group of sequences is drawn: once each first, then by the bootstrap."""
    count = resamples if groups >= ENOUGH_DOCUMENTS else 0
    drawn = np.random.default_rng(seed % 2**64).multinomial(
        groups, np.full(groups, 1 / groups), size=count
    )
    return torch.from_numpy(np.concatenate([np.ones((1, groups)), drawn]))


def _summarize(
    sums: PickedSums, plan: _Plan, layer: int, draws: Float[Tensor, "resample group"]
) -> dict[str, Tensor]:
    """The numbers of one layer's chosen heads, [head, variant, ...]."""
    mean = _means(sums, draws)
    parts: list[dict[str, Tensor]] = []
    for index, rotation in enumerate(plan.rotations[layer]):
        product, inv_freq = mean["product"] * rotation.gain, rotation.inv_freq
        level, best = mean["level"][..., index], mean["best"][0, :, index]
        roots = horizons(
            torch.cat([product.flatten(0, 1), product[0]]),
            inv_freq,
            torch.cat([level.flatten(), best]),
            within=plan.context,
            farthest=int(plan.distances.max()),
        )
        by_level = roots[: level.numel()].view(level.shape)
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
                "best_horizon": roots[level.numel() :],
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
    means = {}
    for name in ("distance", "product", "level", "best"):
        values = getattr(sums, name)
        means[name] = torch.einsum("rg,g...->r...", share.to(values.dtype), values)
    return means


def _interval(
    resampled: Float[Tensor, "resample head"],
) -> tuple[Float[Tensor, " head"], Float[Tensor, " head"]]:
    """The percentiles of `INTERVAL`, themselves resampled values, for some are infinite."""
    if not len(resampled):
        nothing = torch.full(resampled.shape[1:], torch.nan, dtype=torch.float64)
        return nothing, nothing
    ends = np.percentile(resampled.numpy(), INTERVAL, axis=0, method="inverted_cdf")
    return torch.from_numpy(ends[0]), torch.from_numpy(ends[1])


def _labelled(layers: Mapping[int, dict[str, Tensor]], plan: _Plan) -> xr.Dataset:
    """The numbers of every layer as one dataset; NaN for heads that were not chosen."""
    arrays = {row.name: _stacked(row.name, row.dims, layers, plan) for row in REACH}
    turned = [
        [torch.stack([getattr(r, name) for r in of_layer]) for of_layer in plan.rotations]
        for name in ("inv_freq", "gain")
    ]
    inv_freq, gain = (np.moveaxis(stack(layers), 1, 0) for layers in turned)
    rows = (*REACH, *REACH_INDICES)
    dataset = xr.Dataset(
        labelled(arrays | {"variant_inv_freq": inv_freq, "variant_gain": gain}, rows),
        coords={
            "variant": np.array(plan.variants, dtype=object),
            "layer": range(len(plan.planes)),
            "head": range(plan.head_count),
            "distance": plan.distances.numpy(),
        },
    )
    return described(dataset, REACH_INDICES)


def _stacked(
    name: str, dims: tuple[str, ...], layers: Mapping[int, dict[str, Tensor]], plan: _Plan
) -> np.ndarray:
    """One variable of all layers; heads in their places, the variant in front."""
    by_layer = []
    for layer, heads in enumerate(plan.heads):
        shape = layers[layer][name].shape[1:] if layer in layers else (0,) * (len(dims) - 2)
        placed = torch.full((plan.head_count, *shape), torch.nan, dtype=torch.float64)
        if layer in layers:
            placed[heads] = layers[layer][name]
        by_layer.append(placed)
    values = stack(by_layer)
    return np.moveaxis(values, 2, 0) if "variant" in dims else values
