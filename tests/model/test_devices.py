"""Offloaded, quantized, compiled, parallel and adapted models give the numbers of the model."""

import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import xarray as xr
from accelerate import cpu_offload, dispatch_model
from oracles.tiny import random_tokens
from small_measurements import observed_calls
from tiny_checkpoints import edit_config, save_tiny, tiny_llama
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

import ropelens as rl
from ropelens.analysis.plan import plan_analysis
from ropelens.attention.call import AttentionCall
from ropelens.budget.surrogates import DRAWS
from ropelens.checkpoints.load import open_checkpoint
from ropelens.checkpoints.load_options import Loading
from ropelens.errors import BadArgument
from ropelens.measured_rotation.load import load
from ropelens.model.as_live_model import unwrapped
from ropelens.runtime.devices import device_of, devices_of, room_for_weights

CPU = torch.device("cpu")
MAP: dict[str, str | int] = {
    "model.embed_tokens": "disk",
    "model.layers.0": "cpu",
    "model.layers.1": "disk",
    "model.norm": "cpu",
    "model.rotary_emb": "disk",
    "lm_head": "cpu",
}
BACKWARD = ["excerpt_answer", "excerpt_lead", "excerpt_score_gradient"]
"""Variables that need a backward pass, which is impossible through offloaded weights."""
TOKENS = torch.arange(72).reshape(3, 24) * 7 % 40


@pytest.fixture(scope="module")
def plain() -> xr.Dataset:
    return rl.profile(tiny_llama().eval(), TOKENS, surrogates=0)


def on_cpu_and_disk(model: LlamaForCausalLM, folder: Path) -> PreTrainedModel:
    return dispatch_model(model, MAP, main_device="cpu", offload_dir=folder)


def with_its_buffers(model: LlamaForCausalLM, _: Path) -> PreTrainedModel:
    return cpu_offload(model, CPU, offload_buffers=True)


OFFLOADED: dict[str, Callable[[LlamaForCausalLM, Path], PreTrainedModel]] = {
    "to cpu and disk": on_cpu_and_disk,
    "with its buffers": with_its_buffers,
}


@pytest.mark.parametrize("how", OFFLOADED)
def test_an_offloaded_model_is_measured_and_edited(
    how: str, plain: xr.Dataset, tmp_path: Path
):
    model = OFFLOADED[how](tiny_llama().eval(), tmp_path)
    assert model.device.type == "meta"
    assert devices_of(model) == [device_of(model)] == [CPU]
    profile = rl.profile(model, TOKENS, surrogates=0)
    xr.testing.assert_equal(profile, plain.drop_vars(BACKWARD))
    own = tiny_llama().eval()
    with rl.edit_rope(model, "nope"), rl.edit_rope(own, "nope"), torch.no_grad():
        edited = model(TOKENS)
        expected = own(TOKENS)
    torch.testing.assert_close(edited.logits, expected.logits)


def test_a_checkpoint_in_shards_is_placed_by_the_device_map(plain, tmp_path):
    tiny_llama().save_pretrained(tmp_path, max_shard_size="20KB")
    shards = list(tmp_path.glob("*.safetensors"))
    assert len(shards) > 1
    model = LlamaForCausalLM.from_pretrained(tmp_path, device_map=MAP).eval()
    on_disk = model.get_parameter("model.layers.1.mlp.up_proj.weight")
    assert on_disk.device.type == "meta"
    assert device_of(model) == CPU
    profile = rl.profile(model, TOKENS, surrogates=0).drop_attrs()
    expected = plain.drop_vars(BACKWARD).drop_attrs()
    xr.testing.assert_equal(profile, expected)


def test_a_device_map_is_chosen_without_a_message(tmp_path, capfd):
    tiny_llama().save_pretrained(tmp_path, max_shard_size="20KB")
    capfd.readouterr()
    model, _ = load(tmp_path, device_map="auto")
    planned = open_checkpoint(tmp_path, Loading(device_map="auto"))
    assert devices_of(model) == planned.devices
    assert capfd.readouterr() == ("", "")
    assert logging.getLogger("accelerate").level == logging.NOTSET


