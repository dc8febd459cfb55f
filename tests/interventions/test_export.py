"""Exported models equal edited models in a process that does not import ropelens."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import xarray as xr
from checkpoints.test_gguf import write_bundled
from oracles.tiny import logits, random_tokens, tiny
from safetensors import safe_open
from safetensors.torch import load_file
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
    arguments = [root, random_tokens().tolist(), file]
    subprocess.run([sys.executable, "-c", LOADED, *map(str, arguments)], check=True)
    return load_file(file)


def edits_of(family: str) -> dict[str, list[Any]]:
    heads = {} if family in SHARED else {"heads": "0.1,1.*"}
    scaled = [rl.drop(rl.PlaneNumbers([1]), **heads), rl.scale(rl.Fastest(0.5), by=0.5)]
    return {"p-rope": ["p-rope:0.5"], "yarn": ["yarn:4"], "scaled": scaled}


def test_families_load_without_ropelens(tmp_path: Path):
    root = tmp_path / "checkpoints"
    expected = {}
    root.mkdir()
    for family, config in FAMILIES.items():
        model = tiny(family, **config)
        for weight in model.state_dict().values():
            weight.mul_(
                10 if weight.shape in ((4, 16), (2, 16)) else 1
            )  # norms by head
        plain = logits(model)
        for name, edits in edits_of(family).items():
            rl.export(model, *edits, out=root / f"{family} {name}")
            with rl.edit_rope(model, *edits):
                expected[f"{family} {name}"] = logits(model)
            assert (
                expected[f"{family} {name}"] - plain
            ).abs().max() > 1e-2 * plain.abs().max()
        assert torch.equal(logits(model), plain)
    found = loaded_elsewhere(root)
    assert found.keys() == expected.keys()
    for name, ours in expected.items():
        error = (found[name] - ours).abs().max() / ours.abs().max()
        assert error < 1e-4, (name, float(error))


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
    out = tmp_path / "root/out"
    out.parent.mkdir()
    arguments = ["export", str(tmp_path / "model.gguf"), "--variant", "p-rope:0.75"]
    arguments += ["--edit", "drop:0-1,9:*.2", "--edit", "scale=0.5:slowest=0.25"]
    arguments += ["--out", str(out)]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.stdout == f"{out}\n"
    model, tokenizer = rl.load("bundled")
    half = rl.scale(rl.Slowest(0.25), by=0.5)
    with rl.edit_rope(
        model, "p-rope:0.75", rl.drop(rl.PlaneNumbers([0, 1, 9]), heads="*.2"), half
    ):
        expected = logits(model)
    torch.testing.assert_close(
        loaded_elsewhere(out.parent)["out"], expected, rtol=0, atol=1e-4
    )
    assert (
        rl.load(out)[1]("One.").input_ids
        == tokenizer("One.", add_special_tokens=False).input_ids
    )
    for edit in (
        "stop",
        "drop:5-1",
        "drop:1,",
        "drop:1:",
        "scale:1",
        "scale=half:1",
        "drop=2:1",
        "stop:slow=1",
        "stop:fastest=2",
    ):
        with pytest.raises(BadArgument, match=r"is not an edit|from 0 to 1"):
            CliRunner().invoke(
                app, [*arguments, "--edit", edit], catch_exceptions=False
            )
    with pytest.raises(BadArgument, match="is not an empty folder"):
        rl.export(model, half, out=out)
