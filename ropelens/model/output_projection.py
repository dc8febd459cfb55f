"""Output projection of each layer, and the linear path from the heads to the logits."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from ropelens.attention.call import AttentionCall
from ropelens.errors import UnsupportedModel
from ropelens.model.live_model import LiveModel
from ropelens.noise import allowed_residual
from ropelens.runtime.devices import computes_on


@contextmanager
def _modules_recorded(
    live: LiveModel, record: Callable[[nn.Module, Tensor, Any], Any]
) -> Iterator[None]:
    """Call `record(module, input, result)` for every module; it may return another result."""
    with ExitStack() as stack:
        for module in live.model.modules():
            hook = lambda module, x, result: record(module, x[0], result) if x else None  # noqa: E731
            stack.enter_context(module.register_forward_hook(hook))
        yield


@torch.no_grad()
def output_projections(live: LiveModel) -> dict[int, nn.Linear]:
    """Linear map of each layer whose input is the output of the heads, without a gate."""
    calls: list[AttentionCall] = []
    projections: dict[int, nn.Linear] = {}
    results: dict[int, Tensor] = {}

    def record(module: nn.Module, x: Tensor, result: Any) -> None:
        output = calls[-1].output.flatten(2) if calls else None
        if output is None or not isinstance(x, Tensor) or not torch.equal(x, output):
            return
        if isinstance(module, nn.Linear) and calls[-1].layer not in results:
            projections[calls[-1].layer], results[calls[-1].layer] = module, result
        elif not torch.equal(result, results.get(calls[-1].layer, result)):
            projections.pop(
                calls[-1].layer, None
            )  # only a part of a map, as in an adapter

    with (
        live.without_hooks(),
        live.observe(calls.append),
        _modules_recorded(live, record),
    ):
        live.forward(torch.ones(1, 2, dtype=torch.long), last=1)
    if missing := [layer for layer in live.attending if layer not in projections]:
        what = f"{live.class_name} passes the outputs of its heads to no linear map."
        seen = f"layer {missing[0]}: no linear map computes all of the result from them"
        hint = "merge_and_unload() of an adapter on the output projection"
        raise UnsupportedModel(what, seen=seen, hint=hint)
    return projections


def weight_of(linear: Any, dtype: torch.dtype) -> Float[Tensor, "out in"]:
    """Weights of a linear map, from unit vectors if it is quantized, offloaded or adapted."""
    weight, plain = linear.weight.detach(), type(linear).forward is nn.Linear.forward
    if (
        plain
        and type(weight) is Tensor
        and weight.is_floating_point()
        and not weight.is_meta
    ):
        return weight
    unit = torch.eye(linear.in_features, dtype=dtype, device=computes_on(linear))
    with torch.autocast(unit.device.type, enabled=False):
        return (linear(unit) - linear(torch.zeros_like(unit[:1]))).mT


@torch.no_grad()
def logit_directions(
    live: LiveModel,
    projections: dict[int, nn.Linear],
    tokens: Int[Tensor, "1 position"],
    answers: Sequence[int],
    hidden: Bool[Tensor, "1 position"] | None = None,
) -> Float[Tensor, "answer position width"]:
    """Gradient of the logits of `answers`, before a cap, with respect to the residual stream.

    The final norm is r_i g (x - mean) + b, where the mean is 0 if the norm does not center. The
    scale r_i is frozen. Raises `UnsupportedModel` if the path from the heads is not linear.
    """
    head_outputs: list[Tensor] = []
    norms: list[Any] = []
    cause = "a norm or a factor on the path, or a final norm that is not linear"

    def record(module: nn.Module, x: Tensor, result: Any) -> Any:
        nonlocal cause
        if module in projections.values():
            head_outputs.append(result.detach().requires_grad_())
            return head_outputs[-1]
        if "Norm" in type(module).__name__:
            if head_outputs and x is head_outputs[-1]:
                cause = (
                    f"a norm or a factor on the path: {type(module).__name__} follows "
                )
                cause += "the output projection"
            norms[:] = [module, x]
            return result.detach()  # every path that is not linear begins with a norm
        return None

    with torch.enable_grad(), _modules_recorded(live, record):
        live.forward(tokens, hidden=hidden, last=1)
    norm, x = norms[0], norms[1]
    direction = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x)
    gradients: Sequence[Tensor] = [torch.zeros(())] * len(head_outputs)
    if x.requires_grad:  # not if norms cut all paths and the weights are frozen
        gradients = torch.autograd.grad(
            x, head_outputs, direction, materialize_grads=True
        )
    device, dtype = live.device.type, live.model.dtype
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    close = allowed_residual(0, torch.finfo(dtype).eps)
    same = all(
        torch.allclose(g.to(direction), direction, close, close) for g in gradients
    )
    x = x[0].detach()
    y, even = norm(x), torch.ones_like(x[:1])
    even[:, 1::2] = -1  # mean 0, mean square 1
    shift = (y[:1] + norm(-x[:1])) / 2
    moved = norm(x + x.square().mean(-1, keepdim=True).sqrt())
    centered = float((moved - y).norm() / y.norm()) < 0.1  # about 0.7 without centering
    gain = (norm(even) - shift) * even
    dtype = torch.promote_types(x.dtype, torch.float32)
    x, y, shift, gain = (z.to(dtype) for z in (x, y, shift, gain))
    part = gain * (x - centered * x.mean(-1, keepdim=True))
    scale = ((y - shift) * part).sum(-1, keepdim=True) / part.square().sum(
        -1, keepdim=True
    )
    if not (same and float((scale * part + shift - y).norm() / y.norm()) < close):
        what = (
            f"The path from the heads of {live.class_name} to the logits is not linear."
        )
        raise UnsupportedModel(what, seen=cause, hint="values=True without logits_of")
    head = weight_of(live.model.get_output_embeddings(), live.model.dtype)
    before = head[list(answers)][:, None].to(x) * (scale * gain)
    return before - centered * before.mean(-1, keepdim=True)
