"""One checkpoint becomes labelled arrays that stand beside those of the others."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel

from ropelens.comparison.entries import Run
from ropelens.measure.evaluate import evaluate
from ropelens.measure.heads import claim_numbers, head_values
from ropelens.measure.profile import profile
from ropelens.measure.tasks import NEAREST, SHORTEST, Retrieval, doublings
from ropelens.statistics.budget.claim import judge
from ropelens.statistics.labels import Thresholds
from ropelens.statistics.variables import compared
from ropelens.train.data import documents_of, held_out_sequences, spread

TIMES_CONTEXT = 4
"""The length of long texts, in trained contexts."""

PER_HEADS, PER_LONG, PER_EARLY, PER_EARLY_LONG = 8, 8, 32, 64
"""`sequences` is divided by these: heads and long texts of a finished run, then all text and
long texts of an early checkpoint."""

BEHAVIOUR = ("position_loss", "first_loss", "repeat_loss", "retrieval")
"""Measured on every checkpoint, in addition to heads and planes."""

OF_HEADS = ("positional_fraction", "mean_wavelength")
"""Columns of heads.csv that are compared, in addition to variables of the profile."""

OF_LAST = ("position_loss_se", "retrieval_hit")
"""Measured on the finished model only."""

Text = tuple[Int[Tensor, "_sequence _position"], Int[Tensor, " _sequence"]]
"""Sequences of tokens, and the number of the document that each begins in."""


def measure_final(run: Run, model: PreTrainedModel, *, sequences: int, seed: int) -> xr.Dataset:
    """The finished model of `run`: heads, planes, losses, induction and retrieval."""
    text = validation(run, sequences=sequences)
    fewer, documents = validation(run, sequences=max(2, sequences // PER_HEADS))
    dataset = head_measures(profile(model, fewer, documents=documents, seed=seed))
    losses = _evaluate(model, text, ("loss",), seed=seed).reset_coords("group")
    longer = past_context(run, sequences=max(2, sequences // PER_LONG))
    return (
        dataset.assign(
            loss=losses["mean_loss"],
            loss_se=losses["mean_loss_se"],
            sequence_loss=losses["loss"],
            sequence_group=losses["group"],
        )
        .assign(_behaviour(model, text, longer, (*BEHAVIOUR, *OF_LAST), seed=seed))
        .assign(_far(model, text, TIMES_CONTEXT * run.context, seed=seed))
        .assign_attrs(documents=losses.attrs["documents"])
    )


def measure_early(run: Run, model: PreTrainedModel, *, sequences: int, seed: int) -> xr.Dataset:
    """An early checkpoint of `run`: most of the same, on fewer sequences."""
    fewer, documents = validation(run, sequences=max(2, sequences // PER_EARLY))
    measured = profile(model, fewer, documents=documents, seed=seed, surrogates=0)
    dataset = head_measures(measured, "growth")
    text = validation(run, sequences=sequences)  # so that the needles are the same
    longer = past_context(run, sequences=max(2, sequences // PER_EARLY_LONG))
    behaviour = _behaviour(model, text, longer, BEHAVIOUR, seed=seed)
    return dataset.assign(behaviour).drop_vars(("inv_freq", "wavelength"))


def _behaviour(
    model: PreTrainedModel,
    text: Text,
    longer: Text,
    names: tuple[str, ...],
    *,
    seed: int,
) -> dict[str, xr.DataArray]:
    """Loss by position of `longer`; loss of repeats; retrieval of needles in `text`."""
    beyond = _evaluate(model, longer, ("loss",), seed=seed)
    asked = _evaluate(model, text, ("induction", "retrieval"), seed=seed)
    return {name: (beyond if name in beyond else asked)[name] for name in names}


def _far(
    model: PreTrainedModel, text: Text, longest: int, *, seed: int
) -> dict[str, xr.DataArray]:
    """Loss of copies by distance, and needles found by length, in up to `longest` tokens."""
    found = _evaluate(
        model,
        text,
        ("copying", "retrieval"),
        seed=seed,
        retrieval=Retrieval(doublings(SHORTEST, longest)),
        distances=doublings(NEAREST, longest // 2),
    )
    hits = found["retrieval"].mean("depth").rename(retrieval_length="prompt_length")
    return {"copy_loss": found["copy_loss"], "far_retrieval": hits}


def _evaluate(
    model: PreTrainedModel, text: Text, measures: tuple[str, ...], **options: Any
) -> xr.Dataset:
    tokens, documents = text
    found = evaluate(model, tokens, documents=documents, measures=measures, **options)
    return found.isel(edit=0, drop=True)


def head_measures(profile: xr.Dataset, *how: str) -> xr.Dataset:
    """The variables of a profile that are compared, and the labels of its heads.

    Labels use the default thresholds; "" stands for no head. `how` is as for `compared`, or
    empty for all variables.
    """
    dataset = profile[compared(*(how or ("final", "growth")))]
    dataset = dataset.drop_vars(set(dataset.coords) - {"inv_freq", "wavelength"})
    dataset = dataset.reset_coords(("inv_freq", "wavelength"))
    values = head_values(profile, Thresholds())
    heads = ("layer", "head")
    dataset = dataset.assign({name: (heads, values[name]) for name in ("label", *OF_HEADS)})
    losses = {name: float(profile.attrs[name]) for name in ("loss", "loss_se")}
    return dataset.assign(losses if how else losses | _claim(profile))


def _claim(profile: xr.Dataset) -> dict[str, str | float]:
    """The verdict on the paper's claim, and the rank correlations that it rests on."""
    claim = judge(*claim_numbers(profile))
    numbers = ("rank_correlation", "null_low", "null_high")
    return {"verdict": claim.verdict} | {name: getattr(claim, name) for name in numbers}


def validation(run: Run, *, sequences: int) -> Text:
    """Sequences from all of the validation text of `run`."""
    held_out = held_out_sequences(run.data)
    documents = documents_of(held_out, run.data)
    tokens = torch.from_numpy(spread(held_out, sequences).astype(np.int64))
    return tokens, torch.from_numpy(spread(documents, sequences))


def past_context(run: Run, *, sequences: int) -> Text:
    """Validation text in sequences of TIMES_CONTEXT trained contexts.

    Each is BOS and the text of consecutive sequences; shorter if there are too few of them.
    """
    held_out = held_out_sequences(run.data)
    documents = documents_of(held_out, run.data)
    body = run.context - 1
    times = min(TIMES_CONTEXT, max(1, len(held_out) // 2 - 1))
    length = times * run.context - 1
    rows = -(-length // body)
    starts = np.linspace(0, len(held_out) - rows, min(sequences, len(held_out) // rows))
    starts = starts.astype(int)
    texts = [held_out[start : start + rows, 1:].ravel()[:length] for start in starts]
    first = np.full((len(texts), 1), held_out[0, 0])
    tokens = torch.from_numpy(np.hstack([first, np.stack(texts)]).astype(np.int64))
    return tokens, torch.from_numpy(documents[starts])
