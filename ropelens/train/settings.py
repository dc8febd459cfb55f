"""What decides the numbers of a run."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, get_args

from ropelens.errors import BadArgument
from ropelens.train.machine import Precision
from ropelens.train.sizes import Size, model_config
from ropelens.train.tokens import SMALLEST_VOCABULARY

LIMITS: dict[str, tuple[int, int | None]] = {
    "context": (3, None),  # of two tokens the second has one key beside itself
    "vocabulary": (SMALLEST_VOCABULARY, 1 << 16),
    "steps": (1, 10**9),
    "seed": (0, (1 << 32) - 1),
    "log_every": (1, None),
    "eval_every": (1, None),
    "history_every": (0, None),
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that decides the numbers of a run, beside its text.

    `learning_rate`: the peak of the schedule; None: that of the size. `history_every`: steps
    between models that are kept beside those of steps 1, 2, 4, ...; 0: no others. `decay`: the
    share of the steps after the warm-up, the last, in which the rate falls. `compile`: the
    model runs as `torch.compile` makes it: faster, its last bits others.

    Raises:
        BadArgument: naming the value and its limits, or the variants that there are.
        UnsupportedModel: a variant that LLaMA's configuration cannot express.
    """

    size: Size
    context: int
    vocabulary: int
    steps: int
    learning_rate: float | None
    variant: str
    seed: int
    precision: Precision
    log_every: int = 10
    eval_every: int = 250
    history_every: int = 0
    decay: float = 1.0
    compile: bool = False

    def __post_init__(self) -> None:
        for name, (low, high) in LIMITS.items():
            value = getattr(self, name)
            if value < low or (high is not None and value > high):
                limits = f"at least {low}" if high is None else f"between {low} and {high}"
                raise BadArgument(f"{name} is {value}; it must be {limits}.")
        if not 0 < self.peak_rate < math.inf:
            raise BadArgument(
                f"learning_rate is {self.peak_rate}; it must be a number above 0."
            )
        if not 0 <= self.decay <= 1:
            raise BadArgument(
                f"decay is {self.decay}; it must be a share of the steps, 0 to 1."
            )
        if self.precision not in get_args(Precision):
            raise BadArgument(
                f"no precision is called {self.precision!r}.",
                attempt=f"one of: {', '.join(get_args(Precision))}",
            )
        model_config(
            self.size, vocabulary=self.vocabulary, context=self.context, variant=self.variant
        )

    @property
    def peak_rate(self) -> float:
        """The peak of the learning rate."""
        return self.size.learning_rate if self.learning_rate is None else self.learning_rate

    @property
    def warmup_steps(self) -> int:
        """Steps in which the learning rate rises: 4% of them."""
        return max(1, self.steps // 25)

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step sees, BOS included."""
        return self.size.batch * self.context

    def kept_in_history(self, step: int) -> bool:
        """Whether the model after `step` is kept."""
        power_of_two = step & (step - 1) == 0
        return power_of_two or (self.history_every > 0 and step % self.history_every == 0)

    def facts(self) -> dict[str, Any]:
        """The settings as run.json holds them."""
        derived = {"learning_rate": self.peak_rate, "warmup_steps": self.warmup_steps}
        return dataclasses.asdict(self) | derived


def passes_of(size: Size, *, among: int) -> int:
    """Sequences that each of `among` processes takes through the model at once.

    Raises:
        BadArgument: the batch cannot be shared evenly.
    """
    if size.batch % among:
        raise BadArgument(
            f"{among} processes cannot share a batch of {size.batch} sequences evenly.",
            attempt="as many processes as divide it",
        )
    return math.gcd(size.batch // among, size.micro_batch)
