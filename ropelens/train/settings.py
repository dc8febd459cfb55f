"""Settings of a training run, which are also options of the command; imports no torch."""

import dataclasses
import math
import re
from dataclasses import dataclass
from typing import Any, Literal

from ropelens.checkpoints.load_options import Checked, setting
from ropelens.errors import BadArgument


@dataclass(frozen=True)
class Size:
    """The shape of a LLaMA-style decoder, its batch and its peak learning rate."""

    layers: int
    width: int  # width of the residual stream
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int  # inner size of SwiGLU
    batch: int  # sequences in an optimizer step
    micro_batch: int  # sequences in one pass
    learning_rate: float


# fmt: off
SIZES = {
    # 0.4 million parameters with a vocabulary of 512: minutes on a CPU core.
    "micro": Size(layers=5, width=64, heads=4, kv_heads=4, head_dim=32, mlp=192,
                  batch=8, micro_batch=8, learning_rate=3e-3),
    # 2.5 million parameters: one or two hours on a CPU core.
    "tiny": Size(layers=6, width=192, heads=6, kv_heads=2, head_dim=32, mlp=448,
                 batch=16, micro_batch=4, learning_rate=3e-3),
    # 2.1 million parameters: the bundled checkpoints (tools/README.md).
    "mini": Size(layers=6, width=160, heads=5, kv_heads=5, head_dim=32, mlp=448,
                 batch=4, micro_batch=4, learning_rate=1.5e-3),
    # 27 and 65 million parameters with a vocabulary of 16,384: for one GPU.
    "small": Size(layers=8, width=448, heads=7, kv_heads=7, head_dim=64, mlp=1216,
                  batch=64, micro_batch=32, learning_rate=1e-3),
    "base": Size(layers=12, width=640, heads=10, kv_heads=5, head_dim=64, mlp=1728,
                 batch=128, micro_batch=16, learning_rate=6e-4),
}
# fmt: on
SIZE_WORDS = (
    "micro, mini, tiny, small, base, "
    "or layers x width x heads x key-value heads as in 8x384x6x2"
)


SPELLED_SIZE = re.compile(
    r"(?P<layers>\d{1,5})x(?P<width>\d{1,5})x(?P<heads>\d{1,5})x(?P<kv_heads>\d{1,5})",
    re.ASCII,
)


def get_size(name: str) -> Size:
    """The size called `name`, or the size that "8x384x6x2" describes (see `SIZE_WORDS`)."""
    size = SIZES.get(name) or _spelled_size(name)
    if size is None:
        raise BadArgument(f"No model has the size {name!r}.", hint=SIZE_WORDS)
    return size


def _spelled_size(name: str) -> Size | None:
    """The size that `name` describes; None for other names and for impossible sizes."""
    match = SPELLED_SIZE.fullmatch(name)
    if match is None:
        return None
    layers = int(match["layers"])
    width = int(match["width"])
    heads = int(match["heads"])
    kv_heads = int(match["kv_heads"])
    if 0 in (layers, width, heads, kv_heads):
        return None
    if width % (2 * heads) or heads % kv_heads:
        return None
    return Size(
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=width // heads,
        mlp=64 * math.ceil(width * 8 / 3 / 64),
        batch=32,
        micro_batch=4,
        learning_rate=min(3e-3, 0.5 / width),
    )


def size_name(size: Size) -> str:
    """The name of `size` in `SIZES`, or its numbers as in "8x384x6x2"."""
    for name, named_size in SIZES.items():
        if named_size == size:
            return name
    return f"{size.layers}x{size.width}x{size.heads}x{size.kv_heads}"


@dataclass(frozen=True, kw_only=True)
class Settings(Checked):
    """All settings that affect the numbers of a run, except its text.

    history/ keeps the models of steps 1, 2, 4, 8, ... and multiples of `history_every`.
    """

    variant: str = setting("rope", "NAME[:VALUE]", "RoPE variant: p-rope:0.75, ...")
    size: str = setting("tiny", "NAME", f"Size of the model: {SIZE_WORDS}.")
    context: int = setting(512, "N", "Tokens in a sequence.", min=3)
    vocabulary: int = setting(
        2048, "N", "Number of tokens in the BPE tokenizer.", min=258, max=1 << 16
    )
    steps: int = setting(2500, "N", "Number of optimizer steps.", min=1)
    learning_rate: float | None = setting(
        None, "RATE", "Peak learning rate. [default: set by the size]", min=0
    )
    decay: float = setting(1.0, "SHARE", "Share of steps with decay.", min=0, max=1)
    precision: Literal["auto", "bf16", "fp32"] = setting(
        "auto",
        "P",
        "bf16 (autocast, float32 weights), fp32, or auto (bf16 if a GPU supports it).",
    )
    seed: int = setting(
        0, "N", "Seed of initial weights and text order.", min=0, max=2**32 - 1
    )
    history_every: int = setting(0, "N", "Also keep every Nth model.", min=0)
    compile: bool = setting(False, None, "Compile the model with torch.compile.")

    @property
    def shape(self) -> Size:
        return get_size(self.size)

    @property
    def bf16(self) -> bool:
        """Whether the model multiplies in bfloat16."""
        import torch

        if self.precision == "auto":
            return torch.cuda.is_available() and torch.cuda.is_bf16_supported(False)
        return self.precision == "bf16"

    @property
    def peak_rate(self) -> float:
        if self.learning_rate is None:
            return self.shape.learning_rate
        return self.learning_rate

    @property
    def warmup_steps(self) -> int:
        """Number of steps in which the learning rate rises: 4% of all steps."""
        return max(1, self.steps // 25)

    @property
    def tokens_per_step(self) -> int:
        """Tokens in one optimizer step, including BOS."""
        return self.shape.batch * self.context

    def in_history(self, step: int) -> bool:
        """Whether history/ keeps the model after `step`."""
        is_power_of_two = step & (step - 1) == 0
        is_multiple = self.history_every > 0 and step % self.history_every == 0
        return is_power_of_two or is_multiple

    def recorded(self) -> dict[str, Any]:
        """The settings for run.json, with the values that "auto", None and `size` stand for."""
        return dataclasses.asdict(self) | {
            "size": dataclasses.asdict(self.shape),
            "precision": "bf16" if self.bf16 else "fp32",
            "learning_rate": self.peak_rate,
            "warmup_steps": self.warmup_steps,
        }
