"""Measurement of a model before and after a recalibration, on the held-out text of its run."""

from collections.abc import Sequence

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
from ropelens.profiles.head_table import resample_heads
from ropelens.profiles.heads import head_values
from ropelens.profiles.profile import profile
from ropelens.runtime.records import read_json
from ropelens.text.text import Text
from ropelens.train.base_data import DOCUMENTS
from ropelens.train.data import DATA

VALID = "valid.npy"
RESAMPLES = 1000  # of groups of sequences, for the confidence of a label


def held_out_text(run: RecalibratedRun) -> ValidationText:
    """The held-out text of a recalibrated run."""
    hint = "the folder data of the study, which the runs share"
    what = f"The held-out text in {run.data} cannot be read."
    with explained(what, hint, error=BadArgument):
        rows = np.load(run.data / VALID, mmap_mode="r")
        documents = np.load(run.data / DOCUMENTS)
        beginning = read_json(run.data / DATA)["beginning"]
    return ValidationText(rows, documents, beginning=len(beginning))


def profile_of_heads(
    model: PreTrainedModel, text: ValidationText, *, sequences: int, seed: int
) -> xr.Dataset:
    return profile(model, heads_text(text, sequences), seed=seed, surrogates=0)


def heads_text(text: ValidationText, sequences: int) -> Text:
    """The part of the text on which heads are measured."""
    return text.sample(_fewer(sequences))


def _fewer(sequences: int) -> int:
    return max(2, sequences // 8)


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
    longer = evaluate(
        model, text.joined(_fewer(sequences)), measures=["loss"], seed=seed
    )
    longer = unedited(longer)
    tasks = evaluate(model, sampled, measures=["induction", "retrieval"], seed=seed)
    tasks = unedited(tasks)
    far = far_tasks(model, sampled, context=text.context, seed=seed)
    far_retrieval = far["retrieval"].mean("depth")
    return head_measures(profile).assign(
        first_loss=tasks["first_loss"],
        repeat_loss=tasks["repeat_loss"],
        retrieval=tasks["retrieval"],
        retrieval_hit=tasks["retrieval_hit"],
        position_loss=longer["position_loss"],
        position_loss_se=longer["position_loss_se"],
        copy_loss=far["copy_loss"],
        far_retrieval=far_retrieval.rename(retrieval_length="prompt_length"),
        confidence=_confidence(profile, seed=seed),
    )


def _confidence(profile: xr.Dataset, *, seed: int) -> xr.DataArray:
    """The confidence of the label of each head [layer, head]; NaN for missing heads."""
    values = head_values(profile)
    resampled = resample_heads(profile, values, resamples=RESAMPLES, seed=seed)
    return xr.DataArray(resampled.confidence, dims=("layer", "head"))


def measure_change(
    control: PreTrainedModel,
    model: PreTrainedModel,
    profiles: Sequence[xr.Dataset],
    text: Text,
) -> xr.Dataset:
    """The change of each head's attention (bits) and label against the control.

    `profiles` are the profiles of the control and of the model.
    """
    label = [head_values(profile)["label"] for profile in profiles]
    changed = (label[0] != label[1]).astype(float)
    nothing = np.full(label[0].shape, np.nan)
    heads = ("layer", "head")
    return xr.Dataset(
        {
            "attention_change": (heads, nothing),
            "label_changed": (heads, changed),
            "label_change_confidence": (heads, nothing),
        }
    )
