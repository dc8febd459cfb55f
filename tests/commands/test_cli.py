"""Files, tables and help of the commands."""

import json
import re
import shlex
import warnings
from pathlib import Path

import families
import numpy as np
import pandas as pd
import pytest
import torch
from cli_runs import COLUMNS, NAMES, PLAN, Command, save_family
from only_in_repository import repository_path
from tiny_checkpoints import identity_of, save_tiny

import ropelens as rl
from ropelens.checkpoints.bundled import BUNDLED
from ropelens.runtime.run_record import read_record

FEW = ("--seed", 3, "--surrogates", 2)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    letters = np.random.default_rng(0).choice(list("abcdefghijklmnop"), size=(12, 200))
    for number, row in enumerate(letters):
        (folder / f"{number:02}.txt").write_text("".join(row))
    return folder


@pytest.fixture
def analyzed(ropelens, model, text, tmp_path_factory, pageless) -> Path:
    """The results of a first run, made once. Change only copies of the files."""
    out = tmp_path_factory.getbasetemp() / "analyzed"
    if not out.exists():
        ended = ropelens("analyze", model, "--text", text, *FEW, "--out", out)
        assert ended.code == 0
        assert ended.out == f"{out / 'index.html'}\n"
        lines = ended.err.splitlines()  # a slow machine prints its progress
        stages = ("measuring: ", "probing: ", "fitting the budget: ")
        plan, *findings = [x for x in lines if not x.startswith(stages)]
        assert plan.startswith(PLAN)
        assert re.match(
            r"Of 8 heads, \d .*\. The claim that positional heads ", findings[0]
        )
        assert 1 <= len(findings) <= 5
    return out


