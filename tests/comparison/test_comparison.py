"""Tests of comparisons: entries, text, pairs of runs, and the cache of measurements."""

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from unittest import mock

import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr
from scipy import stats
from synthetic_comparison import synthetic_comparison
from trained import NANO, SEQUENCES, VARIANTS, copy_of, run_folder, runs_in, story
from transformers import AutoModelForCausalLM

import ropelens as rl
from ropelens.checkpoints.bundled import sample_path
from ropelens.comparison import checkpoint_cache
from ropelens.comparison.checkpoint_measures import (
    prompts_for,
    run_tasks,
    validation_text,
)
from ropelens.comparison.compare import with_best_induction
from ropelens.comparison.entries import ComparisonEntry as Entry
from ropelens.comparison.entries import find_entries
from ropelens.comparison.join import partners
from ropelens.comparison.summary import summarize_comparison
from ropelens.errors import BadArgument, RopelensError
from ropelens.report import describe
from ropelens.runtime.netcdf import open_results
from ropelens.train.data import cut_stream, documents_of, tokens_of, train_tokenizer

# The numbers of sequences of `compare`, of which the docstring states the parts.
PROFILED = SEQUENCES // 8
PROFILED_EARLY = 2


def by_group(comparison: xr.Dataset) -> pd.DataFrame:
    """The summary of a comparison. The index is the variant of RoPE."""
    return summarize_comparison(comparison).set_index("group")


def test_validation_text_is_evenly_spread_over_the_held_out_text(trained_study: Path):
    run = runs_in(trained_study)[0]
    rows = validation_text(run).sample(10**6)
    assert (rows.documents == 0).all()  # the text is one file
    last = len(rows) - 1
    middle = round(last / 2)
    few = validation_text(run).sample(3)
    assert torch.equal(few.ids, rows.ids[[0, middle, last]])
    trained = np.load(run.data / "train.npy")
    total = len(rows) + len(trained)
    assert len(rows) == round(0.02 * total)


def test_tasks_have_the_numbers_of_separate_evaluations():
    """Prompts that are both within and past the context are measured once."""
    model = rl.load("bundled")[0]
    ids = torch.randint(3, 500, (8, 48), generator=torch.Generator().manual_seed(0))
    text = rl.Text(ids)
    tasks = run_tasks(model, text, prompts=2, far=True, seed=0)
    within = rl.evaluate(model, text, measures=["induction", "retrieval"], prompts=2)
    past = rl.evaluate(
        model,
        text,
        measures=["copying", "retrieval"],
        prompts=2,
        prompt_lengths=(32, 64, 128),
        distances=(8, 16, 32, 64),
    )
    for name in ("first_loss", "repeat_loss", "retrieval", "retrieval_hit"):
        np.testing.assert_array_equal(tasks[name], within[name][0])
    np.testing.assert_array_equal(tasks["copy_loss"], past["copy_loss"][0])
    far = past["retrieval"][0].mean("depth")
    np.testing.assert_array_equal(tasks["far_retrieval"], far)
    assert tasks["far_retrieval"]["prompt_length"].values.tolist() == [32, 64, 128]
    only_near = run_tasks(model, text, prompts=2, far=False, seed=0)
    np.testing.assert_array_equal(only_near["retrieval"], tasks["retrieval"])
    assert "copy_loss" not in only_near


@pytest.mark.parametrize(
    ("sequences", "prompts"), [(1, 4), (64, 4), (128, 8), (256, 16), (512, 16)]
)
def test_fewer_sequences_have_fewer_prompts(sequences: int, prompts: int):
    assert prompts_for(sequences) == prompts


def test_long_text_joins_consecutive_sequences(trained_study: Path):
    run = runs_in(trained_study)[0]
    length = 4 * run.context
    rows = validation_text(run).sample(10**6).ids
    bos = rows[0, 0]
    without_bos = rows[:, 1:].reshape(-1)
    long = validation_text(run).joined(2).ids
    assert long.shape == (2, length)
    assert (long[:, 0] == bos).all()
    first, last = long[:, 1:]
    assert torch.equal(first, without_bos[: length - 1])
    last_five_rows = without_bos[-5 * 31 :]
    assert torch.equal(last, last_five_rows[: length - 1])


