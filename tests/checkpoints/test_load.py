"""Loading of valid checkpoints, also of bundled checkpoints, and refused arguments."""

import functools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny_checkpoints import edit_config, edit_weights, save_over, tiny_llama
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

import ropelens as rl
from ropelens.checkpoints.bundled import BUNDLED, bundled_path, sample_path
from ropelens.checkpoints.files import locate
from ropelens.checkpoints.load import open_checkpoint
from ropelens.checkpoints.load_options import Loading
from ropelens.checkpoints.names import short_name
from ropelens.config_facts import stated_context
from ropelens.errors import BadArgument, BadCheckpoint
from ropelens.rotation.load import load


def test_a_folder_gives_the_saved_model_ready_to_measure(folder, capfd):
    before = torch.random.get_rng_state()
    model, tokenizer = load(folder)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert capfd.readouterr() == ("", "")
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, tiny_llama().eval()(tokens).logits)
    assert isinstance(model, LlamaForCausalLM)
    assert model.dtype is torch.float32
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert model.config._name_or_path == str(folder)
    assert stated_context(model.config) == 64
    assert tokenizer is not None
    assert tokenizer("abc", add_special_tokens=False)["input_ids"] == [2, 3, 4]


def test_dtype_is_the_requested_dtype(folder: Path):
    save_over(folder, tiny_llama().to(torch.bfloat16))
    model, _ = load(folder, dtype="float64", device="cpu")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}


def test_files_other_than_weights_are_not_needed(folder: Path):
    (folder / "pytorch_model.bin").write_bytes(b"not even a pickle")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    model, tokenizer = load(folder, dtype="auto", device="cpu")
    assert tokenizer is None
    assert model.dtype is torch.float32


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"dtype": "int8"}, "load: dtype must be .*'float32', 'float16', 'bfloat16'"),
        ({"device": "gpu"}, "The device 'gpu' does not exist.*auto, cpu, cuda"),
        ({"device": "meta"}, "The device 'meta' does not exist"),
        ({"device_map": "car"}, "load: device_map must be .*'auto'"),
        ({"device_map": "auto", "device": "cpu"}, "Both a device and a device map"),
        ({"revision": "main"}, "has no revision main, because it is a local checkpoint"),
    ],
)
def test_an_impossible_argument_is_refused(folder: Path, arguments: dict[str, Any], words: str):
    with pytest.raises(BadArgument) as caught:
        load(folder, **arguments)
    assert caught.match(f"(?s){words}")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_is_used_if_it_is_available(folder: Path):
    model, _ = load(folder)
    assert model.device.type == "cuda"
    assert model.dtype is torch.float32
    assert load(folder, dtype="auto")[0].dtype is torch.bfloat16
    with pytest.raises(BadArgument, match="'cuda:99' does not exist"):
        load(folder, device="cuda:99")


def test_tensors_that_the_model_does_not_use_are_named(folder: Path):
    edit_config(folder, num_hidden_layers=1)
    with pytest.warns(UserWarning, match=r"does not use 9 tensors .*: model\.layers\.1\."):
        load(folder)


def test_the_bundled_checkpoint_goes_by_its_name():
    whole = f"bundled:{next(iter(BUNDLED))}"
    for name in ("bundled", whole):
        model, tokenizer = load(name)
        assert model.config._name_or_path == whole
        assert tokenizer is not None
        assert locate(name, Loading()).path == bundled_path()
    planned = open_checkpoint("bundled", Loading())
    assert planned.parameters == model.num_parameters(), "tied weights count once"


