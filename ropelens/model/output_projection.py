"""Output projection of each layer, and the linear path from the heads to the logits."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from ropelens.attention.call import AttentionCall
from ropelens.checkpoints.not_finite import in_dtype, remedy
from ropelens.errors import UnsupportedModel
from ropelens.model.forward_patches import refuse_inference_mode
from ropelens.model.live_model import LiveModel
from ropelens.noise import allowed_residual
from ropelens.runtime.devices import computes_on

RecordModule = Callable[[nn.Module, Any, Any], Any]
"""A function of a module, its first input and its result; it may return another result."""


@contextmanager
def _modules_recorded(live: LiveModel, record: RecordModule) -> Iterator[None]:
    """Call `record` for every module that gets inputs by position."""

    def record_first_input(module: nn.Module, inputs: Any, result: Any) -> Any:
        return record(module, inputs[0], result) if inputs else None

    with ExitStack() as stack:
        for module in live.model.modules():
            stack.enter_context(module.register_forward_hook(record_first_input))
        yield


@torch.no_grad()
def output_projections(live: LiveModel) -> dict[int, nn.Linear]:
    """Linear map of each layer whose input is the output of the heads, without a gate."""
    search = ProjectionSearch()
    with (
        live.without_hooks(),
        live.observe(search.begin_layer),
        _modules_recorded(live, search.compare),
    ):
        live.forward(torch.ones(1, 2, dtype=torch.long, device="cpu"), last=1)
    missing = [layer for layer in live.attending if layer not in search.projections]
    if missing:
        raise UnsupportedModel(
            f"{live.class_name} passes the outputs of its heads to no linear map.",
            seen=f"layer {missing[0]}: no linear map computes all of the result from them",
            hint="merge_and_unload() of an adapter on the output projection",
        )
    return search.projections


class ProjectionSearch:
    """Finds the linear maps, by layer, whose input is the output of the last attention call."""

    def __init__(self) -> None:
        self.projections: dict[int, nn.Linear] = {}
        self._results: dict[int, Tensor] = {}
        self._call: AttentionCall | None = None

    def begin_layer(self, call: AttentionCall) -> None:
        self._call = call

    def compare(self, module: nn.Module, x: Any, result: Any) -> None:
        """Keep a linear map of the outputs; forget it if a module makes more of them."""
        if self._call is None or not isinstance(x, Tensor):
            return
        if not torch.equal(x, self._call.output.flatten(2)):
            return
        layer = self._call.layer
        if layer not in self._results:
            if isinstance(module, nn.Linear):
                self.projections[layer] = module
                self._results[layer] = result
        elif not torch.equal(result, self._results[layer]):
            # Only a part of a map, as in an adapter.
            self.projections.pop(layer, None)


def weight_of(linear: Any, dtype: torch.dtype) -> Float[Tensor, "out in"]:
    """Weights of a linear map, from unit vectors if it is quantized, offloaded or adapted."""
    weight = linear.weight.detach()
    is_plain = type(linear).forward is nn.Linear.forward and type(weight) is Tensor
    if is_plain and weight.is_floating_point() and not weight.is_meta:
        return weight
    unit = torch.eye(linear.in_features, dtype=dtype, device=computes_on(linear))
    with torch.autocast(unit.device.type, enabled=False):
        return (linear(unit) - linear(torch.zeros_like(unit[:1]))).mT


@dataclass(frozen=True)
class LogitDirections:
    """Gradient of the logits of some answers with respect to the outputs of the heads.

    `of_stream` is the gradient with respect to the residual stream. The output projection of a
    layer is multiplied by `factor_of_layer` before it is added to the stream, and the output of
    the unembedding by `logit_factor`.
    """

    of_stream: Float[Tensor, "answer position width"]
    factor_of_layer: Mapping[int, float]
    logit_factor: float

    def of_layer(self, layer: int) -> Float[Tensor, "answer position width"]:
        """Gradient with respect to the output projection of a layer."""
        return self.factor_of_layer[layer] * self.of_stream


@torch.no_grad()
def logit_directions(
    live: LiveModel,
    projections: Mapping[int, nn.Linear],
    tokens: Int[Tensor, "1 position"],
    answers: Sequence[int],
    hidden: Bool[Tensor, "1 position"] | None = None,
) -> LogitDirections:
    """Gradient of the logits of `answers`, before a cap, in units of the model's logits.

    The final norm is r_i g (x - mean) + b, where the mean is 0 if the norm does not center. The
    scale r_i is frozen. Raises `UnsupportedModel` if the path from the heads is not linear.
    """
    refuse_inference_mode(live.model)
    path = ResidualPath(projections)
    with torch.enable_grad(), _modules_recorded(live, path.record):
        logits = live.forward(tokens, hidden=hidden, last=1)[0, -1].detach()
    stream = path.stream[0].detach()
    if not stream.isfinite().all():
        raise UnsupportedModel(
            f"{live.class_name} computes NaN or infinity.",
            seen=f"the input of the final norm {in_dtype(stream.dtype)}",
            hint=remedy(stream.dtype, "a text without this fault"),
        )
    dtype = live.model.dtype
    if torch.is_autocast_enabled(live.device.type):
        dtype = torch.get_autocast_dtype(live.device.type)
    close = allowed_residual(0, torch.finfo(dtype).eps)
    norm = FrozenNorm.measure(path.norm, stream)
    factor_of_layer = path.factors(close)
    if factor_of_layer is None or not norm.residual < close:
        raise _not_linear(live, path.cause)
    unembedding: Any = live.model.get_output_embeddings()
    head = weight_of(unembedding, live.model.dtype)
    logit_factor = _logit_factor(live, path.norm(stream[-1:]), head, logits, close)
    gradient = head[list(answers)][:, None].to(norm.scale) * (norm.scale * norm.gain)
    if norm.centers:
        gradient = gradient - gradient.mean(-1, keepdim=True)
    return LogitDirections(logit_factor * gradient, factor_of_layer, logit_factor)


def _not_linear(live: LiveModel, cause: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"The path from the heads of {live.class_name} to the logits is not linear.",
        seen=cause,
        hint="values=True without logits_of",
    )


def _logit_factor(
    live: LiveModel,
    normed: Float[Tensor, "1 width"],
    head: Float[Tensor, "token width"],
    logits: Float[Tensor, " token"],
    close: float,
) -> float:
    """Factor of the logits on the products of the final norm and the unembedding.

    `logits` are those of the last position. A soft-cap is undone first.
    """
    products = (normed.to(head) @ head.mT)[0].double()
    bias = vars(live.model.get_output_embeddings())["_parameters"].get("bias")
    if bias is not None:
        products = products + bias.detach().to(products)
    logits = logits.to(products)
    softcap = live.config.to_dict().get("final_logit_softcapping")
    if softcap:
        logits = softcap * torch.atanh(logits / softcap)
    known = logits.isfinite()  # some models hide tokens, or are at their cap
    logits = logits[known]
    products = products[known]
    factor = float(logits @ products / products.square().sum())
    residual = float((logits - factor * products).norm() / logits.norm())
    if not residual < close:
        cause = (
            "logits that are no multiple of the unembedding of the final norm: they "
        )
        raise _not_linear(live, f"{cause}differ by {residual:.2g} of their size")
    return 1.0 if abs(factor - 1) < close else factor


class ResidualPath:
    """The path from the output projections to the last norm of a forward pass.

    `stream` is the input of the `norm`. Other paths begin with a norm, and are cut there.
    """

    norm: nn.Module
    stream: Float[Tensor, "1 position width"]

    def __init__(self, projections: Mapping[int, nn.Module]) -> None:
        self.layer_of = {module: layer for layer, module in projections.items()}
        self.head_outputs: dict[int, Tensor] = {}  # by layer
        self.last_output: Tensor | None = None
        self.cause = (
            "a norm or a function on the path, or a final norm that is not linear"
        )

    def record(self, module: nn.Module, x: Any, result: Any) -> Any:
        """Let gradients begin at the output projections, and end at norms."""
        if module in self.layer_of:
            self.last_output = result.detach().requires_grad_()
            self.head_outputs[self.layer_of[module]] = self.last_output
            return self.last_output
        if "Norm" not in type(module).__name__:
            return None
        if self.last_output is not None and x is self.last_output:
            self.cause = (
                f"a norm on the path: {type(module).__name__} follows the output "
                "projection"
            )
        self.norm = module
        self.stream = x
        return result.detach()  # every path that is not linear begins with a norm

    def factors(self, close: float) -> dict[int, float] | None:
        """The constant by which the output of each layer is multiplied before it is added.

        None if something else happens to an output on its way to the stream.
        """
        if not self.head_outputs:
            return {}
        if not self.stream.requires_grad:  # norms cut all paths, and weights are frozen
            return None
        random = torch.Generator().manual_seed(0)
        direction = torch.randn(
            self.stream.shape, generator=random, dtype=torch.float32, device="cpu"
        ).to(self.stream)
        gradients = torch.autograd.grad(
            self.stream,
            [*self.head_outputs.values()],
            direction,
            materialize_grads=True,
        )
        factors = {}
        for layer, gradient in zip(self.head_outputs, gradients, strict=True):
            gradient = gradient.to(direction)
            factor = float((gradient * direction).sum() / direction.square().sum())
            allowed = close * abs(factor)
            same = torch.allclose(gradient, factor * direction, close, allowed)
            if not same or not factor:
                return None
            factors[layer] = 1.0 if abs(factor - 1) < close else factor
        return factors


@dataclass(frozen=True)
class FrozenNorm:
    """A norm r_i g (x - mean) + b of some vectors, with the scale r_i of each vector.

    The mean is 0 unless the norm `centers`. `residual` is the relative difference between this
    form and the norm.
    """

    scale: Float[Tensor, "position 1"]
    gain: Float[Tensor, "1 width"]
    centers: bool
    residual: float

    @classmethod
    def measure(
        cls, norm: Callable[[Tensor], Tensor], x: Float[Tensor, "position width"]
    ) -> "FrozenNorm":
        """Measure gain, shift and centering from the results of the norm."""
        y = norm(x)
        shift = (y[:1] + norm(-x[:1])) / 2
        moved = norm(x + x.square().mean(-1, keepdim=True).sqrt())
        # The change is about 0.7 without centering.
        centers = float((moved - y).norm() / y.norm()) < 0.1
        signs = torch.ones_like(x[:1])
        signs[:, 1::2] = -1  # mean 0, mean square 1
        gain = (norm(signs) - shift) * signs
        exact = torch.promote_types(x.dtype, torch.float32)
        x = x.to(exact)
        y = y.to(exact)
        shift = shift.to(exact)
        gain = gain.to(exact)
        if centers:
            x = x - x.mean(-1, keepdim=True)
        unscaled = gain * x
        products = (y - shift) * unscaled
        squares = unscaled.square()
        scale = products.sum(-1, keepdim=True) / squares.sum(-1, keepdim=True)
        residual = (scale * unscaled + shift - y).norm() / y.norm()
        return cls(scale, gain, centers, float(residual))