def test_losses_match_transformers(comparison: xr.Dataset, trained_study: Path):
    for entry in runs_in(trained_study)[:3]:
        text = validation_text(entry).sample(SEQUENCES)
        expected = token_losses(entry, text.ids).mean(1)
        mean = expected.mean()
        results = comparison.sel(entry=entry.name)
        np.testing.assert_allclose(results["sequence_loss"], expected, rtol=1e-5)
        assert float(results["loss"]) == pytest.approx(mean, rel=1e-6)
        group = results["sequence_group"].values
        count = len(group)
        stretches = min(count, 16)  # groups are stretches, as the text is one document
        expected_group = np.arange(count) * stretches // count
        np.testing.assert_array_equal(group, expected_group)
        error = jackknife(expected, group)
        assert float(results["loss_se"]) == pytest.approx(error, rel=0.05)


def interval(change: np.ndarray) -> tuple[float, float]:
    """The 95% interval of a t-test."""
    test = stats.ttest_1samp(change, 0)
    low, high = test.confidence_interval(0.95)
    return low, high


def jackknife(values: np.ndarray, group: np.ndarray) -> float:
    """Standard error of the mean, from the means without each group."""
    means = []
    for left_out in np.unique(group):
        others = values[group != left_out]
        means.append(others.mean())
    variance = (len(means) - 1) * np.var(means)
    return float(np.sqrt(variance))


def token_losses(entry: Entry, tokens: torch.Tensor) -> np.ndarray:
    """Loss of each token but the first [sequence, position], computed by transformers."""
    model = AutoModelForCausalLM.from_pretrained(entry.folder)
    with torch.no_grad():
        logits = model(tokens).logits
    log_p = logits.log_softmax(-1)
    next_token = tokens[:, 1:, None]
    log_p_of_next = log_p[:, :-1].gather(-1, next_token)
    return -log_p_of_next[..., 0].numpy()


def test_a_sequence_belongs_to_the_document_in_which_it_begins(tmp_path: Path):
    texts = [story(lines) for lines in (3, 40, 1, 1, 60, 9, 2, 1, 25)]
    tokenizer = train_tokenizer(texts, vocabulary=300, context=16)
    tokenizer.save_pretrained(tmp_path)
    stream = tokens_of([f"{text}\n" for text in texts], tokenizer)
    rows = cut_stream(stream, begin=[tokenizer.bos_token_id], context=16)
    lengths = []
    for text in texts:
        tokens = tokenizer.tokenize(f"{text}\n")
        lengths.append(len(tokens) + 1)
    ends = np.cumsum(lengths)
    begins = 15 * np.arange(len(rows))
    expected = np.searchsorted(ends, begins, side="right")
    documents = documents_of(rows, tmp_path)
    assert documents.tolist() == expected.tolist()
    assert len(set(expected)) > 5


def test_loss_by_position_goes_to_four_times_the_context(
    comparison: xr.Dataset, trained_study: Path
):
    entry = runs_in(trained_study)[1]
    text = validation_text(entry).joined(PROFILED)
    loss = token_losses(entry, text.ids).mean(0)
    results = comparison.sel(entry=entry.name)
    start = results["position_start"].values
    stop = results["position_stop"].values
    assert stop[-1] == 4 * entry.context
    # The loss at index i is the loss of the token at position i + 1.
    expected = []
    for first, end in zip(start, stop, strict=True):
        of_bin = loss[first - 1 : end - 1]
        expected.append(of_bin.mean())
    np.testing.assert_allclose(results["position_loss"], expected, rtol=1e-5)


