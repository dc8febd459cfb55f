"""Small measurements, the calls that observers receive, and comparisons of results."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from hypothesis import settings
from hypothesis import strategies as st
from oracles.tiny import random_tokens
from torch import Tensor, nn
from transformers.models.llama import modeling_llama

import ropelens as rl
from ropelens.attention.call import AttentionCall
from ropelens.attention.formulas import GAINS, attention_budget
from ropelens.budget.labels import label_heads
from ropelens.measured_rotation.probe import RotationProbe
from ropelens.model.as_live_model import as_live_model
from ropelens.rope.planes import Planes

few = settings(deadline=None, max_examples=25, derandomize=True)
seeds = st.integers(0, 2**20)


def normal(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def observed_calls(
    model: nn.Module, tokens: Tensor
) -> list[tuple[AttentionCall, Planes]]:
    live = as_live_model(model)
    planes = RotationProbe(live).planes(tokens.shape[1])
    calls: dict[int, AttentionCall] = {}

    def keep(call: AttentionCall) -> None:
        calls[call.layer] = call

    with torch.no_grad(), live.observe(keep):
        live.forward(tokens)
    return [(calls[layer], planes[layer]) for layer in sorted(calls)]


def differs_when_observed(forward: Callable, *args: Any, **kwargs: Any) -> Any:
    """The forward pass of a layer of Llama that looks at its attention function."""
    eager = modeling_llama.eager_attention_forward
    used = modeling_llama.ALL_ATTENTION_FUNCTIONS.get_interface("eager", eager)
    output, weights = forward(*args, **kwargs)
    if used is not eager:
        output = output * 1.001
    return output, weights


def assert_same(actual: xr.Dataset | None, expected: xr.Dataset | None) -> None:
    assert actual is not None
    assert expected is not None
    for name in actual.data_vars:
        variable = actual[name].variable
        xr.testing.assert_allclose(variable, expected[name].variable, 1e-6, 1e-9)
    assert actual.attrs.keys() >= expected.attrs.keys()
    for name in {"loss", "loss_se", "rows_measured", "tokens"} & actual.attrs.keys():
        assert actual.attrs[name] == pytest.approx(expected.attrs[name], rel=1e-6)


def assert_alike(actual: xr.Dataset, expected: xr.Dataset) -> None:
    """Variables agree to 1e-5 of their largest number; the scale of bits is 0.1 at least."""
    for name, variable in expected.data_vars.items():
        name = str(name)
        found = actual[name].values
        values = variable.values
        if values.dtype.kind != "f":
            np.testing.assert_array_equal(found, values, err_msg=name)
            continue
        least = 0.1 if "bits" in name or "gain" in name else 1e-30
        largest = np.nanmax(np.abs(values), initial=least)
        np.testing.assert_allclose(
            found, values, rtol=0, atol=1e-5 * largest, err_msg=name
        )


tokens = partial(random_tokens, sequences=3, length=40)


def evaluate(
    model: nn.Module, *, lengths: list[int] | None = None, **options: object
) -> xr.Dataset:
    """Three short sequences, and prompts of their length, if `options` name no others."""
    options.setdefault("text", rl.Text(tokens(), lengths=lengths))
    options.setdefault("prompt_lengths", [40])
    return rl.evaluate(model, **options)


def old_rule(profile: xr.Dataset) -> tuple[np.ndarray, np.ndarray]:
    """Labels [layer, head] if all shared bits count as content, and fractions of content."""
    rows = profile["group_scored"].values
    share = rows / rows.sum()
    gains = []
    for name in GAINS:
        by_group = profile[f"group_{name}"].values
        gains.append(np.einsum("g,glh->lh", share, by_group))
    bits = attention_budget(*gains)
    fraction = bits["content"] / (bits["total"] - bits["sink"])
    return label_heads(bits, rows=float(rows.sum())), fraction


def token_progress(
    add: Callable[[int], object],
) -> Callable[..., AbstractContextManager]:
    """A progress display that passes the number of finished tokens to `add`."""

    def advance(amount: int, stage: int = 0, note: str = "") -> None:
        if stage == 0:
            add(amount)

    def progress(*stages: object) -> AbstractContextManager:
        return nullcontext(advance)

    return progress
