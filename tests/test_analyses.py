"""The scripts run as their docstrings say, and use nothing that a user could not."""

from __future__ import annotations

import ast
import importlib.util
import json
import math
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr
from cli_runs import Command, python
from scipy import stats
from tiny_checkpoints import save_tiny, tiny_llama
from trained import story

import ropelens as rl

__all__ = ["python"]

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / "analyses").glob("*.py"))
MORE = {
    "causal": {"causal.csv"},
    "reach": {"reach.nc"},
    "truncation": {"truncation.nc", "truncation.csv"},
}
"""What an analysis writes beside the four files of every answer."""
LEADS = {"causal": "Against random heads of their layers, silencing the 3 heads going most by"}
"""How answers begin that lead with a sentence without intervals."""
ON_THE_BUNDLED = [s for s in SCRIPTS if s.stem not in ("variants", "truncation", "copying")]
names = pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)


@names
def test_uses_the_public_api_only(script: Path) -> None:
    tree = ast.parse(script.read_text())
    imported = [
        name
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [str(node.module)]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    ]
    assert [name for name in imported if name.startswith("ropelens")] == ["ropelens"]
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "rl"
    }
    assert used
    assert used <= set(rl.__all__)


def run_copy(python: Command, script: Path, place: Path, *options: object) -> Path:
    """Run a copy of `script` in a project of its own at `place`; its reports."""
    (place / "analyses").mkdir()
    copy = shutil.copy(script, place / "analyses")
    ended = python(copy, *options, "--context", 48, "--sequences", 4)
    assert ended.code == 0, ended.err
    reports = place / "reports"
    (folder,) = (reports / script.stem).iterdir()
    assert ended.out == f"{folder / 'index.html'}\n"
    common = {"index.html", "profile.nc", "heads.csv", "run.json"}
    files = {path.name for path in folder.iterdir()}
    assert files == common | MORE.get(script.stem, set())
    assert (reports / "index.html").exists()
    return folder


@pytest.mark.parametrize("script", ON_THE_BUNDLED, ids=lambda path: path.stem)
def test_runs_on_the_bundled_checkpoint(script: Path, tmp_path: Path, python: Command) -> None:
    folder = run_copy(python, script, tmp_path)
    assert folder.name == "bundled-rope"
    lead, *_ = json.loads((folder / "run.json").read_text())["findings"]
    assert lead.startswith(LEADS.get(script.stem, ""))
    assert script.stem not in LEADS or "nats" not in lead, "intervals come below"


def script_named(name: str) -> ModuleType:
    """A script of analyses/, imported."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "analyses" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def table_of(layers: int, heads: int) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "layer": np.repeat(np.arange(layers), heads),
            "head": np.tile(np.arange(heads), layers),
            "label": "positional",
            "positional_fraction": np.linspace(1, 0, layers * heads),
        }
    )


def test_random_heads_are_as_deep_as_those_they_stand_beside() -> None:
    causal, heads = script_named("causal"), table_of(6, 6)
    chosen = heads.loc[[24, 26, 27, 31]]  # of layers 4, 4, 4 and 5
    sets, possible = causal.draws(heads, chosen)
    assert (len(sets), possible) == (5, 5)  # one of layer 4's, by five of layer 5
    sets, possible = causal.draws(heads, heads.loc[[24, 26, 30, 31]])
    assert (len(sets), possible) == (8, 36)
    assert len({tuple(one.index) for one in sets}) == 8
    for one in sets:
        assert one["layer"].tolist() == [4, 4, 5, 5]
        assert one.index.is_unique
        assert not {24, 26, 30, 31} & set(one.index)


def test_of_a_layer_at_most_half_its_heads_are_silenced() -> None:
    causal, heads = script_named("causal"), table_of(9, 5)  # a ninth is 5, layer 0 the first
    chosen = causal.most(heads, "positional_fraction")
    assert chosen["layer"].tolist() == [0, 0, 1, 1, 2]
    heads.loc[heads["layer"] > 0, "label"] = "diffuse"
    assert len(causal.most(heads, "positional_fraction")) == 2
    assert causal.most(table_of(9, 1), "positional_fraction").empty


def losses_of(changes: np.ndarray) -> list[xr.Dataset]:
    """What `losses` would be of each row of `changes`, a number a document, 10 tokens each."""
    return [
        xr.Dataset(
            {
                "loss": (("tokens", "sequence"), np.tile(10 * row, (3, 1))),
                "count": (("tokens", "sequence"), np.full((3, len(row)), 10)),
            },
            coords={"group": ("sequence", np.arange(len(row)))},
        )
        for row in changes
    ]


def test_the_interval_holds_draws_as_well_as_documents() -> None:
    """Where only one of both varies it is scipy's t interval over that one."""
    causal = script_named("causal")
    of = np.random.default_rng(0).normal(size=6)
    (silent,) = losses_of(np.zeros((1, 6)))
    wanted = (-of).mean(), *stats.ttest_1samp(-of, 0).confidence_interval()
    by_document, by_draw = losses_of(np.tile(of, (8, 1))), losses_of(np.tile(of, (6, 1)).T)
    for random in (by_document, by_draw):
        for found in causal.changes_beyond(random, silent, 1.0):
            assert found == pytest.approx(wanted)
    both = losses_of(of + of[:, None])
    whole = causal.changes_beyond(both, silent, 1.0)[0]
    assert whole[2] - whole[1] == pytest.approx(math.sqrt(2) * (wanted[2] - wanted[1]))
    all_drawn = causal.changes_beyond(both, silent, 0.0)[0]
    assert all_drawn[2] - all_drawn[1] == pytest.approx(wanted[2] - wanted[1])


