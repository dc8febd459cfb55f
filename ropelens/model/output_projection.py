"""What heads write, and the straight way from there to the logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from ropelens.attention.call import AttentionCall
from ropelens.errors import UnsupportedModel
from ropelens.model.live_model import LiveModel
from ropelens.runtime.devices import computes_on


@contextmanager
def _noted(live: LiveModel, note: Callable[[nn.Module, Tensor, Any], Any]) -> Iterator[None]:
    """`note` gets every module that runs, with its input and result; it may give another."""
    with ExitStack() as stack:
        for module in live.model.modules():
            hook = module.register_forward_hook(lambda m, x, y: note(m, x[0], y) if x else None)
            stack.callback(hook.remove)
        yield


@torch.no_grad()
def output_projections(live: LiveModel) -> dict[int, nn.Linear]:
    """The linear map of each layer that reads its heads, by layer.

    Raises `UnsupportedModel` where none reads them as they are, such as behind a gate.
    """
    calls: list[AttentionCall] = []
    projections: dict[int, nn.Linear] = {}
    results: dict[int, Tensor] = {}

    def note(module: nn.Module, given: Tensor, result: Any) -> None:
        output = calls[-1].output.flatten(2) if calls else None
        if output is None or not isinstance(given, Tensor) or not torch.equal(given, output):
            return
        if isinstance(module, nn.Linear) and calls[-1].layer not in results:
            projections[calls[-1].layer], results[calls[-1].layer] = module, result
        elif not torch.equal(result, results.get(calls[-1].layer, result)):
            projections.pop(calls[-1].layer, None)  # a part of it, such as below an adapter

    with live.without_hooks(), live.observe(calls.append), _noted(live, note):
        live.forward(torch.ones(1, 2, dtype=torch.long), last=1)
    if missing := [layer for layer in live.attending if layer not in projections]:
        raise UnsupportedModel(
            f"No linear map reads the heads of {live.class_name} as they are.",
            seen=f"layer {missing[0]}: something else stands behind its attention",
        )
    return projections


def weight_of(linear: Any, dtype: torch.dtype) -> Float[Tensor, "out in"]:
    """The weights of a linear map, also of one that is quantized, or lies elsewhere.

    These are what it gives for unit vectors of `dtype`, the model's.
    """
    weight = linear.weight.detach()
    if type(weight) is Tensor and weight.is_floating_point() and not weight.is_meta:
        return weight
    unit = torch.eye(linear.in_features, dtype=dtype, device=computes_on(linear))
    return (linear(unit) - linear(torch.zeros_like(unit[:1]))).mT


@torch.no_grad()
def logit_directions(
    live: LiveModel,
    projections: dict[int, nn.Linear],
    tokens: Int[Tensor, "1 position"],
    answers: Sequence[int],
    hidden: Bool[Tensor, "1 position"] | None = None,
) -> Float[Tensor, "answer position width"]:
    """What adds to the logits of `answers` in the residual stream, as the model runs now.

    The final norm is r_i g (x - mean) + b, with no mean taken off where it centers none; its
    scale r_i is frozen. Logits are those before they are scaled or capped. Raises
    `UnsupportedModel` where what heads write is changed before it is added to the stream.
    """
    written: list[Tensor] = []
    norms: list[Any] = []

    def note(module: nn.Module, given: Tensor, result: Any) -> Any:
        if module in projections.values():
            written.append(result.detach().requires_grad_())
            return written[-1]
        if "Norm" in type(module).__name__:
            norms[:] = [module, given]
            return result.detach()  # all that is not straight begins with a norm
        return None

    with torch.enable_grad(), _noted(live, note):
        live.forward(tokens, hidden=hidden, last=1)
    norm, x = norms[0], norms[1]
    toward = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x)
    straight = torch.autograd.grad(x, written, toward, materialize_grads=True)
    close = max(1e-3, 4 * live.noise)
    _check(live, all(torch.allclose(g.to(toward), toward, close, close) for g in straight))
    x = x[0].detach()
    y, even = norm(x), torch.ones_like(x[:1])
    even[:, 1::2] = -1  # its mean is 0, and its mean square 1
    shift = (y[:1] + norm(-x[:1])) / 2
    moved = norm(x + x.square().mean(-1, keepdim=True).sqrt())
    centered = float((moved - y).norm() / y.norm()) < 0.1  # else about 0.7
    gain = (norm(even) - shift) * even
    dtype = torch.promote_types(x.dtype, torch.float32)
    x, y, shift, gain = (z.to(dtype) for z in (x, y, shift, gain))
    part = gain * (x - centered * x.mean(-1, keepdim=True))
    scale = ((y - shift) * part).sum(-1, keepdim=True) / part.square().sum(-1, keepdim=True)
    _check(live, float((scale * part + shift - y).norm() / y.norm()) < close)
    head = weight_of(live.model.get_output_embeddings(), live.model.dtype)
    before = head[list(answers)][:, None].to(x) * (scale * gain)
    return before - centered * before.mean(-1, keepdim=True)


def _check(live: LiveModel, straight: bool) -> None:
    if not straight:
        raise UnsupportedModel(
            f"What heads of {live.class_name} write does not go straight to the logits.",
            seen="a norm or a factor on the way, or a final norm that is not linear",
            hint="values=True without logits_of",
        )
