"""Sentences, figures, tables and page of recalibrations."""

import re
from pathlib import Path

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest
import xarray as xr
from in_browser import Opened, fits, values
from synthetic_recalibration import GAPS, STEPS, TOKENS_PER_STEP

from ropelens.analysis.answer import save_comparison
from ropelens.analysis.open_folder import rewrite_page
from ropelens.comparison.recalibration import recovery_variables
from ropelens.comparison.recalibration_rates import rate_variables
from ropelens.comparison.recalibration_runs import RecalibratedRun, RecordedLosses
from ropelens.comparison.recalibration_table import summarize_recalibration
from ropelens.figures import recalibration as figures
from ropelens.figures.compared_heads import ComparedHead, plot_compared_head
from ropelens.figures.recalibrated_offsets import (
    changed_followers,
    mass_by_octave,
    most_recovered,
    plot_changed_followers,
)
from ropelens.figures.style import LABEL_ORDER
from ropelens.report.recalibrated_heads import changed_heads, head_maps
from ropelens.report.recalibration_page import render_recalibration
from ropelens.report.recalibration_tables import recalibration_tables
from ropelens.report.sentences.recalibration import recalibration_sentences

SIGNS_OF_CELL = """(cell) => [...cell.querySelectorAll(".glyph")].map(
  (sign) => getComputedStyle(sign, "::before").content)"""
HOSTILE = '<img src=x onerror=alert(1)>"</table>'


def findings(comparison: xr.Dataset) -> list[str]:
    return recalibration_sentences(comparison, summarize_recalibration(comparison))


def finding(comparison: xr.Dataset, beginning: str) -> str:
    (sentence,) = [s for s in findings(comparison) if s.startswith(beginning)]
    return sentence


def with_gaps(comparison: xr.Dataset, **gaps: tuple[float, ...]) -> xr.Dataset:
    """The comparison with other gaps at each step; `half` is p-rope:0.5."""
    losses = comparison["heldout_loss"].copy()
    control = losses.sel(variant="control")
    for name, of_steps in gaps.items():
        variant = {"half": "p-rope:0.5"}.get(name, name)
        gap = xr.DataArray(list(of_steps), dims="step")
        losses.loc[{"variant": variant}] = (control + gap).transpose(
            "seed", "step", "sequence"
        )
    changed = comparison.assign(heldout_loss=losses)
    return changed.assign(recovery_variables(changed))


def with_new_labels(comparison: xr.Dataset) -> xr.Dataset:
    """Heads 0.1 and 1.2 of the finished nope have other labels than the control's."""
    label = np.full(comparison["label"].shape, "semantic", dtype=object)
    changed = np.zeros(label.shape)
    bits = np.full(label.shape, 0.25)
    label[5, 0, 1] = "positional"  # entry, layer, head
    changed[5, 0, 1] = 1
    label[5, 1, 2] = "diffuse"  # within its uncertainty
    bits[5, 0, 1] = 1.5
    dims = ("entry", "layer", "head")
    assert comparison["label"].dims == dims
    return comparison.assign(
        label=(dims, label),
        label_changed=(dims, changed),
        attention_change=(dims, bits),
    )


def with_rates(comparison: xr.Dataset, *, triple: float) -> xr.Dataset:
    """The comparison with p-rope:0.5 at other rates; the gap at the triple rate is given."""
    losses = comparison["heldout_loss"].isel(seed=0)
    control = losses.sel(variant="control").values
    runs = []
    recorded = []
    for factor, gaps in (
        (1 / 3, {"control": 0.01, "p-rope:0.5": 0.11}),
        (1, {"control": 0, "p-rope:0.5": 0.04, "nope": 1.0}),
        (3, {"control": 0.02, "p-rope:0.5": 0.02 + triple}),
    ):
        for variant, gap in gaps.items():
            settings = {"variant": variant, "learning_rate": 5e-4 * factor, "seed": 0}
            runs.append(RecalibratedRun(Path(variant), {"settings": settings}))
            recorded.append(
                RecordedLosses(
                    steps=np.array(STEPS),
                    documents=comparison["document"].values,
                    losses=control + gap,
                    train_loss=np.zeros(len(STEPS)),
                )
            )
    variants = comparison["variant"].values.tolist()
    numbers = rate_variables(runs, recorded, variants, study_rate=5e-4)
    return comparison.drop_dims("rate").merge(numbers)


