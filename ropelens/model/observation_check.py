"""Check that a model computes the same logits while it is observed."""

from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor, nn

from ropelens.checkpoints.not_finite import first_not_finite, remedy
from ropelens.errors import UnsupportedModel
from ropelens.noise import allowed_residual, logit_change

NO_KEY = (
    'attn_implementation="sdpa" if some token sees no key, another dtype, or weights that '
    "are finite"
)
MORE_PASSES = 8  # further passes after a pass whose logits changed


def check_same_logits(
    run: Callable[[], Tensor],
    run_observed: Callable[[], Tensor],
    *,
    model: nn.Module,
    tokens: int,
    eps: float,
) -> None:
    """Raise `UnsupportedModel` unless both runs over so many `tokens` give the same logits.

    If a model does not repeat its own logits, they may change by the noise of its passes, or by
    the `eps` of its dtype.
    """
    plain = [run()]
    observed = [run_observed()]
    class_name = type(model).__name__
    seen = f"logits of {tokens} tokens"
    if plain[0].isnan().any():
        cause = first_not_finite(model, run)
        if cause:
            seen += f"; the first numbers that are not finite are those of {cause}"
        hint = remedy(plain[0].dtype, NO_KEY)
        raise UnsupportedModel(f"{class_name} computes NaN.", seen=seen, hint=hint)
    if torch.equal(plain[0], observed[0]):
        return
    plain += [run() for _ in range(MORE_PASSES)]
    observed += [run_observed() for _ in range(MORE_PASSES)]
    spread = max(_spread(plain), _spread(observed))
    change = min(_change(one, other) for one, other in product(plain, observed))
    if not spread or change > allowed_residual(spread, eps):
        raise UnsupportedModel(
            f"{class_name} computes something else while it is observed.",
            seen=f"{seen}: a relative change of {change:.2g}; "
            f"equal passes by {spread:.2g}",
        )


def _spread(passes: list[Tensor]) -> float:
    """Largest change of the logits between the first of equal passes and another one."""
    return max(_change(passes[0], other) for other in passes[1:])


def _change(one: Tensor, other: Tensor) -> float:
    return float(logit_change(one, other).max())
