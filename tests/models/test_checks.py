"""Damaged and unfit checkpoints: each is refused by name, in one line, with no other output."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import SIZES, edit_config, edit_weights, save_over, save_tiny, tiny_llama
from transformers import (
    BertConfig,
    BertLMHeadModel,
    ModernBertConfig,
    ModernBertForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
)

from ropelens.errors import BadCheckpoint, RopelensError, UnsupportedModel
from ropelens.models.checkpoint import fingerprint
from ropelens.models.load import load

NO_SPECIAL_TOKENS = dict.fromkeys(
    ["pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"]
)


def broken(value: float) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(weights: dict[str, torch.Tensor]) -> None:
        weights["model.layers.1.mlp.up_proj.weight"][3, 5] = value

    return change


def truncate(folder: Path, size: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])


def only_pickle(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def lose_a_shard(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    tiny_llama().save_pretrained(folder, max_shard_size="20KB")
    (folder / "model.safetensors").unlink(missing_ok=True)
    sorted(folder.glob("*.safetensors"))[1].unlink()


def bad_index(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text("[1, 2]")


def adapter(folder: Path) -> None:
    (folder / "config.json").rename(folder / "adapter_config.json")


def overflowing(weights: dict[str, torch.Tensor]) -> None:
    weights["model.norm.weight"][:] = 3e38


DAMAGES: dict[str, tuple[Callable[[Path], object], type[RopelensError], list[str]]] = {
    "no config": (
        lambda f: (f / "config.json").unlink(),
        BadCheckpoint,
        ["has no config.json", "model.safetensors"],
    ),
    "an adapter": (adapter, BadCheckpoint, ["holds an adapter", "merge_and_unload"]),
    "config no JSON": (
        lambda f: (f / "config.json").write_text("{'model_type': "),
        BadCheckpoint,
        ["transformers cannot read", "is not a valid JSON file"],
    ),
    "unknown model type": (
        lambda f: edit_config(f, model_type="yeti"),
        BadCheckpoint,
        ["has model type `yeti`", "a newer transformers"],
    ),
    "code of its own": (
        lambda f: edit_config(f, model_type="yeti", auto_map={"AutoConfig": "yeti.Yeti"}),
        BadCheckpoint,
        ["contains custom code", "trust_remote_code=True"],
    ),
    "impossible config": (
        lambda f: edit_config(f, hidden_size=31),
        BadCheckpoint,
        ["transformers cannot read", "31"],
    ),
    "layers without end": (
        lambda f: edit_config(f, num_hidden_layers=10**30),
        BadCheckpoint,
        ["states an impossible num_hidden_layers: 1000"],
    ),
    "no head": (
        lambda f: edit_config(f, num_attention_heads=0),
        BadCheckpoint,
        ["config.json"],
    ),
    "key heads that share no query heads": (
        lambda f: edit_config(f, num_key_value_heads=3),
        BadCheckpoint,
        [""],
    ),
    "truncated": (
        lambda f: truncate(f, 30_000),
        BadCheckpoint,
        ["model.safetensors is truncated or damaged", "30,000 bytes", "git lfs pull"],
    ),
    "missing tensor": (
        lambda f: edit_weights(f, lambda w: w.pop("model.layers.0.self_attn.q_proj.weight")),
        BadCheckpoint,
        [
            "lacks weights of LlamaForCausalLM",
            "1 missing",
            "layers.0.self_attn.q_proj",
            "random",
        ],
    ),
    "more layers in config": (
        lambda f: edit_config(f, num_hidden_layers=3),
        BadCheckpoint,
        ["lacks weights of LlamaForCausalLM", "9 missing", "model.layers.2."],
    ),
    "mismatched": (
        lambda f: edit_config(f, intermediate_size=64),
        BadCheckpoint,
        ["do not fit the shapes", "layers.0.mlp.down_proj", "[32, 48]", "[32, 64]"],
    ),
    "NaN": (
        lambda f: edit_weights(f, broken(float("nan"))),
        BadCheckpoint,
        ["model.layers.1.mlp.up_proj.weight holds NaN or infinite", "1 of its 1,536 numbers"],
    ),
    "overflow": (
        lambda f: edit_weights(f, overflowing),
        BadCheckpoint,
        ["logits that are NaN or infinite", "all finite", "another dtype"],
    ),
    "pickle": (
        only_pickle,
        BadCheckpoint,
        ["a pickle can run any code", "save_pretrained(NEW"],
    ),
    "no weights": (
        lambda f: (f / "model.safetensors").unlink(),
        BadCheckpoint,
        ["has no weights in safetensors", "it holds config.json"],
    ),
    "missing shard": (
        lose_a_shard,
        BadCheckpoint,
        ["lacks weight files", "model-00002-of-"],
    ),
    "bad index": (bad_index, BadCheckpoint, ["no readable list of its weight files"]),
    "bad tokenizer": (
        lambda f: (f / "tokenizer.json").write_text('{"version": "1.0"}'),
        BadCheckpoint,
        ["tokenizer in", "cannot be read"],
    ),
    "BERT": (
        lambda f: save_over(f, BertLMHeadModel(BertConfig(**SIZES))),
        UnsupportedModel,
        ["BertLMHeadModel is not a causal language model", "changes the logits before it"],
    ),
    "ModernBERT": (
        lambda f: save_over(
            f, ModernBertForMaskedLM(ModernBertConfig(**SIZES, **NO_SPECIAL_TOKENS))
        ),
        UnsupportedModel,
        ["model type modernbert is not a causal language model"],
    ),
    "T5": (
        lambda f: save_over(
            f,
            T5ForConditionalGeneration(
                T5Config(vocab_size=40, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=4)
            ),
        ),
        UnsupportedModel,
        ["model type t5 is not a causal language model"],
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_by_name(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], damage: str
) -> None:
    change, kind, words = DAMAGES[damage]
    folder = save_tiny(tmp_path / "model")
    change(folder)
    capfd.readouterr()
    with pytest.raises(kind) as caught:
        load(folder)
    assert type(caught.value) is kind
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in caught.value.line
    assert capfd.readouterr() == ("", "")


def sharded(folder: Path) -> tuple[Path, dict[str, str]]:
    """A checkpoint of several files in `folder`; its index, and what that maps."""
    (folder / "model.safetensors").unlink()
    tiny_llama().save_pretrained(folder, max_shard_size="20KB")
    index = folder / "model.safetensors.index.json"
    return index, json.loads(index.read_text())["weight_map"]


def test_an_index_of_another_form_is_refused(tmp_path: Path) -> None:
    index, files = sharded(save_tiny(tmp_path / "model"))
    first = next(iter(files))
    (tmp_path / "beside.safetensors").write_bytes((index.parent / files[first]).read_bytes())
    outside = "names weights outside itself"
    wrong: dict[str, tuple[object, str]] = {
        "a list": ([1], "no readable list"),
        "a number": (files | {first: 3}, "no readable list"),
        "above": (files | {first: "../beside.safetensors"}, outside),
        "elsewhere": (files | {first: str(tmp_path / "beside.safetensors")}, outside),
    }
    for weight_map, words in wrong.values():
        index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        with pytest.raises(BadCheckpoint, match=words) as caught:
            load(index.parent)
        assert len(caught.value.line) < 600
    edit_config(save_tiny(tmp_path / "other"), transformers_weights="../beside.safetensors")
    with pytest.raises(BadCheckpoint, match=outside):
        load(tmp_path / "other")


def test_the_fingerprint_is_of_the_files_that_are_loaded(tmp_path: Path) -> None:
    index, files = sharded(save_tiny(tmp_path / "model"))
    before = fingerprint(index.parent)
    shutil.copy(index.parent / next(iter(files.values())), index.parent / "more.safetensors")
    assert fingerprint(index.parent) == before
    edit_weights_of(index.parent / sorted(files.values())[-1])
    assert fingerprint(index.parent) != before


def edit_weights_of(file: Path) -> None:
    weights = load_file(file)
    next(iter(weights.values())).view(-1)[0] += 1
    save_file(weights, file, metadata={"format": "pt"})


def test_a_tokenizer_config_of_wrong_types_is_refused(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model")
    path = folder / "tokenizer_config.json"
    whole = json.loads(path.read_text())
    wrong: list[object] = [[], {"bos_token": 3}, {"model_max_length": "x"}]  # fails at work
    for change in wrong:
        path.write_text(json.dumps(whole | change if isinstance(change, dict) else change))
        with pytest.raises(BadCheckpoint, match=r"tokenizer in .* cannot be read"):
            load(folder)
