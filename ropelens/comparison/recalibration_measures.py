"""Measurement of a model before and after a recalibration, on the held-out text of its run."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import xarray as xr
from transformers import PreTrainedModel

from ropelens.comparison.checkpoint_measures import (
    ValidationText,
    head_measures,
    losses_by_position,
    prompts_for,
    run_tasks,
)
from ropelens.comparison.recalibration_runs import RecalibratedRun
from ropelens.errors import BadArgument, explained
from ropelens.intervals import ENOUGH_DOCUMENTS
from ropelens.profiles.attention_change import attention_change
from ropelens.profiles.head_table import resample_heads
from ropelens.profiles.heads import head_values
from ropelens.profiles.label_changes import label_changes
from ropelens.profiles.profile import profile
from ropelens.runtime.records import read_json
from ropelens.text.text import Text
from ropelens.train.base_data import all_held_out
from ropelens.train.data import DATA

VALID = "valid.npy"
# Columns of `label_changes`, and the names of the variables
OF_CHANGES = {
    "attention_change": "attention_change",
    "changed": "label_changed",
    "label_change_confidence": "label_change_confidence",
    "deciding_before": "deciding_number_of_control",
    "deciding_after": "deciding_number",
    "threshold": "deciding_threshold",
    "margin": "deciding_margin",
}
OF_FOLLOWING = ("follow_score", "offset_mass")  # of profiles, for the page
RESAMPLES = 1000  # draws of the groups of sequences that give the confidence of a label


def held_out_text(run: RecalibratedRun) -> ValidationText:
    """The held-out text of a recalibrated run."""
    hint = "the folder data of the study, which the runs share"
    what = f"The held-out text in {run.data} cannot be read."
    with explained(what, hint, error=BadArgument):
        text = all_held_out(run.data)
        beginning = read_json(run.data / DATA)["beginning"]
    return ValidationText(text.rows, text.documents, beginning=len(beginning))


def profile_of_heads(
    model: PreTrainedModel,
    text: ValidationText,
    *,
    tokenizer: Any,
    sequences: int,
    seed: int,
) -> xr.Dataset:
    """The profile of a model; `tokenizer` gives the tokens of its excerpts names."""
    of_heads = heads_text(text, sequences)
    return profile(model, of_heads, tokenizer=tokenizer, seed=seed, surrogates=0)


def heads_text(text: ValidationText, sequences: int) -> Text:
    """The part of the text on which heads are measured."""
    return text.sample(_fewer(sequences))


def _fewer(sequences: int) -> int:
    """An eighth of the sequences; labels of fewer than 8 groups cannot be compared."""
    return max(ENOUGH_DOCUMENTS, sequences // 8)


def measure_recalibrated(
    model: PreTrainedModel,
    text: ValidationText,
    profile: xr.Dataset,
    *,
    sequences: int,
    seed: int,
) -> xr.Dataset:
    """Heads of the `profile`, losses by position, copying, induction and retrieval."""
    sampled = text.sample(sequences)
    long_text = text.joined(_fewer(sequences))
    # The loss of the runs on all held-out text has another name and another text
    heads = head_measures(profile).drop_vars(["loss", "loss_se"])
    for name in OF_FOLLOWING:
        heads[name] = profile[name].variable
    bins = {name: profile[name].variable for name in ("offset_start", "offset_stop")}
    heads = heads.assign_coords(bins)
    prompts = prompts_for(sequences)
    tasks = run_tasks(model, sampled, prompts=prompts, far=True, seed=seed)
    longer = losses_by_position(model, long_text, seed=seed)
    confidence = _confidence(profile, seed=seed)
    return heads.assign(tasks).assign(longer).assign(confidence=confidence)


def _confidence(profile: xr.Dataset, *, seed: int) -> xr.DataArray:
    """The confidence of the label of each head [layer, head]; NaN for missing heads."""
    values = head_values(profile)
    resampled = resample_heads(profile, values, resamples=RESAMPLES, seed=seed)
    return xr.DataArray(resampled.confidence, dims=("layer", "head"))


def measure_change(
    control: PreTrainedModel,
    model: PreTrainedModel,
    text: Text,
    *,
    profiles: Sequence[xr.Dataset],
    seed: int,
) -> xr.Dataset:
    """The changes of each head's attention (bits) and label against the control.

    `profiles` has the profile of the control, and then the profile of the model.
    """
    of_control, of_model = profiles
    bits = attention_change(control, model, text, seed=seed)
    table = label_changes(of_control, of_model, attention_change=bits)
    layer = table["layer"].to_numpy(int)
    head = table["head"].to_numpy(int)
    dataset = xr.Dataset()
    for column, name in OF_CHANGES.items():
        values = np.full((of_control.sizes["layer"], of_control.sizes["head"]), np.nan)
        values[layer, head] = table[column].to_numpy(float, na_value=np.nan)
        dataset[name] = (("layer", "head"), values)
    return dataset
