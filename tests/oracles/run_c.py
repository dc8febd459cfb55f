"""llama2.c's files and run.c, told a second time: numpy and plain Python."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from ropelens.models.llama2c import BYTE_TOKENS

# Writing llama2.c's files, as export.py (legacy_export) and tokenizer.py do.


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    rows, columns = weight.shape
    return (
        weight.reshape(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, -1)
    )


def export(model: LlamaForCausalLM, path: Path, *, base: float | None = 10_000.0) -> None:
    """Write a transformers Llama as llama2.c version 0; base None leaves the tables empty."""
    config, state = model.config, model.state_dict()
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    vocabulary, context = config.vocab_size, config.max_position_embeddings
    header = [config.hidden_size, config.intermediate_size, config.num_hidden_layers]
    header += [
        heads,
        kv_heads,
        vocabulary if config.tie_word_embeddings else -vocabulary,
        context,
    ]

    def layers(name: str, change: Callable[[torch.Tensor], torch.Tensor] = lambda w: w) -> list:
        indices = range(config.num_hidden_layers)
        return [change(state[f"model.layers.{index}.{name}.weight"]) for index in indices]

    head_dim = config.hidden_size // heads
    angles = torch.zeros(context, head_dim // 2)
    if base is not None:
        frequencies = base ** (-torch.arange(0, head_dim, 2) / head_dim)
        angles = torch.outer(torch.arange(context), frequencies)
    tables = [angles.cos(), angles.sin()] if base is not None else [angles, angles]
    tensors = [
        state["model.embed_tokens.weight"],
        *layers("input_layernorm"),
        *layers("self_attn.q_proj", lambda w: interleaved(w, heads)),
        *layers("self_attn.k_proj", lambda w: interleaved(w, kv_heads)),
        *layers("self_attn.v_proj"),
        *layers("self_attn.o_proj"),
        *layers("post_attention_layernorm"),
        *layers("mlp.gate_proj"),
        *layers("mlp.down_proj"),
        *layers("mlp.up_proj"),
        state["model.norm.weight"],
        *tables,
        *([] if config.tie_word_embeddings else [state["lm_head.weight"]]),
    ]
    with path.open("wb") as file:
        file.write(struct.pack("<7i", *header))
        for tensor in tensors:
            file.write(tensor.float().numpy().astype("<f4").tobytes())


def export_tokenizer(pieces: list[tuple[str, float]], path: Path) -> None:
    encoded = [(piece.replace("▁", " ").encode(), score) for piece, score in pieces]
    with path.open("wb") as file:
        file.write(struct.pack("<i", max(len(piece) for piece, _ in encoded)))
        for piece, score in encoded:
            file.write(struct.pack("<fi", score, len(piece)) + piece)


def pieces_of(tokenizer: PreTrainedTokenizerFast) -> list[tuple[str, float]]:
    """Tokens and scores as sentencepiece numbers them: after bytes, one lower a token."""
    names = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    names[1:3] = ["\n<s>\n", "\n</s>\n"]
    first = 259 if BYTE_TOKENS[0] in names else 3
    return [(name, -float(max(0, index - first))) for index, name in enumerate(names)]


# What the files mean, told a second time: run.c in numpy and plain Python.


def run_c_logits(path: Path, tokens: list[int]) -> np.ndarray:
    """Logits [position, vocabulary] of run.c's forward(), token after token, in float64."""
    dim, hidden, layers, heads, kv_heads, vocabulary, context = struct.unpack(
        "<7i", path.read_bytes()[:28]
    )
    shared, vocabulary, head_dim = vocabulary > 0, abs(vocabulary), dim // heads
    kv_dim = kv_heads * head_dim
    numbers = np.fromfile(path, dtype="<f4", offset=28).astype(np.float64)

    def take(*shape: int) -> np.ndarray:
        nonlocal numbers
        array, numbers = np.split(numbers, [int(np.prod(shape))])
        return array.reshape(shape)

    embedding, rms_att = take(vocabulary, dim), take(layers, dim)
    wq, wk, wv = take(layers, dim, dim), take(layers, kv_dim, dim), take(layers, kv_dim, dim)
    wo, rms_ffn = take(layers, dim, dim), take(layers, dim)
    w1, w2, w3 = take(layers, hidden, dim), take(layers, dim, hidden), take(layers, hidden, dim)
    rms_final = take(dim)
    take(2, context, head_dim // 2)
    classifier = embedding if shared else take(vocabulary, dim)
    assert numbers.size == 0

    def rmsnorm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return weight * x / np.sqrt((x * x).mean() + 1e-5)

    def rotate(x: np.ndarray, position: int) -> np.ndarray:
        for i in range(0, x.size, 2):  # neighbours turn together
            angle = position / 10000.0 ** ((i % head_dim) / head_dim)
            a, b = x[i], x[i + 1]
            x[i] = a * np.cos(angle) - b * np.sin(angle)
            x[i + 1] = a * np.sin(angle) + b * np.cos(angle)
        return x

    keys: list[list[np.ndarray]] = [[] for _ in range(layers)]
    values: list[list[np.ndarray]] = [[] for _ in range(layers)]
    logits = []
    for position, token in enumerate(tokens):
        x = embedding[token].copy()
        for layer in range(layers):
            y = rmsnorm(x, rms_att[layer])
            q = rotate(wq[layer] @ y, position).reshape(heads, head_dim)
            keys[layer].append(rotate(wk[layer] @ y, position).reshape(kv_heads, head_dim))
            values[layer].append((wv[layer] @ y).reshape(kv_heads, head_dim))
            mixed = []
            for head in range(heads):
                k = np.array(keys[layer])[:, head // (heads // kv_heads)]
                v = np.array(values[layer])[:, head // (heads // kv_heads)]
                scores = np.exp(k @ q[head] / np.sqrt(head_dim))
                mixed.append(scores / scores.sum() @ v)
            x = x + wo[layer] @ np.concatenate(mixed)
            y = rmsnorm(x, rms_ffn[layer])
            gate = w1[layer] @ y
            x = x + w2[layer] @ (gate / (1 + np.exp(-gate)) * (w3[layer] @ y))
        logits.append(classifier @ rmsnorm(x, rms_final))
    return np.array(logits)


def run_c_encode(text: str, pieces: list[tuple[str, float]]) -> list[int]:
    """run.c's encode() with byte fallback, without BOS."""
    vocab = {piece.replace("▁", " "): index for index, (piece, _) in enumerate(pieces)}
    tokens = [vocab[" "]] if text else []
    for character in text:
        if character in vocab:
            tokens.append(vocab[character])
        else:
            tokens.extend(byte + 3 for byte in character.encode())
    while True:
        best, where = -1e10, None
        for i in range(len(tokens) - 1):
            pair = (pieces[tokens[i]][0] + pieces[tokens[i + 1]][0]).replace("▁", " ")
            if pair in vocab and pieces[vocab[pair]][1] > best:
                best, where = pieces[vocab[pair]][1], (i, vocab[pair])
        if where is None:
            return tokens
        tokens[where[0] : where[0] + 2] = [where[1]]
