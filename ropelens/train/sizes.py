"""How large a model is, and the LLaMA configuration that follows from it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from transformers import LlamaConfig

from ropelens.errors import BadArgument
from ropelens.models.variants import variant_config
from ropelens.rope.variants import parse_variant

ROPE_BASE = 10_000.0


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


def get_size(size: str | Size) -> Size:
    """The entry of `SIZES` of that name, `size` itself, or the one that "8x384x6x2" spells out.

    Spelled out are layers, width, heads and key-value heads; the rest follows as in the
    named sizes: an MLP 8/3 as wide in steps of 64, batches of 32 and a peak rate that falls
    with the width.

    Raises:
        BadArgument: no size has that name, or heads do not divide the width evenly.
    """
    if isinstance(size, Size):
        return size
    if size in SIZES:
        return SIZES[size]
    if not re.fullmatch(r"\d{1,5}(x\d{1,5}){3}", size, re.ASCII):
        raise BadArgument(
            f"no model size is called {size!r}.",
            attempt=f"one of: {', '.join(SIZES)}; or layers x width x heads x kv_heads, "
            "such as 8x384x6x2",
        )
    layers, width, heads, kv_heads = map(int, size.split("x"))
    if 0 in (layers, width, heads, kv_heads) or width % (2 * heads) or heads % kv_heads:
        raise BadArgument(
            f"no model can have the size {size}.",
            means="the width must be a multiple of twice the heads, and the heads one of the "
            "key-value heads",
            attempt="layers x width x heads x kv_heads, such as 8x384x6x2",
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


def model_config(
    size: Size,
    *,
    vocabulary: int,
    context: int,
    variant: str = "rope",
    bos_token_id: int = 0,
    eos_token_id: int = 1,
) -> LlamaConfig:
    """The configuration of a model of `size` that rotates as `variant`, base 10,000.

    `variant` is written as in `ropelens.VARIANTS`. Embeddings are tied, so that a small
    model spends its parameters on layers.

    Raises:
        BadArgument: no such variant.
        UnsupportedModel: LLaMA's configuration cannot express it.
    """
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=size.width,
        intermediate_size=size.mlp,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim,
        max_position_embeddings=context,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_BASE},
        tie_word_embeddings=True,
        bos_token_id=bos_token_id,
        eos_token_id=eos_token_id,
    )
    return variant_config(config, parse_variant(variant))
