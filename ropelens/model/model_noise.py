"""Rounding noise of a model, measured on short sequences."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from ropelens.attention.call import AttentionCall, attention_map, output_error
from ropelens.model.attention_hooks import attention_modules
from ropelens.model.hook_blocks import Observer
from ropelens.noise import run_noise
from ropelens.runtime.devices import device_of
from ropelens.text.rows import Ids

EMBEDDING_CHANGE = 2.0**-14  # relative change after which every call rounds otherwise
CHANGED_WEIGHT = 1 / 8  # of the run with this change, in which all roundings differ

RunObserved = Callable[[Ids, Observer], Tensor]
"""A function that returns the logits of tokens, and shows an observer all attention calls."""


@dataclass(frozen=True)
class Noise:
    """Relative noise of a model, and the number of query heads of each layer."""

    run: float  # noise of logits
    call: dict[int, float]  # noise of the attention call of each layer
    heads: dict[int, int]
    dtype: torch.dtype  # of the values in attention, which autocast changes
    repeated: frozenset[int] = frozenset()  # layers that attend several times in a pass


def changed_embeddings(
    model: PreTrainedModel, share: Float[Tensor, " sequence"]
) -> Any:
    """Change the embeddings of each sequence by a random relative `share` in the block."""

    def change(module: nn.Module, args: Any, x: Tensor) -> Tensor:
        if len(share) not in (1, len(x)):
            return x
        generator = torch.Generator().manual_seed(0)
        random = torch.randn(
            x.shape, generator=generator, dtype=torch.float32, device="cpu"
        ).to(x)
        other_axes = [1] * (x.ndim - 1)
        return x * (1 + share.view(-1, *other_axes).to(x) * random)

    return model.get_input_embeddings().register_forward_hook(change)


@dataclass(frozen=True)
class Numerics:
    """How a model computes: its noise is the same as long as none of this changes.

    Heads and layers may be pruned, so the shapes are the weights of each attention module,
    after the number of its layer.
    """

    dtype: torch.dtype
    device: torch.device
    autocast: torch.dtype | None
    own_forward: bool  # accelerate puts autocast into a forward of the model
    precision: str  # of matrix products in float32
    shapes: tuple[tuple[object, ...], ...]

    @classmethod
    def of_now(cls, model: PreTrainedModel) -> "Numerics":
        device = device_of(model)
        shapes: list[tuple[object, ...]] = []
        for module in attention_modules(model)[1:]:
            of_weights = [weight.shape for weight in module.parameters()]
            shapes.append((vars(module).get("layer_idx"), *of_weights))
        autocast = None
        if torch.is_autocast_enabled(device.type):
            autocast = torch.get_autocast_dtype(device.type)
        return cls(
            dtype=model.dtype,
            device=device,
            autocast=autocast,
            own_forward="forward" in vars(model),
            precision=torch.get_float32_matmul_precision(),
            shapes=tuple(shapes),
        )


_measured: WeakKeyDictionary[PreTrainedModel, dict[Numerics, Noise]] = (
    WeakKeyDictionary()
)


@torch.no_grad()
def measure_noise(model: PreTrainedModel, run: RunObserved, ids: Ids) -> Noise:
    """Rounding noise, measured once for a model, its dtype, its device and its precision."""
    of_model = _measured.setdefault(model, {})
    numerics = Numerics.of_now(model)
    if numerics not in of_model:
        errors = CallErrors(run)
        logit_noise = run_noise(errors.run, ids)
        change = max(torch.finfo(model.dtype).eps / 2, EMBEDDING_CHANGE)
        share = torch.tensor([change], dtype=torch.float32, device="cpu")
        with changed_embeddings(model, share):
            errors.run(ids[-1:])
        of_model[numerics] = Noise(
            run=logit_noise,
            call=errors.noise(),
            heads=errors.heads,
            dtype=errors.dtype,
            repeated=frozenset(errors.repeated),
        )
    return of_model[numerics]


class CallErrors:
    """Errors of the attention calls of the last sequence of several runs.

    An error is the difference between recomputed attention and the output of the model.
    """

    def __init__(self, run_observed: RunObserved) -> None:
        self.run_observed = run_observed
        self.heads: dict[int, int] = {}  # by layer
        self.dtype = torch.float32
        self.repeated: set[int] = set()  # layers with several calls in a run
        self.runs: list[dict[int, Tensor]] = []  # errors of each run, by layer

    def run(self, ids: Ids) -> Tensor:
        """The logits of a run, whose errors are recorded."""
        self.runs.append({})
        return self.run_observed(ids, self._record)

    def _record(self, call: AttentionCall) -> None:
        # other blocks of rows
        rows = torch.arange(1, call.query.shape[2], device="cpu")
        call = call.of_rows(rows)
        error = output_error(call, attention_map(call).nan_to_num(0))
        self.heads[call.layer] = call.query.shape[1]
        self.dtype = call.value.dtype
        if call.layer in self.runs[-1]:
            self.repeated.add(call.layer)
        self.runs[-1][call.layer] = error[-1] * math.sqrt(len(error))

    def noise(self) -> dict[int, float]:
        """Largest change of the error of each layer; the last run has other roundings."""
        noise: dict[int, float] = {}
        for layer, error in self.runs[0].items():
            changes = [
                (run[layer] - error).nan_to_num(0).norm() for run in self.runs[1:]
            ]
            noise[layer] = float(max(*changes[:-1], CHANGED_WEIGHT * changes[-1]))
        return noise