# ---- sentences


def test_the_first_sentence_answers_the_question(recalibrated: xr.Dataset):
    assert findings(recalibrated)[0] == (
        "After 4 steps (1,024 tokens), p-rope:0.5 has the smallest gap to the control "
        "(+0.040): it has recovered 95 % (95 to 95 %) of its damage of 0.80 nats/token, and "
        "nope 60 % (60 to 60 %) of 2.50; the control changed by −0.03 (−0.030 to −0.030)."
    )


def test_one_variant_is_not_called_the_best(recalibrated: xr.Dataset):
    table = summarize_recalibration(recalibrated)
    table = table[table["variant"] != "p-rope:0.5"]
    first, second, *_ = recalibration_sentences(recalibrated, table)
    assert first.startswith("After 4 steps (1,024 tokens), nope has recovered 60 %")
    assert "smallest gap" not in first
    assert second.startswith(
        "After training, the gap of nope to the control is +1.00 ("
    )


def test_the_first_sentence_says_whether_the_control_changed_for_certain(
    recalibrated: xr.Dataset,
):
    uncertain = recalibrated.copy()
    uncertain["loss_change"].loc[{"variant": "control"}] = 0.01
    uncertain["loss_change_low"].loc[{"variant": "control"}] = -0.002
    uncertain["loss_change_high"].loc[{"variant": "control"}] = 0.022
    assert findings(uncertain)[0].endswith(
        "the control changed by +0.01 (−0.002 to +0.022), which is not certain."
    )


def test_the_table_has_the_loss_of_the_control(recalibrated: xr.Dataset):
    gaps = recalibration_tables(recalibrated, summarize_recalibration(recalibrated))[0]
    titles = [column.title for column in gaps.columns]
    control, half, _nope = gaps.rows
    place = titles.index("loss after training")
    assert control.cells[place] == "2.970\n(before 3.000)"
    assert half.cells[place] == "3.010\n(before 3.800)"


def test_the_table_has_the_tokens_to_half_and_to_90_percent(recalibrated: xr.Dataset):
    gaps = recalibration_tables(recalibrated, summarize_recalibration(recalibrated))[0]
    place = [column.title for column in gaps.columns].index(
        "tokens to half (and to 90\u00a0%)"
    )
    cells = [row.cells[place] for row in gaps.rows]
    assert cells == ["–", "384\n(90 %: 896)", "896\n(90 %: not reached)"]


def test_tokens_are_written_in_millions(recalibrated: xr.Dataset):
    words = findings(recalibrated.assign_attrs(tokens=204_800, steps=100))[0]
    assert words.startswith("After 100 steps (0.2 million tokens), ")


def test_the_first_sentence_says_that_training_damaged_the_control(
    recalibrated: xr.Dataset,
):
    losses = recalibrated["heldout_loss"].copy()
    losses[:, :, -1] += 0.29
    damaged = recalibrated.assign(heldout_loss=losses)
    damaged = damaged.assign(recovery_variables(damaged))
    first = findings(damaged)[0]
    assert first.startswith(
        "The training itself damaged the model: the control is worse"
    )
    assert "by 0.26 nats/token" in first
    assert "learning rate of 0.0005 is too high" in first


def test_a_variant_without_damage_is_named_with_its_gap(recalibrated: xr.Dataset):
    comparison = with_gaps(recalibrated, half=(0, 0.001, 0.001, 0.001))
    first = findings(comparison)[0]
    assert (
        "p-rope:0.5 has the smallest gap to the control (+0.001): it had no clear damage; "
        "nope has recovered 60 %"
    ) in first


def test_a_small_and_certain_damage_is_stated(recalibrated: xr.Dataset):
    comparison = with_gaps(recalibrated, half=(0.015, 0.01, 0.005, 0.001))
    first = findings(comparison)[0]
    assert "it had a damage too small for a recovered share (+0.015)" in first


