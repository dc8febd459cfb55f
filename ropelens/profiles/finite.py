"""Warnings about results that are not finite."""

import warnings
from collections.abc import Mapping
from functools import partial

import torch
from numpy.typing import ArrayLike

from ropelens.checkpoints.not_finite import first_not_finite, remedy
from ropelens.model.live_model import LiveModel
from ropelens.text.text import Text


def warn_unless_finite(
    live: LiveModel, text: Text, results: Mapping[str, ArrayLike]
) -> None:
    """Warn if one of `results`, which should be finite, is not; name the first module."""
    wrong = []
    for name, values in results.items():
        if not torch.as_tensor(values).isfinite().all():
            wrong.append(name)
    if not wrong:
        return
    cause = _first_module(live, text)
    message = f"not finite: {', '.join(wrong)}"
    if cause:
        message += f"; {live.class_name} computes NaN or infinity first in {cause}"
    hint = remedy(live.model.dtype, "look for the cause in the model or the edit")
    warnings.warn(f"{message}; try: {hint}", stacklevel=4)


def _first_module(live: LiveModel, text: Text) -> str:
    """The module that is not finite first, in the first sequence with such a module."""
    for index in range(len(text)):
        sequence = text[[index]]
        run = partial(live.forward, sequence.ids, hidden=sequence.hidden)
        cause = first_not_finite(live.model, run)
        if cause:
            return cause
    return ""
