"""A handmade model that predicts the token that followed the current token earlier in the text.

It has two layers of one head (Olsson et al. 2022, arXiv 2209.11895). The first head attends one
token back, through fast planes, and writes that token next to the current token. The second
head attends, through planes that hardly rotate, to the keys whose previous token is the current
token, and copies their token. The residual stream has three one-hot codes: the token, the
previous token, and the answer.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 64
HEAD_DIM = 256
PLANES = HEAD_DIM // 2
FAST = 64  # planes for positions; the slowest 32 planes hold a code of two tokens each
SHARP = 40.0  # nats between the right key and every wrong key
NOISE = 0.02  # in the weights of the logits, so that an unknown answer is a guess


def copying() -> LlamaForCausalLM:
    code = VOCABULARY
    width = 3 * code
    config = LlamaConfig(
        **{"vocab_size": code, "hidden_size": width, "intermediate_size": 8},
        **{"num_hidden_layers": 2, "num_attention_heads": 1, "num_key_value_heads": 1},
        **{"head_dim": HEAD_DIM, "max_position_embeddings": 128, "rms_norm_eps": 1e-12},
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=False,
    )
    config._attn_implementation = "eager"
    model = LlamaForCausalLM(config).eval()
    token, before, answer = (slice(n * code, (n + 1) * code) for n in range(3))
    eye = torch.eye(code)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name:
                weight.zero_()
        model.model.embed_tokens.weight[:, token] = width**0.5 * eye
        noise = torch.randn(code, width, generator=torch.Generator().manual_seed(0))
        model.lm_head.weight.copy_(NOISE * noise)
        model.lm_head.weight[:, answer] += eye
        first, second = (layer.self_attn for layer in model.model.layers)
        _one_back(first, token)
        first.v_proj.weight[:code, token] = first.o_proj.weight[before, :code] = eye
        # Both codes have the same length, and the norm makes the length of both sqrt(width).
        size = (width / 2) ** 0.5
        strength = (SHARP * HEAD_DIM**0.5) ** 0.5 / size
        slow = [
            *range(PLANES - code // 2, PLANES),
            *range(HEAD_DIM - code // 2, HEAD_DIM),
        ]
        second.q_proj.weight[slow, token] = second.k_proj.weight[slow, before] = (
            strength * eye
        )
        second.v_proj.weight[:code, token] = second.o_proj.weight[answer, :code] = eye
    return model


def _one_back(attention: torch.nn.Module, token: slice) -> None:
    """Every query attends to the previous key, by the sum of cos(w_f (offset - 1))."""
    inv_freq = 10_000.0 ** (-torch.arange(FAST) / PLANES)
    distance = torch.arange(128)
    profile = torch.cos(torch.outer(distance - 1, inv_freq)).sum(1)
    margin = FAST - profile[distance != 1].max()
    size = (3 * VOCABULARY) ** 0.5
    strength = (SHARP / margin * HEAD_DIM**0.5) ** 0.5 / size
    attention.q_proj.weight[:FAST, token] = strength
    attention.k_proj.weight[:FAST, token] = strength * torch.cos(inv_freq)[:, None]
    sines = strength * torch.sin(inv_freq)[:, None]
    attention.k_proj.weight[PLANES : PLANES + FAST, token] = sines
