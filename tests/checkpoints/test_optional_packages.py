"""ropelens in an environment without the packages of its extras and its tests."""

import json
from pathlib import Path

import pytest
from forked import together
from hidden_packages import module_of

OPTIONAL = (
    "transformer_lens",
    "gguf",
    "peft",
    "torchao",
    "bitsandbytes",
    "kaleido",
    "sentencepiece",
    "tiktoken",
    "IPython",
    "ipykernel",
)

# One process runs everything, because the import of torch is slow.
MAIN_JOB = f"""
import json, shutil, sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from hidden_packages import hide

hide(*{OPTIONAL})
try:
    version("transformer-lens")
except PackageNotFoundError:
    pass
else:
    sys.exit("transformer-lens is not hidden")

import ropelens as rl
from ropelens.checkpoints.bundled import bundled_path
from ropelens.commands.app import main

folder = Path(sys.argv[1])
(folder / "model.gguf").write_bytes(b"GGUF")
(folder / "adapter").mkdir()
settings = {{"base_model_name_or_path": "bundled"}}
(folder / "adapter" / "adapter_config.json").write_text(json.dumps(settings))
slow = shutil.copytree(bundled_path(), folder / "slow")
(slow / "tokenizer.json").rename(slow / "tokenizer.model")

refused = {{}}


def refuse(name, call):
    try:
        call()
    except rl.RopelensError as error:
        refused[name] = str(error)


def command(*arguments):
    sys.argv[1:] = arguments
    try:
        main()
    except SystemExit as ended:
        return ended.code


small = ("--context", "32", "--sequences", "2", "--surrogates", "2")
out = str(folder / "out")
analyzed = command("analyze", *small, "--out", out)
model, tokenizer = rl.load("bundled")
profile = rl.profile(model, "The cat sat on the mat.", tokenizer=tokenizer)
refuse("transformer-lens", lambda: rl.Options(backend="transformer-lens"))
refuse("gguf", lambda: rl.load(folder / "model.gguf"))
refuse("peft", lambda: rl.load(folder / "adapter"))
refuse("torchao", lambda: rl.load("bundled", quantize="int8"))
refuse("sentencepiece", lambda: rl.load(slow))
refuse("bitsandbytes", lambda: rl.load("bundled", quantize="bnb-nf4"))
facts = {{
    "analyzed": analyzed,
    "heads": len(rl.open(out).heads),
    "loss": profile.attrs["loss"],
    "versions": json.loads(profile.attrs["versions"]),
    "refused": refused,
    "planned": command("analyze", "--backend", "transformer-lens", "--plan"),
}}
(folder / "facts.json").write_text(json.dumps(facts))
"""

INSTALL = {
    "transformer-lens": 'pip install "ropelens[transformer-lens]"',
    "gguf": 'pip install "ropelens[gguf]"',
    "peft": "pip install peft",
    "torchao": "pip install torchao",
    "bitsandbytes": "pip install bitsandbytes",
    "sentencepiece": (
        "pip install sentencepiece protobuf tiktoken (without tokenizer.json); "
        "or download its files again"
    ),
}


def test_only_what_needs_an_optional_package_is_refused_without_it(tmp_path: Path):
    ended = together("-c", MAIN_JOB, tmp_path)
    assert ended.returncode == 0, ended.stderr
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert facts["analyzed"] == 0
    assert facts["heads"] == 30
    assert 0 < facts["loss"] < 10
    assert facts["versions"].keys() == {
        "ropelens",
        "torch",
        "transformers",
        "numpy",
        "xarray",
    }
    assert facts["refused"].keys() == INSTALL.keys()
    for package, command in INSTALL.items():
        problem, seen, remedy = facts["refused"][package].splitlines()
        assert remedy == f"  try:   {command}"
        if package != "sentencepiece":  # transformers states which package it needs
            assert package in problem
            assert f"seen:  {package} is not installed in " in seen
    # The plan is refused in one line before a model is loaded.
    assert facts["planned"] == 1
    assert ended.stderr.splitlines()[-1].startswith(
        "ropelens: The backend transformer-lens is an optional package; seen: "
    )


@pytest.mark.parametrize("name", ["transformer-lens", "Transformer.Lens"])
def test_a_distribution_is_hidden_under_each_of_its_names(name: str):
    assert module_of(name) == "transformer_lens"
