"""Warnings about results that are not finite."""

import warnings
from collections.abc import Callable, Iterable, Mapping

import torch
from numpy.typing import ArrayLike
from transformers import PreTrainedModel

from ropelens.checkpoints.not_finite import first_not_finite, remedy


def warn_unless_finite(
    runs: Iterable[Callable[[], object]],
    model: PreTrainedModel,
    results: Mapping[str, ArrayLike],
) -> None:
    """Warn if one of `results`, which should be finite, is not; name the first module.

    `runs` are passes of the model over the text, which search the module.
    """
    wrong = []
    for name, values in results.items():
        if not torch.as_tensor(values, device="cpu").isfinite().all():
            wrong.append(name)
    if not wrong:
        return
    message = f"not finite: {', '.join(wrong)}"
    cause = _first_cause(model, runs)
    if cause:
        message += f"; {type(model).__name__} computes NaN or infinity first in {cause}"
    hint = remedy(model.dtype, "look for the cause in the model or the edit")
    warnings.warn(f"{message}; try: {hint}", stacklevel=4)


def _first_cause(model: PreTrainedModel, runs: Iterable[Callable[[], object]]) -> str:
    """The module that is not finite first, in the first run with such a module."""
    for run in runs:
        cause = first_not_finite(model, run)
        if cause:
            return cause
    return ""
