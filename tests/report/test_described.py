"""Numbers and layout of sentences, words for lists, and pages of claims."""

import re

import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr
from synthetic_comparison import synthetic_comparison
from synthetic_profile import synthetic_profile
from synthetic_truncation import synthetic_truncation

import ropelens as rl
from ropelens.claims.verdict import VERDICTS
from ropelens.comparison.summary import summarize_comparison
from ropelens.figures.formats import in_words, plural, ranges
from ropelens.interventions.truncation_table import summarize_truncation
from ropelens.report import describe
from ropelens.report.claims_page import ledger_rows, render_claims
from ropelens.report.page import render_page
from ropelens.report.sentences.claims import claims_sentences
from ropelens.report.sentences.comparison import comparison_sentences
from ropelens.report.sentences.heads import verdict_sentence


def find(sentences: list[str], words: str) -> str:
    (sentence,) = [sentence for sentence in sentences if words in sentence]
    return sentence


def test_a_sweep_compares_both_ends_with_random_planes():
    sweep = synthetic_truncation()
    table = summarize_truncation(sweep).set_index("edit")
    random = table[(table["kind"] == "random") & (table["kept"] == 0.75)]["loss_change"]
    short, ends, *_ = describe(sweep)
    numbers = [float(n) for n in re.findall(r"by ([+-][\d.]+)", ends.replace("−", "-"))]
    expected = [*table.loc[["slow 0.75", "fast 0.75"], "loss_change"], random.mean()]
    np.testing.assert_allclose(numbers, expected, atol=6e-4)
    fast = (
        f"stopping the fastest 25% changes the loss by +{expected[1]:.3f} nats/token."
    )
    begin = (
        "Within 512 tokens, the slowest 50% of the planes can stop at almost no cost"
    )
    assert short == f"{begin}; {fast}"
    (slow,) = describe(synthetic_truncation(bands=0, controls=0, ends=["slow"]))[:1]
    assert slow.startswith("Within 512 tokens, stopping the slowest 25%"), (
        "no other end"
    )


def test_a_change_of_exactly_zero_has_its_interval():
    sweep = synthetic_truncation()
    sweep["loss"].loc[{"edit": "fast 0.75"}] = sweep["loss"].sel(edit="none").values
    ends = find(describe(sweep), "stopping the fastest 25% of the planes (wavelengths")
    zero = "+0.000 nats/token (95% interval +0.000 to +0.000); stopping the same"
    assert f" changes the loss by {zero}" in ends


def test_a_sweep_of_short_text_names_the_trained_context():
    sweep = synthetic_truncation().assign_attrs(trained_context=8192)
    first, *others = (line for line in describe(sweep) if "retrieves" not in line)
    begin = "Within 512 tokens (the model was trained for 8,192; this result applies only to"
    assert first.startswith(f"{begin} the measured length), ")
    assert len(others) == 6
    begin = "Within 512 tokens (longer text may differ), "
    assert all(line.startswith(begin) for line in others)


def test_what_costs_near_the_end_of_the_context_is_not_free():
    sweep = synthetic_truncation()
    far = sweep["loss"] * 0 + sweep["loss"][0] + 0.34 * (sweep["kind"] == "slow")
    copies = xr.zeros_like(sweep["copy_loss"]) + 4.17 + 6.48 * (sweep["kind"] == "slow")
    sweep = sweep.assign(far_loss=far, copy_loss=copies)
    short, *said = describe(sweep)
    cost = "+0.340 (+0.340 to +0.340) nats/token"
    stopped = "stopping the slowest 12.5% of the planes"
    assert f"even {stopped} costs {cost} near the end of the text; " in short
    words = find(said, f"{stopped} costs +0.0002 (+0.0002 to +0.0002) nats/token;")
    assert words.endswith(f"; near the end of the text it costs {cost}.")
    words = find(said, "near the end of the text, stopping the slowest 25%")
    assert "changes the loss by +0.340 nats/token" in words
    words = find(said, "random tokens that are repeated after 255 tokens")
    assert (
        "a loss of 4.17 nats/token; stopping the slowest 25% changes it by +6.480"
        in words
    )


