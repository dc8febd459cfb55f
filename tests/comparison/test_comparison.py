"""Tests of comparisons: their entries, their text, their pairs, and the cache."""

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from unittest import mock

import numpy as np
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
from ropelens.comparison.checkpoint_measures import past_context, validation
from ropelens.comparison.entries import ComparisonEntry as Entry
from ropelens.comparison.entries import find_entries
from ropelens.comparison.join import partners
from ropelens.comparison.summary import summarize_comparison
from ropelens.errors import BadArgument, RopelensError
from ropelens.report import describe
from ropelens.train.data import documents_of, sequences_of, train_tokenizer


def test_validation_text_is_evenly_spread_over_the_held_out_text(study: Path):
    run = runs_in(study)[0]
    few, rows = (validation(run, sequences=n) for n in (3, 10**6))
    assert (rows.documents == 0).all()  # the text is one file
    last = len(rows) - 1
    assert torch.equal(few.ids, rows.ids[[0, round(last / 2), last]])
    assert len(rows) == round(0.02 * (len(rows) + len(np.load(run.data / "train.npy"))))


def test_long_text_joins_consecutive_sequences(study: Path):
    run = runs_in(study)[0]
    rows = validation(run, sequences=10**6).ids
    long = past_context(run, sequences=2).ids
    assert long.shape == (2, 4 * run.context)
    body = rows[:, 1:].reshape(-1)
    assert torch.equal(long[0, 1:], body[: 4 * run.context - 1])
    assert (long[:, 0] == rows[0, 0]).all()
    assert torch.equal(long[1, 1:], body[-5 * 31 :][: 4 * run.context - 1])


