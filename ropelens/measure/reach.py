"""The reach of heads: do they still find the key they picked when it stands farther away?

From queries and keys without their rotation any pair can be scored at any distance, also
at those that no one ran, under the model's own rotation and under that of any variant.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from ropelens.edit.actions import Layer
from ropelens.edit.rope import as_edit
from ropelens.errors import BadArgument, check_count
from ropelens.measure.batches import Batch, Progress, batches
from ropelens.measure.profile import describe_run
from ropelens.measure.reach_summary import Plan, label_arrays, summarize_layer
from ropelens.measure.terms import OWN
from ropelens.measure.tokens import as_corpus
from ropelens.models.subject import Subject, as_subject
from ropelens.rope.planes import Planes
from ropelens.rope.select import ALL_HEADS, chosen_heads, heads_by_layer, parse_heads
from ropelens.rope.turn import Side
from ropelens.rope.variants import parse_variant
from ropelens.statistics.call import AttentionCall
from ropelens.statistics.corpus import Corpus
from ropelens.statistics.intervals import ENOUGH_DOCUMENTS
from ropelens.statistics.picked import PickedSums, Rotation, sum_picked
from ropelens.statistics.rows import HowMany, rows_for
from ropelens.statistics.seeds import whole_seed

VARIANTS = (OWN, "p-rope:0.75", "p-rope:0.5", "p-rope:0.25", "p-rope-reversed:0.75", "nope")
"""What every family can express: planes go on as they are, or stop."""

FARTHEST = 1_000_000
PER_DECADE = 8
LONGEST = 2**24
"""Every whole distance is tried, so the farthest costs time; positions are exact up to here."""


def reach(
    model: nn.Module,
    tokens: Int[Tensor, "sequence position"],
    *,
    lengths: Int[Tensor, " sequence"] | None = None,
    documents: Int[Tensor, " sequence"] | None = None,
    heads: str = ALL_HEADS,
    variants: Sequence[str] = VARIANTS,
    distances: Sequence[float | int] | np.ndarray | None = None,
    rows: HowMany = 64,
    resamples: int = 200,
    seed: int = 0,
    progress: Progress | None = None,
) -> xr.Dataset:
    """Score the keys that heads pick at distances never run, under variants of RoPE.

    One pass of the model as it is. In each of `rows` rows of a sequence (so many drawn with
    `seed`, "all", or "auto" as for `profile`) a head's picked key is the one with the largest
    score but for position 0 and the row itself; rows with fewer than two such keys are left
    out. Moved to distance d it scores s Re sum_f q~_f conj(k~_f) exp(i v_f d) (Su et al. 2021,
    arXiv 2104.09864, eq. 16), while the others stay where they are; v_f is the frequency of
    plane f under the variant. "own" is the model's own rotation as measured; the others are
    names of `ropelens.VARIANTS` put to the model as `edit_rope` would, but for the queries and
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
    subject, seed = as_subject(model), whole_seed(seed)
    text = as_corpus(subject.model, tokens, lengths, documents=documents, rows=rows)
    check_count("resamples", resamples)
    at = _distances(distances)
    layers = subject.planes(text.context, alike=True)
    chosen = _chosen(subject.model, heads, layers=len(layers))
    several = isinstance(variants, Iterable) and not isinstance(variants, str)
    names = tuple(map(str, variants if several else [variants]))
    turned = _rotations(subject, names, layers, length=int(at.max()) + 1)
    plan = Plan(
        planes=layers,
        head_count=subject.heads,
        variants=names,
        heads=chosen,
        rotations=turned,
        distances=at,
        context=text.context,
        rows=rows_for(rows, text.context),
        seed=seed,
    )
    draws = _draws(int(text.group.max()) + 1, resamples, seed)
    sums = _collect(subject, text, plan, progress)
    found = {layer: summarize_layer(sums[layer], plan, layer, draws) for layer in sums}
    dataset = label_arrays(found, plan)
    facts = describe_run(subject.model, text, documents, rows=plan.rows, seed=plan.seed)
    dataset.attrs = {"kind": "reach"} | facts | {"resamples": resamples}
    return dataset


def _distances(
    distances: Sequence[float | int] | np.ndarray | None,
) -> Float[Tensor, " distance"]:
    """The distances asked for, or the default ones; refuses what is no distance."""
    if distances is None:
        decades = round(np.log10(FARTHEST)) * PER_DECADE
        steps = np.unique(np.geomspace(1, FARTHEST, decades + 1).round())
        return torch.from_numpy(np.concatenate([[0.0], steps]))
    try:
        values = torch.as_tensor(np.asarray(distances, dtype=np.float64)).flatten()
        wrong = [f"{d:g}" for d in values.tolist() if not 0 <= d <= LONGEST]
    except (TypeError, ValueError):
        values, wrong = torch.zeros(0), [repr(distances)]
    if wrong or not len(values):
        raise BadArgument(
            f"Distances are numbers of tokens that a key stands back, from 0 to {LONGEST:,}.",
            seen=", ".join(wrong) or "none at all",
        )
    return values


def _chosen(model: PreTrainedModel, heads: str, *, layers: int) -> list[Int[Tensor, " _"]]:
    """The chosen heads of every layer; refuses heads that the model does not have."""
    count = model.config.get_text_config().num_attention_heads
    chosen = heads_by_layer(heads, layers=layers, heads_of_layer=count)
    return [mask.nonzero().flatten() for mask in chosen]


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
    edits = [
        None if name == OWN else as_edit(parse_variant(name), subject) for name in variants
    ]
    found = []
    for index, planes in enumerate(layers):
        about = Layer(index, planes, length=length)
        sides = []
        for edit in edits:
            side = Side.of(planes, heads=1)
            if edit is not None:
                rows = chosen_heads(parse_heads(edit.heads), layer=index, heads=1)
                here = rows[:, None] & edit.select(planes)
                side = edit.action(side, side, here, about)[0] if here.any() else side
            sides.append(Rotation.of(side, planes))
        found.append(sides)
    return found


def _collect(
    subject: Subject,
    text: Corpus,
    plan: Plan,
    progress: Progress | None,
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
        if progress is not None:
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
