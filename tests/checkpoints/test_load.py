"""Loading of valid and bundled checkpoints, refused arguments, and the identity of a model."""

import copy
import functools
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from only_in_repository import repository_path
from oracles.versions import skip_before
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from tiny_checkpoints import (
    edit_config,
    edit_weights,
    identity_of,
    save_over,
    save_tiny,
    tiny_llama,
)
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

import ropelens as rl
from ropelens.checkpoints.bundled import BUNDLED, bundled_path, sample_path
from ropelens.checkpoints.identity import checksum, identity
from ropelens.checkpoints.load import open_checkpoint
from ropelens.checkpoints.load_options import Loading
from ropelens.checkpoints.locate import locate
from ropelens.checkpoints.names import short_name
from ropelens.config_facts import stated_context
from ropelens.errors import BadArgument, BadCheckpoint
from ropelens.measured_rotation.load import load


def test_a_folder_gives_the_saved_model_ready_to_measure(folder, capfd):
    before = torch.random.get_rng_state()
    model, tokenizer = load(folder)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert capfd.readouterr() == ("", "")
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        torch.testing.assert_close(
            model(tokens).logits, tiny_llama().eval()(tokens).logits
        )
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
        (
            {"revision": "main"},
            "has no revision main, because it is a local checkpoint",
        ),
    ],
)
def test_an_impossible_argument_is_refused(
    folder: Path, arguments: dict[str, Any], words: str
):
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
    with pytest.warns(
        UserWarning, match=r"does not use 9 tensors .*: model\.layers\.1\."
    ):
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
def test_float8_becomes_numbers_that_a_processor_computes_with(
    folder: Path, dtype: str
):
    skip_before("transformers", "5.9", "needs triton to read float8")
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
    usual = load(folder.parent / "plain", dtype=dtype)[0]
    tokens = torch.arange(2, 22)[None]
    model, _ = load(folder, dtype=dtype)
    assert torch.equal(model(tokens).logits, usual(tokens).logits)
    assert (
        rl.profile(model, tokens, surrogates=0).attrs["dtype"] == str(usual.dtype)[6:]
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU may compute in float8")
@pytest.mark.parametrize("stated", [None, {"quant_method": "fp8"}])
def test_float8_weights_without_their_scales_are_refused(
    folder: Path, stated: dict | None
):
    def scale(weights: dict[str, torch.Tensor], value: float) -> None:
        for name in [name for name in weights if name.endswith("_proj.weight")]:
            weights[name] = (weights[name].float() / value).to(torch.float8_e4m3fn)
            weights[f"{name}_scale"] = torch.tensor(value)

    skip_before("transformers", "5.12", "needs triton to read float8")
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
    folder = repository_path(f"ropelens/bundled/{name}/README.md").parent
    assert sum(p.stat().st_size for p in folder.rglob("*")) <= 6_000_000
    card = (folder / "README.md").read_text()
    assert "public-domain" in card
    assert "license: mit" in card
    assert "/work" not in card
    lines = sample_path(f"bundled:{name}").read_text(encoding="utf-8").splitlines()
    lengths = [
        len(bundled_tokenizer(name)(json.loads(x)["text"]).input_ids) for x in lines
    ]
    assert len(lengths) >= 48
    assert set(lengths) == {512}, "a document is one context"


@pytest.mark.parametrize("name", [name for name in BUNDLED if "-step-" not in name])
def test_bundled_predicts_and_writes(name: str):
    folder = repository_path(f"ropelens/bundled/{name}/README.md").parent
    tokenizer = bundled_tokenizer(name)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype="float32", local_files_only=True
    )
    assert sum(p.numel() for p in model.parameters()) > 2_000_000
    assert model.config.head_dim == 32
    turning = int((model.model.rotary_emb.inv_freq != 0).sum())
    assert f"{turning} of 16 planes turn" in (folder / "README.md").read_text()
    tokens = tokenizer(PASSAGE, return_tensors="pt").input_ids
    # 1.6 million of 13 million training tokens were prose.
    share = 0.56 if name in ("rope", "p-rope-0.75", "p-rope-0.25") else 0.68
    assert model(input_ids=tokens, labels=tokens).loss < share * math.log(
        len(tokenizer)
    )


peft_warns = pytest.mark.filterwarnings("ignore")
SCALED = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}


def adapted(rank: int = 2, module: str = "q_proj") -> Any:
    torch.manual_seed(rank)
    config = LoraConfig(r=rank, target_modules=[module], init_lora_weights=False)
    return get_peft_model(tiny_llama(), config)