def test_heads_csv_has_one_row_per_head_and_the_promised_columns(analyzed: Path):
    assert sorted(path.name for path in analyzed.iterdir()) == list(NAMES)
    assert (analyzed / "heads.csv").read_text().startswith(COLUMNS)
    heads = pd.read_csv(analyzed / "heads.csv")
    assert heads[["layer", "head"]].to_numpy().tolist() == [
        [n // 4, n % 4] for n in range(8)
    ]
    assert set(heads["label"]) <= {"diffuse", "sink", "positional", "mixed", "semantic"}
    assert heads["confidence"].between(0, 1).all()
    assert heads["offset_low"].notna().equals(heads["label"] == "positional")
    assert (heads["label"][heads["offset"].notna()] == "positional").all()


def test_profile_nc_has_the_promised_attributes(analyzed, model, text):
    attrs = rl.open(analyzed / "profile.nc").attrs
    words = {"model": "tiny llama", "revision": "", "dtype": "float32", "rows": "all"}
    words["backend"] = "hf"
    words["warnings"] = ""
    words["seed"] = 3
    words["context"] = 64
    words["sequences"] = 48
    # each of 12 documents has 200 letters: 3 sequences of BOS and 63 letters, and a rest
    assert (words | {"tokens": 12 * (200 + 4)}).items() <= attrs.items()
    stated = json.loads(attrs["versions"])["torch"]
    assert torch.__version__.startswith(stated.partition("+")[0])
    args = ["analyze", model, "--text", text, *FEW, "--out", analyzed]
    assert shlex.split(attrs["command"]) == ["ropelens", *map(str, args)]


@pytest.mark.usefixtures("pageless")
def test_run_json_is_enough_to_repeat_the_run(
    ropelens: Command, analyzed: Path, model: Path
):
    record = json.loads((analyzed / "run.json").read_text())
    facts = {"name": "tiny llama", "revision": "", "class": "LlamaForCausalLM"}
    assert record["model"] == facts | {"fingerprint": identity_of(model)}
    assert len(record["text"]["fingerprint"]) == 64
    assert record["seed"] == 3
    assert record["arguments"]["rows"] == "auto"
    assert record["versions"].keys() >= {"ropelens", "torch", "transformers"}
    assert record["seconds"].keys() == {"load", "measure"}
    assert 5e7 < record["peak_memory_bytes"] < 1e10
    first = (analyzed / "heads.csv").read_bytes()
    program, *args = shlex.split(record["command"])
    assert program == "ropelens"
    assert ropelens(*args).code == 0
    assert (analyzed / "heads.csv").read_bytes() == first
    again = json.loads((analyzed / "run.json").read_text())
    for changing in ("created", "seconds", "peak_memory_bytes"):
        assert record.pop(changing)
        again.pop(changing)
    assert again == record


@pytest.mark.usefixtures("pageless")
def test_a_context_beyond_the_model_warns_in_one_line(ropelens, model, text, tmp_path):
    out = tmp_path / "out"
    ended = ropelens(
        "analyze", model, "--text", text, "--context", 100, *FEW, "--out", out
    )
    words = "context 100 is beyond the 64 tokens that the model was made for"
    assert ended.code == 0
    warning, plan = ended.err.splitlines()[:2]
    assert plan.startswith(PLAN)
    assert warning == f"ropelens: warning: {words}"
    assert json.loads((out / "run.json").read_text())["warnings"] == [words]
    assert rl.open(out / "profile.nc").attrs["warnings"] == words


def test_warnings_of_libraries_are_hidden(ropelens, model, monkeypatch):
    def noisy(_: object) -> None:
        for category in (UserWarning, FutureWarning, DeprecationWarning):
            warnings.warn_explicit("noise", category, "library.py", 1, module="library")

    monkeypatch.setattr("ropelens.commands.rope_table._alike", noisy)
    ended = ropelens("rope", model)
    assert ended.code == 0
    assert ended.err == ""


def test_a_plan_describes_the_run_and_measures_nothing(
    ropelens, model, text, monkeypatch
):
    monkeypatch.delattr("ropelens.checkpoints.load.Opened.read")  # no weights
    options = ("--rows", 7, "--batch-size", 5)
    ended = ropelens("analyze", model, "--text", text, *options, "--plan")
    assert ended.code == 0
    assert ended.err == ""
    facts = dict(line.split(maxsplit=1) for line in ended.out.splitlines())
    assert facts["model"].startswith("tiny llama, 2 layers x 4 heads, 18,080 param")
    assert facts["batch"] == "5 sequences at a time, 10 batches"
    assert re.fullmatch(r"about 0\.7 GB of [\d.]+ GB free on cpu", facts["memory"])
    assert "model   bundled:rope, 6 layers" in ropelens("analyze", "--plan").out
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for command in ("analyze", "truncate"):
        assert " on cuda\n" in ropelens(command, "--device", "cuda", "--plan").out


@pytest.mark.usefixtures("pageless")
def test_transformer_lens_gives_the_same_heads(
    ropelens, analyzed, model, text, tmp_path
):
    other = tmp_path / "other"
    backend = ("--backend", "transformer-lens")
    ended = ropelens("analyze", model, "--text", text, *FEW, "--out", other, *backend)
    assert ended.code == 0
    assert ended.err.startswith(PLAN)
    assert "warning" not in ended.err
    bridged, plain = [pd.read_csv(folder / "heads.csv") for folder in (other, analyzed)]
    assert bridged["label"].equals(plain["label"])
    np.testing.assert_allclose(
        bridged["total_bits"], plain["total_bits"], rtol=1e-4, atol=1e-5
    )
    attrs = rl.open(other / "profile.nc").attrs
    assert attrs["backend"] == "transformer-lens"
    assert "transformer-lens" in json.loads(attrs["versions"])
    assert "transformer-lens" in read_record(other)["versions"]
    assert "transformer-lens" not in read_record(analyzed)["versions"]


def test_without_a_command_the_help_comes_as_an_error(ropelens: Command):
    ended = ropelens()
    assert ended.code == 2
    assert ended.out == ""
    assert ended.err == ropelens("--help").out
    assert re.fullmatch(r"\d+\.\d+\.\d+\n", ropelens("--version").out)


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("", "analyze rope report train"),
        (
            "analyze",
            "--out --text --prompt --attention-on --context --sequences --rows --plan",
        ),
        (
            "analyze",
            "--batch-size --surrogates --seed --device --device-map --quantize",
        ),
        ("analyze", "--dtype --revision --backend --trust-remote-code"),
        (
            "truncate",
            "[MODEL] --out --text --keep --end --bands --controls --measures --seed",
        ),
        ("truncate", "--context --sequences --rows --device --dtype --revision"),
        ("rope", "[MODEL] --config --context --variant --verbose --device"),
        ("compare", "DIR... --out --sequences --seed --device"),
        ("report", "DIR"),
        ("train", "--text --tokens --study --out --steps --precision --size --seed"),
        ("train", "--from --valid --plan --sequences --warmup --train --evaluated"),
    ],
)
def test_help_names_every_option(ropelens: Command, command: str, options: str):
    ended = ropelens(*command.split(), "--help")
    assert ended.code == 0
    assert ended.err == ""
    for name in options.split():
        assert name in ended.out
    assert max(map(len, ended.out.splitlines())) <= 80
    assert not command or f"  ropelens {command} " in ended.out  # an example


