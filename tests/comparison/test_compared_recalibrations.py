"""Tests of compared recalibrations: runs that are found, their numbers, and their cache."""

import json
import shutil
from pathlib import Path
from unittest import mock

import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr
from synthetic_recalibration import (
    CONTEXT,
    DOCUMENTS,
    GAPS,
    SEQUENCES,
    STEPS,
    TOKENS_PER_STEP,
    write_run,
    write_study,
)
from tiny_checkpoints import save_tiny
from transformers import AutoModelForCausalLM

import ropelens as rl
from ropelens.analysis.answer import save_comparison
from ropelens.comparison import recalibration
from ropelens.comparison.recalibration import recovery_variables
from ropelens.comparison.recalibration_measures import held_out_text
from ropelens.comparison.recalibration_rates import rate_variables
from ropelens.comparison.recalibration_runs import find_recalibrations, read_losses
from ropelens.comparison.recalibration_table import (
    repeated_variants,
    summarize_recalibration,
    swaps_at_rates,
)
from ropelens.errors import BadArgument, RopelensError
from ropelens.runtime.netcdf import as_saved
from ropelens.train.base_data import held_out
from ropelens.train.recalibration import recalibrate_study


def by_variant(comparison: xr.Dataset) -> pd.DataFrame:
    return summarize_recalibration(comparison).set_index("variant")


# ---- which runs are found


def test_runs_at_other_rates_are_apart_and_need_a_control(tmp_path: Path):
    gaps = {"control": 0.0, "p-rope:0.5": 0.4}
    rates = {"third-rate": gaps, "triple-rate": {"p-rope:0.5": 0.3}}
    study = write_study(tmp_path / "study", other_rates=rates)
    with pytest.warns(UserWarning, match="unfinished.*control/seed-0-triple-rate"):
        found = find_recalibrations([study])
    names = [run.name for run in found.runs]
    assert names == ["control seed 0", "p-rope:0.5 seed 0", "nope seed 0"]
    names = [run.name for run in found.at_other_rates]
    assert names == [
        "control seed 0 with 0.33 times the learning rate",
        "p-rope:0.5 seed 0 with 0.33 times the learning rate",
    ]
    assert found.unpaired == ["p-rope:0.5 seed 0 with 3 times the learning rate"]


def test_runs_at_other_rates_are_not_compared_without_their_study(tmp_path: Path):
    gaps = {"control": 0.0, "p-rope:0.5": 0.4}
    study = write_study(
        tmp_path / "study", other_rates={"third-rate": gaps, "triple-rate": gaps}
    )
    third = [study / name / "seed-0-third-rate" for name in ("control", "p-rope-0.5")]
    triple = [study / name / "seed-0-triple-rate" for name in ("control", "p-rope-0.5")]
    with pytest.raises(BadArgument, match="need the runs at the rate of their study"):
        find_recalibrations([*third, *triple])
    assert len(find_recalibrations(triple).runs) == 2
    with pytest.raises(BadArgument, match="has no control") as refused:
        find_recalibrations(triple[1:])
    assert "the folder of its study" in str(refused.value)


def test_a_study_has_the_control_first_and_pairs_seeds_by_number(tmp_path: Path):
    study = write_study(tmp_path / "study", seeds=(0, 1))
    found = find_recalibrations([study])
    names = [run.name for run in found.runs]
    assert names[:2] == ["control seed 0", "control seed 1"]
    assert found.variants == ["control", "p-rope:0.5", "nope"]
    assert found.seeds == [0, 1]


def test_unfinished_runs_are_named(tmp_path: Path):
    study = write_study(tmp_path / "study")
    (study / "nope" / "seed-0" / "run.json").unlink()
    with pytest.warns(UserWarning, match="unfinished runs are left out: .*nope/seed-0"):
        found = find_recalibrations([study])
    assert found.variants == ["control", "p-rope:0.5"]
    (unfinished,) = found.unfinished
    assert unfinished.endswith("nope/seed-0")


def test_the_warning_about_unfinished_runs_names_the_line_of_the_user(tmp_path: Path):
    study = write_study(tmp_path / "study")
    (study / "nope" / "seed-0" / "run.json").unlink()
    unfinished = pytest.warns(UserWarning, match="unfinished")
    refused = pytest.raises(BadArgument, match="has no weights")
    with unfinished as warned, refused:
        rl.compare([study], cache=tmp_path / "cache", sequences=SEQUENCES)
    assert warned[0].filename == __file__


