"""What edits of the rotation do to a model: the same measures, on the same tokens, for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from ropelens.edit.actions import Edit
from ropelens.edit.entries import Entry, entries_of
from ropelens.errors import BadArgument, Positive, Whole, public
from ropelens.files.progress import ShowProgress, silent
from ropelens.measure.batches import Progress, batches
from ropelens.measure.budget import fit_layers
from ropelens.measure.evaluate_text import Measured, OnText, change_values, label_values
from ropelens.measure.savepoint import Stage, begin_stage
from ropelens.measure.summary import number_dims, plane_coordinates
from ropelens.measure.tasks import (
    REPEATS,
    Retrieval,
    copy_distances,
    copy_losses,
    hide_needles,
    repeat_length,
    repeat_scores,
)
from ropelens.measure.terms import MEASURES, wanted_measures
from ropelens.measure.tokens import Lengths, Tokens, as_corpus, describe_run
from ropelens.models.processes import gather, shard
from ropelens.models.subject import Model, Subject, as_subject, stated_context
from ropelens.rope.planes import Planes
from ropelens.statistics.corpus import Corpus, Documents
from ropelens.statistics.rows import HowMany, rows_for
from ropelens.statistics.variables import EVALUATED, labelled, of_planes

ON_TEXT = {"loss", "change", "labels"}
COORDINATES = {"group", "position_start", "position_stop"}


@public
def evaluate(
    model: Model,
    tokens: Tokens,
    *,
    lengths: Lengths | None = None,
    documents: Documents | None = None,
    edits: Mapping[str, Edit | str | Sequence[Edit | str]] | None = None,
    measures: str | Sequence[str] = MEASURES,
    rows: HowMany = "auto",
    retrieval: Retrieval | None = None,
    distances: Sequence[Whole] | None = None,
    seed: Whole = 0,
    batch_size: Positive | None = None,
    progress: ShowProgress | None = None,
) -> xr.Dataset:
    """Measure `model` as it is and under each of `edits`, on the same tokens.

    `edits` names what `edit_rope` takes: an edit, the name of a variant such as "p-rope:0.75",
    or several together. The result's `edit` starts with "none", the model as it is (under what
    is open around the call); the others follow in order. Sequences, rows and random tokens are
    the same for all, so differences are paired. `tokens`, `lengths`, `documents`, `rows`,
    `batch_size` and `progress` are as for `profile`; sequences may be longer than the trained
    context, and of more than 65,536 tokens run in chunks.

    `measures` is any of:

    - "loss": `loss` (edit, sequence) in nats/token, `predicted_tokens` (sequence); the same of
      tokens that the sequence had before, `seen_loss` and `seen_tokens`; `mean_loss`
      (edit) over all predicted tokens and `position_loss` (edit, position_bin), each with
      its standard error (`_se`) over the groups of sequences in the coordinate `group`.
    - "induction": `induction` and `duplicate_token` (edit, layer, head), as in a profile,
      `trial_induction` (edit, trial, layer, head) of each sequence of random tokens, and the
      loss of these the first time and when repeated (edit, trial).
    - "retrieval": `retrieval` (edit, retrieval_length, depth), the share of needles hidden in
      the text that are found, which asks for no instruction tuning (`Retrieval` says how;
      chance is 1 in 8), and `retrieval_hit`, 1 or 0 for each `retrieval_trial`.
    - "copying", on request: `copy_loss` (edit, copy_distance, trial), the loss of random tokens
      that come again after `distances` tokens (by default 8, 16, 32, ..., as far as both
      copies are in the context; more is allowed): 0 for a model that copies, ln(vocabulary)
      for one that cannot.
    - "change": `attention_change` (edit, layer, head) in bits, the mean over rows of
      KL(A of the model as it is || A under the edit).
    - "labels": the attention budget and `label` (edit, layer, head), and `label_changed`,
      1 or 0; `labels_changed_resampled` (edit, resample), how many heads change their label
      when groups of sequences are drawn again; `selectivity`, `q_norm` and `k_norm` of the
      model as it is.

    Coordinates `inv_freq` (rad/token) and `wavelength` (tokens) say how the model rotates as
    it is (layer, frequency). docs/measures.md defines all variables. All measures on the text
    come from one forward pass of an entry. The model is left as it was, on errors too.

    Raises `BadArgument` for measures, tokens, lengths or edits out of range, and otherwise
    as `profile` and `edit_rope` do.
    """
    subject, show, seed = as_subject(model), progress or silent, int(seed)
    corpus = as_corpus(subject, tokens, lengths, documents=documents)
    wanted, rows = wanted_measures(measures), rows_for(rows, corpus.context)
    by_itself = [layer.planes for layer in subject.rotations(corpus.context)]
    entries = entries_of(subject, edits or {}, context=corpus.context)
    on_text = OnText(corpus, wanted, stated_context(subject.config))
    tasks = _tasks(subject, corpus, wanted, by_itself, retrieval, distances, seed)

    stage, bins = begin_stage(), len(on_text.edges) - 1
    measured = [Measured(**of) for of in stage.state or []]
    measured = measured or [Measured.nothing(bins) for _ in entries]
    if "labels" in wanted:
        _fit_budgets(subject, corpus, entries, measured, seed, stage, show)
    unseen = shard(len(corpus))[len(measured[0].losses) :] if wanted & ON_TEXT else range(0)
    mine = shard(len(entries))
    asked = [
        (number, name)
        for name in tasks
        for number in mine
        if name not in measured[number].tasks
    ]
    left = len(entries) * int(corpus.lengths[unseen.start : unseen.stop].sum())
    left += sum(tasks[name].tokens for _, name in asked)
    with show("trying edits", total=left, unit="tokens") as step:
        for batch in batches(
            subject, corpus, rows=rows, seed=seed, chosen=unseen, batch_size=batch_size
        ):
            on_text.measure(subject, batch, entries, measured, step)
            stage.save([vars(of) for of in measured])
        for number, name in asked:
            with entries[number].open(subject):
                measured[number].tasks[name] = tasks[name].measure(step)
            stage.save([vars(of) for of in measured])
    fits = [of.fits for of in measured]
    parts = gather([replace(of, fits=[]) for of in measured])
    measured = [Measured.together(of) for of in zip(*parts, strict=True)]
    measured = [replace(of, fits=fit) for of, fit in zip(measured, fits, strict=True)]

    values = {"edit": np.array([entry.name for entry in entries], dtype=object)}
    dataset = xr.Dataset(coords=plane_coordinates(entries[0].planes))
    if "loss" in wanted:
        values |= on_text.loss_values(measured)
    if "change" in wanted:
        values |= change_values(measured)
    if "labels" in wanted:
        labels, profile = label_values(entries, measured)
        values |= labels
        dataset = profile[of_planes()]
    for name, task in tasks.items():
        each = [of.tasks[name] for of in measured]
        values |= {key: np.stack([of[key].numpy() for of in each]) for key in each[0]}
        values |= task.coordinates
    dataset = dataset.assign(labelled(values, EVALUATED))
    dataset = number_dims(dataset.set_coords(COORDINATES & values.keys()))
    dataset.attrs = describe_run(subject, corpus, documents, rows=rows, seed=seed)
    return dataset


def _fit_budgets(
    subject: Subject,
    text: Corpus,
    entries: Sequence[Entry],
    measured: Sequence[Measured],
    seed: int,
    stage: Stage,
    show: ShowProgress,
) -> None:
    """Fit the models of every entry's budget, but for those that are fitted already."""
    # Processes fit together, so one that saved later than another fits again.
    fitted = min(gather(sum(bool(of.fits) for of in measured)))
    layers = (len(entries) - fitted) * len(shard(subject.layers))
    with show("fitting budgets", total=layers, unit="layers") as step:
        for entry, of in list(zip(entries, measured, strict=True))[fitted:]:
            options: dict[str, Any] = {"surrogates": 0, "seed": seed, "progress": step}
            with entry.open(subject):
                of.fits = fit_layers(subject, text, planes=entry.planes, **options)
            stage.save([vars(of) for of in measured])


