"""A tiny checkpoint on disk, and functions that change it."""

import json
import shutil
import string
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from ropelens.checkpoints.identity import identity
from ropelens.checkpoints.load import open_checkpoint
from ropelens.checkpoints.load_options import Loading

SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}


def tiny_llama(**changes: object) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(**{**SIZES, **changes})
    return LlamaForCausalLM(config)


def save_tiny(folder: Path, **changes: object) -> Path:
    tiny_llama(**changes).save_pretrained(folder)
    words = ["<s>", "<unk>", *string.ascii_lowercase]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>"
    )
    fast.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A valid checkpoint that a test can damage."""
    return save_tiny(tmp_path / "model")


def edit_config(folder: Path, name: str = "config.json", **changes: object) -> None:
    path = folder / name
    config = json.loads(path.read_text())
    config.update(changes)
    path.write_text(json.dumps(config))


def edit_weights(
    folder: Path, change: Callable[[dict[str, torch.Tensor]], object]
) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def save_over(folder: Path, model: PreTrainedModel) -> None:
    shutil.rmtree(folder)
    model.save_pretrained(folder)


def identity_of(path: Path, **options: object) -> str:
    return identity(open_checkpoint(path, Loading(**options), used=False))