def test_single_runs_without_a_control_ask_for_it(tmp_path: Path):
    base = tmp_path / "base"
    run = write_run(tmp_path / "half", base, variant="p-rope:0.5", seed=3)
    other = write_run(tmp_path / "nope", base, variant="nope", seed=3)
    for paths in ([run], [run, other]):
        with pytest.raises(BadArgument, match="has no control") as error:
            rl.compare(paths, cache=tmp_path / "cache")
        command = f"ropelens train --from {base} --variant control --seed 3"
        assert command in str(error.value)


def test_a_control_of_another_seed_is_no_control(tmp_path: Path):
    base = tmp_path / "base"
    control = write_run(tmp_path / "control", base, variant="control", seed=0)
    first = write_run(tmp_path / "first", base, variant="nope", seed=0)
    second = write_run(tmp_path / "second", base, variant="nope", seed=1)
    with pytest.raises(BadArgument, match="--seed 1"):
        find_recalibrations([control, second])
    with pytest.warns(UserWarning, match="without a control are left out: nope seed 1"):
        found = find_recalibrations([control, first, second])
    assert [run.name for run in found.runs] == ["control seed 0", "nope seed 0"]


def test_a_control_alone_asks_for_a_variant(tmp_path: Path):
    control = write_run(tmp_path / "control", tmp_path / "base", variant="control")
    with pytest.raises(BadArgument, match="needs a variant next to the control"):
        find_recalibrations([control])


@pytest.mark.parametrize(
    "setting", ["learning_rate", "context", "text_sha256", "train", "precision"]
)
def test_runs_with_other_settings_are_refused(tmp_path: Path, setting: str):
    base = tmp_path / "base"
    control = write_run(tmp_path / "control", base, variant="control")
    other = write_run(tmp_path / "nope", base, variant="nope", **{setting: 9})
    with pytest.raises(BadArgument, match="cannot be compared") as error:
        find_recalibrations([control, other])
    assert setting in str(error.value)


def test_runs_that_do_not_record_their_precision_are_in_fp32(tmp_path: Path):
    base = tmp_path / "base"
    control = write_run(tmp_path / "control", base, variant="control")
    other = write_run(tmp_path / "nope", base, variant="nope")
    record = json.loads((other / "run.json").read_text())
    del record["settings"]["precision"]
    (other / "run.json").write_text(json.dumps(record))
    found = find_recalibrations([control, other])
    assert [run.settings["precision"] for run in found.runs] == ["fp32", "fp32"]


def test_runs_of_another_base_are_refused(tmp_path: Path):
    control = write_run(tmp_path / "control", tmp_path / "base", variant="control")
    other = write_run(tmp_path / "nope", tmp_path / "base", variant="nope")
    record = json.loads((other / "run.json").read_text())
    record["base"]["fingerprint"] = "files:1"
    (other / "run.json").write_text(json.dumps(record))
    with pytest.raises(BadArgument, match="base: files:0 and files:1"):
        find_recalibrations([control, other])


def test_recalibrations_and_other_results_are_not_mixed(tmp_path: Path):
    study = write_study(tmp_path / "study")
    with pytest.raises(BadArgument, match="cannot be compared with recalibrations"):
        find_recalibrations([study, tmp_path])
    assert find_recalibrations([tmp_path]) is None


def test_fewer_than_eight_documents_are_refused_with_their_number(tmp_path: Path):
    base = tmp_path / "base"
    seven = np.minimum(DOCUMENTS, 6)
    runs = []
    for variant in ("control", "nope"):
        folder = tmp_path / variant
        runs.append(write_run(folder, base, variant=variant, documents=seven))
    found = find_recalibrations(runs)
    with pytest.raises(RopelensError, match=r"8 held-out documents.*\n.*seen: +7 in"):
        read_losses(found.runs)


