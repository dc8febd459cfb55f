"""Measurement of a checkpoint of a trained run, on its validation text."""

import numpy as np
import torch
import xarray as xr
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

TIMES_CONTEXT = 4  # length of long texts, in trained contexts


def measure(
    run: ComparisonEntry,
    model: PreTrainedModel,
    *,
    sequences: int,
    seed: int,
    final: bool,
) -> xr.Dataset:
    """Measure a checkpoint of `run`, with fewer variables and sequences if not `final`."""
    # The divisors are in the table of `compare`
    fewer = max(2, sequences // (8 if final else 32))
    fewer_long = max(2, sequences // (8 if final else 64))
    text = validation(run, sequences=sequences)  # the same needles for all checkpoints
    heads_text = validation(run, sequences=fewer)
    long_text = past_context(run, sequences=fewer_long)
    heads = profile(model, heads_text, seed=seed, surrogates=0)
    longer = evaluate(model, long_text, measures=["loss"], seed=seed)
    tasks = evaluate(model, text, measures=["induction", "retrieval"], seed=seed)
    longer = _unedited(longer)
    tasks = _unedited(tasks)
    dataset = head_measures(heads, final=final).assign(
        first_loss=tasks["first_loss"],
        repeat_loss=tasks["repeat_loss"],
        retrieval=tasks["retrieval"],
        position_loss=longer["position_loss"],
    )
    if not final:
        return dataset.drop_vars(("inv_freq", "wavelength"))
    losses = _unedited(evaluate(model, text, measures=["loss"], seed=seed))
    losses = losses.reset_coords("group")
    far = _far_tasks(run, model, text, seed=seed)
    far_retrieval = far["retrieval"].mean("depth")
    dataset = dataset.assign(
        loss=losses["mean_loss"],
        loss_se=losses["mean_loss_se"],
        sequence_loss=losses["loss"],
        sequence_group=losses["group"],
        position_loss_se=longer["position_loss_se"],
        retrieval_hit=tasks["retrieval_hit"],
        copy_loss=far["copy_loss"],
        far_retrieval=far_retrieval.rename(retrieval_length="prompt_length"),
    )
    return dataset.assign_attrs(documents=losses.attrs["documents"])


def _unedited(evaluation: xr.Dataset) -> xr.Dataset:
    """The results of the unmodified model, without the dimension `edit`."""
    return evaluation.isel(edit=0, drop=True)


def _far_tasks(
    run: ComparisonEntry, model: PreTrainedModel, text: Text, *, seed: int
) -> xr.Dataset:
    """Copying and retrieval over distances up to `TIMES_CONTEXT` trained contexts."""
    longest = TIMES_CONTEXT * run.context
    evaluation = evaluate(
        model,
        text,
        measures=["copying", "retrieval"],
        seed=seed,
        prompt_lengths=doublings(SHORTEST_PROMPT, longest),
        distances=doublings(NEAREST, longest // 2),
    )
    return _unedited(evaluation)


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


def validation(run: ComparisonEntry, *, sequences: int) -> Text:
    """Sequences from the whole validation text of `run`, evenly spread."""
    held_out = held_out_sequences(run.data)
    documents = spread(documents_of(held_out, run.data), sequences)
    tokens = torch.from_numpy(spread(held_out, sequences).astype(np.int64))
    return Text(tokens, documents=torch.from_numpy(documents))


def past_context(run: ComparisonEntry, *, sequences: int) -> Text:
    """Consecutive validation sequences as sequences of up to `TIMES_CONTEXT` contexts."""
    held_out = held_out_sequences(run.data)
    documents = documents_of(held_out, run.data)
    body = run.context - 1
    times = min(TIMES_CONTEXT, max(1, len(held_out) // 2 - 1))
    length = times * run.context - 1
    rows = -(-length // body)
    count = min(sequences, len(held_out) // rows)
    starts = np.linspace(0, len(held_out) - rows, count, dtype=int)
    texts = [held_out[start : start + rows, 1:].ravel()[:length] for start in starts]
    tokens = torch.from_numpy(
        np.insert(texts, 0, held_out[0, 0], axis=1).astype(np.int64)
    )
    return Text(tokens, documents=torch.from_numpy(documents[starts]))
