"""Checkpoints of karpathy's llama2.c, version 0: one `.bin` file of float32 numbers.

Source: github.com/karpathy/llama2.c, `export.py` (legacy_export), `run.c` and
`tokenizer.py` (export). The file is seven int32 and then the weights, layer after layer
within each kind; its queries and keys rotate in interleaved pairs, which become half
pairs here, as transformers' Llama has them.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
from torch import Tensor
from transformers import LlamaConfig, PreTrainedTokenizerFast

from ropelens.errors import BadCheckpoint
from ropelens.models.checkpoint import pickle_refused

BASE = 10_000.0  # run.c has no other
RMS_EPS = 1e-5
HEADER = struct.Struct("<7i")
VERSIONED_MAGIC = 0x616B3432  # "ak42": export.py --version 1 and 2
SPECIAL_TOKENS = ["<unk>", "<s>", "</s>"]  # ids 0, 1, 2, fixed in run.c
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]  # ids 3 to 258, where there are any


@dataclass(frozen=True)
class Header:
    """The seven numbers that a file starts with, in its order.

    `vocab_size` is negative in a file whose last matrix is not the token embedding.
    """

    dim: int
    hidden_dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    vocab_size: int
    max_seq_len: int

    @property
    def vocabulary(self) -> int:
        return abs(self.vocab_size)

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every array of the file, in the order of the file."""
        layers, dim, hidden = self.n_layers, self.dim, self.hidden_dim
        kv_dim = self.n_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "token_embedding": (self.vocabulary, dim),
            "rms_att": (layers, dim),
            "wq": (layers, dim, dim),
            "wk": (layers, kv_dim, dim),
            "wv": (layers, kv_dim, dim),
            "wo": (layers, dim, dim),
            "rms_ffn": (layers, dim),
            "w1": (layers, hidden, dim),
            "w2": (layers, dim, hidden),
            "w3": (layers, hidden, dim),
            "rms_final": (dim,),
            "freq_cis_real": (self.max_seq_len, self.head_dim // 2),
            "freq_cis_imag": (self.max_seq_len, self.head_dim // 2),
        }
        if self.vocab_size < 0:
            shapes["wcls"] = (self.vocabulary, dim)
        return shapes


def read_model(path: Path) -> tuple[LlamaConfig, dict[str, Tensor]]:
    """Config and weights of a llama2.c file, as transformers' LlamaForCausalLM takes them.

    Raises BadCheckpoint for a pickle, a file of version 1 or 2, a header that no model has,
    a file of the wrong size, and rotary frequencies that are not those of run.c.
    """
    header = read_header(path)
    numbers = np.memmap(path, dtype="<f4", mode="r", offset=HEADER.size)
    arrays: dict[str, np.ndarray] = {}
    start = 0
    for name, shape in header.shapes().items():
        stop = start + math.prod(shape)
        arrays[name] = numbers[start:stop].reshape(shape)
        start = stop
    _check_frequencies(path, header, arrays)
    return _config(header), _state_dict(header, arrays)


def read_header(path: Path) -> Header:
    """The header of a llama2.c file, refused unless it fits the size of the file."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        start = stream.read(HEADER.size)
    if start.startswith((b"PK\x03\x04", b"\x80")):
        raise pickle_refused(path)
    if len(start) < HEADER.size:
        raise BadCheckpoint(
            f"{path} is too short for a llama2.c checkpoint.",
            seen=f"{size:,} bytes; its header alone takes {HEADER.size}",
        )
    numbers = HEADER.unpack(start)
    if numbers[0] == VERSIONED_MAGIC:
        raise BadCheckpoint(
            f"{path} is a llama2.c file of version {numbers[1]}; ropelens reads version 0.",
            attempt="export it again with llama2.c: python export.py --version 0 (or -1, "
            "Hugging Face format)",
        )
    header = Header(*numbers)
    if not _plausible(header):
        raise BadCheckpoint(
            f"{path} is not a llama2.c checkpoint.",
            seen="it starts with the numbers " + ", ".join(map(str, numbers)),
            means="they should be dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size, "
            "max_seq_len",
            attempt="pass a .bin file of llama2.c, or the folder of another checkpoint",
        )
    expected = HEADER.size + 4 * sum(math.prod(shape) for shape in header.shapes().values())
    if size != expected:
        raise BadCheckpoint(
            f"{path} is {'shorter' if size < expected else 'longer'} than its header says.",
            seen=f"{size:,} bytes instead of {expected:,}",
            means="the file is truncated, or no llama2.c checkpoint of version 0",
            attempt="fetch or export the checkpoint again",
        )
    return header


def read_tokenizer(path: Path, *, vocabulary: int) -> PreTrainedTokenizerFast:
    """The tokenizer of a llama2.c `tokenizer.bin`, as transformers' fast tokenizer.

    Byte-pair merges follow from the scores: of all neighbours that join to a token, the
    highest score goes first, the leftmost among equals. Every split of a token into two
    tokens becomes a merge at its score's rank, which gives run.c's tokens as long as
    scores differ between tokens, as sentencepiece's do. Two differences are on purpose,
    those of transformers' own Llama tokenizer: "▁" in a text counts as a space, and
    "<unk>", "<s>" and "</s>" in a text are the special tokens.

    Raises BadCheckpoint for a file that does not hold `vocabulary` different tokens.
    """
    pieces = _pieces(path, vocabulary)
    vocab = {piece: index for index, (piece, _) in enumerate(pieces)}
    if len(vocab) < len(pieces):
        raise BadCheckpoint(f"{path} holds the same token twice.", attempt="export it again")
    byte_fallback = [piece for piece, _ in pieces[3:259]] == BYTE_TOKENS
    model = models.BPE(
        vocab=vocab,
        merges=_merges(pieces, vocab),
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=byte_fallback,
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def tokenizer_file(path: Path, *, vocabulary: int) -> Path | None:
    """The tokenizer beside the checkpoint `path`: tokenizer.bin, or tokN.bin for N tokens."""
    for name in ("tokenizer.bin", f"tok{vocabulary}.bin"):
        if path.with_name(name).is_file():
            return path.with_name(name)
    return None


def half_pairs(
    weight: Float[Tensor, "row column"], *, heads: int
) -> Float[Tensor, "row column"]:
    """Rows of a query or key projection moved from interleaved to half pairs.

    Within each head, coordinates 2f and 2f + 1 become f and f + D/2, so that transformers'
    rotation turns the planes that llama2.c turns.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns)


