"""Exported models equal edited models in a process that does not import ropelens."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import xarray as xr
from accelerate import cpu_offload
from checkpoints.test_gguf import write_bundled
from oracles.tiny import logits, random_tokens, tiny
from oracles.versions import skip_before
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import ropelens as rl
from ropelens.commands.app import app
from ropelens.errors import BadArgument, UnsupportedModel
from ropelens.interventions import export

FAMILIES: dict[str, dict[str, Any]] = {
    name: {}
    for name in (
        *(
            "llama_gqa",
            "mistral_sliding",
            "qwen2",
            "qwen3",
            "gemma",
            "gemma2",
            "gemma3",
        ),
        *("phi3", "gpt_neox", "olmo2", "granite", "cohere", "stablelm", "deepseek_v3"),
    )
}
FAMILIES["stablelm"] = {"qk_layernorm": True}  # a module for each head
FAMILIES["cohere"] = {"use_qk_norm": True}
SHARED = ("qwen3", "gemma3")  # one norm for the queries of all heads
LOADED = """
import sys, torch
from pathlib import Path
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
root, logits = Path(sys.argv[1]), {}
for folder in root.iterdir():
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    assert all(x.dtype == torch.float32 for x in model.parameters())
    ids = torch.tensor(eval(sys.argv[2])) % model.config.vocab_size
    logits[folder.name] = model.eval()(input_ids=ids, use_cache=False).logits.detach()