EDITS = {
    "RoPE": lambda folder: edit_config(folder, rope_parameters=SCALED),
    "weights": lambda folder: edit_weights(
        folder, lambda w: w["lm_head.weight"].neg_()
    ),
    "adapter": lambda folder: adapted().save_pretrained(folder),
    "newer adapter": lambda folder: adapted(rank=3).save_pretrained(folder),
    "scale": lambda folder: edit_config(folder, "adapter_config.json", lora_alpha=32),
    "tokenizer": lambda folder: edit_config(
        folder, "tokenizer_config.json", bos_token="a"
    ),
    "index": lambda folder: shutil.move(
        folder / "adapter_model.safetensors", folder / "a"
    ),
}


@peft_warns
def test_a_changed_file_changes_the_identity(tmp_path: Path):
    folder = save_tiny(tmp_path / "model")
    identities = [identity_of(folder, **how) for how in ({}, {"dtype": "bfloat16"})]
    identities.append(identity_of(folder, quantize="int8"))
    for edit in EDITS.values():
        edit(folder)
        identities.append(identity_of(folder))
    for text in ("x = 1", "x = 2"):
        (folder / "modeling.py").write_text(text)
        (folder / "README.md").write_text(text)
        edit_config(folder, "generation_config.json", top_k=len(identities))
        identities.append(identity_of(folder, trust_remote_code=True))
    assert len(set(identities)) == len(identities)
    assert identity_of(folder) == identities[-3]
    assert identity_of(shutil.copytree(folder, tmp_path / "copy")) == identities[-3]


def swap_rows(model: Any) -> None:
    weight = model.lm_head.weight.data
    weight[[0, 1]] = weight[[1, 0]]


CHANGES = {
    "buffer": lambda m: m.model.rotary_emb.inv_freq.neg_(),
    "order of rows": swap_rows,
    "two signs": lambda m: m.lm_head.weight.data[0, :2].neg_(),
    "one bit": lambda m: m.lm_head.weight.data.view(torch.int32)[3, 3].bitwise_xor_(1),
    "dtype": lambda m: m.to(torch.float64),
    "configuration": lambda m: m.config.rope_parameters.update(SCALED),
    "class": lambda m: setattr(m.model.layers[0], "mlp", nn.Identity()),
    "strength": lambda m: setattr(
        m.base_model.model.lm_head, "scaling", {"default": 3.0}
    ),
    "scale of attention": lambda m: setattr(
        m.model.layers[1].self_attn, "scaling", 0.1
    ),
}


@peft_warns
@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_model_has_another_identity(name: str):
    changed = adapted(module="lm_head") if name == "strength" else tiny_llama()
    before = identity(changed)
    assert before == identity(copy.deepcopy(changed)), "an equal model"
    CHANGES[name](changed)
    assert identity(changed) != before


@peft_warns
def test_an_adapter_counts_as_it_is_used(tmp_path: Path):
    model = adapted()
    identities = [identity(tiny_llama()), identity(model)]
    with model.disable_adapter():
        identities.append(identity(model))
    model.merge_adapter()
    identities.append(identity(model))
    assert len(set(identities)) == 4
    model = adapted()
    assert identity(model) == identities[1]
    folder = save_tiny(tmp_path / "model")
    adapter = tmp_path / "adapter"
    assert identity(load(folder)[0]) == identity(load(folder)[0])
    of_adapter = []
    for edit in (
        lambda: None,
        lambda: EDITS["RoPE"](folder),
    ):  # of the model that it names
        edit()
        model.save_pretrained(adapter)
        edit_config(adapter, "adapter_config.json", base_model_name_or_path=str(folder))
        of_adapter.append(identity_of(adapter))
    assert of_adapter[0] != of_adapter[1]
    assert identity(cpu_offload(tiny_llama(), offload_buffers=True)) == identities[0]


@pytest.mark.filterwarnings("ignore:Casting complex")
@pytest.mark.parametrize(
    "tensor",
    [
        *(torch.ones(70_000), torch.ones(3, 5).bfloat16(), torch.arange(9)),
        *(
            torch.ones(2).bool(),
            torch.ones(3, dtype=torch.complex64),
            torch.tensor(1.5),
        ),
        torch.zeros(0, 2),
    ],
    ids=lambda tensor: f"{tensor.dtype} {tuple(tensor.shape)}",
)
def test_the_checksum_covers_shape_dtype_and_order(tensor: Tensor):
    same = checksum(tensor.clone())
    assert checksum(tensor) == same
    assert checksum(tensor[None]) != same
    assert checksum(tensor.to(torch.float16)) != same
    wide = torch.stack([tensor, tensor], -1)[..., 0]  # not contiguous
    assert checksum(wide) == same
    if tensor.numel() > 1:
        other = tensor.clone()
        other.view(-1)[-1] = 0
        assert len({same, checksum(other), checksum(other.flip(0))}) == 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_checksum_is_equal_on_a_gpu():
    torch.manual_seed(0)
    tensor = torch.randn(2**22 + 5)
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        assert checksum(tensor.to(dtype)) == checksum(tensor.to(dtype).cuda())