def test_heads_and_planes_match_a_profile(comparison: xr.Dataset, trained_study: Path):
    entry = runs_in(trained_study)[1]
    model, _ = rl.load(entry.folder)
    results = comparison.sel(entry=entry.name)
    last_step = results.sel(step=entry.steps)
    for prefix, sequences, compared in (
        ("", PROFILED, results),
        ("growth_", PROFILED_EARLY, last_step),
    ):
        text = validation_text(entry).sample(sequences)
        profile = rl.profile(model, text, surrogates=0)
        for name in ("q_norm", "selectivity_keys", "previous_token"):
            values = compared[prefix + name]
            np.testing.assert_allclose(values, profile[name], rtol=1e-5)
        heads = rl.classify_heads(profile)
        labels = compared[prefix + "label"].values.ravel()
        assert labels.tolist() == heads["label"].tolist()
        for name in ("mean_wavelength", "positional_fraction"):
            values = compared[prefix + name].values.ravel()
            np.testing.assert_allclose(values, heads[name], rtol=1e-5)
    trials = profile["trial_induction"].values.reshape(8, -1)
    best = float(last_step["growth_best_induction"].item())
    assert best == pytest.approx(score_of_best_head(trials), rel=1e-5)
    assert "growth_trial_induction" not in comparison
    losses_and_copying_match(last_step, model, entry)
    seen = results["tokens_seen"]
    assert (seen == comparison["step"] * NANO.batch * 32).all()
    wavelength = comparison["wavelength"]
    assert np.isinf(wavelength.sel(entry="nope seed 0")).all()
    half_stopped = wavelength.sel(entry="p-rope:0.5 seed 1", layer=0).values
    assert np.isinf(half_stopped).tolist() == [False] * 4 + [True] * 4


def losses_and_copying_match(
    results: xr.Dataset, model: torch.nn.Module, entry: Entry
) -> None:
    """Results of the last step. Distances go to four times the trained context of 32."""
    for name in ("first_loss", "repeat_loss", "retrieval"):
        np.testing.assert_allclose(results[f"growth_{name}"], results[name], rtol=1e-6)
    copying = rl.evaluate(
        model,
        validation_text(entry).sample(SEQUENCES),
        measures=("copying", "retrieval"),
        distances=(8, 16, 32, 64),
        prompt_lengths=(32, 64, 128),
        prompts=prompts_for(SEQUENCES),
    )
    np.testing.assert_allclose(results["copy_loss"], copying["copy_loss"][0])
    found = copying["retrieval"][0].mean("depth")
    np.testing.assert_allclose(results["far_retrieval"], found)
    longer = validation_text(entry).joined(PROFILED_EARLY)
    losses = rl.evaluate(model, longer, measures=("loss",))
    by_position = losses["position_loss"][0]
    np.testing.assert_allclose(results["growth_position_loss"], by_position, rtol=1e-6)


def test_pairs_have_the_same_seed(comparison: xr.Dataset):
    partner = comparison["partner"].values
    assert partner.tolist() == [0, 0, 0, 3, 3, 3]
    table = by_group(comparison)
    groups = comparison["group"].values
    losses = comparison["loss"].values
    rope = losses[groups == "rope"]
    for group in VARIANTS[1:]:
        change = losses[groups == group] - rope
        low, high = interval(change)
        row = table.loc[group]
        assert row["loss_change"] == pytest.approx(change.mean())
        assert row["low"] == pytest.approx(low)
        assert row["high"] == pytest.approx(high)
        assert row["over"] == "seeds"
        assert row["pairs"] == 2
        assert row["worse"] == (change > 0).sum()
    of_baseline = table.loc["rope"]
    for name in ("loss_change", "low", "high"):
        assert pd.isna(of_baseline[name])


def test_the_interval_of_one_pair_is_over_documents():
    """With two sequences per document, it is the t-test of the means of documents."""
    documents = np.arange(8) // 2
    of_entries = np.tile(documents, (6, 1))
    several = synthetic_comparison().assign(
        sequence_group=(("entry", "sequence"), of_entries)
    )
    one_pair = several.isel(entry=[0, 1, 2])
    row = by_group(one_pair).loc["nope"]
    assert row["over"] == "sequences"
    assert row["pairs"] == 1
    rope, _, nope = one_pair["sequence_loss"].values
    change = nope - rope
    low, high = interval(change.reshape(4, 2).mean(1))
    assert row["low"] == pytest.approx(low)
    assert row["high"] == pytest.approx(high)


def test_entries_without_an_equal_baseline_have_no_partner():
    seeds = [
        entry_of("rope", variant="rope", seed=0),
        entry_of("nope", variant="nope", seed=0),
        entry_of("nope", variant="nope", seed=7),
        entry_of("rope", variant="rope", seed=1),
    ]
    assert partners(seeds) == [0, 0, -1, 3]
    assert partners(seeds, ["a", "b", "a", "c"]) == [0, -1, 0, 3]
    sizes = [
        entry_of("nano rope", variant="rope", size="nano"),
        entry_of("nano nope", variant="nope", size="nano"),
        entry_of("pico rope", variant="rope", size="pico"),
        entry_of("pico nope", variant="nope", size="pico"),
    ]
    assert partners(sizes) == [0, 0, 2, 2]


