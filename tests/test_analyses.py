"""The scripts run as their docstrings describe, and use only the public API."""

import ast
import importlib.util
import json
import math
import re
import runpy
import shutil
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from cli_runs import Command, Ended, here
from only_in_repository import repository_path
from scipy import stats
from synthetic_comparison import CONTEXT, synthetic_comparison
from synthetic_recalibration import recalibrated_study
from tiny_checkpoints import save_tiny
from trained import story
from typer.testing import CliRunner

import ropelens as rl
from ropelens.commands.app import app
from ropelens.interventions.truncation_table import summarize_truncation

__all__ = ["recalibrated_study"]  # a fixture
ROOT = Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / "analyses").glob("*.py"))
MORE = {"causal": {"causal.csv"}, "causes": {"causes.csv", "attribution.nc"}}
MORE["reach"] = {"reach.nc", "needles.nc"}
MORE["truncation"] = {"truncation.nc", "truncation.csv"}
"""Files that an analysis writes in addition to the four files of every answer."""
OF_RUNS = ("variants", "copying", "recalibration")
OF_MODELS = [script for script in SCRIPTS if script.stem not in OF_RUNS]
CLAIMS = ROOT / "analyses/claims.py"
ANSWERS = [script for script in OF_MODELS if script != CLAIMS]
names = pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)


@pytest.fixture
def python(capfd: pytest.CaptureFixture[str]) -> Command:
    """Run a script in this process."""

    def run(script: Path, *args: object) -> Ended:
        def as_main() -> None:
            runpy.run_path(str(script), run_name="__main__")

        return here(capfd, script, as_main, *args)

    return run


@names
def test_uses_the_public_api_only(script: Path):
    code = script.read_text()
    for_scripts = {
        "analysis.answer import Answer",
        "analysis.answer import Answer, comparison_folder",
        "analysis.answer import save_comparison",
        "claims.arrays import parts_by_kind",
        "commands.terminal import run_analysis",
        "commands.terminal import run_script",
        "figures.silenced import plot_silenced",
        "figures.reach import plot_reach",
        "figures.head_wavelengths import plot_head_wavelengths",
        "intervals import paired_interval",
        "profiles.kinds import window_of",
        "report import describe",
        "report import write_index",
        "report.model_order import in_model_order",
        "report.sentences.compared_heads import compared_heads_sentences",
        "train.run import run_study",
    }
    allowed = {
        "import ropelens as rl",
        *(f"from ropelens.{name}" for name in for_scripts),
    }
    assert {*re.findall(r"^\s*((?:import|from) ropelens.*)", code, re.M)} <= allowed
    assert set(re.findall(r"\brl\.(\w+)", code)) <= set(rl.__all__)


def run_copy(python: Command, script: Path, place: Path, *options: object) -> Path:
    (place / "analyses").mkdir()
    copy = place / "analyses" / script.name
    sweep = '"bands": 2, "keep": [0.5], "controls": 1'
    copy.write_text(script.read_text().replace('"bands": 8', sweep))
    ended = python(copy, *options, "--context", 48, "--sequences", 4)
    assert ended.code == 0, ended.err
    reports = place / "reports"
    (folder,) = (reports / script.stem).iterdir()
    assert ended.out == f"{folder / 'index.html'}\n"
    common = {"index.html", "profile.nc", "heads.csv", "run.json"}
    assert {path.name for path in folder.iterdir()} == common | MORE.get(
        script.stem, set()
    )
    assert (reports / "index.html").exists()
    return folder


@pytest.mark.thorough
@pytest.mark.parametrize("script", ANSWERS, ids=lambda path: path.stem)
def test_runs_on_a_model_and_text(script: Path, tmp_path: Path, python: Command):
    layers = 2 if script.stem in ("causal", "causes") else 1
    model = save_tiny(tmp_path / "my-model", num_hidden_layers=layers)
    (tmp_path / "story.txt").write_text(story(40))
    folder = run_copy(python, script, tmp_path, model, "--text", tmp_path / "story.txt")
    assert folder.name == "my-model"
    record = json.loads((folder / "run.json").read_text())
    assert record["rows"] == (64 if script.stem == "truncation" else "all")
    assert "interval" not in record["findings"][0], "intervals come below"
    if script.stem == "truncation":
        sweep = rl.open(folder / "truncation.nc")
        assert set(sweep["kind"].values) >= {"none", "slow", "fast", "random", "band"}