def test_weights_leave_room_for_a_measurement(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ropelens.runtime.devices.free_bytes", lambda _: 6 * 10**9)
    room = room_for_weights([torch.device("cuda", 1)])
    assert room == {1: 10**9, "cpu": 5_120_000_000}
    monkeypatch.setattr("ropelens.runtime.devices.free_bytes", lambda _: 10**8)
    assert room_for_weights([CPU]) == {"cpu": 0}


def test_weights_beyond_the_memory_are_not_read(tmp_path, monkeypatch):
    folder = save_tiny(tmp_path / "model")
    weights = open_checkpoint(folder, Loading()).weight_bytes
    read = mock.Mock(side_effect=LlamaForCausalLM.from_pretrained)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", read)
    set_free_memory(monkeypatch, weights - 1)
    words = r"(?s)memory of cpu.*in torch.float32 takes 0\.0 GB, and 0\.0 GB are free"
    with pytest.raises(BadArgument, match=words):
        load(folder, device="cpu")
    assert not read.called
    set_free_memory(monkeypatch, weights)
    load(folder, device="cpu")
    assert read.called


def set_free_memory(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr("ropelens.checkpoints.load.free_bytes", lambda _: free)
    monkeypatch.setattr("ropelens.analysis.workload.free_bytes", lambda _: free)


@pytest.fixture
def in_bfloat16(tmp_path: Path) -> Path:
    """A checkpoint of 0.1 GB in bfloat16."""
    config = LlamaConfig(
        vocab_size=2**15,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=8,
        max_position_embeddings=64,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "in_bfloat16")
    return tmp_path / "in_bfloat16"


def test_memory_while_weights_are_read(in_bfloat16: Path):
    """The mapped file is in memory next to weights of another dtype."""
    same = open_checkpoint(in_bfloat16, Loading(dtype="bfloat16", device="cpu"))
    size = (in_bfloat16 / "model.safetensors").stat().st_size
    assert same.loading_bytes == pytest.approx(size, rel=1e-3)
    larger = open_checkpoint(in_bfloat16, Loading(device="cpu"))
    assert larger.loading_bytes == pytest.approx(3 * size, rel=1e-3)


PEAK_OF_LOADING = """
import sys
from pathlib import Path
from ropelens.checkpoints.load import open_checkpoint
from ropelens.checkpoints.load_options import Loading

def largest_memory():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return 1024 * int(line.split()[1])

opened = open_checkpoint(sys.argv[1], Loading(dtype=sys.argv[2], device="cpu"))
before = largest_memory()
opened.read()
print(largest_memory() - before, opened.loading_bytes)
"""


@pytest.mark.thorough
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_predicted_memory_is_the_measured_memory(in_bfloat16: Path, dtype: str):
    command = [sys.executable, "-c", PEAK_OF_LOADING, str(in_bfloat16), dtype]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    measured, predicted = map(int, ended.stdout.split())
    assert measured == pytest.approx(predicted, rel=0.1, abs=40e6)


def test_bfloat16_is_a_remedy_only_if_it_fits(in_bfloat16: Path, monkeypatch):
    size = (in_bfloat16 / "model.safetensors").stat().st_size
    # The system can drop the mapped file, but not the weights.
    set_free_memory(monkeypatch, 2 * size)
    load(in_bfloat16, device="cpu")
    set_free_memory(monkeypatch, 3 * size // 2)
    with pytest.raises(BadArgument) as refused:
        load(in_bfloat16, device="cpu")
    assert "--dtype bfloat16" in refused.value.parts["try"]
    load(in_bfloat16, device="cpu", dtype="bfloat16")

    set_free_memory(monkeypatch, size // 2)
    for dtype in ("float32", "bfloat16"):
        with pytest.raises(BadArgument) as refused:
            load(in_bfloat16, device="cpu", dtype=dtype)
        assert "bfloat16" not in refused.value.parts["try"]
        assert "device_map" in refused.value.parts["try"]


def test_a_plan_warns_of_weights_that_do_not_fit(in_bfloat16: Path, monkeypatch):
    size = (in_bfloat16 / "model.safetensors").stat().st_size
    ids = random_tokens(length=24)
    set_free_memory(monkeypatch, 3 * size // 2)
    with pytest.warns(
        UserWarning, match="the weights do not fit; use --dtype bfloat16"
    ):
        plan_analysis(in_bfloat16, ids, rl.Options(device="cpu"))
    set_free_memory(monkeypatch, size // 2)
    with pytest.warns(UserWarning, match="the weights do not fit; use another device"):
        plan_analysis(in_bfloat16, ids, rl.Options(device="cpu"))


def test_weights_are_counted_in_the_dtype_of_the_file_or_the_option(tmp_path: Path):
    folder = save_tiny(tmp_path / "model")
    tiny_llama().to(torch.bfloat16).save_pretrained(folder)
    parameters = open_checkpoint(folder, Loading()).parameters
    edit_config(folder, dtype=None, quantization_config=None)
    in_float32 = open_checkpoint(folder, Loading(dtype="float32"))
    assert in_float32.weight_bytes == 4 * parameters
    in_int8 = open_checkpoint(folder, Loading(quantize="int8"), used=False)
    assert in_int8.weight_bytes == parameters
    edit_config(folder, quantization_config={"quant_method": "gptq", "bits": 4})
    as_saved = open_checkpoint(folder, Loading())
    assert as_saved.weight_bytes == (folder / "model.safetensors").stat().st_size


@pytest.mark.filterwarnings("ignore")  # warnings of torchao
def test_weights_of_eight_bits_give_nearly_the_same_numbers(
    plain: xr.Dataset, tmp_path: Path
):
    pytest.importorskip("torchao")
    folder = save_tiny(tmp_path / "model")
    model, _ = load(folder, quantize="int8", device="cpu")
    weight = model.get_parameter("model.layers.0.self_attn.q_proj.weight")
    assert type(weight).__name__ == "Int8Tensor"
    assert model.dtype == torch.float32
    profile = rl.profile(model, TOKENS, surrogates=0)
    for name in ("q_norm", "selectivity", "total_bits"):
        difference = np.abs(profile[name] - plain[name]).max()
        assert 0 < difference / np.abs(plain[name]).max() < 0.05
    assert_write_norms(model)
    saved = tmp_path / "saved"
    model.save_pretrained(saved)
    again, _ = load(saved)
    again_profile = rl.profile(again, TOKENS, surrogates=0).drop_attrs()
    xr.testing.assert_allclose(again_profile, profile.drop_attrs())


def assert_write_norms(model: PreTrainedModel) -> None:
    """A head writes its values times its columns of the output projection."""
    written = rl.capture(model, TOKENS[:1], heads="1.*", values=True)["write_norm"]
    weight = model.get_parameter("model.layers.1.self_attn.o_proj.weight")
    heads = model.config.num_attention_heads
    columns = weight.dequantize().chunk(heads, dim=1)
    call, _ = observed_calls(model, TOKENS[:1])[1]
    group = heads // call.value.shape[1]  # heads that share a value
    for head in range(heads):
        value = call.value[0, head // group]
        expected = (value @ columns[head].mT).norm(dim=-1)
        np.testing.assert_allclose(written[head], expected, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(("second", "gpus"), [(1, 2), ("cpu", 1)])
def test_layers_are_summed_on_the_gpu_that_computes_them(plain, tmp_path, second, gpus):
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"fewer than {gpus} CUDA devices")
    folder = save_tiny(tmp_path / "model")
    places: dict[str, str | int] = dict.fromkeys(MAP, 0)
    places["model.layers.1"] = second
    places["lm_head"] = gpus - 1
    model = LlamaForCausalLM.from_pretrained(folder, device_map=places).eval()
    assert [str(device) for device in devices_of(model)] == ["cuda:0", "cuda:1"][:gpus]
    seen: list[int | None] = []

    def note(call: AttentionCall, _: object) -> None:
        seen.append(call.key.device.index)

    with rl.observe(model, note), torch.no_grad():
        model(TOKENS.to("cuda:0"))
    assert seen == [0, gpus - 1]
    profile = rl.profile(model, TOKENS, surrogates=0)
    np.testing.assert_allclose(profile["selectivity"], plain["selectivity"], atol=1e-3)


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
    plain = tiny_llama().eval().requires_grad_(False)
    model = tiny_llama().eval().requires_grad_(False)
    wrapped = WRAPPED[name](model)
    tokens = torch.randint(40, (3, 24))
    assert unwrapped(wrapped) is model
    if name == "compiled":
        assert unwrapped(nn.DataParallel(wrapped)) is model
    wrapped(tokens)  # traced without an observer
    assert_same_measurements(wrapped, plain, tokens, quick=name == "compiled")
    assert_same_edit(wrapped, plain, tokens)


def assert_same_measurements(
    wrapped: nn.Module, plain: nn.Module, tokens: torch.Tensor, *, quick: bool
) -> None:
    surrogates = 0 if quick else DRAWS
    for budget in (False, True):
        expected = rl.profile(plain, tokens, budget=budget, surrogates=surrogates)
        profile = rl.profile(wrapped, tokens, budget=budget, surrogates=surrogates)
        xr.testing.assert_equal(profile, expected)
    xr.testing.assert_equal(rl.measure_rope(wrapped), rl.measure_rope(plain))
    assert rl.capture(wrapped, tokens[0], heads="0.0").sizes["head"] == 1


def assert_same_edit(
    wrapped: nn.Module, plain: nn.Module, tokens: torch.Tensor
) -> None:
    layers: list[int] = []
    observer = rl.observe(wrapped, lambda call, _: layers.append(call.layer))
    with rl.edit_rope(plain, "nope"):
        expected = plain(tokens).logits
    with rl.edit_rope(wrapped, "nope"), observer:
        edited = wrapped(tokens).logits
    torch.testing.assert_close(edited, expected)
    assert layers == [0, 1]
    unedited = plain(tokens).logits
    with rl.silence_heads(wrapped, "0.1"):
        silenced = wrapped(tokens).logits
    assert not torch.allclose(silenced, unedited)
    torch.testing.assert_close(wrapped(tokens).logits, unedited)


def test_the_error_for_other_objects_states_what_to_pass():
    words = "the _module of an nnsight or nnterp model"
    with pytest.raises(rl.BadArgument, match=words):
        rl.measure_rope(object())  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore")  # warnings of peft
def test_adapters_are_measured_with_their_model():
    peft = pytest.importorskip("peft")
    model = tiny_llama().eval()
    tokens = torch.randint(40, (3, 24))
    plain = rl.profile(model, tokens, budget=False)
    torch.manual_seed(1)
    settings = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, settings).eval()
    profile = rl.profile(adapted, tokens, budget=False)
    assert abs(profile["q_norm"] - plain["q_norm"]).max() > 1e-3
    merged = rl.profile(adapted.merge_and_unload(), tokens, budget=False)
    xr.testing.assert_allclose(profile["q_norm"], merged["q_norm"], rtol=1e-4)
    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    tuned = peft.get_peft_model(tiny_llama(), prompts)
    words = r"trained tokens(.|\n)*get_base_model\(\)"
    with pytest.raises(rl.UnsupportedModel, match=words):
        rl.profile(tuned, tokens)