def entry_of(group: str, *, variant: str, size: str = "", seed: int = 0) -> Entry:
    return Entry(
        name="",
        group=group,
        folder=Path(),
        size=size,
        variant=variant,
        seed=seed,
    )


def test_the_table_counts_heads(comparison: xr.Dataset):
    row = by_group(comparison).loc["rope"]
    rope = comparison.isel(entry=[0, 3])
    assert row["entries"] == 2
    labels = rope["label"].values
    for label in ("positional", "semantic", "sink", "diffuse", "mixed"):
        heads = (labels == label).sum()
        assert row[label] == heads / 2
    in_layer_0 = rope["previous_token"].isel(layer=0)
    heads = (in_layer_0 >= 0.5).sum()
    assert row["previous_token_layer_0"] == heads / 2
    trials = rope["trial_induction"].values.reshape(2, 8, -1)
    scores = [score_of_best_head(of_entry) for of_entry in trials]
    gain = rope["first_loss"].mean() - rope["repeat_loss"].mean()
    expected = {
        "induction": np.mean(scores),
        "retrieval": rope["retrieval"].mean(),
        "repeat_gain": gain,
        "loss_past_context": loss_past_context(rope),
    }
    for name, value in expected.items():
        assert row[name] == pytest.approx(float(value))


def loss_past_context(entries: xr.Dataset) -> xr.DataArray:
    """Mean over tokens, and so over bins with the tokens of each bin as weights."""
    is_past = entries["position_start"].values >= 32
    past = entries.isel(position_bin=is_past)
    width = past["position_stop"] - past["position_start"]
    loss = past["position_loss"].mean("entry")
    return loss.weighted(width).mean()


def test_each_step_has_its_own_best_induction_head():
    trials = np.random.default_rng(0).random((2, 3, 8, 2, 2))
    trials[0, 1] = np.nan  # a step that was not measured
    trials[1, :, :, 1] = np.nan  # an entry with fewer layers
    dims = ("entry", "step", "trial", "layer", "head")
    growth = with_best_induction(xr.Dataset({"trial_induction": (dims, trials)}))
    assert [*growth] == ["best_induction"]
    best = growth["best_induction"].values
    for entry, step in np.ndindex(2, 3):
        scores = trials[entry, step].reshape(8, -1)
        scores = scores[:, np.isfinite(scores).all(0)]
        expected = score_of_best_head(scores) if scores.size else np.nan
        np.testing.assert_allclose(best[entry, step], expected)


def score_of_best_head(trials: np.ndarray) -> float:
    """Mean score [trial, head] on odd trials of the head that is best on even trials."""
    even = trials[::2]
    odd = trials[1::2]
    best = even.mean(0).argmax()
    return odd[:, best].mean()


def test_behaviour_of_runs_has_intervals(comparison: xr.Dataset):
    first_seed = comparison.isel(entry=[0, 1, 2])
    over_seeds = by_group(comparison).loc["nope"]
    over_trials = by_group(first_seed).loc["nope"]
    gain = comparison["first_loss"] - comparison["repeat_loss"]
    hit = comparison["retrieval_hit"].mean(("retrieval_length", "depth"))
    for name, by_trial in (("repeat_gain", gain), ("retrieval", hit)):
        rope = by_trial.values[[0, 3]]
        nope = by_trial.values[[2, 5]]
        change = nope - rope
        change_is(over_seeds, name, change.mean(1))
        change_is(over_trials, name, change[0])
    assert np.isfinite(over_seeds["loss_past_context_low"])
    assert np.isnan(over_trials["loss_past_context_low"])


def change_is(row: pd.Series, name: str, change: np.ndarray) -> None:
    low, high = interval(change)
    expected = {
        f"{name}_change": change.mean(),
        f"{name}_low": low,
        f"{name}_high": high,
    }
    for column, value in expected.items():
        assert row[column] == pytest.approx(value, rel=1e-7, abs=1e-9)