def test_a_gap_below_zero_is_reported_as_such(recalibrated: xr.Dataset):
    comparison = with_gaps(recalibrated, half=(-0.05, -0.05, -0.1, -0.2))
    first = findings(comparison)[0]
    assert "(−0.20): it was better than the control from the start (−0.050)" in first
    assert "its gap to the control is −0.20" in findings(comparison)[1]


@pytest.mark.parametrize(("gap", "words"), [(0.06, "which is certain"), (0.04, "not")])
def test_the_second_sentence_says_whether_the_best_is_certainly_best(
    recalibrated: xr.Dataset, gap: float, words: str
):
    comparison = with_gaps(
        recalibrated, half=(0.8, 0.6, 0.2, 0.04), nope=(1, 1, 1, gap)
    )
    second = findings(comparison)[1]
    assert second.startswith("Best variant: p-rope:0.5. After training, its gap")
    if gap == 0.04:
        assert "Second: nope, worse than p-rope:0.5 by" in second
        assert second.endswith("not certain (the interval contains 0).")
    else:
        assert "Second: nope, worse than p-rope:0.5 by 0.020" in second
        assert second.endswith("which is certain.")


def test_a_second_variant_that_is_better_in_common_seeds_is_not_called_worse(
    recalibrated: xr.Dataset,
):
    """Seed 1 of the second variant is missing, and is the seed in which the best one gains."""
    losses = recalibrated["heldout_loss"].isel(seed=0, drop=True)
    both = xr.concat([losses, losses], dim=pd.Index([0, 1], name="seed"))
    last = both["step"] == both["step"][-1]
    of_half = (both["variant"] == "p-rope:0.5") & last
    of_nope = (both["variant"] == "nope") & last
    control = both.sel(variant="control")
    both = both.where(~of_half, control + 0.10)
    both = both.where(~(of_half & (both["seed"] == 1)), control)
    both = both.where(~of_nope, control + 0.08)
    both = both.where(~((both["variant"] == "nope") & (both["seed"] == 1)))
    comparison = recalibrated.drop_dims("seed").assign(heldout_loss=both)
    comparison = comparison.assign(recovery_variables(comparison))
    second = findings(comparison)[1]
    assert second.startswith("Best variant: p-rope:0.5.")
    assert (
        "Second: nope, better than p-rope:0.5 in the seeds that both have, by 0.020"
        in second
    )
    assert second.endswith("which is certain.")


def test_tokens_that_are_not_reached_or_not_defined(recalibrated: xr.Dataset):
    words = finding(recalibrated, "Training tokens until")
    assert "p-rope:0.5 384 and 896; nope 896, without reaching 90 %" in words
    slow = (1.0, 1.0, 0.9, 0.8)
    words = finding(with_gaps(recalibrated, nope=slow), "Training tokens until")
    assert "nope reached neither" in words
    flat = (0.0,) * 4
    comparison = with_gaps(recalibrated, half=flat, nope=flat)
    assert finding(comparison, "The recovered share is not defined for any variant")


def test_the_end_of_a_curve_below_90_percent_has_its_slope(recalibrated: xr.Dataset):
    sentence = finding(recalibrated, f"In the last {2 * TOKENS_PER_STEP} training")
    assert "nope from 20.0 to 60.0 %" in sentence
    assert sentence.endswith("Curves that had not ended: nope.")
    assert "p-rope:0.5" not in sentence


@pytest.mark.parametrize("end", [1.0, 1.5])
def test_a_curve_that_no_longer_rises_has_ended(recalibrated: xr.Dataset, end: float):
    comparison = with_gaps(recalibrated, nope=(2.5, 2.5, 1.0, end))
    sentence = finding(comparison, "In the last")
    assert f"nope from 60.0 to {100 - 40 * end:.1f} %" in sentence
    assert "not ended" not in sentence