@dataclass(frozen=True)
class _Task:
    """What is measured of an entry beside the text: of so many tokens, by `measure`."""

    tokens: int
    measure: Callable[[Progress], dict[str, Tensor]]
    coordinates: dict[str, np.ndarray] = field(default_factory=dict)


def _tasks(
    subject: Subject,
    corpus: Corpus,
    wanted: set[str],
    planes: Sequence[Planes],
    retrieval: Retrieval | None,
    distances: Sequence[Whole] | None,
    seed: int,
) -> dict[str, _Task]:
    """The tasks among the measures that are wanted; any planes do, for attention alone."""
    if distances is not None and "copying" not in wanted:
        raise BadArgument(
            "distances are those of copies, which are not measured.",
            seen=f"measures {', '.join(sorted(wanted))}",
            attempt='measures=[..., "copying"]',
        )
    first = int(corpus.tokens[0, 0])
    context = min(subject.context, corpus.context)
    given = {"first_token": first, "seed": seed}
    length = repeat_length(subject)

    def repeat(progress: Progress) -> dict[str, Tensor]:
        _forget_length(subject)
        scores, losses = repeat_scores(subject, planes=planes, **given)
        # Nothing announces the repetition's first token; the others follow as before.
        once, again = losses[:, 2 : length + 1], losses[:, length + 2 :]
        progress(losses.numel())
        of_scores = {name: torch.from_numpy(x) for name, x in scores.items()}
        return of_scores | {"first_loss": once.mean(1), "repeat_loss": again.mean(1)}

    tasks = {}
    if "induction" in wanted:
        tasks["induction"] = _Task(REPEATS * (1 + 2 * length), repeat)
    if "copying" in wanted:
        at = copy_distances(distances, context)

        def copy(progress: Progress) -> dict[str, Tensor]:
            losses = []
            for distance in at:
                _forget_length(subject)
                losses.append(copy_losses(subject, distance=distance, **given))
                progress(REPEATS * (1 + 2 * distance))
            return {"copy_loss": torch.stack(losses)}

        total = REPEATS * sum(1 + 2 * distance for distance in at)
        tasks["copying"] = _Task(total, copy, {"copy_distance": np.array(at)})
    if "retrieval" in wanted:
        tasks["retrieval"] = _retrieval(
            subject, corpus, retrieval or Retrieval(), context, first, seed
        )
    return tasks


