"""A small evaluation: three sequences, few needles."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import xarray as xr
from oracles.tiny import random_tokens
from torch import nn
from transformers import PreTrainedModel

import ropelens as rl
from ropelens.measure.tasks import Retrieval

FEW = Retrieval(lengths=(40,), depths=(0.5,), trials=2)


def tokens(*, sequences: int = 3, length: int = 40) -> torch.Tensor:
    return torch.from_numpy(random_tokens(sequences=sequences, length=length))


@torch.no_grad()
def logits(model: PreTrainedModel) -> torch.Tensor:
    return model(tokens(), use_cache=False).logits


def evaluate(model: nn.Module, **options: object) -> xr.Dataset:
    return rl.evaluate(model, **{"tokens": tokens(), "retrieval": FEW, **options})


def telling(told: Callable[[int], object]) -> Callable[..., AbstractContextManager]:
    """A progress that tells the tokens done."""
    return lambda what, *, total, unit: nullcontext(told if unit == "tokens" else lambda _: 0)
