"""What is measured beside the text, of every entry: repeats, copies and needles."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from ropelens.edit.entries import Entry
from ropelens.measure.batches import LOGITS_AT_ONCE, Progress, quick_batch
from ropelens.measure.chunks import chunk_of
from ropelens.measure.copying import copy_losses
from ropelens.measure.evaluate_text import TextFindings
from ropelens.measure.repeats import REPEATS, repeat_length, repeat_scores
from ropelens.measure.savepoint import Stage
from ropelens.measure.tasks import Haystack, Retrieval, hide_needles
from ropelens.models.processes import gather, shard
from ropelens.models.subject import Subject, trained_context
from ropelens.rope.planes import Planes
from ropelens.statistics.corpus import Corpus

Found = TypeVar("Found")


@dataclass
class SoFar:
    """What an evaluation has found: on the text; on repeats, copies and needles by entry."""

    kept: Stage
    text: list[dict[str, Any]] = field(default_factory=list)
    repeats: list[dict[str, np.ndarray]] = field(default_factory=list)
    copies: list[Float[np.ndarray, "distance trial"]] = field(default_factory=list)
    hits: list[Float[np.ndarray, "length depth trial"]] = field(default_factory=list)

    def save(self, text: Sequence[TextFindings] = ()) -> None:
        """Keep it; `text` is what there is on the text, where that has grown."""
        self.kept.save(lambda: self._with(text))

    def _with(self, text: Sequence[TextFindings]) -> dict[str, Any]:
        self.text = [found.state for found in text] or self.text
        names = ("text", "repeats", "copies", "hits")
        return {name: getattr(self, name) for name in names}

    def of_each(
        self,
        found: list[Found],
        entries: list[Entry],
        subject: Subject,
        measure: Callable[[], Found],
    ) -> list[Found]:
        """What `measure` finds of every entry; `found` holds what this process has so far.

        Processes that share the measurement share the entries.
        """
        mine = shard(len(entries))
        for entry in entries[mine.start : mine.stop][len(found) :]:
            with entry.open(subject):
                found.append(measure())
            self.save()
        return [of for part in gather(found) for of in part]


def measure_repeats(
    subject: Subject,
    entries: list[Entry],
    own: list[Planes],
    first_token: int,
    seed: int,
    so_far: SoFar,
    progress: Progress,
) -> dict[str, np.ndarray]:
    """Attention and losses on repeated random tokens, as `profile` has them, of every entry."""
    length = repeat_length(subject.model)

    def measure() -> dict[str, np.ndarray]:
        _forget_length(subject)
        # Only attention is looked at here, so any planes will do.
        scores = repeat_scores(
            subject, first_token=first_token, planes=own, length=length, seed=seed
        )
        # The repetition's first token is announced by nothing; the others by their past.
        first, second = scores.losses[:, 2 : length + 1], scores.losses[:, length + 2 :]
        losses = {"first_loss": first.mean(1).numpy(), "repeat_loss": second.mean(1).numpy()}
        progress(scores.losses.numel())
        return scores.values | losses

    found = so_far.of_each(so_far.repeats, entries, subject, measure)
    return {name: np.stack([of[name] for of in found]) for name in found[0]}


def measure_copying(
    subject: Subject,
    entries: list[Entry],
    first_token: int,
    distances: Sequence[int],
    seed: int,
    so_far: SoFar,
    progress: Progress,
) -> dict[str, np.ndarray]:
    """Losses of random tokens that come again, of every entry, by distance."""

    def measure() -> Float[np.ndarray, "distance trial"]:
        losses = []
        for distance in distances:
            _forget_length(subject)
            losses.append(
                copy_losses(subject, first_token=first_token, distance=distance, seed=seed)
            )
            progress(REPEATS * (1 + 2 * distance))
        return np.stack(losses)

    found = so_far.of_each(so_far.copies, entries, subject, measure)
    return {"copy_loss": np.stack(found), "copy_distance": np.array(distances)}


def measure_retrieval(
    subject: Subject,
    entries: list[Entry],
    corpus: Corpus,
    plan: Retrieval,
    seed: int,
    so_far: SoFar,
    progress: Progress,
) -> dict[str, np.ndarray]:
    """Which needles every entry finds, by the length of the prompt and the needle's depth."""
    rows = zip(corpus.tokens, corpus.lengths, strict=True)
    text = torch.cat([row[1:length] for row, length in rows])
    at = prompt_lengths(subject.model, corpus.lengths, plan)
    needles = [
        hide_needles(
            text.cpu(),
            first_token=int(corpus.tokens[0, 0]),
            vocabulary=subject.vocabulary,
            length=length,
            depths=plan.depths,
            trials=plan.trials,
            seed=seed,
        )
        for length in at
    ]

    def measure() -> Float[np.ndarray, "length depth trial"]:
        return np.array([_look_for(subject, of_length, progress) for of_length in needles])

    found = so_far.of_each(so_far.hits, entries, subject, measure)
    hit = np.stack(found)
    return {
        "retrieval": hit.mean(-1),
        "retrieval_hit": hit,
        "retrieval_length": np.array(at),
        "depth": np.array(plan.depths),
    }


def prompt_lengths(
    model: PreTrainedModel, lengths: Int[Tensor, " sequence"], plan: Retrieval
) -> tuple[int, ...]:
    return plan.lengths_within(context_of(model, lengths))


def context_of(model: PreTrainedModel, lengths: Int[Tensor, " sequence"]) -> int:
    """The trained context, or that of the text where it is shorter."""
    return min(trained_context(model.config), int(lengths.max()))


def _look_for(
    subject: Subject, needles: Haystack, progress: Progress
) -> Float[np.ndarray, "depth trial"]:
    """1 where the logit of the needle's value is the highest of all needles', 0 elsewhere."""
    _forget_length(subject)
    depths, trials, length = needles.prompts.shape
    size = quick_batch(subject, length)
    last = []
    for prompts in needles.prompts.flatten(0, 1).split(size):
        with torch.no_grad():
            last.append(_last_logits(subject, prompts).float().cpu())
        progress(prompts.numel())
    return needles.found(torch.cat(last).unflatten(0, (depths, trials))).double().numpy()


def _last_logits(
    subject: Subject, tokens: Int[Tensor, "sequence position"]
) -> Float[Tensor, "sequence token"]:
    """The logits at the last position."""
    chunk = chunk_of(subject, tokens.shape[1])
    if chunk is None:
        return subject.forward(tokens, last=1)[:, -1]
    at_once = LOGITS_AT_ONCE[subject.device.type]
    pieces = subject.logits(tokens, at_once=at_once, chunk=chunk)
    return deque(pieces, maxlen=1).pop()[1][:, -1]


def _forget_length(subject: Subject) -> None:
    """Dynamic RoPE turns as its longest sequence so far made it; one short one undoes that."""
    if subject.depends_on_length:
        with subject.by_itself(), torch.no_grad():  # one token cannot be resampled
            subject.forward(torch.zeros(1, 1, dtype=torch.long), last=1)
