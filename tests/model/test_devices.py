"""Offloaded, quantized, compiled, parallel and adapted models give the numbers of the model."""

import logging
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr
from accelerate import cpu_offload, dispatch_model
from measured import observed_calls
from tiny_checkpoints import edit_config, save_tiny, tiny_llama
from torch import nn
from transformers import LlamaForCausalLM, PreTrainedModel

import ropelens as rl
from ropelens.checkpoints.load import open_checkpoint
from ropelens.checkpoints.load_options import Loading
from ropelens.errors import BadArgument, BadCheckpoint
from ropelens.measured_rotation.load import load
from ropelens.model.as_live_model import unwrapped
from ropelens.runtime.devices import device_of, devices_of, room_for_weights

CPU = torch.device("cpu")
MAP = {"model.embed_tokens": "disk", "model.layers.0": "cpu", "model.layers.1": "disk"}
MAP |= {"model.norm": "cpu", "model.rotary_emb": "disk", "lm_head": "cpu"}
BACKWARD = ["excerpt_answer", "excerpt_lead", "excerpt_score_gradient"]
"""Variables that need a backward pass, which is impossible through offloaded weights."""
TOKENS = torch.arange(72).reshape(3, 24) * 7 % 40


@pytest.fixture(scope="module")
def plain() -> xr.Dataset:
    return rl.profile(tiny_llama().eval(), TOKENS, surrogates=0)


OFFLOADED: dict[str, Callable[[LlamaForCausalLM, Path], PreTrainedModel]] = {
    "to cpu and disk": lambda model, folder: dispatch_model(
        model, MAP, main_device="cpu", offload_dir=folder
    ),
    "with its buffers": lambda model, _: cpu_offload(model, CPU, offload_buffers=True),
}


@pytest.mark.parametrize("how", OFFLOADED)
def test_an_offloaded_model_is_measured_and_edited(
    how: str, plain: xr.Dataset, tmp_path: Path
):
    model = OFFLOADED[how](tiny_llama().eval(), tmp_path)
    assert model.device.type == "meta"
    assert devices_of(model) == [device_of(model)] == [CPU]
    xr.testing.assert_equal(
        rl.profile(model, TOKENS, surrogates=0), plain.drop_vars(BACKWARD)
    )
    own = tiny_llama().eval()
    with rl.edit_rope(model, "nope"), rl.edit_rope(own, "nope"), torch.no_grad():
        torch.testing.assert_close(model(TOKENS).logits, own(TOKENS).logits)


def test_a_checkpoint_in_shards_is_placed_by_the_device_map(plain, tmp_path, capfd):
    tiny_llama().save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    model = LlamaForCausalLM.from_pretrained(tmp_path, device_map=MAP).eval()
    on_disk = model.get_parameter("model.layers.1.mlp.up_proj.weight")
    assert (on_disk.device.type, device_of(model)) == ("meta", CPU)
    found = rl.profile(model, TOKENS, surrogates=0)
    xr.testing.assert_equal(found.drop_attrs(), plain.drop_vars(BACKWARD).drop_attrs())
    capfd.readouterr()
    model, _ = load(tmp_path, device_map="auto")
    assert (
        devices_of(model)
        == open_checkpoint(tmp_path, Loading(device_map="auto")).devices
    )
    assert capfd.readouterr() == ("", "")
    assert logging.getLogger("accelerate").level == logging.NOTSET


