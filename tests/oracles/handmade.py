"""A Llama of one layer whose heads are those of planted.py.

The residual stream has each token's code (one-hot) and, in coordinates beside it, noise of the
token's own; all tokens have the same length, so RMSNorm changes nothing. Projections write for
each code what the head wants, plus noise in every weight.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import LlamaConfig, LlamaForCausalLM

from .planted import BASE, BOS, Expected, Floats, Site, coordinates, every_kind, keys

CONTEXT, SEQUENCES = 96, 8
NOISE_COORDINATES = 16  # at least
WEIGHT_NOISE = 0.02  # std of each coordinate of a query or key
OFFSETS = (0, 1, 3, 17, 60)


def residual_stream(site: Site, *, multiple: int) -> Floats:
    """Embeddings [token, coordinate] of mean square 1; their width is a `multiple`."""
    tokens = 1 + site.words
    width = -(-(tokens + NOISE_COORDINATES) // multiple) * multiple
    noise = site.random.normal(size=(tokens, width - tokens))
    noise /= np.linalg.norm(noise, axis=1, keepdims=True)
    return np.concatenate([np.eye(tokens), noise], axis=1) * np.sqrt(width / 2)


def projection(site: Site, stream: Floats, wanted: Floats) -> Floats:
    """Weights [head x coordinate, stream] that turn each code into `wanted`, plus noise.

    `wanted` [head, token, coordinate] makes scores in nats; Llama divides them by sqrt(d).
    """
    tokens, width = stream.shape
    weights = site.random.normal(size=(len(wanted) * site.head_dim, width))
    weights *= WEIGHT_NOISE / np.sqrt(width)
    scaled = wanted * site.head_dim**0.25 / stream[0, 0]
    weights[:, :tokens] += scaled.transpose(0, 2, 1).reshape(len(weights), tokens)
    return weights


def handmade(
    seed: int, head_dim: int
) -> tuple[LlamaForCausalLM, NDArray[np.int64], list[Expected]]:
    """The model in eval mode, tokens [SEQUENCES, CONTEXT] that begin with BOS, and what is
    expected of each head. The output of the model means nothing."""
    site = Site(head_dim, CONTEXT, np.random.default_rng(seed))
    heads = list(every_kind(site, OFFSETS))
    stream = residual_stream(site, multiple=len(heads))
    config = LlamaConfig(
        vocab_size=len(stream),
        hidden_size=stream.shape[1],
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=len(heads),
        num_key_value_heads=len(heads),
        head_dim=head_dim,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": BASE},
        bos_token_id=BOS,
        eos_token_id=None,
        rms_norm_eps=1e-12,
    )
    config._attn_implementation = "eager"
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).eval()
    attention = model.model.layers[0].self_attn
    query = np.stack([coordinates(query) for query, _ in heads])
    key = np.stack([coordinates(keys(site))] * len(heads))
    weights = {
        model.model.embed_tokens.weight: stream,
        attention.q_proj.weight: projection(site, stream, query),
        attention.k_proj.weight: projection(site, stream, key),
    }
    with torch.no_grad():
        for weight, values in weights.items():
            weight.copy_(torch.from_numpy(values))
    tokens = site.random.integers(1, len(stream), size=(SEQUENCES, CONTEXT))
    tokens[:, 0] = BOS
    return model, tokens, [expected for _, expected in heads]