def _plausible(header: Header) -> bool:
    sizes = (header.dim, header.hidden_dim, header.n_layers, header.n_heads, header.n_kv_heads)
    return (
        min(sizes) > 0
        and header.vocab_size != 0
        and header.max_seq_len > 1
        and header.dim % header.n_heads == 0
        and header.head_dim % 2 == 0
        and header.n_heads % header.n_kv_heads == 0
    )


def _check_frequencies(path: Path, header: Header, arrays: dict[str, np.ndarray]) -> None:
    """The cosines and sines in the file, which run.c skips, must be those it computes."""
    cos, sin = arrays["freq_cis_real"][1], arrays["freq_cis_imag"][1]
    if not cos.any() and not sin.any():
        return  # some exporters leave the arrays empty
    stated = np.arctan2(sin, cos)  # of position 1: rad / token
    computed = BASE ** (-np.arange(0, header.head_dim, 2) / header.head_dim)
    if not np.allclose(stated, computed, rtol=1e-3, atol=0.0):
        raise BadCheckpoint(
            f"{path} was made for other rotary frequencies than llama2.c uses.",
            seen=f"its slowest plane turns {stated[-1]:.3g} rad per token, base 10,000 gives "
            f"{computed[-1]:.3g}",
            attempt="export the model to Hugging Face format, which states its base",
        )