def test_planes_are_parted_nearest_to_half_of_the_push() -> None:
    """Three planes of 0.45, 0.45, 0.1: the first alone, not the first two with 90 %."""
    causal = script_named("causal")
    push = xr.DataArray([[[0.45, 0.1, 0.45, -1.0]]], dims=("layer", "head", "frequency"))
    wavelength = xr.DataArray([[6.0, 60.0, 600.0, 6000.0]], dims=("layer", "frequency"))
    profile = xr.Dataset({"selectivity_keys": push, "wavelength": wavelength})
    chosen = pd.DataFrame({"layer": [0], "head": [0]})
    strong, weak, share = causal.planes_of(SimpleNamespace(profile=profile), chosen)
    assert strong == [rl.stop_planes([0], heads="0.0")]
    assert weak == [rl.stop_planes([2, 1, 3], heads="0.0")]
    assert share == pytest.approx(0.45)


def test_one_head_or_none_is_silenced(tmp_path: Path) -> None:
    causal = script_named("causal")
    model = save_tiny(tmp_path / "model", num_hidden_layers=4)
    analysis = rl.analyze(model, [story(8)], rl.Options(context=24, sequences=4))
    heads = analysis.heads.assign(label="diffuse")
    none = causal.answer(replace(analysis, heads=heads))
    assert none.findings == [
        f"No head that goes by {by} is silenced: every head is diffuse, or alone in its layer."
        for by in ("position", "content")
    ]
    assert (none.figures, none.more) == ({}, {})
    page = rl.write_answer(tmp_path / "reports", replace(analysis, heads=heads), none)
    assert page.exists()
    heads.loc[5, "label"] = "positional"
    one = causal.answer(replace(analysis, heads=heads))
    table = one.more["causal.csv"].drop_duplicates("what")
    silenced = table[table["what"].str.startswith("one head, ")]
    assert silenced["heads"].tolist() == ["1.1", "1.1"]
    draws = table[table["label"] == ""]
    assert sorted(draws["heads"]) == sorted(["1.0", "1.2", "1.3"] * 2)
    assert "silencing the one head going most by position" in one.findings[0]
    assert "(draws: 3, all that there are)" in one.findings[1]
    (planes,) = [line for line in one.findings if "strongest planes" in line]
    first, second = map(int, re.findall(r"hold (\d+)%", planes))
    assert first + second == 100
    cost = float(re.findall(r"\((\S+) nats", planes)[0].replace("−", "-"))
    assert (causal.UNFAIR in planes) == (cost * (50 - first) < 0)


def test_copying_is_held_beside_as_many_heads_without_a_role() -> None:
    copying = script_named("copying")
    scores = np.zeros((3, 5))
    scores[1] = [0.9, 0.8, 0.7, 0.1, 0.1]
    scores[2, 4] = 0.4
    assert copying.best_heads(scores, 3) == ["1.0", "1.1", "1.2"]
    drawn = copying.random_heads(scores, ["1.0", "1.1", "1.2"])
    assert len(drawn) == len({*map(tuple, drawn)}) == 3
    assert all(len({*heads}) == 3 and "2.4" not in heads for heads in drawn)
    assert {name.split(".")[0] for heads in drawn for name in heads} == {"2"}, "none of layer 0"
    early = copying.random_heads(scores, ["2.0", "2.1", "2.2", "2.3", "2.4"])
    assert {name.split(".")[0] for heads in early for name in heads} == {"0", "2"}
    scores[0], scores[2, 1:] = 0.5, 0.5
    assert copying.random_heads(scores, ["1.0"]) == [["2.0"]] * 3
    assert copying.random_heads(scores, ["1.0", "1.1"]) == [], "one is left"
    assert copying.random_heads(scores, []) == []
    alone = tiny_llama(num_attention_heads=1, num_key_value_heads=1, vocab_size=300)
    tokens = torch.randint(300, (2, 24), generator=torch.Generator().manual_seed(0))
    names = {"induction": ["0.0"], "previous_token": []}
    still = np.arange(16) < 12
    costs = list(copying.costs_of(alone, tokens, names, np.ones((2, 1)), still))
    assert [row["what"] for row in costs][-2:] == [
        "planes 8 to 11 of induction heads stop",
        "induction heads silent",
    ]
    assert [row["heads"] for row in costs][-2:] == ["", "0.0"]


