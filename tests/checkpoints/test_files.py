"""Locating checkpoints, and refusing damaged checkpoints with one clear line."""

import json
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
import transformers as hf
from huggingface_hub import constants
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file
from tiny_checkpoints import (
    SIZES,
    edit_config,
    edit_weights,
    save_over,
    save_tiny,
    tiny_llama,
)
from transformers.integrations.peft import MIN_PEFT_VERSION

from ropelens.checkpoints.load_options import Loading
from ropelens.checkpoints.locate import locate
from ropelens.errors import BadCheckpoint, RopelensError, UnsupportedModel
from ropelens.measured_rotation.load import load


def test_a_hub_id_is_read_from_the_cache(folder, tmp_path, monkeypatch):
    repository = tmp_path / "hub/models--acme--tiny"
    shutil.copytree(folder, repository / "snapshots" / ("c" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("c" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    model, tokenizer = load("acme/tiny")
    assert model.config._name_or_path == "acme/tiny"
    assert tokenizer is not None
    assert locate("acme/tiny", Loading()).revision == "c" * 40


def test_no_pickle_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    files = [
        "config.json",
        "model.safetensors",
        "pytorch_model.bin",
        "onnx/config.json",
    ]
    fetch = mock.Mock(return_value=str(tmp_path))
    monkeypatch.setattr("ropelens.checkpoints.locate.snapshot_download", fetch)
    locate("acme/tiny", Loading())
    del fetch.call_args.kwargs["revision"]
    assert list(filter_repo_objects(files, **fetch.call_args.kwargs)) == files[:2]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("/no/such/folder", ["no folder is called /no/such/folder", "a Hub id"]),
        ("a" * 3000, ["No checkpoint and no folder is called aaaa"]),
        (
            "bundled:alibi",
            ["no checkpoint called 'alibi' is bundled", "of: rope, p-rope-"],
        ),
        ("acme/none", ["no folder is called acme/none", "HF_HUB_OFFLINE"]),
    ],
)
def test_an_unknown_name_is_refused(tmp_path, monkeypatch, name, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RopelensError) as caught:
        load(name)
    assert all(word in str(caught.value) for word in words), caught.value
    assert "\n" not in caught.value.line


def truncate(folder: Path, size: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])


