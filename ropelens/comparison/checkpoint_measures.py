"""Measurement of a checkpoint of a trained run, on its validation text."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Int
from transformers import PreTrainedModel

from ropelens.comparison.entries import ComparisonEntry
from ropelens.interventions.evaluate import evaluate
from ropelens.profiles.heads import head_values
from ropelens.profiles.measures import compared
from ropelens.profiles.needles import SHORTEST_PROMPT
from ropelens.profiles.profile import profile
from ropelens.profiles.tasks import NEAREST, doublings
from ropelens.text.text import Text
from ropelens.train.data import documents_of, held_out_sequences, spread

TIMES_CONTEXT = 4  # length of long texts, in contexts of the training


def profile_of_heads(
    run: ComparisonEntry,
    model: PreTrainedModel,
    *,
    tokenizer: Any,
    sequences: int,
    seed: int,
    final: bool,
) -> xr.Dataset:
    """The profile of a checkpoint of `run`; `tokenizer` gives the tokens of excerpts names."""
    # The divisors are in the table of `compare`
    fewer = max(2, sequences // (8 if final else 32))
    text = validation_text(run).sample(fewer)
    return profile(model, text, tokenizer=tokenizer, seed=seed, surrogates=0)


def measure(
    run: ComparisonEntry,
    model: PreTrainedModel,
    heads: xr.Dataset,
    *,
    sequences: int,
    seed: int,
    final: bool,
) -> xr.Dataset:
    """Measure a checkpoint of `run`, with fewer variables and sequences if not `final`.

    `heads` is its profile.
    """
    fewer_long = max(2, sequences // (8 if final else 64))
    held_out = validation_text(run)
    text = held_out.sample(sequences)  # the same needles for all checkpoints
    long_text = held_out.joined(fewer_long)
    tasks = near_tasks(model, text, long_text, seed=seed)
    dataset = head_measures(heads, final=final).assign(
        first_loss=tasks["first_loss"],
        repeat_loss=tasks["repeat_loss"],
        retrieval=tasks["retrieval"],
        position_loss=tasks["position_loss"],
    )
    if not final:
        return dataset.drop_vars(("inv_freq", "wavelength"))
    losses = unedited(evaluate(model, text, measures=["loss"], seed=seed))
    losses = losses.reset_coords("group")
    far = far_tasks(model, text, context=run.context, seed=seed)
    dataset = dataset.assign(
        loss=losses["mean_loss"],
        loss_se=losses["mean_loss_se"],
        sequence_loss=losses["loss"],
        sequence_group=losses["group"],
        position_loss_se=tasks["position_loss_se"],
        retrieval_hit=tasks["retrieval_hit"],
        copy_loss=far["copy_loss"],
        far_retrieval=far["far_retrieval"],
    )
    return dataset.assign_attrs(documents=losses.attrs["documents"])


def unedited(evaluation: xr.Dataset) -> xr.Dataset:
    """The results of the unmodified model, without the dimension `edit`."""
    return evaluation.isel(edit=0, drop=True)


def near_tasks(
    model: PreTrainedModel, text: Text, long_text: Text, *, seed: int
) -> dict[str, xr.DataArray]:
    """Repeated tokens and retrieval in the context, and losses by position in `long_text`."""
    longer = evaluate(model, long_text, measures=["loss"], seed=seed)
    tasks = evaluate(model, text, measures=["induction", "retrieval"], seed=seed)
    longer = unedited(longer)
    tasks = unedited(tasks)
    return {
        "first_loss": tasks["first_loss"],
        "repeat_loss": tasks["repeat_loss"],
        "retrieval": tasks["retrieval"],
        "retrieval_hit": tasks["retrieval_hit"],
        "position_loss": longer["position_loss"],
        "position_loss_se": longer["position_loss_se"],
    }


def far_tasks(
    model: PreTrainedModel, text: Text, *, context: int, seed: int
) -> dict[str, xr.DataArray]:
    """Copying and retrieval over distances up to `TIMES_CONTEXT` contexts."""
    longest = TIMES_CONTEXT * context
    evaluation = evaluate(
        model,
        text,
        measures=["copying", "retrieval"],
        seed=seed,
        prompt_lengths=doublings(SHORTEST_PROMPT, longest),
        distances=doublings(NEAREST, longest // 2),
    )
    evaluation = unedited(evaluation)
    retrieval = evaluation["retrieval"].mean("depth")
    return {
        "copy_loss": evaluation["copy_loss"],
        "far_retrieval": retrieval.rename(retrieval_length="prompt_length"),
    }


def head_measures(profile: xr.Dataset, *, final: bool = True) -> xr.Dataset:
    """Variables of a profile for a comparison, and the labels of its heads ("" if missing)."""
    names = compared("final", "growth") if final else compared("growth")
    dataset = profile[names]
    others = set(dataset.coords) - {"inv_freq", "wavelength"}
    dataset = dataset.drop_vars(others).reset_coords(("inv_freq", "wavelength"))
    values = head_values(profile)
    for name in ("label", "positional_fraction", "mean_wavelength"):  # of heads.csv
        dataset[name] = ("layer", "head"), values[name]
    return dataset.assign(
        loss=float(profile.attrs["loss"]), loss_se=float(profile.attrs["loss_se"])
    )


@dataclass(frozen=True)
class ValidationText:
    """All held-out sequences [sequence, position], and the document in which each begins.

    Each sequence has `beginning` tokens in front of its text. The texts of neighbouring
    sequences follow each other.
    """

    rows: np.ndarray
    documents: Int[np.ndarray, " sequence"]
    beginning: int = 1

    @property
    def context(self) -> int:
        return self.rows.shape[1]

    def sample(self, sequences: int) -> Text:
        """At most this number of sequences, evenly spread over the whole text."""
        documents = spread(self.documents, sequences)
        tokens = spread(self.rows, sequences).astype(np.int64)
        return Text(torch.from_numpy(tokens), documents=torch.from_numpy(documents))

    def joined(self, sequences: int) -> Text:
        """Consecutive sequences as sequences of up to `TIMES_CONTEXT` contexts."""
        rows = self.rows
        body = self.context - self.beginning
        times = min(TIMES_CONTEXT, max(1, len(rows) // 2 - 1))
        length = times * self.context - self.beginning
        parts = -(-length // body)
        count = min(sequences, len(rows) // parts)
        starts = np.linspace(0, len(rows) - parts, count, dtype=int)
        first = rows[0, : self.beginning]
        joined = []
        for start in starts:
            stream = rows[start : start + parts, self.beginning :].ravel()
            joined.append(np.concatenate([first, stream[:length]]))
        tokens = torch.from_numpy(np.array(joined).astype(np.int64))
        return Text(tokens, documents=torch.from_numpy(self.documents[starts]))


def validation_text(run: ComparisonEntry) -> ValidationText:
    """The validation text of a run that was trained from the start."""
    rows = held_out_sequences(run.data)
    return ValidationText(rows, documents_of(rows, run.data))
