"""Checkpoints as trainers, wrappers and the Hub leave them: the error names the cause."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers as hf
from peft import LoraConfig, get_peft_model
from safetensors.torch import load as load_bytes
from safetensors.torch import load_file, save_file
from tiny_checkpoints import edit_config, edit_weights, save_over, save_tiny, tiny_llama
from torch import nn
from torch.distributed import checkpoint as distributed_checkpoint

import ropelens as rl
from ropelens.checkpoints.names import by_step, name_checkpoints
from ropelens.errors import BadCheckpoint, UnsupportedModel
from ropelens.measured_rotation.load import load

WEIGHTS = "model.safetensors"


def refusal(place: Path) -> str:
    with pytest.raises(BadCheckpoint) as caught:
        load(place)
    assert "\n" not in caught.value.line
    return str(caught.value)


def rename(folder: Path, new_name: Callable[[str], str]) -> None:
    weights = load_file(folder / WEIGHTS)
    renamed = {new_name(name): tensor for name, tensor in weights.items()}
    save_file(renamed, folder / WEIGHTS, metadata={"format": "pt"})


@pytest.mark.parametrize(
    "prefix",
    ["module.", "_orig_mod.", "base_model.model.", "module._orig_mod.", "policy.lm."],
)
def test_a_prefix_of_all_names_is_named_and_its_remedy_works(folder, prefix):
    rename(folder, lambda name: f"{prefix}{name}")
    message = refusal(folder)
    assert f'LlamaForCausalLM begin with "{prefix}"' in message
    assert f"21 names such as {prefix}lm_head.weight" in message
    check_remedy(folder, message)


def test_a_part_within_names_is_named_and_its_remedy_works(folder: Path):
    """torch.compile of each layer."""
    rename(folder, lambda name: name.replace("layers.0.", "layers.0._orig_mod."))
    rename(folder, lambda name: name.replace("layers.1.", "layers.1._orig_mod."))
    message = refusal(folder)
    assert 'LlamaForCausalLM contain "_orig_mod."' in message
    check_remedy(folder, message)


def check_remedy(folder: Path, message: str) -> None:
    """Run the code after "try:", and compare the loaded weights."""
    _, code = message.split("try:")
    new = folder.parent / "repaired"
    names = {"AutoModelForCausalLM": hf.AutoModelForCausalLM, "OLD": folder}
    eval(code.strip(), names | {"NEW_FOLDER": new})
    check_weights_of(new)


def check_weights_of(folder: Path) -> None:
    expected = tiny_llama().state_dict()
    model, _ = load(folder)
    assert model.state_dict().keys() == expected.keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[name])


def test_names_that_only_some_weights_share_are_no_prefix(folder: Path):
    rename(folder, lambda name: name.replace("model.norm", "module.model.norm"))
    edit_weights(folder, lambda weights: weights.pop("lm_head.weight"))
    edit_weights(folder, lambda weights: weights.pop("model.embed_tokens.weight"))
    message = refusal(folder)
    assert "3 missing or with another shape: lm_head.weight" in message


def adapted() -> nn.Module:
    config = LoraConfig(r=2, target_modules=["q_proj"])
    return get_peft_model(tiny_llama(), config)


def save_adapter(folder: Path) -> Path:
    adapter = folder.parent / "adapter"
    adapted().save_pretrained(adapter)  # type: ignore[operator]
    edit_config(adapter, "adapter_config.json", base_model_name_or_path=str(folder))
    return adapter


peft_warns = pytest.mark.filterwarnings("ignore")


@peft_warns
def test_weights_that_were_saved_inside_peft_are_named(folder: Path):
    weights = {name: x.clone() for name, x in adapted().state_dict().items()}
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    message = refusal(folder)
    assert "saved together with an adapter of peft" in message
    assert "merge_and_unload" in message


@peft_warns
def test_an_adapter_in_a_pickle_without_weights_or_without_settings_is_named(folder):
    adapter = save_adapter(folder)
    weights = adapter / "adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:900])
    assert f"{weights} ends too early" in refusal(adapter)
    empty = dict.fromkeys(names_in(whole), torch.zeros(0))
    save_file(empty, weights)
    assert "4 tensors of size 0" in refusal(adapter)
    weights.unlink()
    assert "has no adapter_model.safetensors" in refusal(adapter)
    assert "does not read" not in refusal(adapter)
    (adapter / "adapter_model.bin").write_bytes(b"")
    assert "PeftModel.from_pretrained(MODEL, OLD).save_pretrained" in refusal(adapter)
    (adapter / "adapter_config.json").unlink()
    assert "has an adapter without adapter_config.json" in refusal(adapter)


def names_in(content: bytes) -> list[str]:
    return [*load_bytes(content)]


@peft_warns
def test_an_adapter_of_an_unknown_model_states_which_setting_is_wrong(folder: Path):
    adapter = save_adapter(folder)
    edit_config(adapter, "adapter_config.json", base_model_name_or_path="acme/none")
    message = refusal(adapter)
    assert f"is called acme/none, the model of {adapter}" in message
    assert "base_model_name_or_path in adapter_config.json" in message


def test_tensors_of_size_0_are_named_with_their_cause(folder: Path):
    def empty(weights: dict[str, torch.Tensor]) -> None:
        for name in weights:
            weights[name] = torch.zeros(0)

    edit_weights(folder, empty)
    message = refusal(folder)
    assert "21 tensors of size 0" in message
    assert "ZeRO-3" in message
    assert "zero_to_fp32.py" in message


def test_a_folder_of_the_hub_cache_names_its_files_and_its_id(folder: Path):
    repository = folder.parent / "hub" / "models--acme--tiny-2"
    snapshots = repository / "snapshots"
    shutil.copytree(folder, snapshots / ("a" * 40))
    shutil.copytree(folder, snapshots / ("b" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    for place in (repository, snapshots):
        message = refusal(place)
        assert "a folder of the cache of the Hub" in message
        assert f"try:   {snapshots / ('a' * 40)}, or acme/tiny-2" in message
    assert "the models acme/tiny-2" in refusal(repository.parent)
    check_weights_of(snapshots / ("a" * 40))


def test_a_link_to_a_file_that_was_not_downloaded_is_named(folder: Path):
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).symlink_to("../../blobs/abc")
    message = refusal(folder)
    assert f"{WEIGHTS} is a link to a file that does not exist" in message
    assert "download the model again" in message


def test_the_folder_of_a_training_names_the_newest_checkpoint(folder: Path):
    out = folder.parent / "out"
    for step in (500, 1000, 90):
        shutil.copytree(folder, out / f"checkpoint-{step}")
    (out / "checkpoint-best").mkdir()
    message = refusal(out)
    assert "has checkpoints of a training, but no model" in message
    assert "checkpoint-90, checkpoint-500, checkpoint-1000\n" in message
    assert f"try:   {out / 'checkpoint-1000'}, the newest checkpoint" in message


def test_checkpoints_of_a_shell_are_sorted_by_their_numbers():
    of_shell = ["a/checkpoint-1000", "a/checkpoint-500", "a/checkpoint-90"]
    by_number = ["a/checkpoint-90", "a/checkpoint-500", "a/checkpoint-1000"]
    assert by_step(of_shell) == by_number
    assert [*name_checkpoints(of_shell).values()] == by_number
    assert by_step(by_number) == by_number
    chosen = ["a/checkpoint-500", "a/checkpoint-90", "a/checkpoint-1000"]
    assert by_step(chosen) == chosen, "an order that no shell gives"
    models = ["llama-13", "llama-7"]
    assert by_step(models) == models, "sizes are no steps"


def test_a_folder_of_deepspeed_names_its_own_script(folder: Path):
    (folder / WEIGHTS).unlink()
    parts = folder / "global_step500"
    parts.mkdir()
    (parts / "zero_pp_rank_0_mp_rank_00_model_states.pt").write_bytes(b"")
    (folder / "zero_to_fp32.py").write_text("")
    for place in (folder, parts):
        message = refusal(place)
        assert "the parts that processes of DeepSpeed saved" in message
        assert "python zero_to_fp32.py . . --safe_serialization" in message
        assert str(folder) in message
        assert "does not read" not in message


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_a_folder_of_fsdp_is_repaired_by_the_command_that_is_named(folder: Path):
    weights = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    parts = folder / "pytorch_model_fsdp_0"
    distributed_checkpoint.save({"model": weights}, checkpoint_id=parts, no_dist=True)
    command = f"accelerate merge-weights {parts} {folder}"
    for place in (folder, parts):
        message = refusal(place)
        assert "the parts that processes of FSDP saved" in message
        assert f"{command}; then {folder}" in message
        assert "does not read" not in message
    merge = ["-m", "accelerate.commands.accelerate_cli", *command.split()[1:]]
    subprocess.run([sys.executable, *merge], check=True, capture_output=True)
    check_weights_of(folder)


def test_the_state_of_an_optimizer_has_no_weights(folder: Path):
    (folder / WEIGHTS).unlink()
    for name in ("optimizer.pt", "rng_state_0.pth", "training_args.bin"):
        (folder / name).touch()
    assert "has no weights" in refusal(folder)


def test_a_pickle_of_another_name_is_renamed_first(folder: Path):
    weights = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    pickle = folder / "pytorch_model_fsdp.bin"
    torch.save(weights, pickle)
    message = refusal(folder)
    assert f"rename {pickle.name} to pytorch_model.bin; then CLASS.from" in message
    pickle.rename(folder / "pytorch_model.bin")
    assert "rename" not in refusal(folder)
    hf.AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder.parent / "x")
    check_weights_of(folder.parent / "x")


def test_pickles_are_mentioned_only_if_there_are_some(folder: Path):
    (folder / WEIGHTS).unlink()
    message = refusal(folder)
    assert "has no weights" in message
    assert "does not read" not in message
    (folder / "tf_model.h5").write_bytes(b"")
    assert "has weights only for TensorFlow, JAX or ONNX" in refusal(folder)


def test_a_folder_above_models_names_them(folder: Path):
    message = refusal(folder.parent)
    assert "no model, but folders with models" in message
    assert f"a folder with a model, such as {folder}" in message


@pytest.mark.parametrize("name", [WEIGHTS, "config.json"])
def test_a_file_of_a_folder_names_the_folder(folder: Path, name: str):
    message = refusal(folder / name)
    assert "is a file, and not the folder of a model" in message
    assert f"try:   {folder} if it has config.json" in message


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_a_settings_file_that_ends_too_early_is_named(folder: Path, name: str):
    if name != "config.json":
        (folder / WEIGHTS).unlink()
        tiny_llama().save_pretrained(folder, max_shard_size="20KB")
    text = (folder / name).read_text()
    (folder / name).write_text(text[:200])
    message = refusal(folder)
    assert f"{name} is not complete JSON" in message
    assert "download, copy or save it again" in message


HEADLESS = {
    "LlamaModel": lambda: tiny_llama().model,
    "LlamaForSequenceClassification": lambda: hf.LlamaForSequenceClassification(
        tiny_llama().config
    ),
}


@pytest.mark.parametrize("name", HEADLESS)
def test_a_base_or_reward_model_is_refused_with_the_reason(folder: Path, name: str):
    model = HEADLESS[name]()
    save_over(folder, model)
    message = refusal(folder)
    assert "no output weights of LlamaForCausalLM" in message
    assert f"weights of {name}, without lm_head.weight" in message
    assert "the language model from which it was trained" in message
    with pytest.raises(UnsupportedModel, match=f"{name} is not a model that") as caught:
        rl.measure_rope(model)
    assert "no logits of tokens, as in base, reward" in str(caught.value)


class WithValueHead(nn.Module):
    """A language model with a value head, as TRL builds it."""

    def __init__(self) -> None:
        super().__init__()
        self.pretrained_model = tiny_llama()
        self.v_head = nn.Linear(32, 1)


def test_the_attribute_with_the_language_model_is_named():
    model = WithValueHead()
    with pytest.raises(UnsupportedModel) as caught:
        rl.measure_rope(model)
    assert "WithValueHead is a module around a language model" in str(caught.value)
    assert "LlamaForCausalLM in its attribute .pretrained_model" in str(caught.value)
    assert "try:   pass model.pretrained_model" in str(caught.value)
    rl.measure_rope(model.pretrained_model)


def test_a_whole_checkpoint_in_a_folder_with_a_training_is_loaded(tmp_path: Path):
    folder = save_tiny(tmp_path / "model")
    shutil.copytree(folder, folder / "checkpoint-500")
    (folder / "global_step5").mkdir()
    check_weights_of(folder)