def only_pickle(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def sharded(folder: Path) -> tuple[Path, dict[str, str]]:
    (folder / "model.safetensors").unlink()
    tiny_llama().save_pretrained(folder, max_shard_size="20KB")
    index = folder / "model.safetensors.index.json"
    return index, json.loads(index.read_text())["weight_map"]


def lose_a_shard(folder: Path) -> None:
    _, files = sharded(folder)
    (folder / sorted(files.values())[-1]).unlink()


def not_a_number(weights: dict[str, torch.Tensor]) -> None:
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = torch.nan


def integers(weights: dict[str, torch.Tensor]) -> None:
    weights.update({name: weight.view(torch.int32) for name, weight in weights.items()})


T5 = {
    "vocab_size": 40,
    "d_model": 16,
    "d_kv": 4,
    "d_ff": 16,
    "num_layers": 1,
    "num_heads": 4,
}


def write_header(folder: Path, header: bytes) -> None:
    beginning = len(header).to_bytes(8, "little")
    (folder / "model.safetensors").write_bytes(beginning + header)


# fmt: off
DAMAGES = {
    "no config": (lambda f: (f / "config.json").unlink(),
        ["transformers cannot read", "a folder with config.json"]),
    "unknown model type": (lambda f: edit_config(f, model_type="yeti"),
        ["has model type `yeti`", "a newer transformers"]),
    "code of its own": (
        lambda f: edit_config(f, model_type="yeti", auto_map={"AutoConfig": "yeti.Yeti"}),
        ["contains custom code", "trust_remote_code=True"]),
    "unknown rope type": (
        lambda f: edit_config(f, rope_parameters={"rope_type": "yeti", "rope_theta": 1e4}),
        ["does not know 'yeti'; a rope_type is default, linear"]),
    "truncated": (lambda f: truncate(f, 30_000),
        ["model.safetensors ends too early", "30,000 bytes of at least", "copy or save it"]),
    "truncated header": (lambda f: truncate(f, 100),
        ["ends too early", "100 bytes of at least"]),
    "header without offsets": (lambda f: write_header(f, b'{"a":{"dtype":"F32"}}'),
        ["transformers cannot load", "Error while deserializing header"]),
    "header with a list": (lambda f: write_header(f, b"[1]"),
        ["transformers cannot load", "Error while deserializing header"]),
    "empty file": (lambda f: truncate(f, 0), ["ends too early", "0 bytes of at least 8"]),
    "missing tensor": (
        lambda f: edit_weights(f, lambda w: w.pop("model.layers.0.self_attn.q_proj.weight")),
        ["lacks weights of LlamaForCausalLM", "1 missing", "self_attn.q_proj", "random"]),
    "mismatched": (lambda f: edit_config(f, intermediate_size=64),
        ["6 missing or with another shape", "layers.0.mlp.down_proj",
            "down_proj.weight has the shape [32, 48] instead of [32, 64]",
            "the config.json that was saved with these weights"]),
    "NaN": (lambda f: edit_weights(f, not_a_number),
        ["does not run in torch.float32", "logits are NaN or infinite", "another dtype"]),
    "integers": (lambda f: edit_weights(f, integers), ["weight is I32 without a quantization"]),
    "pickle": (only_pickle, ["no model.safetensors", "run any code", "save_pretrained(NEW"]),
    "no index": (lambda f: sharded(f)[0].unlink(), ["has shards of weights, but no index"]),
    "another name": (lambda f: (f / "model.safetensors").rename(f / "consolidated.safetensors"),
        ["neither model.safetensors nor an index"]),
    "GGUF": (lambda f: (f / "model.safetensors").rename(f / "model.gguf"),
        ["one of its GGUF files"]),
    **{name: (lambda f, name=name: (f / name).write_text("version https://git-lfs\noid"),
        [f"{name} is only a git-LFS pointer", "git lfs pull"])
        for name in ("model.safetensors", "config.json", "tokenizer.json")},
    "pointer to a shard": (
        lambda f: (f / sharded(f)[1]["lm_head.weight"]).write_text("version https://git-lfs"),
        ["is only a git-LFS pointer"]),
    "MLX": (lambda f: edit_config(f, quantization={"group_size": 64, "bits": 4}),
        ["weights in 4 bits, in the format of MLX"]),
    "missing shard": (lose_a_shard,
        ["lacks 1 of 4 files of weights", "model-00004-of-00004.safetensors, which"]),
    "tokenizer config": (  # it fails only when it is used
        lambda f: edit_config(f, "tokenizer_config.json", model_max_length="x"),
        ["tokenizer in", "cannot be read"]),
    "bad tokenizer": (lambda f: (f / "tokenizer.json").write_text('{"version": "1.0"}'),
        ["tokenizer in", "cannot be read"]),
    "T5": (lambda f: save_over(f, hf.T5ForConditionalGeneration(hf.T5Config(**T5))),
        ["Unrecognized configuration class"]),
    "BERT": (lambda f: save_over(f, hf.BertLMHeadModel(hf.BertConfig(**SIZES))),
        ["BertLMHeadModel is not a causal", "change earlier logits by"]),
}
# fmt: on


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_by_name(folder, capfd, damage):
    change, words = DAMAGES[damage]
    change(folder)
    capfd.readouterr()
    with pytest.raises(
        UnsupportedModel if damage == "BERT" else BadCheckpoint
    ) as caught:
        load(folder)
    assert all(word in str(caught.value) for word in words), caught.value
    assert "\n" not in caught.value.line
    assert capfd.readouterr() == ("", "")


def test_weights_outside_the_folder_are_not_read(folder: Path):
    index, files = sharded(folder)
    first = next(iter(files))
    outside = folder.parent / "outside.safetensors"
    outside.write_bytes((folder / files[first]).read_bytes())
    for place in ("../outside.safetensors", str(outside)):
        index.write_text(
            json.dumps({"metadata": {}, "weight_map": files | {first: place}})
        )
        with pytest.raises(BadCheckpoint, match="weights that are outside the folder"):
            load(folder)
    whole = save_tiny(folder.parent / "whole")
    edit_config(whole, transformers_weights="../outside.safetensors")
    assert load(whole)[0].num_parameters() == tiny_llama().num_parameters()


def test_an_adapter_is_added_to_its_model(folder: Path):
    model = hf.LlamaForCausalLM.from_pretrained(folder)
    adapter = folder.parent / "adapter"
    peft = pytest.importorskip("peft", MIN_PEFT_VERSION)
    model.add_adapter(
        peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    )
    model.save_pretrained(adapter)
    edit_config(adapter, "adapter_config.json", base_model_name_or_path=str(folder))
    tokens = torch.arange(20)[None]
    usual = load(folder)[0]
    expected = hf.AutoModelForCausalLM.from_pretrained(adapter)
    copies = shutil.copytree(folder, folder.parent / "both")
    for file in adapter.glob("adapter_*"):
        shutil.copy(file, copies)
    for place in (adapter, copies):
        model, tokenizer = load(place)
        assert torch.equal(model(tokens).logits, expected(tokens).logits)
        assert not torch.allclose(model(tokens).logits, usual(tokens).logits)
        assert tokenizer is not None
        assert not any(parameter.requires_grad for parameter in model.parameters())
    edit_weights(copies, lambda weights: weights.pop("model.norm.weight"))
    with pytest.raises(BadCheckpoint, match="lacks weights of LlamaForCausalLM"):
        load(copies)  # transformers does not report it
    names = [(x, f"called {x}, the model of") for x in ("acme/none", None)]
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    for model_name, words in [(str(folder), "has no adapter_model"), *names]:
        edit_config(adapter, "adapter_config.json", base_model_name_or_path=model_name)
        with pytest.raises(BadCheckpoint, match=words):
            load(adapter)


def test_a_part_of_a_split_gguf_model_is_refused_and_merged_by_the_remedy(tmp_path):
    for number in (1, 2):
        (tmp_path / f"my model-0000{number}-of-00002.gguf").touch()
    with pytest.raises(BadCheckpoint, match="is one of 2 files of a model") as refused:
        load(tmp_path / "my model-00002-of-00002.gguf")
    first = tmp_path / "my model-00001-of-00002.gguf"
    merge = f"llama-gguf-split --merge '{first}' MERGED.gguf"
    assert refused.value.parts["try"].startswith(merge)


def test_a_folder_of_several_gguf_files_names_them(tmp_path: Path):
    for name in ("tiny-Q4_0.gguf", "tiny-Q8_0.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(BadCheckpoint, match="has several GGUF files") as refused:
        load(tmp_path)
    assert refused.value.parts["seen"] == "tiny-Q4_0.gguf, tiny-Q8_0.gguf"
    assert (
        refused.value.parts["try"] == f"one of them, such as {tmp_path}/tiny-Q4_0.gguf"
    )