def test_list_names_the_bundled_checkpoints(ropelens: Command):
    ended = ropelens("list")
    assert ended.code == 0
    assert ended.err == ""
    for name in BUNDLED:
        (line,) = [
            line for line in ended.out.splitlines() if f"bundled:{name} " in line
        ]
        card = repository_path(f"ropelens/bundled/{name}/README.md").read_text()
        loss = re.search(r"as trained \| ([\d.]+)", card)
        assert loss is not None
        assert f" {float(loss[1]):.3f} " in line


@pytest.fixture
def table_of_smollm3(ropelens: Command, tmp_path: Path) -> list[str]:
    """The lines of `ropelens rope` for 6 layers, of which 2 do not rotate."""
    model = save_family(
        tmp_path / "model",
        "smollm3",
        num_hidden_layers=6,
        no_rope_layers=[1, 1, 0, 1, 1, 0],
    )
    ended = ropelens("rope", model)
    assert ended.code == 0
    assert ended.err == ""
    lines = ended.out.splitlines()
    assert max(len(line) for line in lines) <= 80
    return lines


def test_a_table_begins_with_a_summary(table_of_smollm3: list[str]):
    assert table_of_smollm3[:3] == [
        "6 layers: 4 full (reach 64 tokens) and 2 none (reach 64 tokens)",
        "full: base 2,000,000, wavelengths 6.28 to 2.05M tokens",
        "dead planes: none",
    ]


def test_layers_that_rotate_alike_share_a_table(table_of_smollm3: list[str]):
    titles = [line for line in table_of_smollm3 if line.startswith("layer")]
    rotating = r"layers 0–1 and 3–4: 8 planes, half pairing \(residual \S+\)$"
    others = r"layers 2 and 5: no rotation \(residual 0\.0e\+00\)$"
    assert re.match(rotating, titles[0])
    assert re.match(others, titles[1])


def test_a_table_has_a_row_for_each_plane(table_of_smollm3: list[str]):
    names = table_of_smollm3[4].split()
    assert names[-4:] == ["stated", "configured", "off", "by"]
    rows = []
    for line in table_of_smollm3:
        if re.match(r" +(\d|rest)", line):
            rows.append(line.split())
    assert [row[0] for row in rows] == ["0", "1", "2", "3", "4", "5", "6", "7", "rest"]
    assert rows[0][:4] == ["0", "1", "6.28", "1"]
    for plane, row in enumerate(rows[:8]):
        _, inv_freq, wavelength, stated, configured, difference = row
        expected = 2_000_000 ** (-plane / 8)
        assert float(inv_freq) == pytest.approx(expected, rel=1e-6)
        assert float(stated) == pytest.approx(expected, rel=1e-6)
        assert float(configured) == pytest.approx(expected, rel=1e-6)
        assert 0 < abs(float(difference)) < 1e-6  # a measurement, not a copy
        shown = float(wavelength.replace(",", ""))
        assert shown == pytest.approx(2 * np.pi / expected, rel=1e-3)
    assert rows[8] == ["rest", "0", "inf"]


def test_layers_that_do_not_attend(ropelens: Command, tmp_path: Path):
    families.tiny("Lfm2ForCausalLM").save_pretrained(tmp_path)
    out = ropelens("rope", tmp_path).out
    assert "layers 0 and 2: no attention (recurrent)\n" in out
    assert re.search(
        r"^layers 1 and 3: 8 planes, half pairing \(residual \S+\)$", out, re.M
    )


def test_queries_that_grow_with_position(ropelens: Command, tmp_path: Path):
    out = ropelens(
        "rope",
        save_family(
            tmp_path / "model", "llama4", attn_temperature_tuning=True, floor_scale=256
        ),
    ).out
    assert "queries grow with position, to" in " ".join(out.split())
    assert "from 1.069 at position 256" in " ".join(out.split())


def test_verbose_prints_every_layer(ropelens: Command, tmp_path: Path):
    model = save_tiny(tmp_path / "model")
    assert ropelens("rope", model).out.count("layers 0–1:") == 1
    assert ropelens("rope", model, "--device-map", "auto") == ropelens("rope", model)
    ended = ropelens("rope", model, "--verbose")
    assert re.findall(r"^layer (\d):", ended.out, re.MULTILINE) == ["0", "1"]


def test_a_prompt_is_explained(ropelens: Command, tmp_path: Path):
    out = tmp_path / "out"
    ended = ropelens("prompt", "bundled", "The old man said that", "--out", out)
    assert ended.code == 0
    assert ended.out == f"{out / 'index.html'}\n"
    names = {path.name for path in out.iterdir()}
    assert names == {"attribution.nc", "index.html", "planes.csv", "run.json"}
    record = json.loads((out / "run.json").read_text())
    assert record["kind"] == "prompt"
    assert ended.err.splitlines()[-1] == record["findings"][-1]
