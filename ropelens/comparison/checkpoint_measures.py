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
from ropelens.profiles.needles import SHORTEST_PROMPT, TRIALS, near_lengths
from ropelens.profiles.profile import profile
from ropelens.profiles.tasks import NEAREST, doublings
from ropelens.text.text import Text
from ropelens.train.data import documents_of, held_out_sequences, spread

TIMES_CONTEXT = 4  # length of long texts, in contexts of the training
FEWEST_PROMPTS = 4  # prompts with needles per length and depth


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
    prompts = prompts_for(sequences)
    tasks = run_tasks(model, text, prompts=prompts, far=final, seed=seed)
    longer = losses_by_position(model, long_text, seed=seed)
    dataset = head_measures(heads, final=final).assign(
        first_loss=tasks["first_loss"],
        repeat_loss=tasks["repeat_loss"],
        retrieval=tasks["retrieval"],
        position_loss=longer["position_loss"],
    )
    if not final:
        return dataset.drop_vars(("inv_freq", "wavelength"))
    losses = unedited(evaluate(model, text, measures=["loss"], seed=seed))
    losses = losses.reset_coords("group")
    dataset = dataset.assign(
        loss=losses["mean_loss"],
        loss_se=losses["mean_loss_se"],
        sequence_loss=losses["loss"],
        sequence_group=losses["group"],
        position_loss_se=longer["position_loss_se"],
        retrieval_hit=tasks["retrieval_hit"],
        copy_loss=tasks["copy_loss"],
        far_retrieval=tasks["far_retrieval"],
    )
    return dataset.assign_attrs(documents=losses.attrs["documents"])


def unedited(evaluation: xr.Dataset) -> xr.Dataset:
    """The results of the unmodified model, without the dimension `edit`."""
    return evaluation.isel(edit=0, drop=True)


def prompts_for(sequences: int) -> int:
    """Prompts with needles per length and depth: a sixteenth of `sequences`, 4 to 16."""
    return min(max(FEWEST_PROMPTS, sequences // 16), TRIALS)


def losses_by_position(
    model: PreTrainedModel, text: Text, *, seed: int
) -> dict[str, xr.DataArray]:
    """Losses by position, and their standard errors."""
    losses = unedited(evaluate(model, text, measures=["loss"], seed=seed))
    return {name: losses[name] for name in ("position_loss", "position_loss_se")}


def run_tasks(
    model: PreTrainedModel, text: Text, *, prompts: int, far: bool, seed: int
) -> dict[str, xr.DataArray]:
    """Repeated tokens, and retrieval in prompts of up to the context of the text.

    With `far`, also copying and retrieval over distances up to `TIMES_CONTEXT` contexts.
    """
    longest = TIMES_CONTEXT * text.context
    within = near_lengths(text.context)
    doubled = list(doublings(SHORTEST_PROMPT, longest))
    measures = ["induction", "retrieval"]
    lengths = within
    if far:
        measures.append("copying")
        lengths = [*within, *doubled]  # lengths in both lists are measured once
    evaluation = evaluate(
        model,
        text,
        measures=measures,
        seed=seed,
        prompts=prompts,
        prompt_lengths=lengths,
        distances=doublings(NEAREST, longest // 2),
    )
    evaluation = unedited(evaluation)
    near = evaluation.sel(retrieval_length=within)
    tasks = {
        "first_loss": evaluation["first_loss"],
        "repeat_loss": evaluation["repeat_loss"],
        "retrieval": near["retrieval"],
        "retrieval_hit": near["retrieval_hit"],
    }
    if far:
        retrieval = evaluation["retrieval"].sel(retrieval_length=doubled)
        retrieval = retrieval.mean("depth").rename(retrieval_length="prompt_length")
        tasks |= {"copy_loss": evaluation["copy_loss"], "far_retrieval": retrieval}
    return tasks


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