def test_variants_below_the_control_past_the_context_in_each_seed_are_named(
    recalibrated: xr.Dataset,
):
    losses = recalibrated["position_loss"]
    partner = recalibrated["partner"].values
    control = losses.isel(entry=partner).values
    losses = losses.copy(data=control)
    equal = recalibrated.assign(position_loss=losses)
    assert "Lower than" not in finding(equal, "Loss past")
    for name, gain in (("p-rope:0.5", 0.253), ("nope", 0.019)):
        is_after = (equal["group"] == name) & (equal["phase"] == "after")
        losses = losses.where(~is_after, losses - gain)
    sentence = finding(recalibrated.assign(position_loss=losses), "Loss past")
    assert sentence.endswith(
        "Lower than the control in each seed: p-rope:0.5 (by 0.25)."
    )


def test_the_page_states_that_stopped_planes_limit_wavelengths(
    recalibrated: xr.Dataset,
):
    words = finding(recalibrated, "A variant that stops planes limits the wavelengths")
    assert "p-rope:0.5 stops 2 of 4 planes" in words
    assert finding(recalibrated, "No plane rotates in nope.")


def test_a_sentence_states_whether_other_rates_change_the_order(
    recalibrated: xr.Dataset,
):
    alone = finding(recalibrated, "The learning rate was")
    assert "no run with another rate is compared" in alone
    same = finding(with_rates(recalibrated, triple=0.2), "Gaps with the learning rate")
    assert "0.000167 (1/3 of the study's rate): p-rope:0.5 +0.100" in same
    assert "0.0015 (3 times the study's rate): p-rope:0.5 +0.200" in same
    assert (
        "The order of control and p-rope:0.5 is the same with all compared rates."
        in same
    )
    assert "Not repeated: nope." in same
    assert "loss changes by +0.010 (+0.010 to +0.010) with 0.000167 and +0.020" in same
    other = finding(
        with_rates(recalibrated, triple=-0.1), "Gaps with the learning rate"
    )
    assert "changes: with 0.0015, p-rope:0.5 is better than control. Not" in other


def test_a_rate_without_a_finished_run_of_a_variant_is_named(recalibrated: xr.Dataset):
    comparison = with_rates(recalibrated, triple=0.2)
    at = {"variant": "p-rope:0.5", "rate": 15e-4}
    for name in ("rate_loss", "rate_gap", "rate_gap_low", "rate_gap_high"):
        comparison[name].loc[at] = np.nan
    sentence = finding(comparison, "Gaps with the learning rate")
    missing = "No finished run with the learning rate 0.0015 (3 times the study's rate)"
    assert f"{missing}: p-rope:0.5." in sentence
    assert "–" not in sentence


def test_a_swap_whose_interval_contains_0_is_not_certain(recalibrated: xr.Dataset):
    comparison = with_rates(recalibrated, triple=-0.1)
    at = {"variant": "control", "other_variant": "p-rope:0.5", "rate": 15e-4}
    comparison["rate_difference_low"].loc[at] = -0.01
    sentence = finding(comparison, "Gaps with the learning rate")
    assert "p-rope:0.5 is better than control, which is not certain." in sentence


def test_an_equal_order_whose_interval_contains_0_is_not_certain(
    recalibrated: xr.Dataset,
):
    comparison = with_rates(recalibrated, triple=0.2)
    at = {"variant": "control", "other_variant": "p-rope:0.5", "rate": 15e-4}
    comparison["rate_difference_high"].loc[at] = 0.01
    sentence = finding(comparison, "Gaps with the learning rate")
    assert "the same with all compared rates, but it is not certain." in sentence


def test_a_table_has_the_runs_at_other_rates(recalibrated: xr.Dataset):
    comparison = with_rates(recalibrated, triple=0.2)
    table = recalibration_tables(comparison, summarize_recalibration(comparison))[-1]
    assert table.title == "Learning rates"
    assert [(row.name, *row.cells[:3]) for row in table.rows] == [
        ("0.000167", "control", "2.980", "+0.010\n(+0.010 to +0.010)"),
        ("0.000167", "p-rope:0.5", "3.080", "+0.070\n(+0.070 to +0.070)"),
        ("0.0005 (the study's)", "control", "2.970", "–"),
        ("0.0005 (the study's)", "p-rope:0.5", "3.010", "–"),
        ("0.0015", "control", "2.990", "+0.020\n(+0.020 to +0.020)"),
        ("0.0015", "p-rope:0.5", "3.190", "+0.18\n(+0.18 to +0.18)"),
    ]


