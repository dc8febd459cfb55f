"""A small evaluation with three sequences and few needles."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import xarray as xr
from oracles.tiny import random_tokens
from torch import nn

import ropelens as rl

tokens = partial(random_tokens, sequences=3, length=40)


def evaluate(model: nn.Module, **options: object) -> xr.Dataset:
    lengths = options.pop("lengths", None)
    options = {"text": rl.Text(tokens(), lengths=lengths), "prompt_lengths": [40], **options}
    return rl.evaluate(model, **options)


def token_progress(add: Callable[[int], object]) -> Callable[..., AbstractContextManager]:
    """A progress display that passes the number of finished tokens to `add`."""
    advance = lambda amount, stage=0, note="": None if stage else add(amount)  # noqa: E731
    return lambda *stages: nullcontext(advance)