@pytest.mark.thorough
def test_claims_skip_models_that_were_measured_before(tmp_path, python, monkeypatch):
    def run_here(
        command: list[str],
    ) -> SimpleNamespace:  # a new process would take seconds
        return SimpleNamespace(
            returncode=CliRunner().invoke(app, command[3:]).exit_code
        )

    monkeypatch.setattr("subprocess.run", run_here)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "story.txt").write_text(story(40))
    models = [save_tiny(tmp_path / name) for name in ("one", "two")]
    options = ["--text", "story.txt", "--context", 48, "--sequences", 4]
    ledger = tmp_path / "reports" / "claims" / "one" / "claims.csv"
    written = set()
    for measured in (models[:1], models):
        ended = python(CLAIMS, *measured, *options)
        assert ended.code == 0, ended.err
        written.add(ledger.stat().st_mtime_ns)
    assert len(written) == 1
    assert (
        'href="one/index.html#norms-title"'
        in (ledger.parent / "index.html").read_text()
    )
    assert (ledger.parent / "one" / "index.html").is_file()
    table = pd.read_csv(tmp_path / "reports" / "claims" / "models" / "claims.csv")
    assert table["model"].unique().tolist() == ["one", "two"]
    assert (tmp_path / "reports" / "index.html").read_text().count("claims/") == 3


def test_claims_of_all_models_are_compared_in_one_setting_each(tmp_path: Path):
    for name in ("smollm2-135m", "smollm2-135m-robust", "random", "models", "stories"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "claims.csv").write_text("")
    ledgers = script_named("claims").ledgers(tmp_path)
    assert [path.name for path in ledgers] == ["stories", "smollm2-135m", "random"]


def test_a_sweep_has_figures_of_what_it_measured_in_each_kind_of_layers():
    sweep = rl.open(ROOT / "reports/truncation/gemma3-270m/truncation.nc")
    table = summarize_truncation(sweep)
    figures = script_named("truncation").figures_of(sweep, table)
    _, of_full, of_others, of_classes = figures
    assert of_full == "The same for planes of full layers."
    assert of_others.endswith("end of the context, loss of repeated random tokens.")
    assert of_classes.endswith("by class of token.")