def test_losses_that_are_missing_or_of_other_sequences_are_refused(tmp_path: Path):
    study = write_study(tmp_path / "study")
    file = study / "nope" / "seed-0" / "losses.csv"
    rows = file.read_text().splitlines()
    found = find_recalibrations([study])
    file.write_text("\n".join(rows[:-1]))
    with pytest.raises(BadArgument, match="lacks losses"):
        read_losses(found.runs)
    file.write_text("\n".join(rows[:-16]))
    with pytest.raises(BadArgument, match="other steps or other sequences"):
        read_losses(found.runs)
    file.write_text("no table")
    with pytest.raises(BadArgument, match="cannot be read"):
        read_losses(found.runs)


# ---- losses


def losses_of(study: Path) -> xr.Dataset:
    found = find_recalibrations([study])
    return recalibration.recorded_gaps(found, read_losses(found.runs))


def test_gaps_are_means_over_sequences_and_paired_seeds(tmp_path: Path):
    gaps = losses_of(write_study(tmp_path / "study", seeds=(0, 1)))
    assert gaps["tokens_seen"].values.tolist() == [s * TOKENS_PER_STEP for s in STEPS]
    for variant in ("control", "p-rope:0.5", "nope"):
        of_variant = gaps.sel(variant=variant)
        np.testing.assert_allclose(of_variant["gap"], GAPS[variant], atol=1e-12)
    share = gaps["recovered"].sel(variant="p-rope:0.5")
    np.testing.assert_allclose(share, [0, 0.25, 0.75, 0.95], atol=1e-9)
    assert gaps["recovered"].sel(variant="control").isnull().all()
    half = float(gaps["tokens_to_half"].sel(variant="p-rope:0.5"))
    assert half == pytest.approx(1.5 * TOKENS_PER_STEP)  # between steps 1 and 2
    assert float(gaps["tokens_to_90"].sel(variant="nope")) == np.inf


def test_gaps_at_other_rates_are_to_the_control_of_that_rate(tmp_path: Path):
    rates = {
        "third-rate": {"control": 0.01, "p-rope:0.5": 0.41},
        "triple-rate": {"control": 0.02, "p-rope:0.5": 1.52},
    }
    found = find_recalibrations([write_study(tmp_path / "study", other_rates=rates)])
    runs = [*found.runs, *found.at_other_rates]
    numbers = rate_variables(runs, read_losses(runs), found.variants, study_rate=5e-4)
    np.testing.assert_allclose(numbers["rate"], [5e-4 / 3, 5e-4, 15e-4])
    gaps = numbers["rate_gap"]
    np.testing.assert_allclose(gaps.sel(variant="p-rope:0.5"), [0.40, 0.04, 1.50])
    np.testing.assert_allclose(gaps.sel(variant="nope"), [np.nan, 1.0, np.nan])
    np.testing.assert_allclose(
        numbers["rate_loss"].sel(variant="control"), [2.98, 2.97, 2.99]
    )
    change = numbers["rate_loss_change"].sel(variant="p-rope:0.5")
    np.testing.assert_allclose(change, [0.37, 0, 1.48])
    numbers.attrs["learning_rate"] = 5e-4
    assert repeated_variants(numbers) == ["control", "p-rope:0.5"]
    assert swaps_at_rates(numbers) == []


def test_only_the_seeds_of_other_rates_count(tmp_path: Path):
    """Seed 1 has another loss, and ran only at the study's rate."""
    gaps = {"control": 0.0, "p-rope:0.5": 0.4}
    rates = {"third-rate": gaps, "triple-rate": gaps}
    study = write_study(tmp_path / "study", seeds=(0, 1), other_rates=rates)
    found = find_recalibrations([study])
    runs = [*found.runs, *found.at_other_rates]
    recorded = read_losses(runs)
    numbers = rate_variables(runs, recorded, found.variants, study_rate=5e-4)
    first = recorded[0].losses[-1].mean()
    measured = float(numbers["rate_loss"].sel(variant="control", rate=5e-4))
    assert measured == pytest.approx(first, abs=1e-9)


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_rates_pair_the_seeds_that_both_variants_have(tmp_path: Path, missing: int):
    """A study that is trained in part has no runs at other rates, and unequal seeds."""
    study = write_study(tmp_path / "study", seeds=(0, 1, 2))
    # The loss of a seed must not be compared with the loss of another seed
    for variant in ("control", "p-rope-0.5", "nope"):
        file = study / variant / "seed-1/losses.csv"
        losses = pd.read_csv(file)
        losses["loss"] += 5.0
        losses.to_csv(file, index=False)
    (study / "nope" / f"seed-{missing}" / "run.json").unlink()
    with pytest.warns(UserWarning, match="unfinished"):
        found = find_recalibrations([study])
    numbers = rate_variables(
        found.runs, read_losses(found.runs), found.variants, study_rate=5e-4
    )
    gaps = numbers["rate_gap"].sel(rate=5e-4)
    np.testing.assert_allclose(gaps.sel(variant="nope"), 1.0)
    pair = numbers["rate_difference"].sel(rate=5e-4, other_variant="p-rope:0.5")
    np.testing.assert_allclose(pair.sel(variant="nope"), 0.96)


