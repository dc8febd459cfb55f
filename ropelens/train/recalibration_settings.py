"""Settings of a recalibration, which are also options of the command; imports no torch."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ropelens.checkpoints.load_options import Checked, setting

CONTROL = "control"
"""The name of the run with the unmodified configuration."""

WORSE = 0.2
"""Rise of the control's loss above which the training itself damages the model, nats/token."""

LONGEST = 512  # tokens in a sequence, unless --context is given
LEAST_EVALUATED = 8  # sequences, because an interval needs 8 documents
SMALL = 10_000_000  # models with fewer parameters need no memory-saving passes
RATE = 1e-4
RATE_OF_SMALL = 5e-4
LAST_SHARE = 0.1  # the last learning rate, divided by the peak


def recorded_settings(record: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in a run.json. The first runs did not record their precision, fp32."""
    return {"precision": "fp32"} | record["settings"]


@dataclass(frozen=True, kw_only=True)
class Recalibration(Checked):
    """All settings that affect the numbers of a recalibration, except the base and the text."""

    variant: str = setting(
        CONTROL,
        "NAME[:VALUE]",
        "RoPE variant: p-rope:0.25, p-rope:0.5@full, ..., or control.",
    )
    context: int | None = setting(
        None,
        "N",
        f"Tokens in a sequence. [default: the trained context, at most {LONGEST}]",
        min=3,
    )
    steps: int = setting(100, "N", "Number of optimizer steps.", min=1)
    sequences: int = setting(8, "N", "Sequences in a step.", min=1)
    learning_rate: float | None = setting(
        None,
        "RATE",
        f"Peak learning rate. [default: {RATE}; {RATE_OF_SMALL} below "
        f"{SMALL // 1_000_000} million parameters]",
        min=0,
    )
    warmup: float = setting(
        0.1, "SHARE", "Share of steps in which the rate rises.", min=0, max=1
    )
    train: Literal["all", "attention"] = setting(
        "all",
        None,
        "Parameters that train: all, or the projections of attention.",
    )
    precision: Literal["auto", "bf16", "fp32"] = setting(
        "fp32",
        "P",
        "Precision of training: bf16 (autocast, float32 weights), fp32, or auto (bf16 if a "
        "GPU supports it).",
    )
    evaluated: int = setting(
        32, "N", "Held-out sequences of an evaluation.", min=LEAST_EVALUATED
    )
    seed: int = setting(0, "N", "Seed of the text order.", min=0, max=2**32 - 1)

    @property
    def is_control(self) -> bool:
        return self.variant == CONTROL

    def for_model(
        self, *, parameters: int, trained: int | None, bf16: bool
    ) -> "Recalibration":
        """The settings with the values that None and "auto" stand for.

        `trained` is the trained context, or None if it is not known. `bf16` is whether the
        device is a GPU that supports bf16.
        """
        rate = self.learning_rate
        if rate is None:
            rate = RATE_OF_SMALL if parameters < SMALL else RATE
        context = self.context
        if context is None:
            context = min(trained or LONGEST, LONGEST)
        precision = self.precision
        if precision == "auto":
            precision = "bf16" if bf16 else "fp32"
        return dataclasses.replace(
            self, learning_rate=rate, context=context, precision=precision
        )

    @property
    def bf16(self) -> bool:
        """Whether training multiplies in bfloat16; see `for_model`."""
        return self.precision == "bf16"

    @property
    def warmup_steps(self) -> int:
        """Number of steps in which the learning rate rises."""
        return round(self.warmup * self.steps)

    @property
    def tokens_per_step(self) -> int:
        """Tokens in a step, with those that sequences begin with; see `for_model`."""
        assert self.context is not None
        return self.sequences * self.context

    @property
    def evaluated_steps(self) -> list[int]:
        """The steps 0, 1, 2, 4, 8, ... and the last one."""
        steps = [0]
        step = 1
        while step < self.steps:
            steps.append(step)
            step *= 2
        return [*steps, self.steps]

    def rate_of(self, step: int) -> float:
        """Learning rate of `step`, counted from 0: linear warm-up, then linear decay.

        It falls to a tenth of the peak in the last step.
        """
        assert self.learning_rate is not None
        warmup = self.warmup_steps
        if step < warmup:
            return self.learning_rate * (step + 1) / warmup
        decaying = self.steps - warmup
        share_done = (step + 1 - warmup) / decaying
        return self.learning_rate * (1 - (1 - LAST_SHARE) * share_done)

    def recorded(self) -> dict[str, Any]:
        """The settings for run.json."""
        return dataclasses.asdict(self)