@pytest.mark.parametrize(
    ("place", "shown"),
    [
        ("my-llama", "my-llama"),
        ("tiny/p-rope-0.75/seed-0", "p-rope-0.75 seed-0"),
        ("tiny/nope/seed-12/history/step-000256", "nope seed-12 step-000256"),
        ("seed-me", "seed-me"),
    ],
)
def test_runs_of_a_study_are_told_apart(tmp_path: Path, place: str, shown: str):
    (tmp_path / place).mkdir(parents=True)
    assert short_name(str(tmp_path / place)) == shown


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU may compute in float8")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_float8_becomes_numbers_that_a_processor_computes_with(folder: Path, dtype: str):
    plain = tiny_llama().to(torch.bfloat16)
    weights = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    for name in [name for name in weights if "_proj" in name]:
        weights[name] = weights[name].to(torch.float8_e4m3fn)
        plain.get_parameter(name).data = weights[name].to(torch.bfloat16)
        weights[f"{name}_scale_inv"] = torch.ones(1, 1)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    stated = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    edit_config(folder, dtype="bfloat16", quantization_config=stated)
    plain.save_pretrained(folder.parent / "plain")
    usual, tokens = load(folder.parent / "plain", dtype=dtype)[0], torch.arange(2, 22)[None]
    model, _ = load(folder, dtype=dtype)
    assert torch.equal(model(tokens).logits, usual(tokens).logits)
    assert rl.profile(model, tokens, surrogates=0).attrs["dtype"] == str(usual.dtype)[6:]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU may compute in float8")
@pytest.mark.parametrize("stated", [None, {"quant_method": "fp8"}])
def test_float8_weights_without_their_scales_are_refused(folder: Path, stated: dict | None):
    def scale(weights: dict[str, torch.Tensor], value: float) -> None:
        for name in [name for name in weights if name.endswith("_proj.weight")]:
            weights[name] = (weights[name].float() / value).to(torch.float8_e4m3fn)
            weights[f"{name}_scale"] = torch.tensor(value)

    edit_config(folder, quantization_config=stated)
    edit_weights(folder, lambda weights: scale(weights, 1.0))
    with pytest.warns(UserWarning, match="does not use 14 tensors"):
        load(folder)  # scales of 1 change nothing
    edit_weights(folder, lambda weights: scale(weights, 0.5))
    with pytest.raises(BadCheckpoint, match="nothing multiplies them by their scales"):
        load(folder)


# Written for this test, in the style of the training text.
PASSAGE = """\
The old gentleman put down his hat upon the table, and looked at her for a long time without
speaking. "You have been very good to me, my dear," he said at last, "and I shall not forget
it; but I am afraid that I must go away to London in the morning." She did not answer him. The
fire had burned low, and there was no sound in the room but the ticking of the clock upon the
wall. "Will you come back again?" she asked, in a low voice, and her hand trembled a little.
"""


@functools.cache
def bundled_tokenizer(name: str = "rope") -> Any:
    return AutoTokenizer.from_pretrained(bundled_path(name), local_files_only=True)


@pytest.mark.parametrize("name", BUNDLED)
def test_bundled_is_small_and_described(name: str):
    folder = bundled_path(name)
    assert sum(p.stat().st_size for p in folder.rglob("*")) <= 6_000_000
    card = (folder / "README.md").read_text()
    assert "public-domain" in card
    assert "license: mit" in card
    assert "/work" not in card
    lines = sample_path(name).read_text(encoding="utf-8").splitlines()
    lengths = [len(bundled_tokenizer(name)(json.loads(x)["text"]).input_ids) for x in lines]
    assert len(lengths) >= 48
    assert set(lengths) == {512}, "a document is one context"


@pytest.mark.parametrize("name", [name for name in BUNDLED if "-step-" not in name])
def test_bundled_predicts_and_writes(name: str):
    folder, tokenizer = bundled_path(name), bundled_tokenizer(name)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32", local_files_only=True)
    assert sum(p.numel() for p in model.parameters()) > 2_000_000
    assert model.config.head_dim == 32
    turning = int((model.model.rotary_emb.inv_freq != 0).sum())
    assert f"{turning} of 16 planes turn" in (folder / "README.md").read_text()
    tokens = tokenizer(PASSAGE, return_tensors="pt").input_ids
    # 1.6 million of 13 million training tokens were prose.
    share = 0.56 if name in ("rope", "p-rope-0.75", "p-rope-0.25") else 0.68
    assert model(input_ids=tokens, labels=tokens).loss < share * math.log(len(tokenizer))
