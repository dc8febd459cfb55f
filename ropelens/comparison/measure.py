"""Measurement of one checkpoint for a comparison."""

from typing import Any

import numpy as np
import torch
import xarray as xr
from transformers import PreTrainedModel

from ropelens.comparison.entries import ComparisonEntry
from ropelens.interventions.evaluate import evaluate
from ropelens.interventions.tasks import NEAREST, SHORTEST_PROMPT, doublings
from ropelens.profiles.heads import head_values
from ropelens.profiles.measures import compared
from ropelens.profiles.profile import profile
from ropelens.text.text import Text
from ropelens.train.data import documents_of, held_out_sequences, spread

TIMES_CONTEXT = 4  # length of long texts, in trained contexts


def measure(
    run: ComparisonEntry, model: PreTrainedModel, *, sequences: int, seed: int, final: bool
) -> xr.Dataset:
    """Measure a checkpoint of `run`, with fewer variables and sequences if not `final`."""

    def on(text: Text, *measures: str, **options: Any) -> xr.Dataset:
        evaluated = evaluate(model, text, measures=measures, seed=seed, **options)
        return evaluated.isel(edit=0, drop=True)

    per, per_long = (8, 8) if final else (32, 64)  # see the table in `compare`
    text = validation(run, sequences=sequences)  # the same needles for all checkpoints
    fewer = validation(run, sequences=max(2, sequences // per))
    measured = profile(model, fewer, seed=seed, surrogates=0)
    longer = on(past_context(run, sequences=max(2, sequences // per_long)), "loss")
    tasks = on(text, "induction", "retrieval")
    added = {name: tasks[name] for name in ("first_loss", "repeat_loss", "retrieval")}
    added["position_loss"] = longer["position_loss"]
    dataset = head_measures(measured, final=final).assign(added)
    if not final:
        return dataset.drop_vars(("inv_freq", "wavelength"))
    losses = on(text, "loss").reset_coords("group")
    longest = TIMES_CONTEXT * run.context
    lengths, distances = doublings(SHORTEST_PROMPT, longest), doublings(NEAREST, longest // 2)
    far = on(text, "copying", "retrieval", prompt_lengths=lengths, distances=distances)
    return dataset.assign(
        loss=losses["mean_loss"],
        loss_se=losses["mean_loss_se"],
        sequence_loss=losses["loss"],
        sequence_group=losses["group"],
        position_loss_se=longer["position_loss_se"],
        retrieval_hit=tasks["retrieval_hit"],
        copy_loss=far["copy_loss"],
        far_retrieval=far["retrieval"].mean("depth").rename(retrieval_length="prompt_length"),
    ).assign_attrs(documents=losses.attrs["documents"])


def head_measures(profile: xr.Dataset, *, final: bool = True) -> xr.Dataset:
    """Variables of a profile for a comparison, and the labels of its heads ("" if missing)."""
    dataset = profile[compared("final", "growth") if final else compared("growth")]
    dataset = dataset.drop_vars(set(dataset.coords) - {"inv_freq", "wavelength"})
    dataset = dataset.reset_coords(("inv_freq", "wavelength"))
    values, heads = head_values(profile), ("layer", "head")
    columns = ("label", "positional_fraction", "mean_wavelength")  # of heads.csv
    dataset = dataset.assign({name: (heads, values[name]) for name in columns})
    losses = {name: float(profile.attrs[name]) for name in ("loss", "loss_se")}
    return dataset.assign(losses)


def validation(run: ComparisonEntry, *, sequences: int) -> Text:
    """Sequences from the whole validation text of `run`, evenly spread."""
    held_out = held_out_sequences(run.data)
    documents = spread(documents_of(held_out, run.data), sequences)
    tokens = torch.from_numpy(spread(held_out, sequences).astype(np.int64))
    return Text(tokens, documents=torch.from_numpy(documents))


def past_context(run: ComparisonEntry, *, sequences: int) -> Text:
    """Validation text in sequences of up to `TIMES_CONTEXT` trained contexts.

    A sequence is BOS and the text of consecutive sequences.
    """
    held_out = held_out_sequences(run.data)
    documents = documents_of(held_out, run.data)
    body = run.context - 1
    times = min(TIMES_CONTEXT, max(1, len(held_out) // 2 - 1))
    length = times * run.context - 1
    rows = -(-length // body)
    count = min(sequences, len(held_out) // rows)
    starts = np.linspace(0, len(held_out) - rows, count, dtype=int)
    texts = [held_out[start : start + rows, 1:].ravel()[:length] for start in starts]
    tokens = torch.from_numpy(np.insert(texts, 0, held_out[0, 0], axis=1).astype(np.int64))
    return Text(tokens, documents=torch.from_numpy(documents[starts]))