def test_losses_keep_every_bit_of_the_file(tmp_path: Path):
    study = write_study(tmp_path / "study")
    gaps = losses_of(study)
    file = study / "nope" / "seed-0" / "losses.csv"
    lines = file.read_text().splitlines()[1:]
    expected = [float(line.split(",")[-1]) for line in lines]
    of_nope = gaps["heldout_loss"].sel(variant="nope", seed=0)
    assert of_nope.values.ravel().tolist() == expected


def test_a_missing_seed_leaves_its_pair_out(tmp_path: Path):
    study = write_study(tmp_path / "study", seeds=(0, 1))
    (study / "nope" / "seed-1" / "run.json").unlink()
    with pytest.warns(UserWarning, match="unfinished"):
        gaps = losses_of(study)
    assert np.isnan(gaps["gap_of_seed"].sel(variant="nope", seed=1)).all()
    np.testing.assert_allclose(gaps["gap"].sel(variant="nope"), GAPS["nope"])


def test_the_spread_between_seeds_is_largest_minus_smallest_gap(
    recalibrated: xr.Dataset,
):
    assert np.isnan(by_variant(recalibrated)["gap_after_spread_of_seeds"]).all()
    losses = recalibrated["heldout_loss"]
    nudge = xr.DataArray([0.0, 0.3, 0.0], dims="variant")
    twice = xr.concat([losses, losses + nudge], "seed").assign_coords(seed=[0, 1])
    several = recalibrated.drop_dims("seed").drop_vars(["gap", "recovered"])
    several["heldout_loss"] = twice
    several = several.assign(recovery_variables(several))
    row = by_variant(several).loc["p-rope:0.5"]
    assert row["seeds"] == 2
    assert row["gap_after_spread_of_seeds"] == pytest.approx(0.3)
    assert row["gap_after"] == pytest.approx(0.04 + 0.15)


# ---- models before and after


def test_each_variant_is_measured_before_and_after(recalibrated: xr.Dataset):
    assert recalibrated["entry"].values.tolist() == [
        "control before",
        "control seed 0",
        "p-rope:0.5 before",
        "p-rope:0.5 seed 0",
        "nope before",
        "nope seed 0",
    ]
    assert recalibrated["partner"].values.tolist() == [0, 1, 0, 1, 0, 1]
    stopped = np.isinf(recalibrated["wavelength"]).sum(("layer", "frequency"))
    planes = recalibrated.sizes["layer"] * recalibrated.sizes["frequency"]
    assert stopped.values.tolist() == [0, 0, planes / 2, planes / 2, planes, planes]


def test_loss_before_training_is_the_loss_of_the_edited_base(
    recalibrated: xr.Dataset, recalibrated_study: Path
):
    run = find_recalibrations([recalibrated_study]).runs[0]
    text = held_out_text(run).joined(8)
    model = AutoModelForCausalLM.from_pretrained(recalibrated_study.parent / "base")
    edits = {"nope": "nope"}
    expected = rl.evaluate(model, text, edits=edits, measures=["loss"])
    for entry, edit in (("control before", "none"), ("nope before", "nope")):
        losses = recalibrated["position_loss"].sel(entry=entry)
        of_edit = expected["position_loss"].sel(edit=edit)
        np.testing.assert_allclose(losses, of_edit, atol=1e-4)