def test_costs_of_copying_are_told_by_seed_and_beyond_those_of_random_heads() -> None:
    copying = script_named("copying")
    rows = [
        {"variant": variant, "seed": seed, "what": what, "copy_loss": loss, "retrieval": 0.5}
        for variant in ("rope", "p-rope:0.5")
        for seed, by in enumerate((2.9, 3.0, 3.1))
        for what, loss in (
            ("none", 1.0),
            (copying.INDUCTION, 1 + by),
            *((copying.RANDOM, 1.5 + 0.1 * draw) for draw in (-1, 0, 1)),
        )
    ]
    copies, needles = copying.what_it_costs(pd.DataFrame(rows))
    assert "induction heads silent: more (+3.000, +2.752 to +3.248)" in copies
    assert "without a role, silent: more (+0.500, +0.500 to +0.500)" in copies
    assert copies.endswith("beyond random ones: more (+2.500, +2.252 to +2.748).")
    assert needles.count("unresolved (+0.000, +0.000 to +0.000)") == 3
    assert copying.what_it_costs(pd.DataFrame(rows)[lambda of: of["what"] == "none"]) == []


def test_ranks_agree_by_what_columns_do_not_have_in_common() -> None:
    """Of variants: their runs are much alike, and say one thing together."""
    copying = script_named("copying")
    names = pd.MultiIndex.from_product([list("abcdef"), [0, 1]], names=copying.RUN)
    steps = np.repeat(np.arange(6.0), 2)[:, None] + [0, 100, 200]
    runs = pd.DataFrame(steps + 0.1 * np.tile([[0], [1]], (6, 1)), names)
    assert copying.agree(runs, runs) == "holds (+1.00, p 0.00, of 6 variants)"
    assert copying.agree(runs, -runs) == "contradicted (−1.00, p 0.00, of 6 variants)"
    mixed = runs.loc[list("cfadeb")].set_index(names)
    expected = stats.spearmanr(range(6), [2, 5, 0, 3, 4, 1]).statistic
    assert copying.agree(runs, mixed).startswith(f"unresolved (−{-expected:.2f}")
    few = runs.loc[list("abc")]
    assert copying.agree(few, few) == "not testable (+1.00, p 0.33, of 3 variants)"
    assert copying.agree(runs, runs * 0) == "not testable (6 variants, all alike)"
    assert copying.agree(runs * np.nan, runs) == "not testable (0 variants, all alike)"


def test_what_appears_before_copying_does() -> None:
    """Two runs: labels, copying, and a previous-token head that fades and may come back."""
    copying = script_named("copying")
    labels = np.full((2, 5, 1, 2), "diffuse", dtype=object)
    labels[:, 1:, 0, 0] = "positional"
    labels[0, 4, 0, 1] = "semantic"
    fades = np.array([[0, 0.6, 0.2, 0.9, 1], [0, 0.6, 0.2, 0.2, 1]])
    copies = np.array([[0, 0, 0, 0.4, 0.9]] * 2)
    dims = ("entry", "step", "layer", "head")
    seen = xr.Dataset(
        {
            "growth_label": (dims, labels),
            "growth_previous_token": (dims, fades[..., None, None] * [1, 0]),
            "growth_induction": (dims, copies[..., None, None] * [0, 1]),
        },
        coords={
            "seed": ("entry", [0, 1]),
            "variant": ("entry", ["rope", "rope"]),
            "group": ("entry", ["rope", "rope"]),
            "tokens_seen": (
                ("entry", "step"),
                [[0, 10**6, 2 * 10**6, 3 * 10**6, 4 * 10**6]] * 2,
            ),
        },
    )
    (said,) = copying.what_comes_first(seen)
    assert "positional heads in 2 of 2, more (+2.000, +2.000 to +2.000)" in said
    assert "semantic heads in 0 of 2, not testable (−1.000, of one seed)" in said
    assert "a previous-token head in 2 of 2, more (+2.000" in said
    assert "one that stays in 1 of 2, unresolved (−0.500" in said
    assert copying.who_copies(seen).endswith("rope 2 of 2, after 4.0 million tokens.")


