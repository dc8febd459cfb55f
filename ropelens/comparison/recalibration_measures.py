"""Measurement of a model before and after a recalibration, on the held-out text of its run."""

import numpy as np
import xarray as xr
from transformers import PreTrainedModel

from ropelens.comparison.checkpoint_measures import (
    ValidationText,
    far_tasks,
    head_measures,
    unedited,
)
from ropelens.comparison.recalibration_runs import RecalibratedRun
from ropelens.errors import BadArgument, explained
from ropelens.interventions.evaluate import evaluate
from ropelens.profiles.head_table import head_table
from ropelens.profiles.profile import profile
from ropelens.runtime.records import read_json
from ropelens.train.data import DATA

VALID = "valid.npy"
DOCUMENTS = "valid_documents.npy"
RESAMPLES = 1000  # of groups of sequences, for the confidence of a label
OF_LABELS = ("confidence", "content_fraction", "fraction_low", "fraction_high")
"""Columns of heads.csv that tell how certain a label is."""


def held_out_text(run: RecalibratedRun) -> ValidationText:
    """The held-out text of a recalibrated run."""
    hint = "the folder data of the study, which the runs share"
    what = f"The held-out text in {run.data} cannot be read."
    with explained(what, hint, error=BadArgument):
        rows = np.load(run.data / VALID, mmap_mode="r")
        documents = np.load(run.data / DOCUMENTS)
        beginning = read_json(run.data / DATA)["beginning"]
    return ValidationText(rows, documents, beginning=len(beginning))


def measure_recalibrated(
    model: PreTrainedModel, text: ValidationText, *, sequences: int, seed: int
) -> xr.Dataset:
    """Heads and their labels, losses by position, copying, induction and retrieval."""
    fewer = max(2, sequences // 8)
    sampled = text.sample(sequences)
    heads = profile(model, text.sample(fewer), seed=seed, surrogates=0)
    longer = evaluate(model, text.joined(fewer), measures=["loss"], seed=seed)
    longer = unedited(longer)
    tasks = evaluate(model, sampled, measures=["induction", "retrieval"], seed=seed)
    tasks = unedited(tasks)
    far = far_tasks(model, sampled, context=text.context, seed=seed)
    far_retrieval = far["retrieval"].mean("depth")
    dataset = head_measures(heads).assign(
        first_loss=tasks["first_loss"],
        repeat_loss=tasks["repeat_loss"],
        retrieval=tasks["retrieval"],
        retrieval_hit=tasks["retrieval_hit"],
        position_loss=longer["position_loss"],
        position_loss_se=longer["position_loss_se"],
        copy_loss=far["copy_loss"],
        far_retrieval=far_retrieval.rename(retrieval_length="prompt_length"),
    )
    return _with_certainty(dataset, heads, seed=seed)


def _with_certainty(
    dataset: xr.Dataset, profile: xr.Dataset, *, seed: int
) -> xr.Dataset:
    """Add the columns `OF_LABELS` as variables [layer, head]; NaN for missing heads."""
    table = head_table(profile, resamples=RESAMPLES, seed=seed)
    shape = (profile.sizes["layer"], profile.sizes["head"])
    places = (table["layer"].to_numpy(int), table["head"].to_numpy(int))
    for name in OF_LABELS:
        values = np.full(shape, np.nan)
        values[places] = table[name].to_numpy(float)
        dataset[name] = (("layer", "head"), values)
    return dataset