def test_attention_by_offset_is_without_the_first_token(recalibrated: xr.Dataset):
    mass = recalibrated["offset_mass"].sum("offset_bin")
    # Queries of the first token attend to nothing else.
    assert (mass + recalibrated["sink_mass"]).max() <= 1 + 1e-6
    assert mass.min() > 0.5
    assert recalibrated["offset_start"].values[0] == 0
    assert recalibrated["follow_score"].dims == ("entry", "layer", "head")


def test_attention_changes_against_the_control_of_the_same_phase(
    recalibrated: xr.Dataset,
):
    change = recalibrated["attention_change"]
    assert (change.sel(entry="control before") == 0).all()
    assert (change.sel(entry="control seed 0") == 0).all()
    assert (change.sel(entry="nope before") > 0).all()
    assert not (recalibrated["label_changed"] == 1).sel(entry="control seed 0").any()


def test_long_texts_join_held_out_sequences_after_any_beginning(
    recalibrated_study: Path,
):
    run = find_recalibrations([recalibrated_study]).runs[0]
    text = held_out_text(run)
    long = text.joined(1).ids
    body = torch.from_numpy(text.rows[:, 1:].astype(np.int64)).reshape(-1)
    assert long.shape == (1, 4 * CONTEXT)
    assert torch.equal(long[0, 1:], body[: 4 * CONTEXT - 1])
    without = type(text)(text.rows, text.documents, beginning=0).joined(1).ids
    assert without.shape == (1, 4 * CONTEXT)


def test_results_are_read_again_without_weights(
    recalibrated: xr.Dataset, recalibrated_study: Path, tmp_path: Path
):
    cache = recalibrated_study.parent / "cache"
    copy = Path(shutil.copytree(recalibrated_study, tmp_path / "study"))
    for weights in copy.glob("*/*/model.safetensors"):
        weights.unlink()
    with mock.patch.object(recalibration, "open_base", side_effect=AssertionError):
        again = rl.compare([copy], cache=cache, sequences=SEQUENCES)
    for name in ("position_loss", "label", "attention_change", "gap"):
        before = recalibrated[name].drop_vars(["page", "profile"], errors="ignore")
        after = again[name].drop_vars(["page", "profile"], errors="ignore")
        xr.testing.assert_equal(after, before)
    with pytest.raises(BadArgument, match="has no weights"):
        rl.compare([copy], cache=cache, sequences=SEQUENCES + 8)


def test_another_base_of_the_same_name_is_refused(
    recalibrated_study: Path, tmp_path: Path
):
    study = Path(shutil.copytree(recalibrated_study, tmp_path / "study"))
    for file in study.glob("*/*/run.json"):
        record = json.loads(file.read_text())
        record["base"]["fingerprint"] = "files:other"
        file.write_text(json.dumps(record))
    with pytest.raises(BadArgument, match="is not the checkpoint from which"):
        rl.compare([study], cache=tmp_path / "cache", sequences=SEQUENCES)


# ---- the table and the files


def test_the_table_has_a_row_per_variant_and_words_for_missing_tokens(
    recalibrated: xr.Dataset,
):
    table = by_variant(recalibrated)
    assert table.index.tolist() == ["control", "p-rope:0.5", "nope"]
    assert table["gap_before"].tolist() == pytest.approx([0, 0.8, 2.5])
    assert table["tokens_to_half"].tolist()[0] == "not defined"
    assert table["tokens_to_half"].tolist()[1] == 1.5 * TOKENS_PER_STEP
    assert table["tokens_to_90"].tolist()[2] == "not reached"
    heads = table.filter(regex="_heads_after$").sum(axis=1)
    assert set(heads) == {8}  # 2 layers of 4 heads, also untested and diffuse ones


def test_losses_past_both_contexts_are_means_over_tokens(recalibrated: xr.Dataset):
    table = by_variant(recalibrated)
    models = recalibrated.sel(entry=["nope seed 0"])
    start = models["position_start"].values
    width = models["position_stop"].values - start
    losses = models["position_loss"].values[0]
    for column, context in (("recalibrated", CONTEXT), ("trained", 64)):
        past = start >= context
        expected = np.average(losses[past], weights=width[past])
        measured = table.loc["nope", f"loss_past_{column}_context_after"]
        assert measured == pytest.approx(expected)