def test_unfinished_and_unpaired_runs_are_named(recalibrated: xr.Dataset):
    comparison = recalibrated.assign_attrs(
        unfinished="nope/seed-1", unpaired="x seed 2"
    )
    words = finding(comparison, "These runs are not finished: nope/seed-1.")
    assert words.endswith("no control has their seed and learning rate: x seed 2.")


# ---- figures


def test_the_picture_shows_the_gap_of_each_step_with_its_interval(
    recalibrated: xr.Dataset,
):
    figure = figures.plot_gaps(recalibrated)
    lines = [trace for trace in figure.data if (trace.meta or {}).get("role") == "gap"]
    bands = [
        trace for trace in figure.data if (trace.meta or {}).get("role") == "interval"
    ]
    assert [line.name for line in lines] == [
        "p-rope:0.5: 95 % recovered",
        "nope: 60 % recovered",
    ]
    for line, band, variant in zip(lines, bands, ("p-rope:0.5", "nope"), strict=True):
        np.testing.assert_allclose(line.y, GAPS[variant])
        assert line.x.tolist() == [step + 1 for step in STEPS]
        of_variant = recalibrated.sel(variant=variant)
        ends = [*of_variant["gap_high"].values, *of_variant["gap_low"].values[::-1]]
        np.testing.assert_allclose(band.y, ends)
    last = f"{STEPS[-1] * TOKENS_PER_STEP / 1000:.3g}k"
    ticks = dict(
        zip(figure.layout.xaxis.tickvals, figure.layout.xaxis.ticktext, strict=True)
    )
    assert ticks[1] == "0"
    assert ticks[STEPS[-1] + 1] == last


def test_a_variant_on_the_line_of_the_control_is_named_in_the_legend(
    recalibrated: xr.Dataset,
):
    comparison = with_gaps(recalibrated, half=(0.001, 0.001, 0.001, 0.001))
    names = [trace.name for trace in figures.plot_gaps(comparison).data]
    assert "p-rope:0.5: no clear damage, near 0" in names
    assert "nope: 60 % recovered" in names


def test_ticks_of_retrieval_are_the_measured_lengths(recalibrated: xr.Dataset):
    figure = figures.plot_needles_before_and_after(recalibrated)
    lengths = recalibrated["prompt_length"].values
    for axis in figure.select_xaxes():
        assert [*axis.tickvals] == lengths.tolist()
        assert lengths.min() / 2 < axis.autorangeoptions.clipmin < lengths.min()


def test_losses_by_position_are_shown_before_and_after(recalibrated: xr.Dataset):
    figure = figures.plot_losses_before_and_after(recalibrated)
    for row, entry in ((1, "nope before"), (2, "nope seed 0")):
        (line,) = figure.select_traces({"name": "nope"}, row=row, col=1)
        np.testing.assert_allclose(
            line.y, recalibrated["position_loss"].sel(entry=entry)
        )
    assert marks(figure) == {32: "recalibrated context", 64: "trained context"}
    alike = recalibrated.assign_attrs(trained_context=32)
    figure = figures.plot_losses_before_and_after(alike)
    assert marks(figure) == {32: "recalibrated and trained context"}


def test_octaves_sum_the_attention_of_their_offsets():
    starts = np.array([0, 1, 2, 3, 4, 6, 8])
    octaves, mass = mass_by_octave(starts, np.array([1.0, 2, 3, 4, 5, 6, 7]))
    assert octaves.tolist() == [0, 1, 2, 4, 8]
    assert mass.tolist() == [1, 2, 7, 11, 7]