def test_a_sweep_of_a_model_and_text_of_ones_own(tmp_path: Path, python: Command) -> None:
    """Of a model with few planes: that of the bundled checkpoint takes a minute."""
    model = save_tiny(tmp_path / "my-model")
    (tmp_path / "story.txt").write_text(story(40))
    script = ROOT / "analyses" / "truncation.py"
    text = ("--text", tmp_path / "story.txt")
    folder = run_copy(python, script, tmp_path, model, *text)
    assert folder.name == "my-model"
    record = json.loads((folder / "run.json").read_text())
    assert record["rows"] == 64
    assert "can stop at almost no cost; stopping the fastest" in record["findings"][0]
    assert "interval" not in record["findings"][0]
    swept = rl.open(folder / "truncation.nc")
    assert set(swept["kind"].values) >= {"none", "slow", "fast", "random", "band"}


@names
def test_says_what_it_is_for_and_what_went_wrong(
    script: Path, tmp_path: Path, python: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    told = python(script, "--help")
    title = (ast.get_docstring(ast.parse(script.read_text())) or "").splitlines()[0]
    assert (told.code, told.err) == (0, "")
    assert title in told.out
    option, of = ("--runs", "folder") if script.stem == "copying" else ("--text", "text")
    failed = python(script, option, "nowhere")
    assert failed.code == 1
    assert failed.problem.startswith(f"There is no {of} ")
    assert "nowhere" in failed.problem
    assert not list(tmp_path.iterdir())


STUDY = """\
variants = ["rope", "p-rope:0.5", "nope"]
sizes = ["2x32x2x1"]
context = 32
vocabulary = 300
steps = 2
"""


def test_variants_are_trained_and_compared(tmp_path: Path) -> None:
    (tmp_path / "analyses").mkdir()
    script = shutil.copy(ROOT / "analyses" / "variants.py", tmp_path / "analyses")
    (tmp_path / "small.toml").write_text(STUDY)
    (tmp_path / "story.txt").write_text(story(900), encoding="utf-8")
    options = ("--text", "story.txt", "--study", "small.toml", "--sequences", "2")
    done = subprocess.run(
        [sys.executable, script, *options],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "reports" / "variants" / "small"
    assert done.stdout.strip() == str(folder / "index.html")
    said = json.loads((folder / "run.json").read_text())["findings"]
    assert said[0].startswith("Loss against that of rope, nats per token")
    (peaks,) = [sentence for sentence in said if "largest share" in sentence]
    assert peaks.endswith("evenly spread: 12%.")
    assert "% (one that stands still); evenly" in peaks
    found = rl.open(folder / "comparison.nc")
    rope = found.isel(entry=0)
    product = (rope["q_norm"].mean("head") * rope["k_norm"][:, 0]).values
    share = (product / product.sum(1, keepdims=True)).mean(0)
    wavelength = rope["wavelength"][0, share.argmax()].item()
    assert f"rope {share.max():.0%} ({wavelength:,.0f} tokens), p-rope:0.5" in peaks
    (still,) = [sentence for sentence in said if "stops carry" in sentence]
    assert still.startswith("The 4 planes of 8 that p-rope:0.5 stops carry ")
    assert "% of the squared query norm" in still
    assert "small" in (tmp_path / "reports" / "index.html").read_text()
    copying_of_the_same_runs(tmp_path)


def copying_of_the_same_runs(place: Path) -> None:
    """Of two steps no head copies; what was measured stands for weights that are deleted."""
    script = shutil.copy(ROOT / "analyses" / "copying.py", place / "analyses")
    folder = place / "reports" / "copying" / "variants"
    tables = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, script, "--runs", "runs/variants", "--sequences", "2"],
            capture_output=True,
            text=True,
            cwd=place,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, done.stderr
        tables.append((folder / "costs.csv").read_text())
        for weights in (place / "runs").glob("**/model.safetensors"):
            weights.unlink()
    assert tables[0] == tables[1]
    said = json.loads((folder / "run.json").read_text())["findings"]
    assert said[0].endswith("rope 0 of 1; p-rope:0.5 0 of 1; nope 0 of 1.")
    assert any(line.startswith("No run has an induction head") for line in said)
    costs = pd.read_csv(folder / "costs.csv")
    assert costs["what"].unique().tolist() == ["none"]
    assert len(costs) == 3