def script_named(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        name, ROOT / "analyses" / f"{name}.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def table_of(layers: int, heads: int) -> pd.DataFrame:
    layer, head = np.divmod(np.arange(layers * heads), heads)
    table = pd.DataFrame({"layer": layer, "head": head, "label": "positional"})
    return table.assign(positional_fraction=np.linspace(1, 0, layers * heads))


def test_random_heads_come_from_the_layers_of_the_chosen_heads():
    causal = script_named("causal")
    heads = table_of(6, 6)
    chosen = heads.loc[[24, 26, 27, 31]]  # layers 4, 4, 4 and 5
    drawn_of_four = causal.draws(heads, chosen)
    # 1 set of layer 4 times 5 heads of layer 5
    assert len(drawn_of_four.sets) == drawn_of_four.possible == 5
    drawn_of_two = causal.draws(heads, heads.loc[[24, 26, 30, 31]])
    assert drawn_of_two.possible == 36
    assert len({tuple(drawn.index) for drawn in drawn_of_two.sets}) == 8
    for drawn in drawn_of_two.sets:
        assert drawn["layer"].tolist() == [4, 4, 5, 5]
        assert drawn.index.is_unique
        assert not {24, 26, 30, 31} & set(drawn.index)


def test_at_most_half_of_the_heads_of_a_layer_are_silenced():
    causal = script_named("causal")
    heads = table_of(9, 5)  # a ninth is 5, layer 0 the first
    assert causal.most(heads, "positional_fraction")["layer"].tolist() == [
        0,
        0,
        1,
        1,
        2,
    ]
    heads.loc[heads["layer"] > 0, "label"] = "diffuse"
    assert len(causal.most(heads, "positional_fraction")) == 2
    assert causal.most(table_of(9, 1), "positional_fraction").empty


def losses_of(changes: np.ndarray) -> list[xr.Dataset]:
    """The result of `losses` for each row of `changes`, a number per document of 10 tokens."""
    dims = ("tokens", "sequence")
    results = []
    for row in changes:
        values = {"loss": (dims, np.tile(10 * row, (3, 1)))}
        values["count"] = dims, np.full((3, len(row)), 10)
        results.append(
            xr.Dataset(values, coords={"group": ("sequence", np.arange(len(row)))})
        )
    return results


def test_the_interval_covers_draws_and_documents():
    """If only the draws or only the documents vary, it is scipy's t interval over them."""
    causal = script_named("causal")
    changes = np.random.default_rng(0).normal(size=6)
    (silent,) = losses_of(np.zeros((1, 6)))
    by_scipy = stats.ttest_1samp(-changes, 0).confidence_interval()
    only_documents = losses_of(np.tile(changes, (8, 1)))
    only_draws = losses_of(np.tile(changes, (6, 1)).T)
    for random in (only_documents, only_draws):
        for change in causal.changes_beyond(random, silent, 1.0):
            assert change.mean == pytest.approx(-changes.mean())
            assert (change.low, change.high) == pytest.approx(tuple(by_scipy))
    width = by_scipy.high - by_scipy.low
    both = losses_of(changes + changes[:, None])
    some_drawn = causal.changes_beyond(both, silent, 1.0)[0]
    assert some_drawn.high - some_drawn.low == pytest.approx(math.sqrt(2) * width)
    all_drawn = causal.changes_beyond(both, silent, 0.0)[0]
    assert all_drawn.high - all_drawn.low == pytest.approx(width)


def test_planes_are_split_near_half_of_the_push():
    """Three planes of 0.45, 0.45, 0.1: only the first, not the first two with 90 %."""
    causal = script_named("causal")
    push = xr.DataArray(
        [[[0.45, 0.1, 0.45, -1.0]]], dims=("layer", "head", "frequency")
    )
    wavelength = xr.DataArray([[6.0, 60.0, 600.0, 6000.0]], dims=("layer", "frequency"))
    profile = xr.Dataset({"selectivity_keys": push, "wavelength": wavelength})
    chosen = pd.DataFrame({"layer": [0], "head": [0]})
    planes = causal.planes_of(SimpleNamespace(profile=profile), chosen)
    (strongest,) = planes.strongest
    (others,) = planes.others
    assert strongest.select == rl.PlaneNumbers([0])
    assert others.select == rl.PlaneNumbers([2, 1, 3])
    assert strongest.heads == others.heads == "0.0"
    assert planes.share == pytest.approx(0.45)


@pytest.mark.thorough
def test_induction_needs_previous_token_heads():
    """In the bundled model head 3.4 is such a head; random heads of its layer matter little."""
    causal = script_named("causal")
    options = rl.Options(context=64, sequences=4, surrogates=0)
    analysis = rl.analyze("bundled", options=options)
    part = causal.without_previous(analysis)
    (sentence,) = part.findings
    words = r"3\.4\) takes .* 4\.4, from (\S+) to (\S+); .* leave it at (\S+) "
    match = re.search(words, sentence)
    assert match is not None
    before, after, random = map(float, match.groups())
    assert before > 0.6
    assert after < 0.05
    assert random > before / 2
    assert "it holds (+" in sentence
    assert [row["tokens"] for row in part.rows] == [
        "random tokens, repeated"
    ] * 5  # 4 draws


def test_the_largest_rise_of_the_training_loss_is_found(tmp_path):
    variants = script_named("variants")
    for seed, losses in enumerate(([5, 4, 4.5, 3], [5, 4, 3, 3.25])):
        run = tmp_path / "micro" / "nope" / f"seed-{seed}"
        run.mkdir(parents=True)
        (run / "run.json").write_text('{"settings": {"variant": "nope"}}')
        pd.DataFrame({"train_loss": losses}).to_csv(run / "metrics.csv")
    assert variants.largest_rises([tmp_path]) == {"nope": 0.5}


def test_copying_is_compared_with_random_heads_without_a_role():
    copying = script_named("copying")
    scores = np.zeros((3, 5))
    scores[1] = [0.9, 0.8, 0.7, 0.1, 0.1]
    scores[2, 4] = 0.4
    assert copying.best_heads(scores, 3) == ["1.0", "1.1", "1.2"]
    drawn = copying.random_heads(scores, ["1.0", "1.1", "1.2"])
    assert len(drawn) == len({*map(tuple, drawn)}) == 3
    assert all(len({*heads}) == 3 and "2.4" not in heads for heads in drawn)
    assert {name.split(".")[0] for heads in drawn for name in heads} == {"2"}, (
        "none of layer 0"
    )
    early = copying.random_heads(scores, ["2.0", "2.1", "2.2", "2.3", "2.4"])
    assert {name.split(".")[0] for heads in early for name in heads} == {"0", "2"}
    scores[0] = 0.5
    scores[2, 1:] = 0.5
    assert copying.random_heads(scores, ["1.0"]) == [["2.0"]] * 3
    assert copying.random_heads(scores, ["1.0", "1.1"]) == [], "only one head is left"
    assert copying.random_heads(scores, []) == []


def test_the_variant_that_finds_most_needles_past_the_context_is_named():
    copying = script_named("copying")
    comparison = synthetic_comparison(groups=("rope", "p-rope:0.5"))
    is_past = comparison["prompt_length"] > CONTEXT
    shares = {"rope": {0: 0.4, 1: 0.5}, "p-rope:0.5": {0: 0.6, 1: 0.8}}
    found = [
        xr.where(is_past, shares[group][seed], 0.9)
        for group, seed in zip(
            comparison["group"].values, comparison["seed"].values, strict=True
        )
    ]
    comparison["far_retrieval"] = xr.concat(found, "entry")
    low, high = stats.ttest_1samp([0.2, 0.3], 0).confidence_interval(0.95)
    assert copying.who_finds_most(comparison) == (
        "Past the trained context, p-rope:0.5 finds the most needles: 70%, and rope 45% "
        f"(+25 percentage points, 95% interval −{-100 * low:.0f} to +{100 * high:.0f}, over "
        "2 seeds); within the context, they find 90% and 90%."
    )
    comparison["far_retrieval"] = 1 - comparison["far_retrieval"]
    assert copying.who_finds_most(comparison) == (
        "Past the trained context, rope finds the most needles: 55%; within the "
        "context, it finds 10%."
    )


def test_costs_of_copying_are_given_by_seed_and_minus_random_heads():
    copying = script_named("copying")
    rows = [
        {
            "variant": variant,
            "seed": seed,
            "what": what,
            "copy_loss": loss,
            "retrieval": 0.5,
        }
        for variant in ("rope", "p-rope:0.5")
        for seed, cost in enumerate((2.9, 3.0, 3.1))
        for what, loss in (
            ("none", 1.0),
            (copying.INDUCTION, 1 + cost),
            *((copying.RANDOM, 1.5 + 0.1 * draw) for draw in (-1, 0, 1)),
        )
    ]
    copies, needles = copying.what_it_costs(pd.DataFrame(rows))
    assert "induction heads silent: more (+3.000, +2.752 to +3.248)" in copies
    assert "without a role, silent: +0.500 in all 3 seeds" in copies
    assert copies.endswith(
        "minus random heads: more (+2.500, +2.252 to +2.748) in rope, p-rope:0.5."
    )
    assert needles.count("+0.000 in all 3 seeds") == 3
    # A variant without induction heads in two seeds is not part of the mean
    seldom = [row | {"variant": "nope"} for row in rows if row["seed"] == 0]
    for seed in (1, 2):
        seldom.append(rows[0] | {"variant": "nope", "seed": seed})
    copies, _ = copying.what_it_costs(pd.DataFrame(rows + seldom))
    assert "silent: more (+3.000, +2.752 to +3.248) in rope, p-rope:0.5;" in copies
    plain = pd.DataFrame(rows)[lambda table: table["what"] == "none"]
    assert copying.what_it_costs(plain) == []


@names
def test_prints_its_purpose_and_its_errors(script, tmp_path, python, monkeypatch):
    monkeypatch.chdir(tmp_path)
    helped = python(script, "--help")
    title = (ast.get_docstring(ast.parse(script.read_text())) or "").splitlines()[0]
    assert helped.code == 0
    assert helped.err == ""
    assert title in helped.out
    commands = re.findall(r"^    python .*", script.read_text(), re.M)
    assert commands
    assert {f"  {line}" for line in commands} <= {*helped.out.splitlines()}
    option = "--runs" if script.stem in ("copying", "recalibration") else "--text"
    failed = python(script, option, "nowhere")
    assert failed.code == 1
    assert "nowhere" in failed.problem
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("script", OF_MODELS, ids=lambda path: path.stem)
def test_scripts_accept_the_options_of_the_findings(script: Path, python):
    findings = repository_path("reports/README.md").read_text(encoding="utf-8")
    (options,) = re.findall(r'TEXT="(.*)"', findings)
    helped = python(script, "--help")
    for option in re.findall(r"--\w+", options):
        assert f"  {option} " in helped.out


STUDY = """\
variants = ["rope", "p-rope:0.5"]
sizes = ["2x32x2x1"]
context = 32
vocabulary = 300
steps = 1
"""


@pytest.mark.thorough
def test_variants_are_trained_and_compared(tmp_path, python, monkeypatch):
    shutil.copytree(ROOT / "analyses", tmp_path / "analyses")
    (tmp_path / "small.toml").write_text(STUDY)
    (tmp_path / "story.txt").write_text(story(900), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    options = ("--text", "story.txt", "--study", "small.toml", "--sequences", "2")
    ended = python(tmp_path / "analyses/variants.py", *options)
    assert ended.code == 0, ended.err
    folder = tmp_path / "reports/variants/small"
    assert ended.out == f"{folder / 'index.html'}\n"
    findings = json.loads((folder / "run.json").read_text())["findings"]
    assert findings[0].startswith("After 1,024 training tokens, ")
    (peaks,) = [sentence for sentence in findings if "largest share" in sentence]
    assert peaks.endswith("evenly spread: 12%.")
    rope = rl.open(folder).isel(entry=0)
    product = (rope["q_norm"].mean("head") * rope["k_norm"][:, 0]).values
    share = (product / product.sum(1, keepdims=True)).mean(0)
    wavelength = rope["wavelength"][0, share.argmax()].item()
    assert f"rope {share.max():.0%} ({wavelength:,.0f} tokens), p-rope:0.5" in peaks
    (still,) = [sentence for sentence in findings if "stops carry" in sentence]
    assert still.startswith("The 4 planes of 8 that p-rope:0.5 stops carry ")
    assert "small" in (tmp_path / "reports/index.html").read_text()

    options = ("--runs", "runs/variants", "--sequences", "2")
    ended = python(tmp_path / "analyses/copying.py", *options)
    assert ended.code == 0, ended.err
    folder = tmp_path / "reports/copying/variants"
    findings = json.loads((folder / "run.json").read_text())["findings"]
    assert findings[0].startswith("Past the trained context, ")
    (copies,) = [sentence for sentence in findings if "Runs that copy" in sentence]
    assert copies.endswith("rope 0 of 1; p-rope:0.5 0 of 1.")
    assert pd.read_csv(folder / "costs.csv")["what"].tolist() == ["none"] * 2


@pytest.mark.thorough
def test_recalibrations_become_a_page_without_pages_of_models(
    tmp_path, python, recalibrated_study: Path
):
    shutil.copytree(ROOT / "analyses", tmp_path / "analyses")
    runs = Path(shutil.copytree(recalibrated_study, tmp_path / "prose"))
    options = ("--runs", runs, "--sequences", 8)
    ended = python(tmp_path / "analyses/recalibration.py", *options)
    assert ended.code == 0, ended.err
    folder = tmp_path / "reports/recalibration/prose"
    assert ended.out == f"{folder / 'index.html'}\n"
    names = {path.name for path in folder.iterdir()}
    assert names == {"index.html", "comparison.nc", "comparison.csv", "run.json"}
    assert "prose" in (tmp_path / "reports/index.html").read_text()
