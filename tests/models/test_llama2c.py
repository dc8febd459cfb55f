"""llama2.c checkpoints: against an independent forward, an exporter, and run.c's tokenizer."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.run_c import (
    export,
    export_tokenizer,
    interleaved,
    pieces_of,
    run_c_encode,
    run_c_logits,
)
from tokenizers import Tokenizer, models, trainers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from ropelens.errors import BadArgument, BadCheckpoint
from ropelens.models.llama2c import BYTE_TOKENS, half_pairs, read_header, read_tokenizer
from ropelens.models.load import load
from ropelens.models.subject import stated_context
from ropelens.models.texts import read_documents, tokenize

# The model.


def tiny(*, tied: bool = True, kv_heads: int = 2) -> LlamaForCausalLM:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@torch.no_grad()
def test_against_the_exported_model_and_run_c(
    tmp_path: Path, tied: bool, kv_heads: int
) -> None:
    original = tiny(tied=tied, kv_heads=kv_heads)
    export(original, tmp_path / "model.bin")
    model, tokenizer = load(tmp_path / "model.bin")
    tokens = torch.randint(300, (1, 40), generator=torch.Generator().manual_seed(0))
    logits = model(tokens).logits
    torch.testing.assert_close(logits, original(tokens).logits, rtol=1e-5, atol=1e-5)
    expected = run_c_logits(tmp_path / "model.bin", tokens[0].tolist())
    np.testing.assert_allclose(logits[0].numpy(), expected, rtol=1e-5, atol=2e-5)
    assert isinstance(model, LlamaForCausalLM)
    assert tokenizer is None
    assert stated_context(model.config) == 64
    assert not any(parameter.requires_grad for parameter in model.parameters())


@torch.no_grad()
def test_without_the_permutation_the_logits_are_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = tiny()
    export(original, tmp_path / "model.bin")
    monkeypatch.setattr("ropelens.models.llama2c.half_pairs", lambda weight, *, heads: weight)
    model, _ = load(tmp_path / "model.bin")
    tokens = torch.arange(40)[None]
    assert (model(tokens).logits - original(tokens).logits).abs().max() > 0.1


def test_half_pairs_undoes_interleaving() -> None:
    weight = torch.randn(24, 5)
    assert torch.equal(half_pairs(interleaved(weight, 3), heads=3), weight)


@torch.no_grad()
def test_against_a_real_checkpoint(shared: Path, tmp_path: Path) -> None:
    folder = shared / "checkpoints" / "stories260k"
    original, reference = load(folder)
    assert reference is not None
    export(original, tmp_path / "stories260K.bin")
    export_tokenizer(pieces_of(reference), tmp_path / "tok512.bin")
    model, tokenizer = load(tmp_path / "stories260K.bin")
    documents = read_documents([shared / "corpora" / "tinystories"])
    here = tokenize(documents, tokenizer, context=64)
    there = tokenize(documents, reference, context=64)
    assert torch.equal(here.tokens, there.tokens)
    tokens = here.tokens[:4]
    torch.testing.assert_close(
        model(tokens).logits, original(tokens).logits, rtol=1e-5, atol=1e-5
    )
    expected = run_c_logits(tmp_path / "stories260K.bin", tokens[0].tolist())
    np.testing.assert_allclose(model(tokens[:1]).logits[0], expected, rtol=1e-4, atol=1e-4)


def test_dtype_and_empty_tables(tmp_path: Path) -> None:
    export(tiny(), tmp_path / "model.bin", base=None)
    model, _ = load(tmp_path / "model.bin", dtype="bfloat16", device="cpu")
    assert model.dtype is torch.bfloat16


# The tokenizer.


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[tuple[str, float]], Path]:
    """Pieces of a BPE trained on runs and repeats, the hard case for the order of merges."""
    tokenizer = Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=60, show_progress=False)
    words = ["▁a", "aaaa", "abab", "aab▁b", "▁▁▁▁", "bbbbbbb", "▁aé", "abc▁abcabc"]
    tokenizer.train_from_iterator(words * 3, trainer)
    names = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    letters = [name for name in names if len(name) == 1]
    merged = [name for name in names if len(name) > 1]
    pieces = [("<unk>", 0.0), ("\n<s>\n", 0.0), ("\n</s>\n", 0.0)]
    pieces += [(name, 0.0) for name in BYTE_TOKENS]
    pieces += [(name, -float(rank)) for rank, name in enumerate([*merged, *letters])]
    path = tmp_path_factory.mktemp("trained") / "tokenizer.bin"
    export_tokenizer(pieces, path)
    return pieces, path


@given(text=st.text(alphabet="ab c é\n日", max_size=30))
@settings(deadline=None, max_examples=300)
def test_against_run_c_on_any_text(
    trained: tuple[list[tuple[str, float]], Path], text: str
) -> None:
    pieces, path = trained
    tokenizer = read_tokenizer(path, vocabulary=len(pieces))
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokens == run_c_encode(text, pieces)
    assert tokenizer.decode(tokens) == text


def test_against_run_c_and_transformers_on_real_text(shared: Path, tmp_path: Path) -> None:
    reference = AutoTokenizer.from_pretrained(shared / "checkpoints" / "stories260k")
    pieces = pieces_of(reference)
    export_tokenizer(pieces, tmp_path / "tokenizer.bin")
    tokenizer = read_tokenizer(tmp_path / "tokenizer.bin", vocabulary=512)
    text = (shared / "corpora" / "wikitext2_valid.txt").read_text(encoding="utf-8")
    text = text.replace("<unk>", "unknown")  # which the two mean differently, see the docstring
    assert len(text) > 100_000
    assert tokenizer(text)["input_ids"] == reference(text)["input_ids"]
    for start in range(0, 20_000, 1_000):
        piece = text[start : start + 400]
        ours = tokenizer(piece, add_special_tokens=False)["input_ids"]
        assert ours == run_c_encode(piece, pieces)


def test_a_tokenizer_of_letters_has_no_bytes(tmp_path: Path) -> None:
    pieces = [("<unk>", 0.0), ("\n<s>\n", 0.0), ("\n</s>\n", 0.0), ("▁", 0.0), ("a", -1.0)]
    export_tokenizer(pieces, tmp_path / "tokenizer.bin")
    tokenizer = read_tokenizer(tmp_path / "tokenizer.bin", vocabulary=5)
    assert tokenizer("aa xa")["input_ids"] == [1, 3, 4, 4, 3, 0, 4]
    assert tokenizer.bos_token_id == 1


@pytest.mark.parametrize("name", ["tokenizer.bin", "tok300.bin"])
def test_the_tokenizer_beside_the_model_is_found(tmp_path: Path, name: str) -> None:
    export(tiny(), tmp_path / "model.bin")
    pieces = [(f"piece{index}", -float(index)) for index in range(300)]
    export_tokenizer(pieces, tmp_path / name)
    _, tokenizer = load(tmp_path / "model.bin")
    assert tokenizer is not None
    assert tokenizer.convert_ids_to_tokens(7) == "piece7"


# What is refused.


def edited(path: Path, index: int, value: int) -> None:
    data = bytearray(path.read_bytes())
    data[4 * index : 4 * index + 4] = struct.pack("<i", value)
    path.write_bytes(bytes(data))


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4])


def lengthened(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0\0\0\0")


def with_nan(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[28:32] = struct.pack("<f", float("nan"))
    path.write_bytes(bytes(data))


DAMAGES: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "empty": (lambda p: p.write_bytes(b""), ["too short for a llama2.c checkpoint", "0 bytes"]),
    "truncated": (truncated, ["is shorter than its header says", "bytes instead of"]),
    "lengthened": (lengthened, ["is longer than its header says", "bytes instead of"]),
    "version 1": (
        lambda p: (edited(p, 0, 0x616B3432), edited(p, 1, 1)),
        ["is a llama2.c file of version 1; ropelens reads version 0", "export.py --version 0"],
    ),
    "garbage": (
        lambda p: p.write_bytes(b"What is this, a text file of some length?"),
        ["is not a llama2.c checkpoint", "they should be dim, hidden_dim"],
    ),
    "no layers": (lambda p: edited(p, 2, 0), ["is not a llama2.c checkpoint", "32, 40, 0, 4"]),
    "odd heads": (lambda p: edited(p, 3, 5), ["is not a llama2.c checkpoint"]),
    "odd groups": (lambda p: edited(p, 4, 3), ["is not a llama2.c checkpoint"]),
    "more layers": (lambda p: edited(p, 2, 3), ["is shorter than its header says"]),
    "pickle": (
        lambda p: torch.save({"weight": torch.zeros(9)}, p),
        ["model.bin is a pickle, which ropelens never loads", "convert once"],
    ),
    "old pickle": (
        lambda p: torch.save({"w": torch.zeros(9)}, p, _use_new_zipfile_serialization=False),
        ["model.bin is a pickle"],
    ),
    "other base": (
        lambda p: export(tiny(), p, base=500_000.0),
        ["other rotary frequencies than llama2.c uses", "base 10,000 gives 0.001"],
    ),
    "NaN": (with_nan, ["model.embed_tokens.weight holds NaN", "1 of its 9,600 numbers"]),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_refused(tmp_path: Path, damage: str) -> None:
    change, words = DAMAGES[damage]
    path = tmp_path / "model.bin"
    export(tiny(), path)
    change(path)
    with pytest.raises(BadCheckpoint) as caught:
        load(path)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in caught.value.line


def test_the_header_is_read_as_written(tmp_path: Path) -> None:
    export(tiny(tied=False), tmp_path / "model.bin")
    header = read_header(tmp_path / "model.bin")
    assert (header.vocab_size, header.vocabulary, header.head_dim) == (-300, 300, 8)


def test_a_file_has_no_revision(tmp_path: Path) -> None:
    export(tiny(), tmp_path / "model.bin")
    with pytest.raises(BadArgument, match="has no revision v1"):
        load(tmp_path / "model.bin", revision="v1")


TOKENIZER_DAMAGES: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "truncated": (truncated, ["is not a tokenizer of llama2.c", "token 299"]),
    "not UTF-8": (
        lambda p: p.write_bytes(struct.pack("<ifi", 1, 0.0, 1) + b"\xff"),
        ["is not a tokenizer of llama2.c", "token 0", "can't decode byte 0xff"],
    ),
    "other model": (
        lambda p: export_tokenizer([(f"t{i}", 0.0) for i in range(299)], p),
        ["belongs to another model", "299 tokens, and the model has 300"],
    ),
    "doubled": (
        lambda p: export_tokenizer([(f"t{i % 200}", 0.0) for i in range(300)], p),
        ["holds the same token twice"],
    ),
}


@pytest.mark.parametrize("damage", TOKENIZER_DAMAGES)
def test_a_damaged_tokenizer_is_refused(tmp_path: Path, damage: str) -> None:
    change, words = TOKENIZER_DAMAGES[damage]
    export(tiny(), tmp_path / "model.bin")
    beside = tmp_path / "tokenizer.bin"
    export_tokenizer([(f"token{index}", 0.0) for index in range(300)], beside)
    shutil.copy(beside, tmp_path / "whole.bin")
    change(beside)
    with pytest.raises(BadCheckpoint) as caught:
        load(tmp_path / "model.bin")
    for word in words:
        assert word in str(caught.value)
    shutil.copy(tmp_path / "whole.bin", beside)
    load(tmp_path / "model.bin")