def test_heads_whose_follow_score_changed_most_come_first(recalibrated: xr.Dataset):
    scores = recalibrated["follow_score"].copy(data=np.full((6, 2, 4), 0.5))
    scores[3, 1, 2] = -0.5  # the finished p-rope:0.5
    scores[3, 0, 1] = 0.1
    scores[3, 0, 0] = np.nan
    comparison = recalibrated.assign(follow_score=scores)
    assert most_recovered(comparison) == "p-rope:0.5"
    first, second, *others = changed_followers(comparison, "p-rope:0.5")
    assert first.title == "L1 H2: follow score +0.50 before, −0.50 after"
    assert (second.layer, second.head) == (0, 1)
    assert (0, 0) not in [(other.layer, other.head) for other in others]
    figure = plot_changed_followers(comparison)
    assert len(figure.data) == 10
    of_head = comparison["offset_mass"][2, 1, 2]  # p-rope:0.5 before training
    assert sum(figure.data[0].y) == pytest.approx(float(of_head.sum()))


def marks(figure: go.Figure) -> dict[int, str]:
    """The words of the dotted lines, by position."""
    words = {}
    for note in figure.layout.annotations:
        if note.name == "context":
            words[round(10**note.x)] = note.text.strip()
    return words


# ---- heads next to the control's


def test_the_map_shows_both_labels_and_the_bits_of_each_head(recalibrated: xr.Dataset):
    of_half, of_nope = head_maps(with_new_labels(recalibrated))
    assert of_nope.name == "nope seed 0"
    changed = of_nope.rows[0][1]
    assert (changed.control, changed.label) == ("semantic", "positional")
    assert (changed.bits, changed.changed) == ("1.50", True)
    assert changed.link == "#heads=1.L0H1,5.L0H1"
    uncertain = of_nope.rows[1][2]
    assert (uncertain.label, uncertain.changed) == ("diffuse", False)
    assert "within its uncertainty" in uncertain.words
    assert not any(cell.changed for row in of_half.rows for cell in row)


def test_heads_whose_label_changed_in_a_variant_are_listed(recalibrated: xr.Dataset):
    (head,) = changed_heads(head_maps(with_new_labels(recalibrated)))
    assert head.name == "L0 H1"
    assert [cell.label for cell in head.cells] == ["semantic", "positional"]


def test_the_table_counts_all_labels(recalibrated: xr.Dataset):
    table = summarize_recalibration(with_new_labels(recalibrated)).set_index("variant")
    nope = table.loc["nope"]
    assert nope["diffuse_heads_after"] == 1
    assert nope["positional_heads_after"] == 1
    assert nope["semantic_heads_after"] == 6
    assert nope["labels_changed_after"] == 1


def test_stopped_planes_are_points_in_a_named_group(recalibrated: xr.Dataset):
    half = recalibrated["entry"].values.tolist().index("p-rope:0.5 seed 0")
    figure = plot_compared_head(recalibrated, ComparedHead(half, 0, 1))
    (line, points) = figure.select_traces(selector={"name": "query"})
    assert np.isfinite(line.y).tolist() == [True, True, False, False]
    assert np.isfinite(points.y).tolist() == [False, False, True, True]
    assert points.mode == "markers"
    assert figure.layout.xaxis2.ticktext[-1] == "∞<br>(stopped)"
    group = figure.layout.shapes[0]
    assert line.x[1] < group.x0 < points.x[2] < points.x[3] < group.x1


# ---- the page


def page_of(comparison: xr.Dataset) -> str:
    return render_recalibration(comparison, summarize_recalibration(comparison))


def test_the_page_names_the_seeds_of_heads_of_training_and_of_the_measurement(
    recalibrated: xr.Dataset,
):
    assert "These are the runs of seed 0." in page_of(recalibrated)
    two_seeds = recalibrated.isel(seed=[0, 0]).assign_coords(seed=[0, 1])
    page = page_of(two_seeds)
    assert "These are the runs of seed 0, the first seed of each variant." in page
    assert "<dt>training seeds</dt><dd>0 and 1</dd>" in page
    assert "<dt>seed of the measurement</dt><dd>0</dd>" in page