def test_the_cache_replaces_weights(
    comparison, trained_study, comparison_cache, tmp_path, monkeypatch
):
    copy = copy_of(trained_study, tmp_path)
    for path in copy.glob("**/model.safetensors"):
        path.unlink()
    shutil.rmtree(copy / "data")
    rope = run_folder(copy, "rope", 0)
    nope = run_folder(copy, "nope", 0)
    from_cache = rl.compare([rope, nope], cache=comparison_cache, sequences=SEQUENCES)
    xr.testing.assert_equal(from_cache, comparison.isel(entry=[0, 2]))
    for cache, sequences, seed in (
        (tmp_path / "empty", SEQUENCES, 0),
        (comparison_cache, SEQUENCES, 1),
        (comparison_cache, SEQUENCES - 1, 0),
    ):
        with pytest.raises(BadArgument, match="no weights"):
            rl.compare(
                [rope, nope],
                cache=cache,
                sequences=sequences,
                seed=seed,
            )
    # With the weights, another version of a library measures again.
    measure = mock.Mock(side_effect=BadArgument("Again."))
    versions = mock.Mock(return_value={"torch": "another"})
    monkeypatch.setattr(checkpoint_cache, "versions", versions)
    monkeypatch.setattr(checkpoint_cache, "measure", measure)
    with pytest.raises(BadArgument, match="Again"):
        rl.compare([trained_study], cache=comparison_cache, sequences=SEQUENCES)


def test_labels_follow_from_saved_profiles(
    comparison: xr.Dataset, trained_study: Path, comparison_cache: Path, tmp_path: Path
):
    study = Path(shutil.copytree(trained_study, tmp_path / "study"))
    for weights in study.rglob("model.safetensors"):
        weights.unlink()
    cache = Path(shutil.copytree(comparison_cache, tmp_path / "cache"))
    file = cache / "rope-seed-0" / "profile.nc"
    profile = open_results(file)
    bits = ["total_bits", "group_total"]
    rl.save(profile.assign({name: 0 * profile[name] for name in bits}), file)
    compared = rl.compare([study], cache=cache, sequences=SEQUENCES)
    labels = set(compared["label"].sel(entry="rope seed 0").values.ravel())
    assert labels == {"diffuse"}


@pytest.mark.thorough
def test_only_missing_runs_are_measured(
    comparison, trained_study, comparison_cache, tmp_path, monkeypatch
):
    copy = copy_of(trained_study, tmp_path)
    cache = Path(shutil.copytree(comparison_cache, tmp_path / "cache"))
    damaged = cache / "rope-seed-0" / "final.nc"
    damaged.write_bytes(damaged.read_bytes()[:1000])
    (cache / "nope-seed-1" / "step-000001.nc").unlink()
    changed = "p-rope:0.5 seed 1"
    one = run_folder(copy, "p-rope:0.5", 0)
    other = run_folder(copy, "p-rope:0.5", 1)
    shutil.copy(one / "model.safetensors", other / "model.safetensors")
    measure = checkpoint_cache.measure
    measured_runs = []

    def record(run: Entry, *args: object, final: bool, **options: object) -> xr.Dataset:
        measured_runs.append((run.name, final))
        return measure(run, *args, final=final, **options)

    monkeypatch.setattr(checkpoint_cache, "measure", record)
    again = rl.compare([copy], cache=cache, sequences=SEQUENCES)
    assert measured_runs == [
        ("rope seed 0", True),
        (changed, True),
        (changed, False),
        ("nope seed 1", False),
    ]
    others = comparison.drop_sel(entry=changed).drop_vars("profile")
    unchanged = again.drop_sel(entry=changed).drop_vars("profile")
    xr.testing.assert_equal(unchanged, others)
    loss = again["loss"].sel(entry=["p-rope:0.5 seed 0", changed]).values
    assert loss[0] == loss[1]
    assert loss[1] != comparison["loss"].sel(entry=changed)