def test_a_sweep_states_the_change_for_each_class_of_tokens():
    sweep = synthetic_truncation()
    kinds = np.array(["digits", "newline", "capital"], dtype=object)
    weight = np.arange(32)[:, None] % [3, 2, 1]
    scale = xr.DataArray(
        [2.0, 3.0, 4.0], dims="token_class", coords={"token_class": kinds}
    )
    loss, change = sweep["loss"] * scale, sweep["attention_change"] * scale
    label = change.copy(data=np.full(change.shape, "mixed", dtype=object))
    label[{"token_class": 0}] = "untested"
    slow = sweep.get_index("edit").get_loc("slow 0.75")
    label[{"token_class": 1, "layer": 0, "edit": slow}] = "semantic"
    values = {"class_loss": loss, "class_change": change, "class_label": label}
    groups = {"group": ("sequence", np.arange(32) // 2)}
    groups["class_tokens"] = (("sequence", "token_class"), weight)
    sweep = sweep.assign(values).assign_coords(groups)
    words = find(describe(sweep), "changes the loss of digits tokens by")
    assert "capital" not in words  # the text has no such token
    heads = re.findall(r"the label of (\d+) heads? in their rows", words)
    assert list(map(int, heads)) == [sweep.sizes["head"], 0], (
        "no head was tested on digits"
    )
    numbers = [
        float(n) for n in re.findall(r"by ([+-][\d.]+)", words.replace("−", "-"))
    ]
    bits = [float(n) for n in re.findall(r"by ([\d.]+) bits", words)]
    places = [(end, kind) for end in ("slow 0.75", "fast 0.75") for kind in (0, 1)]
    figure = rl.plot_truncation(sweep, by="class")
    marks = {trace.legendgroup: trace for trace in figure.select_traces(row=1)}
    for number, moved, (end, kind) in zip(numbers, bits, places, strict=True):
        assert marks[end[:4]].y[kind] == pytest.approx(number, abs=6e-4)
        lost = (loss.sel(edit=end) - loss[0])[:, kind].values
        assert number == pytest.approx(
            np.average(lost, weights=weight[:, kind]), abs=6e-4
        )
        assert moved == pytest.approx(
            float(change.sel(edit=end)[..., kind].mean()), abs=6e-4
        )


def test_planes_are_free_up_to_the_first_step_with_a_cost():
    sweep = synthetic_truncation()
    slow = [f"slow {kept:.4g}" for kept in (0.875, 0.75, 0.625)]
    loss = sweep["loss"].sel(edit="none").values
    for edit in (name for name in sweep["edit"].values if name.startswith("slow")):
        sweep["loss"].loc[{"edit": edit}] = loss + (0.001 if edit in slow else 0.5)
    sweep["loss"].loc[{"edit": "slow 0.25"}] = loss  # free again after a cost
    words = find(describe(sweep), "almost no cost (the interval")
    assert "as long as 62.5% still rotate." in words
    sweep["loss"].loc[{"edit": "slow 0.875"}] = loss + 0.2
    short = describe(sweep)[0]
    assert (
        "slowest 12.5% of the planes costs +0.200 (+0.200 to +0.200) nats/token; "
        in short
    )
    noise = np.random.default_rng(0).normal(-0.18, 0.5, loss.shape)
    sweep["loss"].loc[{"edit": "slow 0.875"}] += noise
    short, *said = describe(sweep)
    assert "even stopping the slowest 12.5% of the planes may have a cost; " in short
    high = (
        summarize_truncation(sweep)
        .set_index("edit")
        .loc["slow 0.875", "loss_change_high"]
    )
    find(
        said,
        f"stopping the slowest 12.5% of the planes may cost up to +{high:.3f} nats",
    )
    sweep["loss"].loc[{"edit": "slow 0.875"}] = loss - 0.05
    sweep = sweep.assign(far_loss=sweep["loss"].copy())
    sweep["far_loss"].loc[{"edit": "slow 0.875"}] = loss + 0.34
    costs = "the planes costs nothing; near the end of the text it costs +0.340"
    assert costs in find(describe(sweep), "costs nothing")


def test_reach_has_a_sentence_for_each_variant():
    model, _ = rl.load("bundled")
    text = torch.randint(
        5, model.config.vocab_size, (4, 100), generator=torch.manual_seed(0)
    )
    reach = rl.reach(model, text, heads="4.*", variants=["own", "nope"], draws=2)
    own, nope = describe(reach)
    of_model = reach.sel(variant="own", layer=4)
    near = of_model["found_share"].isel(run_distance=0)
    best = of_model.isel(head=int(near.argmax("head")))
    begin = "Copies of 48 random tokens, with text between the copies: "
    assert own.startswith(
        f"{begin}{(near >= 0.5).sum():.0f} of the 5 heads that were run"
    )
    for distance, share in zip(best["run_distance"], best["found_share"], strict=True):
        assert re.search(rf" {share:.0%} \(\d+% to \d+%\) {distance:,}[ ,]", own)
    error = 100 * abs(best["foretold_share"] - best["found_share"]).max()
    assert f"from the measured share by at most {error:.0f} percentage points." in own
    far = best["extrapolated_share"].sel(distance=slice(100_000, None)).mean()
    assert f"finds {far:.0%} of copies 100,000 to 1,000,000 tokens back" in own
    end = "none of the 5 heads that were run finds half of the copies 48 tokens back."
    assert nope.endswith(f"and rotation nope: {end}")


def test_heads_with_a_new_label_are_counted_with_their_interval():
    sweep = synthetic_truncation()
    row = summarize_truncation(sweep).set_index("edit").loc["fast 0.75"]
    words = find(describe(sweep), "heads have a new label")
    low, high = row["labels_changed_low"], row["labels_changed_high"]
    count, share = row["labels_changed"], row["labels_changed_share"]
    numbers = (
        f"{count:.0f} heads have a new label ({share:.0%}; 95% interval {low:.0f} to "
    )
    assert f"fastest 25% of the planes stopped, {numbers}{high:.0f}" in words


CLAIM = {
    "rank_correlation": -0.5,
    "low": -0.7,
    "high": -0.2,
    "heads": 12,
    "p_value": 0.3,
}
CLAIM |= {"null_median": -0.4, "null_low": -0.6, "null_high": -0.1, "null_draws": 40}


@pytest.mark.parametrize(
    "verdict", ["holds", "contradicted", "unresolved", "not testable"]
)
def test_a_claim_is_worded_by_its_verdict_not_by_a_sign(verdict: str):
    words = verdict_sentence(CLAIM | {"verdict": verdict, "why": "no head"})
    tested = verdict != "not testable"
    assert f" {verdict} here{'.' if tested else ': no head.'}" in words
    for number in (
        "wavelength is −0.50. ",
        "(−0.60 to −0.10, median",
        "−0.70 to −0.20.",
    ):
        assert (number in words) == tested
    assert ("no head" in words) != tested


def test_an_unknown_verdict_and_a_missing_number_are_errors():
    with pytest.raises(KeyError):
        verdict_sentence(CLAIM | {"verdict": "true", "why": ""})
    fewer = {name: CLAIM[name] for name in CLAIM if name != "null_low"}
    with pytest.raises(KeyError):
        verdict_sentence(fewer | {"verdict": "holds", "why": ""})


def test_names_are_text_and_layout_is_not():
    comparison = synthetic_comparison(groups=("rope", "<b>a</b>", "{{ 7 *\n7 }}"))
    comparison["wavelength"][{"entry": [1, 2, 4, 5]}] = np.inf
    table = summarize_comparison(comparison)
    words = find(comparison_sentences(comparison, table), "No plane rotates")
    assert words.startswith(
        "No plane rotates in <b>a</b> and {{ 7 * 7 }}. No head there"
    )
    assert words.split() == words.split(" ")


def test_lists_counts_and_ranges_in_words():
    assert [in_words(["a", "b", "c"][:n]) for n in (1, 2, 3)] == [
        "a",
        "a and b",
        "a, b and c",
    ]
    assert [plural(n, "head") for n in (1, 2, 1024)] == [
        "1 head",
        "2 heads",
        "1,024 heads",
    ]
    for numbers, words in (
        ([3], "3"),
        ([0, 1, 2, 5], "0–2 and 5"),
        ([1, 3, 4], "1 and 3–4"),
    ):
        assert ranges(numbers) == words


HOSTILE = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def profile() -> xr.Dataset:
    return synthetic_profile(layers=6)[0]


@pytest.fixture(scope="module")
def table(profile: xr.Dataset) -> pd.DataFrame:
    return rl.test_claims(profile, draws=60).assign(model="toy")


def test_a_mark_beyond_its_null_on_the_claimed_side_is_a_claim_that_holds(
    table: pd.DataFrame,
):
    rows = ledger_rows(table)
    verdicts = [row.claim["verdict"] for row in rows]
    assert verdicts == sorted(verdicts, key=VERDICTS.index)
    for row in rows:
        assert all(0 <= x <= 100 + 1e-9 for x in row.places.values())
        assert ("number" in row.places) == np.isfinite(row.claim["number"])
        if row.claim["verdict"] == "holds":
            assert row.places["number"] > row.null.stop
            side = row.claim["side"]
            assert side * row.claim["number"] > side * row.claim["threshold"]


def test_the_first_sentence_counts_verdicts():
    words = ["holds", "holds", "contradicted", "not testable"]
    texts = {"statement": [*"abcd"], "claim": [*"abcd"]}
    table = pd.DataFrame({"model": "m", "verdict": words} | texts)
    counts = "Of 4 claims, 2 hold, 1 is contradicted and 1 is not testable."
    assert claims_sentences(table) == [counts, "Contradicted: c."]
    kinds = pd.concat([table[:3].assign(layers=kind) for kind in ("full", "sliding")])
    assert claims_sentences(kinds)[0].startswith(
        "Of 6 tests of 3 claims, 4 hold and 2 are"
    )
    assert (
        claims_sentences(kinds)[1]
        == "Contradicted: c (full layers); c (sliding layers)."
    )
    both = pd.concat([table.assign(model="none", verdict="unresolved"), table])
    assert claims_sentences(both)[0] == "Of 4 claims, 2 hold in m and none in none."
    quick = pd.concat([table, table[:3].assign(model="q")])
    first = "Of 4 claims, 2 hold in m and 2 in q (where only 3 were tested)."
    assert claims_sentences(quick)[0] == first


RECORD = {"findings": ["Of 14 claims, none."], "model": {"name": "toy"}}
RECORD |= {"runs": {"toy": {"facts": "6 layers"}}, "versions": {"torch": "1"}}
RECORD |= {"command": "ropelens claims"}


@pytest.mark.parametrize("names", [["toy"], ["toy", HOSTILE]])
def test_the_page_has_each_claim_and_escapes_names(
    table: pd.DataFrame, names: list[str]
):
    several = pd.concat([table.assign(model=name) for name in names])
    several = several[(several["claim"] != "decay") | (several["model"] == "toy")]
    page = render_claims(several, RECORD)
    assert page.count('<details class="more claim"') == len(several)
    assert HOSTILE not in page
    assert all(statement in page for statement in table["statement"])
    cells = re.findall(r'<td class="([a-z-]+)"><a href="#(model-\d-\w+)"', page)
    assert len(cells) == (len(several) if len(names) > 1 else 0)
    assert all(f'id="{place}"' in page for _, place in cells)


def test_rows_link_to_their_figures_on_the_page_of_the_analysis(table, profile):
    run = RECORD["runs"]["toy"] | {"page": '../#1 "page"/index.html'}
    linked = render_claims(table, RECORD | {"runs": {"toy": run}})
    places = re.findall(r'href="\.\./%231%20%22page%22/index.html#([\w=-]+)"', linked)
    drawn = [row for row in table["call"] if "plot_" in row]
    assert len(places) == len(drawn) > 9
    assert "#" + places[0] not in render_claims(table, RECORD)
    page = render_page(profile, rl.classify_heads(profile))
    assert page.count("Show the figure") == len(drawn)
    assert page.count('<details class="more claim"') == len(table)
    assert f"Of {len(table)} claims, " in page
    for place in set(places):
        there = place.replace("view=", "all-tab-").replace("tab=", "one-tab-")
        assert f'id="{there}"' in page
