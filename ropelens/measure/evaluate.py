"""What edits of the rotation do to a model: the same measures, on the same tokens, for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import xarray as xr
from jaxtyping import Int
from torch import Tensor

from ropelens.edit.actions import Edit
from ropelens.edit.entries import entries_of
from ropelens.errors import BadArgument
from ropelens.measure.batches import Progress, batches
from ropelens.measure.copying import copy_distances
from ropelens.measure.evaluate_tasks import (
    SoFar,
    context_of,
    measure_copying,
    measure_repeats,
    measure_retrieval,
    prompt_lengths,
)
from ropelens.measure.evaluate_text import (
    TextFindings,
    label_values,
    measure_batch,
    text_values,
)
from ropelens.measure.profile import OpenStage, describe_run
from ropelens.measure.repeats import REPEATS, repeat_length
from ropelens.measure.savepoint import begin_stage
from ropelens.measure.summary import number_dims, plane_coordinates
from ropelens.measure.tasks import Retrieval
from ropelens.measure.terms import MEASURES, wanted_measures
from ropelens.measure.tokens import as_corpus
from ropelens.models.processes import gather, place, shard
from ropelens.models.subject import Model, Subject, as_subject, stated_context
from ropelens.statistics.rows import HowMany, rows_for
from ropelens.statistics.seeds import whole_seed
from ropelens.statistics.variables import Variable, columns, named, of_planes

ON_TEXT = {"loss", "change", "labels"}

BY_HEAD = ("edit", "layer", "head")
BY_TRIAL = ("edit", "trial")
BY_BIN = ("edit", "position_bin")
BY_DISTANCE = ("edit", "copy_distance", "trial")
BY_DEPTH = ("edit", "retrieval_length", "depth")

# fmt: off
ROWS = (
    Variable("edit", ("edit",), "", "name of the edit"),
    Variable("loss", ("edit", "sequence"), "nat/token",
        "mean loss of the sequence's predicted tokens"),
    Variable("predicted_tokens", ("sequence",), "token",
        "tokens of the sequence that are predicted"),
    Variable("seen_loss", ("edit", "sequence"), "nat/token",
        "mean loss of the predicted tokens that the sequence has had before"),
    Variable("seen_tokens", ("sequence",), "token", "how many these are"),
    Variable("group", ("sequence",), "",
        "sequences of one group are drawn together: those of a document, or of a stretch"),
    Variable("mean_loss", ("edit",), "nat/token", "mean loss of all predicted tokens"),
    Variable("mean_loss_se", ("edit",), "nat/token",
        "its standard error over groups of sequences"),
    Variable("position_loss", BY_BIN, "nat/token",
        "mean loss of the tokens at the bin's positions"),
    Variable("position_loss_se", BY_BIN, "nat/token",
        "its standard error over groups of sequences"),
    Variable("position_start", ("position_bin",), "token", "first position of the bin"),
    Variable("position_stop", ("position_bin",), "token", "first position beyond the bin"),
    Variable("first_loss", BY_TRIAL, "nat/token",
        "mean loss of random tokens, the first time"),
    Variable("repeat_loss", BY_TRIAL, "nat/token", "mean loss of the same tokens, repeated"),
    Variable("copy_loss", BY_DISTANCE, "nat/token",
        "mean loss of random tokens that come again, but for the first"),
    Variable("copy_distance", ("copy_distance",), "token", "tokens from a token to its copy"),
    Variable("attention_change", BY_HEAD, "bit",
        "divergence of the attention from that of the model as it is"),
    Variable("label", BY_HEAD, "", "label of the head"),
    Variable("labels_changed_resampled", ("edit", "resample"), "1",
        "heads with another label, groups of sequences drawn again"),
    Variable("label_changed", BY_HEAD, "1",
        "whether the label is another than that of the model as it is"),
    Variable("positional_fraction", BY_HEAD, "1",
        "share of the bits that sinks do not explain which only the offset explains"),
    Variable("retrieval", BY_DEPTH, "1", "share of needles whose value was found"),
    Variable("retrieval_hit", (*BY_DEPTH, "retrieval_trial"), "1",
        "whether the needle's value was found"),
    Variable("retrieval_length", ("retrieval_length",), "token", "tokens of the prompt"),
    Variable("depth", ("depth",), "1", "share of the prompt's text before the needle"),
)
# fmt: on

EVALUATED = {row.name: row for row in ROWS} | {
    row.name: replace(row, dims=("edit", *row.dims))
    for row in named(*columns("budget"), "induction", "trial_induction", "duplicate_token")
}
"""The variables of an evaluation, beside those of the planes of the model as it is."""

COORDINATES = {"group", "position_start", "position_stop"}


def evaluate(
    model: Model,
    tokens: Int[Tensor, "sequence position"],
    *,
    lengths: Int[Tensor, " sequence"] | None = None,
    documents: Int[Tensor, " sequence"] | None = None,
    edits: Mapping[str, Edit | str | Sequence[Edit | str]] | None = None,
    measures: Sequence[str] = MEASURES,
    rows: HowMany = "auto",
    retrieval: Retrieval | None = None,
    distances: Sequence[int] | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    progress: Progress | None = None,
) -> xr.Dataset:
    """Measure `model` as it is and under each of `edits`, on the same tokens.

    `edits` names what `edit_rope` takes: an edit, the name of a variant such as "p-rope:0.75",
    or several together. The result's `edit` starts with "none", the model as it is (under what
    is open around the call); the others follow in order. Sequences, rows and random tokens are
    the same for all, so differences are paired. `tokens`, `lengths`, `documents`, `rows` and
    `batch_size` are as for `profile`; sequences may be longer than the trained context, and of
    more than 65,536 tokens run in chunks. `progress` is told the tokens done, of text, repeats
    and prompts, in every entry; `tokens_of_entry` says how many an entry has.

    `measures` is any of:

    - "loss": `loss` (edit, sequence) in nats/token, `predicted_tokens` (sequence); the same of
      tokens that the sequence has had before, `seen_loss` and `seen_tokens`; `mean_loss`
      (edit) over all predicted tokens and `position_loss` (edit, position_bin), each with
      its standard error (`_se`) over the groups of sequences that the coordinate `group`
      (sequence) tells.
    - "induction": `induction` and `duplicate_token` (edit, layer, head), as in a profile,
      `trial_induction` (edit, trial, layer, head) of each sequence of random tokens, and the
      loss of these the first time and when repeated (edit, trial).
    - "retrieval": `retrieval` (edit, retrieval_length, depth), the share of needles hidden in
      the text that are found, which asks for no instruction tuning (`Retrieval` says how;
      chance is 1 in 8), and `retrieval_hit`, 1 or 0 for each `retrieval_trial`.
    - "copying", on request: `copy_loss` (edit, copy_distance, trial), the loss of random tokens
      that come again after `distances` tokens (by default 8, 16, 32, ..., as far as both
      copies are in the context; more is allowed). Who copies has 0, who cannot ln(vocabulary).
    - "change": `attention_change` (edit, layer, head) in bits, the mean over rows of
      KL(A of the model as it is || A under the edit).
    - "labels": the attention budget and `label` (edit, layer, head), with `Thresholds()`, and
      `label_changed`, 1 or 0; `labels_changed_resampled` (edit, resample), how many heads
      change their label when groups of sequences are drawn again; `selectivity`, `q_norm` and
      `k_norm` of the model as it is.

    Coordinates `inv_freq` (rad/token) and `wavelength` (tokens) say how the model rotates as
    it is (layer, frequency), as those of `profile` do.

    See docs/measures.md for definitions. All measures on the text come from one forward pass
    of an entry. The model is left as it was, on errors too.

    Raises `BadArgument` for measures, tokens, lengths, rows or edits out of range, and
    otherwise as `profile` and `edit_rope` do.
    """
    return evaluate_in_stages(
        model,
        tokens,
        lengths=lengths,
        documents=documents,
        edits=edits or {},
        measures=measures,
        rows=rows,
        retrieval=retrieval,
        distances=distances,
        seed=seed,
        batch_size=batch_size,
        stage=lambda what, **_: nullcontext(progress if what == TRYING else None),
    )


TRYING = "trying edits"


def evaluate_in_stages(
    model: Model,
    tokens: Int[Tensor, "sequence position"],
    *,
    lengths: Int[Tensor, " sequence"] | None,
    documents: Int[Tensor, " sequence"] | None,
    edits: Mapping[str, Edit | str | Sequence[Edit | str]],
    measures: Sequence[str],
    rows: HowMany,
    retrieval: Retrieval | None = None,
    distances: Sequence[int] | None = None,
    seed: int,
    batch_size: int | None,
    stage: OpenStage,
) -> xr.Dataset:
    """What `evaluate` gives, each stage of it shown by `stage`."""
    subject, seed = as_subject(model), whole_seed(seed)
    corpus = as_corpus(
        subject.model, tokens, lengths, documents=documents, rows=rows, batch_size=batch_size
    )
    wanted, rows = wanted_measures(measures), rows_for(rows, corpus.context)
    own, entries = entries_of(subject, edits, context=corpus.context)
    of_entry = tokens_of_entry(
        model, corpus.lengths, measures=measures, retrieval=retrieval, distances=distances
    )

    kept = begin_stage()
    so_far = SoFar(kept, **(kept.state or {}))
    left = len(entries) * of_entry // place()[1] - kept.tokens
    values = {"edit": np.array([entry.name for entry in entries], dtype=object)}
    dataset = xr.Dataset(coords=plane_coordinates(entries[0].planes))
    stated = stated_context(subject.model.config)
    text = [
        TextFindings(entry, wanted, corpus, stated, **found)
        for entry, found in zip(entries, so_far.text or [{}] * len(entries), strict=True)
    ]
    if "labels" in wanted:
        _fit_budgets(subject, text, seed, so_far, stage)
    with stage(TRYING, total=left, unit="tokens") as told:
        progress = kept.counting(told)
        if wanted & ON_TEXT:
            unseen = shard(len(corpus))[text[0].sequences :]
            for batch in batches(
                subject, corpus, rows=rows, seed=seed, chosen=unseen, batch_size=batch_size
            ):
                measure_batch(subject, batch, text, progress)
                so_far.save(text)
            text = [found.with_parts(gather(found.state)) for found in text]
            values |= text_values(text, wanted)
        if "labels" in wanted:
            labels, profile = label_values(text)
            values |= labels
            dataset = profile[of_planes()]
        first = int(corpus.tokens[0, 0])
        if "induction" in wanted:
            values |= measure_repeats(subject, entries, own, first, seed, so_far, progress)
        if "copying" in wanted:
            at = copy_distances(distances, context_of(subject.model, corpus.lengths))
            values |= measure_copying(subject, entries, first, at, seed, so_far, progress)
        if "retrieval" in wanted:
            plan = retrieval or Retrieval()
            values |= measure_retrieval(subject, entries, corpus, plan, seed, so_far, progress)
    rows_of = {name: EVALUATED[name] for name in values}
    dataset = dataset.assign(
        {name: xr.Variable(r.dims, values[name], r.attrs) for name, r in rows_of.items()}
    ).set_coords(COORDINATES & values.keys())
    dataset = number_dims(dataset)
    dataset.attrs = describe_run(subject.model, corpus, documents, rows=rows, seed=seed)
    return dataset


def tokens_of_entry(
    model: Model,
    lengths: Int[Tensor, " sequence"],
    *,
    measures: Sequence[str] = MEASURES,
    retrieval: Retrieval | None = None,
    distances: Sequence[int] | None = None,
) -> int:
    """Tokens that `evaluate` runs for the model as it is, and for each edit."""
    if retrieval is not None and not isinstance(retrieval, Retrieval):
        raise BadArgument(
            "retrieval says what needles to look for.",
            seen=repr(retrieval)[:80],
            attempt="retrieval=ropelens.Retrieval(lengths=(128, 512))",
        )
    wanted, plan = wanted_measures(measures), retrieval or Retrieval()
    if distances is not None and "copying" not in wanted:
        raise BadArgument(
            "distances are those of copies, which are not measured.",
            seen=f"measures {', '.join(sorted(wanted))}",
            attempt='measures=[..., "copying"]',
        )
    of = as_subject(model).model
    total = int(lengths.sum()) if wanted & ON_TEXT else 0
    if "induction" in wanted:
        total += REPEATS * (1 + 2 * repeat_length(of))
    if "copying" in wanted:
        at = copy_distances(distances, context_of(of, lengths))
        total += REPEATS * sum(1 + 2 * distance for distance in at)
    if "retrieval" in wanted:
        prompts = len(plan.depths) * plan.trials
        total += prompts * sum(prompt_lengths(of, lengths, plan))
    return total


def _fit_budgets(
    subject: Subject, text: list[TextFindings], seed: int, so_far: SoFar, stage: OpenStage
) -> None:
    """Fit the models of every entry's budget, but for those that are fitted already."""
    # Processes fit together, so one that had saved later than another fits again.
    fitted = min(gather(sum(bool(found.fits) for found in text)))
    layers = (len(text) - fitted) * len(shard(len(text[0].entry.planes)))
    with stage("fitting budgets", total=layers, unit="layers") as progress:
        for found in text[fitted:]:
            found.fit(subject, seed=seed, progress=progress)
            so_far.save(text)