def test_the_glossary_explains_each_label_and_only_words_of_the_page(
    recalibrated: xr.Dataset,
):
    page = page_of(recalibrated)
    for label in LABEL_ORDER:
        assert f"<dd><b>{label.capitalize()}</b>: " in page
    words = page[: page.index("<script")]
    for unused in ("kernel", "surrogate", "coherence", "hatched", "||", "66.7"):
        assert unused not in words[words.index("<body") :]
    assert not re.search(r"\d%", words[words.index("<body") :])


def test_numbers_are_singular_and_names_do_not_break(recalibrated: xr.Dataset):
    page = page_of(recalibrated)
    assert "2 variants and the control, 1 seed<" in page
    assert '<th scope="row"><span class="whole">p-rope:0.5</span></th>' in page


def test_names_and_texts_of_files_are_escaped(recalibrated: xr.Dataset):
    hostile = recalibrated.assign_attrs(base=HOSTILE, unfinished=HOSTILE)
    names = {"nope": HOSTILE}
    for name in ("variant", "group", "entry"):
        values = [
            names.get(value, value.replace("nope", HOSTILE))
            for value in hostile[name].values
        ]
        hostile[name] = hostile[name].copy(data=np.array(values, dtype=object))
    page = render_recalibration(hostile, summarize_recalibration(hostile))
    assert "<img src=x" not in page


@pytest.fixture(scope="module")
def folder(recalibrated: xr.Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved comparison; the finished nope and the control have pages."""
    root = tmp_path_factory.mktemp("pages")
    run = root / "run of nope"
    run.mkdir()
    (run / "index.html").write_text("a page")
    pages = [""] * 5 + [(run / "index.html").as_posix()]
    comparison = with_new_labels(recalibrated).assign_coords(
        page=("entry", np.array(pages, dtype=object))
    )
    save_comparison(root / "out", comparison)
    return root / "out"


def test_the_page_is_drawn_again_from_saved_numbers(folder: Path):
    first = (folder / "index.html").read_text()
    assert rewrite_page(folder) == folder / "index.html"
    assert (folder / "index.html").read_text() == first
    assert 'href="../run%20of%20nope/index.html"' in first


def test_each_shown_model_without_a_page_gets_one(folder: Path):
    text = (folder / "index.html").read_text()
    pages = sorted(page.name for page in (folder / "models").iterdir())
    # The run of nope has a page already.
    assert pages == ["control-seed-0.html", "p-rope-0.5-seed-0.html"]
    for name in pages:
        assert f'href="models/{name}"' in text
    page = folder / "models" / pages[1]
    first = page.read_text()
    assert "recalibrated: p-rope:0.5 seed 0" in first
    page.unlink()
    rewrite_page(folder)
    assert page.read_text() == first


@pytest.mark.parametrize("width", [1280, 800])
def test_no_column_is_cut_off(browser, folder: Path, width: int):
    size = {"width": width, "height": 900}
    with Opened(browser, folder / "index.html", viewport=size) as opened:
        page = opened.load(ready="html.ready")
        for name in ("Side by side", "Heads by label"):
            table = page.locator(f'[role=region][aria-label="{name}"]')
            assert table.evaluate("e => e.scrollWidth - e.clientWidth") <= 0
        fits(page)


def test_a_cell_of_the_map_shows_both_heads(browser, folder: Path):
    with Opened(browser, folder / "index.html") as opened:
        page = opened.load(ready="html.ready")
        words = "L0H1: control semantic, variant positional (certain)"
        cell = page.get_by_label(words).first
        assert cell.get_attribute("title").startswith(words)
        signs = cell.evaluate(SIGNS_OF_CELL)
        assert signs == ['"■" / ""', '"●" / ""']
        cell.click()
        page.wait_for_selector('#plot-second[data-head="nope seed 0: L0 H1"]')
        assert page.locator("#first-entry").input_value() == "1"
        rotating, stopped = 0, 3  # traces of the selectivity of nope
        assert np.isnan(values(page, "plot-second", "y", rotating)).all()
        assert np.isfinite(values(page, "plot-second", "y", stopped)).all()
        numbers = page.locator("#head-numbers th").all_text_contents()
        assert "bits of content and position together (bits)" in numbers
        assert "mean wavelength (tokens)" in numbers
        assert page.locator("#changed tbody tr:visible").count() == 1
