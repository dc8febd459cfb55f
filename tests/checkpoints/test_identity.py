"""The identity of a model changes with its function, and with nothing else."""

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from peft import LoraConfig, get_peft_model
from tiny_checkpoints import edit_config, edit_weights, identity_of, save_tiny, tiny_llama
from torch import Tensor, nn

from ropelens.checkpoints.identity import checksum, identity
from ropelens.rotation.load import load

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of peft

SCALED = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}


def adapted(rank: int = 2, module: str = "q_proj") -> Any:
    torch.manual_seed(rank)
    config = LoraConfig(r=rank, target_modules=[module], init_lora_weights=False)
    return get_peft_model(tiny_llama(), config)


EDITS = {
    "RoPE": lambda folder: edit_config(folder, rope_parameters=SCALED),
    "weights": lambda folder: edit_weights(folder, lambda w: w["lm_head.weight"].neg_()),
    "adapter": lambda folder: adapted().save_pretrained(folder),
    "newer adapter": lambda folder: adapted(rank=3).save_pretrained(folder),
    "scale": lambda folder: edit_config(folder, "adapter_config.json", lora_alpha=32),
    "tokenizer": lambda folder: edit_config(folder, "tokenizer_config.json", bos_token="a"),
    "index": lambda folder: shutil.move(folder / "adapter_model.safetensors", folder / "a"),
}


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
    "strength": lambda m: setattr(m.base_model.model.lm_head, "scaling", {"default": 3.0}),
    "scale of attention": lambda m: setattr(m.model.layers[1].self_attn, "scaling", 0.1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_model_has_another_identity(name: str):
    changed = adapted(module="lm_head") if name == "strength" else tiny_llama()
    before = identity(changed)
    assert before == identity(copy.deepcopy(changed)), "an equal model"
    CHANGES[name](changed)
    assert identity(changed) != before


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
    folder, adapter = save_tiny(tmp_path / "model"), tmp_path / "adapter"
    assert identity(load(folder)[0]) == identity(load(folder)[0])
    of_adapter = []
    for edit in (lambda: None, lambda: EDITS["RoPE"](folder)):  # of the model that it names
        edit()
        model.save_pretrained(adapter)
        edit_config(adapter, "adapter_config.json", base_model_name_or_path=str(folder))
        of_adapter.append(identity_of(adapter))
    assert of_adapter[0] != of_adapter[1]
    assert identity(cpu_offload(tiny_llama(), offload_buffers=True)) == identities[0]


@pytest.mark.parametrize(
    "tensor",
    [
        *(torch.ones(70_000), torch.ones(3, 5).bfloat16(), torch.arange(9)),
        *(torch.ones(2).bool(), torch.ones(3, dtype=torch.complex64), torch.tensor(1.5)),
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
