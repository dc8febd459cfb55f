"""Warnings about results that are not finite."""

import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import torch
from numpy.typing import ArrayLike
from torch import nn

from ropelens.checkpoints.not_finite import first_not_finite, remedy
from ropelens.profiles.measurement import Measurement


def warn_unless_finite(
    measurement: Measurement, results: Mapping[str, ArrayLike]
) -> None:
    """Warn if one of `results`, which should be finite, is not; name the first module."""
    wrong = []
    for name, values in results.items():
        if not torch.as_tensor(values, device="cpu").isfinite().all():
            wrong.append(name)
    if not wrong:
        return
    live = measurement.live
    text = measurement.text
    runs = []
    for index in range(len(text)):
        sequence = text[[index]]
        runs.append(partial(live.forward, sequence.ids, hidden=sequence.hidden))
    cause = _first_cause(live.model, runs)
    message = f"not finite: {', '.join(wrong)}"
    if cause:
        message += f"; {live.class_name} computes NaN or infinity first in {cause}"
    hint = remedy(live.model.dtype, "look for the cause in the model or the edit")
    warnings.warn(f"{message}; try: {hint}", stacklevel=4)


def _first_cause(model: nn.Module, runs: Iterable[Callable[[], object]]) -> str:
    """The module that is not finite first, in the first run with such a module."""
    for run in runs:
        cause = first_not_finite(model, run)
        if cause:
            return cause
    return ""