@pytest.mark.parametrize("trained_context", [0, 10**6])
def test_losses_past_a_context_that_no_text_exceeds_are_missing(
    recalibrated: xr.Dataset, trained_context: int
):
    longer = recalibrated.assign_attrs(trained_context=trained_context)
    table = by_variant(longer)
    assert table["loss_past_trained_context_after"].isna().all()
    assert table["loss_past_recalibrated_context_after"].notna().all()


def test_the_saved_folder_opens_again(recalibrated: xr.Dataset, tmp_path: Path):
    save_comparison(tmp_path / "out", recalibrated)
    again = rl.open(tmp_path / "out")
    saved = as_saved(recalibrated)
    for name in recalibrated.data_vars:
        before = saved[name].drop_vars(["page", "profile"], errors="ignore")
        after = again[name].drop_vars(["page", "profile"], errors="ignore")
        xr.testing.assert_equal(after, before)
    table = pd.read_csv(tmp_path / "out" / "comparison.csv")
    assert table["variant"].tolist() == ["control", "p-rope:0.5", "nope"]
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    assert record["kind"] == "comparison"
    assert record["findings"][0].startswith("After 4 steps (1,024 tokens), p-rope:0.5")


def test_a_folder_for_reports_has_five_digits_and_no_paths_of_profiles(
    recalibrated: xr.Dataset, tmp_path: Path
):
    files = np.full(recalibrated.sizes["entry"], "profile.nc", dtype=object)
    comparison = recalibrated.assign_coords(profile=("entry", files))
    save_comparison(tmp_path / "out", comparison, with_models=False)
    again = rl.open(tmp_path / "out")
    assert "profile" not in again.coords
    assert again["heldout_loss"].dtype == np.float32
    losses = recalibrated["heldout_loss"].values
    np.testing.assert_allclose(again["heldout_loss"], losses, rtol=8e-6)
    assert not np.array_equal(again["heldout_loss"], losses.astype(np.float32))


def test_a_comparison_that_was_stopped_after_a_profile_continues(
    recalibrated: xr.Dataset, recalibrated_study: Path, tmp_path: Path
):
    """Only the profile of a model is saved, and the other models have all their files."""
    cache = shutil.copytree(recalibrated_study.parent / "cache", tmp_path / "cache")
    (Path(cache) / "nope" / "before.nc").unlink()
    for _ in range(2):  # measured from the profile, and then read
        again = rl.compare([recalibrated_study], cache=cache, sequences=SEQUENCES)
        np.testing.assert_array_equal(again["wavelength"], recalibrated["wavelength"])
        assert "wavelength" in again.data_vars


# ---- a study that ropelens trained


@pytest.mark.thorough
def test_a_trained_study_obeys_the_laws_of_gaps(tmp_path: Path):
    base = save_tiny(tmp_path / "base", initializer_range=0.5)
    texts = tmp_path / "texts"
    texts.mkdir()
    letters = np.random.default_rng(0).choice(list("abcde"), size=(20, 200))
    for number, document in enumerate(letters):
        (texts / f"{number:02}.txt").write_text("".join(document))
    file = tmp_path / "study.toml"
    file.write_text(
        'variants = ["p-rope:1", "nope"]\nseeds = [0, 1]\nsteps = 3\ncontext = 16\n'
        "sequences = 4\nevaluated = 16\n"
    )
    study = recalibrate_study(base, file, out=tmp_path / "study", text=[texts])
    comparison = rl.compare([study], cache=tmp_path / "cache", sequences=SEQUENCES)
    same = comparison.sel(variant="p-rope:1")
    for name in ("gap", "gap_low", "gap_high"):
        assert (same[name] == 0).all()
    rows = held_out(study / "data", sequences=16).rows
    model, _ = rl.load(base)
    text = torch.from_numpy(rows.astype(np.int64))
    loss = rl.evaluate(model, text, edits={"nope": "nope"}, measures=["loss"])
    damage = loss["mean_loss"].sel(edit="nope") - loss["mean_loss"].sel(edit="none")
    gap = float(comparison["gap"].sel(variant="nope", step=0))
    assert gap == pytest.approx(float(damage), abs=1e-4)
    page = save_comparison(tmp_path / "out", comparison)
    assert "After 3 steps" in page.read_text()
