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
        vocab_size=code,
        hidden_size=width,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=HEAD_DIM,
        max_position_embeddings=128,
        rms_norm_eps=1e-12,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=False,
    )
    config._attn_implementation = "eager"
    model = LlamaForCausalLM(config).eval()
    token = slice(0, code)
    before = slice(code, 2 * code)
    answer = slice(2 * code, 3 * code)
    eye = torch.eye(code)
    first = model.model.layers[0].self_attn
    second = model.model.layers[1].self_attn
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name:
                weight.zero_()
        model.model.embed_tokens.weight[:, token] = width**0.5 * eye
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(code, width, generator=generator)
        model.lm_head.weight.copy_(NOISE * noise)
        model.lm_head.weight[:, answer] += eye
        _attend_one_back(first, token)
        _copy_value(first, token, before)
        _attend_to_codes(second, token, before)
        _copy_value(second, token, answer)
    return model


def _attend_one_back(attention: torch.nn.Module, token: slice) -> None:
    """Every query attends to the previous key, by the sum of cos(w_f (offset - 1))."""
    inv_freq = 10_000.0 ** (-torch.arange(FAST) / PLANES)
    distance = torch.arange(128)
    angles = torch.outer(distance - 1, inv_freq)
    profile = torch.cos(angles).sum(1)
    largest_other = profile[distance != 1].max()
    margin = FAST - largest_other
    size = (3 * VOCABULARY) ** 0.5
    strength = (SHARP / margin * HEAD_DIM**0.5) ** 0.5 / size
    cosines = strength * torch.cos(inv_freq)[:, None]
    sines = strength * torch.sin(inv_freq)[:, None]
    attention.q_proj.weight[:FAST, token] = strength
    attention.k_proj.weight[:FAST, token] = cosines
    attention.k_proj.weight[PLANES : PLANES + FAST, token] = sines


def _attend_to_codes(attention: torch.nn.Module, token: slice, before: slice) -> None:
    """Every query attends to the keys whose previous token is its own token."""
    # Both codes have the same length, and the norm makes the length of both sqrt(width).
    size = (3 * VOCABULARY / 2) ** 0.5
    strength = (SHARP * HEAD_DIM**0.5) ** 0.5 / size
    half = VOCABULARY // 2
    first_coordinates = range(PLANES - half, PLANES)
    second_coordinates = range(HEAD_DIM - half, HEAD_DIM)
    slow = [*first_coordinates, *second_coordinates]
    weights = strength * torch.eye(VOCABULARY)
    attention.q_proj.weight[slow, token] = weights
    attention.k_proj.weight[slow, before] = weights


def _copy_value(attention: torch.nn.Module, source: slice, target: slice) -> None:
    """Write the code in `source` of the attended key to `target` of the row."""
    eye = torch.eye(VOCABULARY)
    attention.v_proj.weight[:VOCABULARY, source] = eye
    attention.o_proj.weight[target, :VOCABULARY] = eye