def _config(header: Header) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=header.vocabulary,
        hidden_size=header.dim,
        intermediate_size=header.hidden_dim,
        num_hidden_layers=header.n_layers,
        num_attention_heads=header.n_heads,
        num_key_value_heads=header.n_kv_heads,
        max_position_embeddings=header.max_seq_len,
        rms_norm_eps=RMS_EPS,
        rope_parameters={"rope_type": "default", "rope_theta": BASE},
        tie_word_embeddings=header.vocab_size > 0,
        bos_token_id=1,
        eos_token_id=2,
        architectures=["LlamaForCausalLM"],
    )


def _state_dict(header: Header, arrays: dict[str, np.ndarray]) -> dict[str, Tensor]:
    def tensor(name: str, layer: int | None = None) -> Tensor:
        array = arrays[name] if layer is None else arrays[name][layer]
        return torch.from_numpy(np.array(array, dtype=np.float32))

    state = {
        "model.embed_tokens.weight": tensor("token_embedding"),
        "model.norm.weight": tensor("rms_final"),
    }
    if "wcls" in arrays:
        state["lm_head.weight"] = tensor("wcls")
    for layer in range(header.n_layers):
        weights = {
            "input_layernorm": tensor("rms_att", layer),
            "self_attn.q_proj": half_pairs(tensor("wq", layer), heads=header.n_heads),
            "self_attn.k_proj": half_pairs(tensor("wk", layer), heads=header.n_kv_heads),
            "self_attn.v_proj": tensor("wv", layer),
            "self_attn.o_proj": tensor("wo", layer),
            "post_attention_layernorm": tensor("rms_ffn", layer),
            "mlp.gate_proj": tensor("w1", layer),
            "mlp.down_proj": tensor("w2", layer),
            "mlp.up_proj": tensor("w3", layer),
        }
        state |= {f"model.layers.{layer}.{name}.weight": w for name, w in weights.items()}
    return state


def _pieces(path: Path, vocabulary: int) -> list[tuple[str, float]]:
    """Every token of the file with its score, by id; spaces as sentencepiece writes them."""
    data = path.read_bytes()
    pieces: list[tuple[str, float]] = []
    position = 4  # after the length of the longest token
    try:
        while position < len(data):
            score, length = struct.unpack_from("<fi", data, position)
            position += 8
            if length < 0 or position + length > len(data):
                raise struct.error("a token reaches beyond the end")
            piece = data[position : position + length].decode("utf-8")
            pieces.append((piece.replace(" ", "▁"), score))
            position += length
    except (struct.error, UnicodeDecodeError) as error:
        raise BadCheckpoint(
            f"{path} is not a tokenizer of llama2.c.",
            seen=f"token {len(pieces)}, near byte {position:,}: {error}",
            attempt="export it again with llama2.c: python tokenizer.py",
        ) from error
    if len(pieces) != vocabulary or vocabulary < len(SPECIAL_TOKENS):
        raise BadCheckpoint(
            f"{path} belongs to another model.",
            seen=f"{len(pieces):,} tokens, and the model has {vocabulary:,}",
            attempt="put the tokenizer of this model beside it, or none",
        )
    # The file holds them as run.c prints them ("\n<s>\n").
    return [(name, 0.0) for name in SPECIAL_TOKENS] + pieces[len(SPECIAL_TOKENS) :]


def _merges(pieces: list[tuple[str, float]], vocab: dict[str, int]) -> list[tuple[str, str]]:
    never = {*SPECIAL_TOKENS, *BYTE_TOKENS}
    ranked = []
    for piece, score in pieces:
        if piece in never:
            continue
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocab and right in vocab and not {left, right} & never:
                ranked.append((-score, vocab[left], vocab[right], left, right))
    return [(left, right) for *_, left, right in sorted(ranked)]