def test_weights_leave_room_for_a_measurement(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ropelens.runtime.devices.free_bytes", lambda _: 6 * 10**9)
    assert room_for_weights([torch.device("cuda", 1)]) == {
        1: 10**9,
        "cpu": 5_100_000_000,
    }
    monkeypatch.setattr("ropelens.runtime.devices.free_bytes", lambda _: 10**8)
    assert room_for_weights([CPU]) == {"cpu": 0}


def test_weights_beyond_the_memory_are_not_read(tmp_path, monkeypatch):
    save_tiny(tmp_path / "model")
    weights = open_checkpoint(tmp_path / "model", Loading()).weight_bytes
    monkeypatch.setattr("ropelens.checkpoints.load.free_bytes", lambda _: weights - 1)
    with pytest.raises(
        BadArgument, match=r"(?s)memory of cpu.*0\.0 GB free.*device_map auto"
    ):
        load(tmp_path / "model", device="cpu")
    monkeypatch.setattr("ropelens.checkpoints.load.free_bytes", lambda _: weights)
    load(tmp_path / "model", device="cpu")


def test_weights_are_counted_in_the_dtype_of_the_file_or_the_option(tmp_path: Path):
    folder = save_tiny(tmp_path / "model")
    tiny_llama().to(torch.bfloat16).save_pretrained(folder)
    numbers = open_checkpoint(folder, Loading()).parameters
    edit_config(folder, dtype=None, quantization_config=None)
    assert open_checkpoint(folder, Loading(dtype="float32")).weight_bytes == 4 * numbers
    assert open_checkpoint(folder, Loading(quantize="int8")).weight_bytes == numbers
    edit_config(folder, quantization_config={"quant_method": "gptq", "bits": 4})
    saved = (folder / "model.safetensors").stat().st_size
    assert open_checkpoint(folder, Loading()).weight_bytes == saved


@pytest.mark.skipif(
    find_spec("bitsandbytes") is not None, reason="bitsandbytes is installed"
)
def test_a_missing_package_is_named():
    with pytest.raises(BadCheckpoint, match=r"requires bitsandbytes: `pip install"):
        load("bundled", quantize="bnb-nf4")


@pytest.mark.filterwarnings("ignore")  # warnings of torchao
def test_weights_of_eight_bits_give_nearly_the_same_numbers(
    plain: xr.Dataset, tmp_path: Path
):
    pytest.importorskip("torchao")
    folder, saved = save_tiny(tmp_path / "model"), tmp_path / "saved"
    model = load(folder, quantize="int8", device="cpu")[0]
    weight = model.get_parameter("model.layers.0.self_attn.q_proj.weight")
    assert (type(weight).__name__, model.dtype) == ("Int8Tensor", torch.float32)
    found = rl.profile(model, TOKENS, surrogates=0)
    for name in ("q_norm", "selectivity", "total_bits"):
        error = np.abs(found[name] - plain[name]).max() / np.abs(plain[name]).max()
        assert 0 < error < 0.05
    written = rl.capture(model, TOKENS[:1], heads="1.*", values=True)
    projection = model.get_parameter(
        "model.layers.1.self_attn.o_proj.weight"
    ).dequantize()
    value = observed_calls(model, TOKENS[:1])[1][0].value
    for head, weight in enumerate(
        projection.chunk(model.config.num_attention_heads, dim=1)
    ):
        own = value[0, head * value.shape[1] // model.config.num_attention_heads]
        norms = (own @ weight.mT).norm(dim=-1)
        np.testing.assert_allclose(written["write_norm"][head], norms, rtol=1e-5)
    model.save_pretrained(saved)
    again, _ = load(saved)
    again_profile = rl.profile(again, TOKENS, surrogates=0).drop_attrs()
    xr.testing.assert_allclose(again_profile, found.drop_attrs())


@pytest.mark.gpu
@pytest.mark.parametrize(("second", "gpus"), [(1, 2), ("cpu", 1)])
def test_layers_are_summed_on_the_gpu_that_computes_them(plain, tmp_path, second, gpus):
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"fewer than {gpus} CUDA devices")
    save_tiny(tmp_path / "model")
    places = dict.fromkeys(MAP, 0) | {"model.layers.1": second, "lm_head": gpus - 1}
    model = LlamaForCausalLM.from_pretrained(
        tmp_path / "model", device_map=places
    ).eval()
    assert [str(device) for device in devices_of(model)] == ["cuda:0", "cuda:1"][:gpus]
    seen: list[torch.device] = []
    with (
        rl.observe(model, lambda call, _: seen.append(call.key.device)),
        torch.no_grad(),
    ):
        model(TOKENS.to("cuda:0"))
    assert [device.index for device in seen] == [0, gpus - 1]
    found = rl.profile(model, TOKENS, surrogates=0)
    np.testing.assert_allclose(found["selectivity"], plain["selectivity"], atol=1e-3)


def compiled_in_place(model: PreTrainedModel) -> nn.Module:
    model.compile(backend="eager")
    return model


class LanguageModel:
    def __init__(self, model: PreTrainedModel) -> None:
        self._module = model

    def __call__(self, tokens: torch.Tensor):
        return self._module(tokens)


WRAPPED: dict[str, Callable[[PreTrainedModel], nn.Module]] = {
    "compiled": lambda model: torch.compile(model, backend="eager"),  # type: ignore[return-value]
    "compiled in place": compiled_in_place,
    "data parallel": nn.DataParallel,
    "nnsight": LanguageModel,  # type: ignore[dict-item]
}


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")  # warnings of torch.compile
@pytest.mark.parametrize("name", WRAPPED)
def test_a_wrapper_is_measured_and_edited_like_its_model(name: str):
    plain, model = (tiny_llama().eval().requires_grad_(False) for _ in range(2))
    wrapped, tokens = WRAPPED[name](model), torch.randint(40, (3, 24))
    assert unwrapped(wrapped) is model
    if name == "compiled":
        assert unwrapped(nn.DataParallel(wrapped)) is model
    wrapped(tokens)  # traced without an observer
    for options in ({"budget": False}, {"surrogates": 0} if name == "compiled" else {}):
        expected, found = (rl.profile(x, tokens, **options) for x in (plain, wrapped))
        xr.testing.assert_equal(found, expected)
    xr.testing.assert_equal(rl.measure_rope(wrapped), rl.measure_rope(plain))
    seen: list[int] = []
    with rl.edit_rope(plain, "nope"):
        edited = plain(tokens).logits
    with (
        rl.edit_rope(wrapped, "nope"),
        rl.observe(wrapped, lambda c, _: seen.append(c.layer)),
    ):
        torch.testing.assert_close(wrapped(tokens).logits, edited)
    assert seen == [0, 1]
    with rl.silence_heads(wrapped, "0.1"):
        assert not torch.allclose(wrapped(tokens).logits, plain(tokens).logits)
    torch.testing.assert_close(wrapped(tokens).logits, plain(tokens).logits)
    assert rl.capture(wrapped, tokens[0], heads="0.0").sizes["head"] == 1


def test_the_error_for_other_objects_states_what_to_pass():
    with pytest.raises(
        rl.BadArgument, match="the _module of an nnsight or nnterp model"
    ):
        rl.measure_rope(object())  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore")  # warnings of peft
def test_adapters_are_measured_with_their_model():
    peft = pytest.importorskip("peft")
    model, tokens = tiny_llama().eval(), torch.randint(40, (3, 24))
    plain = rl.profile(model, tokens, budget=False)
    torch.manual_seed(1)
    settings = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, settings).eval()
    found = rl.profile(adapted, tokens, budget=False)
    assert abs(found["q_norm"] - plain["q_norm"]).max() > 1e-3
    again = rl.profile(adapted.merge_and_unload(), tokens, budget=False)
    xr.testing.assert_allclose(found["q_norm"], again["q_norm"], rtol=1e-4)
    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    tuned = peft.get_peft_model(tiny_llama(), prompts)
    with pytest.raises(
        rl.UnsupportedModel, match=r"trained tokens(.|\n)*get_base_model\(\)"
    ):
        rl.profile(tuned, tokens)
