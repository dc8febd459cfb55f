"""What decides the numbers of a run: the size of the model, and how it is trained."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import LlamaConfig, PreTrainedTokenizerBase

from ropelens.errors import BadArgument, Count, Number, Positive
from ropelens.models.variants import variant_config
from ropelens.rope.variants import parse_variant

ROPE_BASE = 10_000.0

Precision = Literal["auto", "bf16", "fp32"]


@dataclass(frozen=True)
class Size:
    """The shape of a LLaMA-style decoder and the batch it learns from.

    `width` is the residual stream's, `mlp` the inner width of SwiGLU, `batch` the
    sequences per optimizer step, of which `micro_batch` go through the model at once,
    `learning_rate` the peak of the schedule.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    batch: int
    micro_batch: int
    learning_rate: float


# Rows of a table, a size each.
# fmt: off
SIZES: Mapping[str, Size] = {
    # 2.5 million parameters: one or two hours of a CPU core.
    "tiny": Size(layers=6, width=192, heads=6, kv_heads=2, head_dim=32, mlp=448,
                 batch=16, micro_batch=4, learning_rate=3e-3),
    # The bundled checkpoints, which copy (tools/README.md): 2.1 million parameters.
    "mini": Size(layers=6, width=160, heads=5, kv_heads=5, head_dim=32, mlp=448,
                 batch=4, micro_batch=4, learning_rate=1.5e-3),
    # For one GPU: 27 and 65 million parameters with a vocabulary of 16,384.
    "small": Size(layers=8, width=448, heads=7, kv_heads=7, head_dim=64, mlp=1216,
                  batch=64, micro_batch=32, learning_rate=1e-3),
    "base": Size(layers=12, width=640, heads=10, kv_heads=5, head_dim=64, mlp=1728,
                 batch=128, micro_batch=16, learning_rate=6e-4),
}
# fmt: on


def get_size(name: str) -> Size:
    """The size of that name in `SIZES`, or the one that "8x384x6x2" spells out.

    Spelled out are layers, width, heads and key-value heads; the rest follows as in the
    named sizes: an MLP 8/3 as wide in steps of 64, batches of 32 and a peak rate that falls
    with the width.
    """
    if name in SIZES:
        return SIZES[name]
    spelled = re.fullmatch(r"\d{1,5}(x\d{1,5}){3}", name, re.ASCII)
    layers, width, heads, kv_heads = map(int, name.split("x")) if spelled else (0, 0, 0, 0)
    if 0 in (layers, width, heads, kv_heads) or width % (2 * heads) or heads % kv_heads:
        raise BadArgument(
            f"No model has the size {name!r}.",
            attempt=f"one of: {', '.join(SIZES)}; or layers x width x heads x key-value heads, "
            "such as 8x384x6x2",
        )
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
    """The name of `size` in `SIZES`, or its numbers: "8x384x6x2"."""
    named = [name for name, known in SIZES.items() if known == size]
    return named[0] if named else "x".join(map(str, dataclasses.astuple(size)[:4]))


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that decides the numbers of a run, except its text.

    `learning_rate` is the peak of the schedule; None: that of the size. `variant` is written
    as in docs/variants.md. `seed` decides the first weights and the order of the text.
    `precision` bf16 is autocast over float32 weights; "auto" is bf16 on a GPU that has it.
    Models of steps 1, 2, 4, 8, ... stay in history/, and with `history_every` those of its
    multiples. The rate falls in the last share `decay` of the steps after the warm-up.
    `compile` runs the model by `torch.compile`: up to 1.6 times as fast, other last bits.
    """

    size: Size = SIZES["tiny"]
    context: Positive = 512
    vocabulary: Positive = 2048
    steps: Positive = 2500
    learning_rate: Number | None = None
    variant: str = "rope"
    seed: Count = 0
    precision: Precision = "auto"
    log_every: Positive = 10
    eval_every: Positive = 250
    history_every: Count = 0
    decay: Number = 1.0
    compile: bool = False

    def __post_init__(self) -> None:
        if self.context < 3 or not 258 <= self.vocabulary <= 1 << 16:
            raise BadArgument(
                # Every byte is a token, and there are BOS and EOS.
                "A context has 3 tokens or more, a vocabulary 258 to 65,536.",
                seen=f"context {self.context:,}, vocabulary {self.vocabulary:,}",
            )
        self.config()

    @property
    def bf16(self) -> bool:
        """Whether the model multiplies in bfloat16."""
        if self.precision == "auto":
            return torch.cuda.is_available() and torch.cuda.is_bf16_supported()
        return self.precision == "bf16"

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
        """Tokens of one optimizer step, BOS included."""
        return self.size.batch * self.context

    def config(self, tokenizer: PreTrainedTokenizerBase | None = None) -> LlamaConfig:
        """The model's configuration, for the tokens of `tokenizer`; the base is 10,000.

        Embeddings are tied, so that a small model spends its parameters on layers.

        Raises:
            BadArgument: there is no such variant.
            UnsupportedModel: LLaMA's configuration cannot express it.
        """
        config = LlamaConfig(
            vocab_size=len(tokenizer) if tokenizer else self.vocabulary,
            hidden_size=self.size.width,
            intermediate_size=self.size.mlp,
            num_hidden_layers=self.size.layers,
            num_attention_heads=self.size.heads,
            num_key_value_heads=self.size.kv_heads,
            head_dim=self.size.head_dim,
            max_position_embeddings=self.context,
            rope_parameters={"rope_type": "default", "rope_theta": ROPE_BASE},
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id if tokenizer else 0,
            eos_token_id=tokenizer.eos_token_id if tokenizer else 1,
        )
        return variant_config(config, parse_variant(self.variant))

    def in_history(self, step: int) -> bool:
        """Whether the model after `step` stays."""
        power_of_two = step & (step - 1) == 0
        return power_of_two or (self.history_every > 0 and step % self.history_every == 0)

    def facts(self) -> dict[str, Any]:
        """The settings as run.json has them, with what "auto" and None stand for."""
        return dataclasses.asdict(self) | {
            "precision": "bf16" if self.bf16 else "fp32",
            "learning_rate": self.peak_rate,
            "warmup_steps": self.warmup_steps,
        }


def passes_of(size: Size, *, among: int) -> int:
    """Sequences that each of `among` processes takes through the model at once."""
    if size.batch % among:
        raise BadArgument(
            f"{among} processes cannot share a batch of {size.batch} sequences evenly."
        )
    return math.gcd(size.batch // among, size.micro_batch)
