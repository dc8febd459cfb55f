"""Labels of heads over the rows of each class of tokens, and how certain their changes are."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ropelens.attention.sums import by_layer
from ropelens.budget.held_out import head_budget
from ropelens.budget.logit import SCORES
from ropelens.interventions.entry_runs import EntrySums
from ropelens.profiles.heads import draw_groups
from ropelens.profiles.label_changes import LEAST_GROUPS, RESAMPLES

WEIGHT = SCORES.index("weight")


def class_label_values(sums: Sequence[EntrySums], layers: int) -> dict[str, np.ndarray]:
    """Labels by class of tokens, and in how many resamples they differ from the first entry."""
    label = np.stack([_class_labels(entry, layers) for entry in sums])
    confidence = np.full(label.shape, np.nan)
    for layer, scores in sums[0].sums.scores.items():
        has_rows = scores[:, 0, 0, WEIGHT] > 0
        if has_rows.sum() < LEAST_GROUPS:
            break
        unmodified = _resampled_labels(scores[has_rows])
        for entry, of_entry in enumerate(sums):
            labels = _resampled_labels(of_entry.sums.scores[layer][has_rows])
            share = np.not_equal(labels, unmodified).mean(0).T
            confidence[entry, layer, : len(share)] = share
    return {"class_label": label, "class_label_change_confidence": confidence}


def _class_labels(entry: EntrySums, layers: int) -> np.ndarray:
    """Label [layer, head, class] of each head over the rows of each class."""
    of_classes = {}
    for layer, scores in entry.sums.scores.items():
        of_classes[layer] = scores[:, 1:].sum(0)
    by_class = by_layer(of_classes, layers).transpose(1, 2)
    return head_budget(by_class).labels(rows=by_class[..., WEIGHT].numpy())


def _resampled_labels(scores: Float[Tensor, "group set head score"]) -> np.ndarray:
    """Labels [resample, class, head] in resamples of the groups."""
    of_classes = scores[:, 1:]
    draws = draw_groups(len(scores), resamples=RESAMPLES, seed=0)
    weights = torch.from_numpy(draws).to(of_classes)
    drawn = torch.einsum("rg,gchs->rchs", weights, of_classes)
    return head_budget(drawn).labels(rows=drawn[..., WEIGHT].numpy())