@pytest.mark.thorough
def test_text_sampled_from_a_model_is_the_first_finding(tmp_path: Path):
    few = rl.Options(
        context=64,
        sequences=2,
        rows=8,
        surrogates=0,
    )
    profile = rl.analyze("bundled", sample_path(), few).profile
    one = tmp_path / "one"
    other = tmp_path / "other"
    one.mkdir()
    other.mkdir()
    rl.save(profile, one / "profile.nc")
    rl.save(profile.assign_attrs(model="another"), other / "profile.nc")
    first, *_ = describe(rl.compare([one, other], cache=tmp_path))
    assert first.startswith("The text was sampled from bundled:rope. ")

    on_other_text = profile.assign_attrs(
        model="another", tokens_sha256="0", bytes_per_token=2.0, text="other.txt"
    )
    rl.save(on_other_text, other / "profile.nc")
    sentences = describe(rl.compare([one, other], cache=tmp_path))
    sampled = "A text of this comparison was sampled from bundled:rope. "
    assert sentences[0].startswith(sampled)
    text = " ".join(sentences)
    loss = profile.attrs["loss"]
    bits_per_token = loss / np.log(2)
    assert f"{loss:.3f} (one), {loss:.3f} (other) nats per token, and " in text
    assert f"{bits_per_token / 2:.3f} (other) bits per byte" in text


def test_a_study_gives_its_runs_in_order(trained_study: Path):
    entries = runs_in(trained_study)
    runs = [(entry.variant, entry.seed) for entry in entries]
    assert runs == [
        ("rope", 0),
        ("p-rope:0.5", 0),
        ("nope", 0),
        ("rope", 1),
        ("p-rope:0.5", 1),
        ("nope", 1),
    ]
    first = entries[0]
    assert first.name == "rope seed 0"
    assert list(first.checkpoints()) == [1, 2]
    groups = {entry.group for entry in entries}
    assert groups == set(VARIANTS)


def test_unfinished_runs_of_a_study_are_left_out(trained_study: Path, tmp_path: Path):
    copy = copy_of(trained_study, tmp_path)
    unfinished = run_folder(copy, "nope", 1)
    change(unfinished, without="finished")
    shutil.rmtree(run_folder(copy, "p-rope:0.5", 0))
    with pytest.warns(
        UserWarning, match=r"left out: .*p-rope-0.5/seed-0, .*nope/seed-1"
    ):
        found = find_entries([copy])
    names = ["rope seed 0", "nope seed 0", "rope seed 1", "p-rope:0.5 seed 1"]
    assert [entry.name for entry in found.entries] == names
    assert found.unfinished == ["nano/p-rope-0.5/seed-0", "nano/nope/seed-1"]
    with pytest.raises(BadArgument, match=r"seed-1 cannot be compared with"):
        find_entries([unfinished, run_folder(copy, "rope", 0)])


def test_folders_that_cannot_be_compared_are_refused(
    trained_study: Path, tmp_path: Path
):
    rope = run_folder(trained_study, "rope", 0)
    again = run_folder(copy_of(trained_study, tmp_path), "rope", 0)
    with pytest.raises(BadArgument, match="both runs are rope seed 0"):
        find_entries([rope, again])
    with pytest.raises(BadArgument, match="cannot be compared with"):
        find_entries([trained_study, tmp_path])
    with pytest.raises(BadArgument, match="needs two or more different folders"):
        find_entries([rope, rope / ".." / rope.name])


def change(run: Path, *, without: str = "", **settings: object) -> None:
    """Change settings in the record of a run, and remove the entry `without`."""
    path = run / "run.json"
    record = json.loads(path.read_text())
    record.pop(without, None)
    record["settings"].update(settings)
    path.write_text(json.dumps(record))


def test_runs_with_different_settings_are_refused(trained_study: Path, tmp_path: Path):
    copy = copy_of(trained_study, tmp_path)
    first = run_folder(copy, "rope", 0)
    other = run_folder(copy, "nope", 0)
    change(other, learning_rate=1.0)
    with pytest.raises(RopelensError, match=r"learning_rate: 0\.01 and 1\.0"):
        find_entries([first, other])
    # Another size may have another rate.
    another_size = replace(NANO, layers=3)
    change(other, size=asdict(another_size))
    entries = find_entries([first, other]).entries
    assert [entry.group for entry in entries] == ["nano rope", "3x32x2x1 nope"]
    change(other, context=64, steps=9)
    with pytest.raises(RopelensError, match="context: 32 and 64; steps: 2 and 9"):
        find_entries([first, other])


def test_damaged_records_are_refused(trained_study: Path, tmp_path: Path):
    copy = copy_of(trained_study, tmp_path)
    of_run = run_folder(copy, "nope", 0) / "run.json"
    of_study = copy / "study.json"
    for file in (of_run, of_study):
        file.write_text("{")
        with pytest.raises(BadArgument, match=rf"{file.name} cannot be read"):
            find_entries([copy])