def _retrieval(
    subject: Subject, corpus: Corpus, plan: Retrieval, context: int, first_token: int, seed: int
) -> _Task:
    """Needles in stretches of the text: which ones are found, by length and depth."""
    rows = zip(corpus.tokens, corpus.lengths, strict=True)
    text = torch.cat([row[1:length] for row, length in rows]).cpu()
    lengths = plan.lengths_within(context)
    haystacks = [
        hide_needles(
            text,
            first_token=first_token,
            vocabulary=subject.vocabulary,
            length=length,
            depths=plan.depths,
            trials=plan.trials,
            seed=seed,
        )
        for length in lengths
    ]

    def look(progress: Progress) -> dict[str, Tensor]:
        hits = []
        for haystack in haystacks:
            _forget_length(subject)
            hits.append(haystack.found_by(subject, progress).double())
        hit = torch.stack(hits)
        return {"retrieval": hit.mean(-1), "retrieval_hit": hit}

    coordinates = {"retrieval_length": np.array(lengths), "depth": np.array(plan.depths)}
    return _Task(len(plan.depths) * plan.trials * sum(lengths), look, coordinates)


def _forget_length(subject: Subject) -> None:
    """Dynamic RoPE turns as its longest sequence so far made it; a short one undoes that."""
    if subject.depends_on_length:
        with subject.by_itself(), torch.no_grad():  # one token cannot be resampled
            subject.forward(torch.zeros(1, 1, dtype=torch.long), last=1)