def test_losses_match_transformers(comparison: xr.Dataset, study: Path):
    for entry in runs_in(study)[:3]:
        expected = token_losses(entry, validation(entry, sequences=SEQUENCES).ids).mean(
            1
        )
        results = comparison.sel(entry=entry.name)
        np.testing.assert_allclose(results["sequence_loss"], expected, rtol=1e-5)
        assert float(results["loss"]) == pytest.approx(expected.mean(), rel=1e-6)
        group = results["sequence_group"].values
        count = len(group)  # the text is one document, so groups are stretches
        np.testing.assert_array_equal(group, np.arange(count) * min(count, 16) // count)
        assert float(results["loss_se"]) == pytest.approx(
            jackknife(expected, group), rel=0.05
        )


def interval(change: np.ndarray) -> tuple[float, float]:
    return tuple(stats.ttest_1samp(change, 0).confidence_interval(0.95))


def jackknife(values: np.ndarray, group: np.ndarray) -> float:
    means = np.array([values[group != out].mean() for out in np.unique(group)])
    return float(np.sqrt((len(means) - 1) * means.var()))


def token_losses(entry: Entry, tokens: torch.Tensor) -> np.ndarray:
    """Loss of each token but the first [sequence, position], computed by transformers."""
    model = AutoModelForCausalLM.from_pretrained(entry.folder)
    with torch.no_grad():
        log_p = model(tokens).logits.log_softmax(-1)[:, :-1]
    return -log_p.gather(-1, tokens[:, 1:, None])[..., 0].numpy()


def test_a_sequence_belongs_to_the_document_in_which_it_begins(tmp_path: Path):
    texts = [story(lines) for lines in (3, 40, 1, 1, 60, 9, 2, 1, 25)]
    tokenizer = train_tokenizer(texts, vocabulary=300, context=16)
    tokenizer.save_pretrained(tmp_path)
    rows = sequences_of(texts, tokenizer, context=16)
    ends = np.cumsum([len(tokenizer.tokenize(f"{text}\n")) + 1 for text in texts])
    expected = np.searchsorted(ends, 15 * np.arange(len(rows)), side="right")
    assert documents_of(rows, tmp_path).tolist() == expected.tolist()
    assert len(set(expected)) > 5


def test_loss_by_position_goes_to_four_times_the_context(
    comparison: xr.Dataset, study: Path
):
    entry = runs_in(study)[1]
    loss = token_losses(entry, past_context(entry, sequences=SEQUENCES // 8).ids).mean(
        0
    )
    results = comparison.sel(entry=entry.name)
    start, stop = results["position_start"].values, results["position_stop"].values
    assert stop[-1] == 4 * entry.context
    expected = [loss[a - 1 : b - 1].mean() for a, b in zip(start, stop, strict=True)]
    np.testing.assert_allclose(results["position_loss"], expected, rtol=1e-5)


def test_heads_and_planes_match_a_profile(comparison: xr.Dataset, study: Path):
    entry = runs_in(study)[1]
    model, _ = rl.load(entry.folder)
    for prefix, sequences, dataset in (
        ("", SEQUENCES // 8, comparison),
        ("growth_", 2, comparison.sel(step=entry.steps)),
    ):
        profile = rl.profile(
            model, validation(entry, sequences=sequences), surrogates=0
        )
        heads = rl.classify_heads(profile)
        results = dataset.sel(entry=entry.name)
        for name in ("q_norm", "selectivity_keys", "previous_token"):
            np.testing.assert_allclose(results[prefix + name], profile[name], rtol=1e-5)
        assert (
            results[prefix + "label"].values.ravel().tolist() == heads["label"].tolist()
        )
        for name in ("mean_wavelength", "positional_fraction"):
            values = results[prefix + name].values.ravel()
            np.testing.assert_allclose(values, heads[name], rtol=1e-5)
    last = comparison.sel(entry=entry.name, step=entry.steps)
    for name in ("first_loss", "repeat_loss", "retrieval"):
        np.testing.assert_allclose(last[f"growth_{name}"], last[name], rtol=1e-6)
    text = validation(entry, sequences=SEQUENCES)
    measures = ("copying", "retrieval")
    far = {"distances": (8, 16, 32, 64), "prompt_lengths": (32, 64, 128)}
    evaluated = rl.evaluate(model, text, measures=measures, **far)
    np.testing.assert_allclose(last["copy_loss"], evaluated.copy_loss[0])
    np.testing.assert_allclose(
        last["far_retrieval"], evaluated.retrieval[0].mean("depth")
    )
    longer = past_context(entry, sequences=2)
    by_position = rl.evaluate(model, longer, measures=("loss",))["position_loss"][0]
    np.testing.assert_allclose(last["growth_position_loss"], by_position, rtol=1e-6)
    seen = comparison["tokens_seen"].sel(entry=entry.name)
    assert (seen == comparison["step"] * NANO.batch * 32).all()
    assert np.isinf(comparison["wavelength"].sel(entry="nope seed 0")).all()
    stopped = np.isinf(comparison["wavelength"].sel(entry="p-rope:0.5 seed 1", layer=0))
    assert stopped.values.tolist() == [False] * 4 + [True] * 4


def test_pairs_have_the_same_seed(comparison: xr.Dataset):
    assert comparison["partner"].values.tolist() == [0, 0, 0, 3, 3, 3]
    table = summarize_comparison(comparison).set_index("group")
    groups, loss = comparison["group"].values, comparison["loss"].values
    losses = {group: loss[groups == group] for group in VARIANTS}
    for group in VARIANTS[1:]:
        change = losses[group] - losses["rope"]
        row = table.loc[group]
        assert row["loss_change"] == pytest.approx(change.mean())
        assert (row["low"], row["high"]) == pytest.approx(interval(change))
        assert (row["over"], row["pairs"]) == ("seeds", 2)
        assert row["worse"] == (change > 0).sum()
    assert table.loc["rope", ["loss_change", "low", "high"]].isna().all()


def test_the_interval_of_one_pair_is_over_documents():
    """With two sequences per document, it is the t-test of the means of documents."""
    group = ("entry", "sequence"), np.tile(np.arange(8) // 2, (6, 1))
    one_pair = synthetic_comparison().assign(sequence_group=group).isel(entry=[0, 1, 2])
    row = summarize_comparison(one_pair).set_index("group").loc["nope"]
    losses = one_pair["sequence_loss"].values
    assert (row["over"], row["pairs"]) == ("sequences", 1)
    means = (losses[2] - losses[0]).reshape(4, 2).mean(1)
    assert (row["low"], row["high"]) == pytest.approx(interval(means))


def test_entries_without_an_equal_baseline_have_no_partner():
    runs = [("rope", 0), ("nope", 0), ("nope", 7), ("rope", 1)]
    entries = [
        Entry("", group, Path(), variant=group, seed=seed) for group, seed in runs
    ]
    assert partners(entries) == [0, 0, -1, 3]
    assert partners(entries, ["a", "b", "a", "c"]) == [0, -1, 0, 3]
    sizes = [
        (size, variant) for size in ("nano", "pico") for variant in ("rope", "nope")
    ]
    entries = [Entry("", f"{s} {v}", Path(), size=s, variant=v) for s, v in sizes]
    assert partners(entries) == [0, 0, 2, 2]


def test_the_table_counts_heads(comparison: xr.Dataset):
    table = summarize_comparison(comparison).set_index("group")
    rope = comparison.isel(entry=[0, 3])
    assert table.loc["rope", "entries"] == 2
    labels = rope["label"].values.ravel().tolist()
    for label in ("positional", "semantic", "sink", "diffuse", "mixed"):
        assert table.loc["rope", label] == labels.count(label) / 2
    previous = rope["previous_token"].values[:, 0]
    assert table.loc["rope", "previous_token_layer_0"] == (previous >= 0.5).sum() / 2
    trials = rope["trial_induction"].values.reshape(2, 8, -1)
    best = (
        trials[:, ::2].mean(1).argmax(-1)
    )  # chosen on even trials, scored on odd trials
    scores = [trials[entry, 1::2, best[entry]].mean() for entry in (0, 1)]
    assert table.loc["rope", "induction"] == pytest.approx(np.mean(scores))
    gain = rope["first_loss"].values.mean() - rope["repeat_loss"].values.mean()
    assert table.loc["rope", "repeat_gain"] == pytest.approx(gain)
    past = rope.isel(position_bin=rope["position_start"].values >= 32)
    width = past["position_stop"] - past["position_start"]
    expected = past["position_loss"].mean("entry").weighted(width).mean()
    assert table.loc["rope", "loss_past_context"] == pytest.approx(float(expected))
    assert table.loc["rope", "retrieval"] == pytest.approx(
        float(rope["retrieval"].mean())
    )


def test_behaviour_of_runs_has_intervals(comparison: xr.Dataset):
    two = summarize_comparison(comparison).set_index("group").loc["nope"]
    one = (
        summarize_comparison(comparison.isel(entry=[0, 1, 2]))
        .set_index("group")
        .loc["nope"]
    )
    gain = comparison["first_loss"].values - comparison["repeat_loss"].values
    hit = comparison["retrieval_hit"].mean(("retrieval_length", "depth")).values
    for name, parts in {"repeat_gain": gain, "retrieval": hit}.items():
        seeds = parts[[2, 5]].mean(1) - parts[[0, 3]].mean(1)
        for row, change in ((two, seeds), (one, parts[2] - parts[0])):
            assert row[f"{name}_change"] == pytest.approx(change.mean(), abs=1e-9)
            ends = row[[f"{name}_low", f"{name}_high"]].tolist()
            np.testing.assert_allclose(ends, interval(change), atol=1e-9)
    assert np.isfinite(two["loss_past_context_low"])
    assert np.isnan(one["loss_past_context_low"])


def test_the_cache_replaces_weights(comparison, study, measured, tmp_path, monkeypatch):
    copy = copy_of(study, tmp_path)
    for path in copy.glob("**/model.safetensors"):
        path.unlink()
    shutil.rmtree(copy / "data")
    two = [run_folder(copy, variant, 0) for variant in ("rope", "nope")]
    given = {"cache": measured, "sequences": SEQUENCES}
    xr.testing.assert_equal(rl.compare(two, **given), comparison.isel(entry=[0, 2]))
    for other in (
        {"cache": tmp_path / "empty"},
        {"seed": 1},
        {"sequences": SEQUENCES - 1},
    ):
        with pytest.raises(BadArgument, match="no weights"):
            rl.compare(two, **given | other)
    monkeypatch.setattr(checkpoint_cache, "versions", lambda: {"torch": "another"})
    monkeypatch.setattr(
        checkpoint_cache, "measure", mock.Mock(side_effect=BadArgument("Again."))
    )
    with pytest.raises(BadArgument, match="Again"):  # the weights exist
        rl.compare([study], **given)


@pytest.mark.thorough
def test_only_missing_runs_are_measured(
    comparison, study, measured, tmp_path, monkeypatch
):
    copy, cache = (
        copy_of(study, tmp_path),
        Path(shutil.copytree(measured, tmp_path / "cache")),
    )
    damaged = cache / "rope-seed-0" / "final.nc"
    damaged.write_bytes(damaged.read_bytes()[:1000])
    (cache / "nope-seed-1" / "step-000001.nc").unlink()
    one, other = (run_folder(copy, "p-rope:0.5", seed) for seed in (0, 1))
    shutil.copy(one / "model.safetensors", other / "model.safetensors")
    measure, measured_runs = checkpoint_cache.measure, []

    def record(run: Entry, *args: object, final: bool, **options: object) -> xr.Dataset:
        measured_runs.append((run.name, final))
        return measure(run, *args, final=final, **options)

    monkeypatch.setattr(checkpoint_cache, "measure", record)
    again = rl.compare([copy], cache=cache, sequences=SEQUENCES)
    changed = "p-rope:0.5 seed 1"
    expected = [("rope seed 0", True), (changed, True), (changed, False)]
    assert measured_runs == [*expected, ("nope seed 1", False)]
    xr.testing.assert_equal(
        again.drop_sel(entry=changed), comparison.drop_sel(entry=changed)
    )
    loss = again["loss"].sel(entry=["p-rope:0.5 seed 0", changed]).values
    assert loss[0] == loss[1] != comparison["loss"].sel(entry=changed)


@pytest.mark.thorough
def test_text_sampled_from_a_model_is_the_first_finding(tmp_path: Path):
    few = rl.Options(context=64, sequences=2, rows=8, surrogates=0)
    profile = rl.analyze("bundled", sample_path(), few).profile
    folders = [tmp_path / "one", tmp_path / "other"]
    for folder, name in zip(folders, (profile.attrs["model"], "another"), strict=True):
        folder.mkdir()
        rl.save(profile.assign_attrs(model=name), folder / "profile.nc")
    first, *_ = describe(rl.compare(folders, cache=tmp_path))
    assert first.startswith("The text was sampled from bundled:rope. ")
    other = profile.assign_attrs(
        model="another", tokens_sha256="0", bytes_per_token=2.0
    )
    rl.save(other, folders[1] / "profile.nc")
    compared = rl.compare(folders, cache=tmp_path)
    loss, bits = profile.attrs["loss"], profile.attrs["loss"] / np.log(2) / 2
    text = " ".join(describe(compared))
    assert f"{loss:.3f} (one), {loss:.3f} (other) nats per token, and " in text
    assert f"{bits:.3f} (other) bits per byte" in text


def test_a_study_gives_its_runs_in_order(study: Path):
    entries = runs_in(study)
    assert [(e.variant, e.seed) for e in entries] == [
        (v, s) for s in (0, 1) for v in VARIANTS
    ]
    assert entries[0].name == "rope seed 0"
    assert {e.group for e in entries} == set(VARIANTS)
    assert list(entries[0].checkpoints()) == [1, 2]


def test_unfinished_runs_of_a_study_are_left_out(study: Path, tmp_path: Path):
    copy = copy_of(study, tmp_path)
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


def test_folders_that_cannot_be_compared_are_refused(study: Path, tmp_path: Path):
    rope, again = (run_folder(x, "rope", 0) for x in (study, copy_of(study, tmp_path)))
    cases = {
        "both runs are rope seed 0": [rope, again],
        "cannot be compared with": [study, tmp_path],
        "needs two or more folders": [rope, rope / ".." / rope.name],
    }
    for words, paths in cases.items():
        with pytest.raises(BadArgument, match=words):
            find_entries(paths)


def change(run: Path, *, without: str = "", **settings: object) -> None:
    record = json.loads((run / "run.json").read_text())
    record.pop(without, None)
    record["settings"] |= settings
    (run / "run.json").write_text(json.dumps(record))


def test_runs_with_different_settings_are_refused(study: Path, tmp_path: Path):
    copy = copy_of(study, tmp_path)
    first, other = (run_folder(copy, name, 0) for name in ("rope", "nope"))
    change(other, learning_rate=1.0)
    with pytest.raises(RopelensError, match=r"learning_rate: 0\.01 and 1\.0"):
        find_entries([first, other])
    change(
        other, size=asdict(replace(NANO, layers=3))
    )  # another size may have another rate
    entries = find_entries([first, other]).entries
    assert [entry.group for entry in entries] == ["nano rope", "3x32x2x1 nope"]
    change(other, context=64, steps=9)
    with pytest.raises(RopelensError, match="context: 32 and 64; steps: 2 and 9"):
        find_entries([first, other])


def test_damaged_records_are_refused(study: Path, tmp_path: Path):
    copy = copy_of(study, tmp_path)
    for file in (run_folder(copy, "nope", 0) / "run.json", copy / "study.json"):
        file.write_text("{")
        with pytest.raises(BadArgument, match=rf"{file.name} cannot be read"):
            find_entries([copy])