assert not any(name.startswith("ropelens") for name in sys.modules)
save_file(logits, sys.argv[3])
"""


def loaded_elsewhere(root: Path) -> dict[str, torch.Tensor]:
    """Logits of every checkpoint in `root`, from a process without ropelens."""
    file = root.with_suffix(".safetensors")
    ids = str(random_tokens().tolist())
    command = [sys.executable, "-c", LOADED, str(root), ids, str(file)]
    subprocess.run(command, check=True)
    return load_file(file)


def edits_of(family: str) -> dict[str, list[Any]]:
    heads = "*.*" if family in SHARED else "0.1,1.*"
    dropped = rl.drop(rl.PlaneNumbers([1]), heads=heads)
    halved = rl.scale(rl.Fastest(0.5), by=0.5)
    return {"p-rope": ["p-rope:0.5"], "yarn": ["yarn:4"], "scaled": [dropped, halved]}


@pytest.mark.thorough
def test_families_load_without_ropelens(tmp_path: Path):
    root = tmp_path / "checkpoints"
    expected = {}
    root.mkdir()
    for family, config in FAMILIES.items():
        model = tiny(family, **config)
        for weight in model.state_dict().values():
            if weight.shape in ((4, 16), (2, 16)):  # norms by head
                weight.mul_(10)
        plain = logits(model)
        scale = plain.abs().max()
        for name, edits in edits_of(family).items():
            case = f"{family} {name}"
            rl.export(model, *edits, out=root / case)
            with rl.edit_rope(model, *edits):
                expected[case] = logits(model)
            assert (expected[case] - plain).abs().max() > 1e-2 * scale, case
        assert torch.equal(logits(model), plain)
    exported = loaded_elsewhere(root)
    assert exported.keys() == expected.keys()
    for case, edited in expected.items():
        error = (exported[case] - edited).abs().max() / edited.abs().max()
        assert error < 1e-4, case


ONE_HEAD = rl.drop(rl.PlaneNumbers([1]), heads="0.1")


@pytest.mark.parametrize(
    ("family", "edit", "line"),
    [
        (
            "llama_gqa",
            rl.stop(rl.PlaneNumbers([1]), heads="0.1"),
            "new frequencies of planes of only some heads",
        ),
        (
            "llama_gqa",
            rl.stop(rl.PlaneNumbers([1]), heads="0.*"),
            "new frequencies of planes of only some heads",
        ),
        ("llama_dynamic", "p-rope:0.5", "RoPE that depends on the length"),
        (
            "qwen3",
            ONE_HEAD,
            "layers.0.self_attn.q_norm, whose weights multiply several heads",
        ),
        (
            "nanochat",
            ONE_HEAD,
            "queries of layer 0 that no weight multiplies by itself",
        ),
        (
            "gemma4",
            "p-rope-reversed:0.5",
            "transformers cannot store Gemma4ForCausalLM",
        ),
        (
            "falcon",
            "p-rope:0.5",
            "do not call an attention function that transformers registers",
        ),
    ],
)
def test_what_nothing_can_carry_is_refused(
    tmp_path: Path, family: str, edit: Any, line: str
):
    with pytest.raises(UnsupportedModel) as refused:
        rl.export(tiny(family), edit, out=tmp_path / "out")
    assert line in refused.value.line
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_checkpoint_is_not_written(tmp_path: Path, llama, monkeypatch):
    monkeypatch.setattr(export, "scaled_queries", lambda *_: {})
    with pytest.raises(
        UnsupportedModel, match="logits of the checkpoint that differ by"
    ):
        rl.export(llama, ONE_HEAD, out=tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def double_output(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return 2 * output


def doubled_layer(model: Any) -> None:
    model.model.layers[1].mlp.register_forward_hook(double_output)


def other_scaling(model: Any) -> None:
    model.model.layers[0].self_attn.scaling = 0.1


def other_activation(model: Any) -> None:
    model.model.layers[0].mlp.act_fn = nn.ReLU()


def other_forward(model: Any) -> None:
    mlp = model.model.layers[1].mlp
    mlp.forward = lambda x: 2 * type(mlp).forward(mlp, x)


def backward(model: Any) -> None:
    model.model.rotary_emb.inv_freq.neg_()


DIFFERENCES = {
    "a hook of model.layers.1.mlp": doubled_layer,
    "model.layers.0.self_attn.scaling = 0.1": other_scaling,
    "model.layers.0.mlp.act_fn = torch.nn.modules.activation.ReLU": other_activation,
    "another forward of model.layers.1.mlp": other_forward,
    "the output of model.layers.0.self_attn is the first that differs": backward,
}


@pytest.mark.filterwarnings("ignore:.*ropelens measures the model")
@pytest.mark.parametrize("difference", DIFFERENCES)
def test_a_refusal_for_other_logits_states_what_differs(tmp_path, difference: str):
    model = tiny("llama_gqa")
    DIFFERENCES[difference](model)
    with pytest.raises(
        UnsupportedModel, match="logits of the checkpoint that diff"
    ) as e:
        rl.export(model, ONE_HEAD, out=tmp_path / "out")
    assert difference in e.value.line
    assert list(tmp_path.iterdir()) == []


def rounded_frequencies(model: Any) -> None:
    model.to(torch.bfloat16).float()


def other_frequencies(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(0.5)


def other_configuration(model: Any) -> None:
    scaling = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    model.config.rope_parameters = scaling


@pytest.mark.filterwarnings("ignore:.*ropelens measures the model")
@pytest.mark.parametrize("edits", [(), ("p-rope:0.5",)])
@pytest.mark.parametrize(
    "change", [rounded_frequencies, other_frequencies, other_configuration]
)
def test_a_checkpoint_has_the_frequencies_of_the_model_not_of_its_configuration(
    tmp_path, change, edits
):
    model = tiny("llama_gqa")
    change(model)
    folder = rl.export(model, *edits, out=tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    with rl.edit_rope(model, *edits):
        torch.testing.assert_close(logits(loaded), logits(model), atol=1e-4, rtol=0)


def test_an_output_that_shares_the_weights_of_the_input_is_written(tmp_path: Path):
    """Although the configuration does not tie them."""
    model = tiny("llama_gqa", tie_word_embeddings=False)
    model.lm_head.weight = model.model.embed_tokens.weight
    folder = rl.export(model, "p-rope:0.5", out=tmp_path / "out")
    weights = load_file(folder / "model.safetensors")
    shared = model.model.embed_tokens.weight
    assert torch.equal(weights["lm_head.weight"], shared)
    assert torch.equal(weights["model.embed_tokens.weight"], shared)


def quantized_by_torch(model: Any) -> Any:
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, torch.qint8)


def in_few_bits(model: Any) -> Any:
    pytest.importorskip("torchao")
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model, Int8WeightOnlyConfig())
    return model


def with_adapter(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))


STATES = {
    "_packed_params.dtype, which is dtype and no plain tensor": quantized_by_torch,
    "layers.0.self_attn.q_proj.weight, which is ": in_few_bits,
    "an adapter of peft, at model.layers.0.self_attn.q_proj.base_layer": with_adapter,
    "weight, which accelerate keeps elsewhere": cpu_offload,
}


@pytest.mark.filterwarnings("ignore")  # torch's own quantization is deprecated
@pytest.mark.parametrize("state", STATES)
def test_weights_that_are_not_plain_tensors_are_refused(tmp_path: Path, state: str):
    model = tiny("llama_gqa", hidden_size=32)
    model = STATES[state](model) or model  # cpu_offload changes the model itself
    with pytest.raises(UnsupportedModel) as refused:
        rl.export(model, ONE_HEAD, out=tmp_path / "out")
    assert state in refused.value.line


def test_folders_are_checked_before_the_work_and_created_after_it(tmp_path, llama):
    (tmp_path / "file").write_text("")
    with pytest.raises(BadArgument, match="cannot be written to"):
        rl.export(llama, "no variant", out=tmp_path / "file" / "out")
    arguments = ["export", "no/model", "--variant", "nope"]
    arguments += ["--out", str(tmp_path / "file" / "out")]
    with pytest.raises(BadArgument, match="cannot be written to"):
        CliRunner().invoke(app, arguments, catch_exceptions=False)
    folder = rl.export(llama, ONE_HEAD, out=tmp_path / "a" / "b" / "out")
    assert (folder / "model.safetensors").is_file()


def test_measurements_of_an_exported_and_an_edited_model_agree(tmp_path: Path, llama):
    """Sweeps, reach and claims measure scaled planes and stopped planes."""
    edits = [
        "p-rope-reversed:0.75",
        rl.scale(rl.PlaneNumbers([3, 4]), by=3, heads="*.1"),
    ]
    folder = rl.export(llama, *edits, out=tmp_path / "out")
    other, _ = rl.load(folder)
    tokens = random_tokens(sequences=6)

    def profiles_of(model: Any) -> list[xr.Dataset]:
        profile = rl.profile(model, tokens, surrogates=0)
        claims = rl.test_claims(profile, model=model, text=tokens, draws=40)
        return [
            rl.measure_rope(model)[["inv_freq"]],
            rl.truncate(model, tokens, keep=[0.5], controls=0, measures="loss")[
                ["mean_loss"]
            ],
            rl.evaluate(model, tokens, edits={"all": rl.scale(rl.Slowest(1), by=2)})[
                ["loss"]
            ],
            rl.reach(model, tokens, copied=4, copies=[5], draws=1)[["found_share"]],
            xr.Dataset.from_dataframe(claims.set_index("claim")[["number"]]),
        ]

    with rl.edit_rope(llama, *edits):
        expected = profiles_of(llama)
    for ours, theirs in zip(profiles_of(other), expected, strict=True):
        xr.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_tied_weights_in_bfloat16_become_tied_weights_in_float32(tmp_path: Path):
    tiny("llama_gqa", tie_word_embeddings=True).save_pretrained(tmp_path / "model")
    model, _ = rl.load(tmp_path / "model", dtype="bfloat16")
    rl.export(model, ONE_HEAD, out=tmp_path / "out")
    with safe_open(tmp_path / "out/model.safetensors", "pt") as weights:
        assert "lm_head.weight" not in weights.keys()  # noqa: SIM118
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "float32"
    assert (tmp_path / "out/model.safetensors").stat().st_mode & 0o044


def test_the_command_reads_gguf(tmp_path: Path):
    write_bundled(tmp_path / "model.gguf", permutations=1)
    out = tmp_path / "out"
    command = ["export", str(tmp_path / "model.gguf"), "--variant", "p-rope:0.75"]
    edits = ["--edit", "drop:0-1,9:*.2", "--edit", "scale=0.5:slowest=0.25"]
    arguments = [*command, *edits, "--out", str(out)]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.stdout == f"{out}\n"
    model, tokenizer = rl.load("bundled")
    dropped = rl.drop(rl.PlaneNumbers([0, 1, 9]), heads="*.2")
    halved = rl.scale(rl.Slowest(0.25), by=0.5)
    with rl.edit_rope(model, "p-rope:0.75", dropped, halved):
        expected = logits(model)
    exported = AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager")
    torch.testing.assert_close(logits(exported), expected, rtol=0, atol=1e-4)
    skip_before("transformers", "5.6", "cannot read the tokenizer of a file again")
    _, tokenizer_of_export = rl.load(out)
    assert tokenizer_of_export("One.").input_ids == tokenizer("One.").input_ids
    with pytest.raises(BadArgument, match="is not an empty folder"):
        rl.export(model, halved, out=out)


@pytest.mark.parametrize(
    "edit",
    [
        "stop",
        "drop:5-1",
        "drop:1,",
        "drop:1:",
        "scale:1",
        "scale=half:1",
        "drop=2:1",
        "stop:slow=1",
        "stop:fastest=2",
    ],
)
def test_an_edit_that_is_none_is_refused(tmp_path: Path, edit: str):
    arguments = ["export", "bundled", "--edit", edit, "--out", str(tmp_path / "out")]
    with pytest.raises(BadArgument, match=r"is not an edit|from 0 to 1"):
        CliRunner().invoke(app, arguments, catch_exceptions=False)
