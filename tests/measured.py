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
    with torch.no_grad(), live.observe(lambda call: calls.update({call.layer: call})):
        live.forward(tokens)
    return [(calls[layer], planes[layer]) for layer in sorted(calls)]


def differs_when_observed(forward: Callable, *args: Any, **kwargs: Any) -> Any:
    """The forward pass of a layer of Llama that looks at its attention function."""
    eager = modeling_llama.eager_attention_forward
    plain = (
        modeling_llama.ALL_ATTENTION_FUNCTIONS.get_interface("eager", eager) is eager
    )
    output, weights = forward(*args, **kwargs)
    return output * (1 if plain else 1.001), weights


def assert_same(actual: xr.Dataset | None, expected: xr.Dataset | None) -> None:
    assert actual is not None
    assert expected is not None
    for name in actual.data_vars:
        xr.testing.assert_allclose(
            actual[name].variable, expected[name].variable, 1e-6, 1e-9
        )
    assert actual.attrs.keys() >= expected.attrs.keys()
    for name in {"loss", "loss_se", "rows_measured", "tokens"} & actual.attrs.keys():
        assert actual.attrs[name] == pytest.approx(expected.attrs[name], rel=1e-6)


def assert_alike(actual: xr.Dataset, expected: xr.Dataset) -> None:
    """Variables agree to 1e-5 of their largest number; the scale of bits is 0.1 at least."""
    for name, variable in expected.data_vars.items():
        values = variable.values
        if values.dtype.kind == "f":
            least = (
                0.1 if any(part in str(name) for part in ("bits", "gain")) else 1e-30
            )
            atol = 1e-5 * np.nanmax(np.abs(values), initial=least)
            np.testing.assert_allclose(actual[name], values, 0, atol, err_msg=str(name))
        else:
            np.testing.assert_array_equal(
                actual[name].values, values, err_msg=str(name)
            )


tokens = partial(random_tokens, sequences=3, length=40)


def evaluate(model: nn.Module, **options: object) -> xr.Dataset:
    lengths = options.pop("lengths", None)
    options = {
        "text": rl.Text(tokens(), lengths=lengths),
        "prompt_lengths": [40],
        **options,
    }
    return rl.evaluate(model, **options)


def old_rule(profile: xr.Dataset) -> tuple[np.ndarray, np.ndarray]:
    """Labels [layer, head] if all shared bits count as content, and fractions of content."""
    rows = profile["group_scored"].values
    share = rows / rows.sum()
    gains = (
        np.einsum("g,glh->lh", share, profile[f"group_{name}"].values) for name in GAINS
    )
    bits = attention_budget(*gains)
    fraction = bits["content"] / (bits["total"] - bits["sink"])
    return label_heads(bits, rows=float(rows.sum())), fraction


def token_progress(
    add: Callable[[int], object],
) -> Callable[..., AbstractContextManager]:
    """A progress display that passes the number of finished tokens to `add`."""
    advance = lambda amount, stage=0, note="": None if stage else add(amount)  # noqa: E731
    return lambda *stages: nullcontext(advance)
