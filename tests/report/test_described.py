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
    """The only sentence that contains `words`."""
    (sentence,) = [sentence for sentence in sentences if words in sentence]
    return sentence


def numbers_in(sentence: str, pattern: str) -> list[float]:
    """The numbers that `pattern` finds. It writes a minus as "-"."""
    return [float(number) for number in re.findall(pattern, sentence.replace("−", "-"))]


def test_a_sweep_compares_both_ends_with_random_planes():
    sweep = synthetic_truncation()
    table = summarize_truncation(sweep).set_index("edit")
    slow = table.loc["slow 0.75", "loss_change"]
    fast = table.loc["fast 0.75", "loss_change"]
    of_random_planes = table[(table["kind"] == "random") & (table["kept"] == 0.75)]
    random = of_random_planes["loss_change"].mean()
    short, ends, *_ = describe(sweep)
    changes = numbers_in(ends, r"by ([+-][\d.]+)")
    np.testing.assert_allclose(changes, [slow, fast, random], atol=6e-4)
    assert short == (
        "Within 512 tokens, the slowest 50% of the planes can stop at almost no cost; "
        f"stopping the fastest 25% changes the loss by +{fast:.3f} nats/token."
    )
    only_slow = synthetic_truncation(bands=0, controls=0, ends=["slow"])
    short = describe(only_slow)[0]
    assert short.startswith("Within 512 tokens, stopping the slowest 25%")


def test_a_change_of_exactly_zero_has_its_interval():
    sweep = synthetic_truncation()
    sweep["loss"].loc[{"edit": "fast 0.75"}] = sweep["loss"].sel(edit="none").values
    ends = find(describe(sweep), "stopping the fastest 25% of the planes (wavelengths")
    zero = "+0.000 nats/token (95% interval +0.000 to +0.000); stopping the same"
    assert f" changes the loss by {zero}" in ends


def test_a_sweep_of_short_text_names_the_trained_context():
    sweep = synthetic_truncation().assign_attrs(trained_context=8192)
    first, *others = [line for line in describe(sweep) if "retrieves" not in line]
    begin = "Within 512 tokens (the model was trained for 8,192; this result applies only to"
    assert first.startswith(f"{begin} the measured length), ")
    assert len(others) == 6
    for line in others:
        assert line.startswith("Within 512 tokens (longer text may differ), ")


def test_what_costs_near_the_end_of_the_context_is_not_free():
    sweep = synthetic_truncation()
    far = sweep["loss"] * 0 + sweep["loss"][0] + 0.34 * (sweep["kind"] == "slow")
    copies = xr.zeros_like(sweep["copy_loss"]) + 4.17 + 6.48 * (sweep["kind"] == "slow")
    sweep = sweep.assign(far_loss=far, copy_loss=copies)
    short, *others = describe(sweep)
    cost = "+0.340 (+0.340 to +0.340) nats/token"
    stopped = "stopping the slowest 12.5% of the planes"
    assert f"even {stopped} costs {cost} near the end of the text; " in short
    words = find(others, f"{stopped} costs +0.0002 (+0.0002 to +0.0002) nats/token;")
    assert words.endswith(f"; near the end of the text it costs {cost}.")
    words = find(others, "near the end of the text, stopping the slowest 25%")
    assert "changes the loss by +0.340 nats/token" in words
    words = find(others, "random tokens that are repeated after 255 tokens")
    change = "stopping the slowest 25% changes it by +6.480"
    assert f"a loss of 4.17 nats/token; {change}" in words


def by_class_of_tokens(sweep: xr.Dataset) -> xr.Dataset:
    """The sweep with results for three classes of tokens. The text has no capital.

    No head was tested on digits. On newlines the heads of layer 0 have a new label if the
    slowest planes stop.
    """
    factor = xr.DataArray(
        [2.0, 3.0, 4.0],
        dims="token_class",
        coords={"token_class": np.array(["digits", "newline", "capital"], object)},
    )
    change = sweep["attention_change"] * factor
    label = change.copy(data=np.full(change.shape, "mixed", dtype=object))
    label.loc[{"token_class": "digits"}] = "untested"
    label.loc[{"token_class": "newline", "layer": 0, "edit": "slow 0.75"}] = "semantic"
    confidence = change.copy(data=np.ones(change.shape))
    sequence = np.arange(32)
    tokens = sequence[:, None] % [3, 2, 1]
    return sweep.assign(
        class_loss=sweep["loss"] * factor,
        class_change=change,
        class_label=label,
        class_label_change_confidence=confidence,
    ).assign_coords(
        group=("sequence", sequence // 2),
        class_tokens=(("sequence", "token_class"), tokens),
    )


def test_a_sweep_states_the_change_for_each_class_of_tokens():
    sweep = by_class_of_tokens(synthetic_truncation())
    words = find(describe(sweep), "changes the loss of digits tokens by")
    assert "capital" not in words
    new_labels = re.findall(r"the label of (\d+) heads? in their rows", words)
    assert new_labels == [str(sweep.sizes["head"]), "0"]
    changes = numbers_in(words, r"by ([+-][\d.]+)")
    bits = numbers_in(words, r"by ([\d.]+) bits")
    figure = rl.plot_truncation(sweep, by="class")
    marks = {trace.legendgroup: trace for trace in figure.select_traces(row=1)}
    places = [
        ("slow", "digits"),
        ("slow", "newline"),
        ("fast", "digits"),
        ("fast", "newline"),
    ]
    for change, moved, (end, token_class) in zip(changes, bits, places, strict=True):
        of_class = sweep.sel(token_class=token_class)
        edited = of_class.sel(edit=f"{end} 0.75")
        lost = edited["class_loss"] - of_class["class_loss"].sel(edit="none")
        tokens = of_class["class_tokens"].values
        expected = np.average(lost.values, weights=tokens)
        assert change == pytest.approx(expected, abs=6e-4)
        drawn = marks[end].y[["digits", "newline"].index(token_class)]
        assert drawn == pytest.approx(change, abs=6e-4)
        expected_bits = float(edited["class_change"].mean())
        assert moved == pytest.approx(expected_bits, abs=6e-4)


def with_loss(sweep: xr.Dataset, edit: str, loss: np.ndarray) -> xr.Dataset:
    """The sweep with another loss of each sequence under one edit."""
    changed = sweep.copy(deep=True)
    changed["loss"].loc[{"edit": edit}] = loss
    return changed


def free_until_half_have_stopped() -> xr.Dataset:
    """A sweep whose slowest planes stop at almost no cost as long as 62.5% rotate."""
    sweep = synthetic_truncation()
    loss = sweep["loss"].sel(edit="none").values
    free = ("slow 0.875", "slow 0.75", "slow 0.625")
    for edit in sweep["edit"].values:
        if edit.startswith("slow"):
            sweep = with_loss(sweep, edit, loss + (0.001 if edit in free else 0.5))
    return with_loss(sweep, "slow 0.25", loss)  # free again after a cost


def test_planes_are_free_up_to_the_first_step_with_a_cost():
    free = free_until_half_have_stopped()
    loss = free["loss"].sel(edit="none").values
    words = find(describe(free), "almost no cost (the interval")
    assert "as long as 62.5% still rotate." in words

    first_costs = with_loss(free, "slow 0.875", loss + 0.2)
    short = describe(first_costs)[0]
    cost = "+0.200 (+0.200 to +0.200) nats/token; "
    assert f"slowest 12.5% of the planes costs {cost}" in short

    noise = np.random.default_rng(0).normal(-0.18, 0.5, loss.shape)
    first_is_uncertain = with_loss(free, "slow 0.875", loss + 0.2 + noise)
    short, *others = describe(first_is_uncertain)
    stopped = "stopping the slowest 12.5% of the planes"
    assert f"even {stopped} may have a cost; " in short
    table = summarize_truncation(first_is_uncertain).set_index("edit")
    high = table.loc["slow 0.875", "loss_change_high"]
    find(others, f"{stopped} may cost up to +{high:.3f} nats")

    far_loss = with_loss(free, "slow 0.875", loss + 0.34)["loss"]
    far_costs = with_loss(free, "slow 0.875", loss - 0.05).assign(far_loss=far_loss)
    costs = "the planes costs nothing; near the end of the text it costs +0.340"
    assert costs in find(describe(far_costs), "costs nothing")


def test_reach_has_a_sentence_for_each_variant():
    model, _ = rl.load("bundled")
    text = torch.randint(
        5, model.config.vocab_size, (4, 100), generator=torch.Generator().manual_seed(0)
    )
    reach = rl.reach(model, text, heads="4.*", variants=["own", "nope"], draws=2)
    own, nope = describe(reach)
    of_model = reach.sel(variant="own", layer=4)
    near = of_model["found_share"].isel(run_distance=0)
    finders = int((near >= 0.5).sum())
    begin = "Copies of 48 random tokens, with text between the copies: "
    assert own.startswith(f"{begin}{finders} of the 5 heads that were run")
    best = of_model.isel(head=int(near.argmax("head")))
    measured = best["found_share"]
    for distance, share in zip(best["run_distance"], measured, strict=True):
        assert re.search(rf" {share:.0%} \(\d+% to \d+%\) {distance:,}[ ,]", own)
    error = 100 * abs(best["foretold_share"] - measured).max()
    assert f"from the measured share by at most {error:.0f} percentage points." in own
    far = best["extrapolated_share"].sel(distance=slice(100_000, None)).mean()
    assert f"finds {far:.0%} of copies 100,000 to 1,000,000 tokens back" in own
    end = "none of the 5 heads that were run finds half of the copies 48 tokens back."
    assert nope.endswith(f"and rotation nope: {end}")


def test_heads_with_a_new_label_are_counted_with_their_interval():
    sweep = synthetic_truncation()
    edit = sweep["edit"].values.tolist().index("fast 0.75")
    for head, confidence in ((0, 1.0), (1, 0.96), (2, 0.5)):
        before = sweep["label"].values[0, 0, head]
        after = "mixed" if before == "semantic" else "semantic"
        sweep["label"][edit, 0, head] = after
        sweep["label_change_confidence"][edit, 0, head] = confidence
    row = summarize_truncation(sweep).set_index("edit").loc["fast 0.75"]
    words = find(describe(sweep), "heads have a new label")
    changed = (
        f"{row['labels_changed']:.0f} heads have a new label beyond its uncertainty "
        f"({row['labels_changed_share']:.0%})"
    )
    interval = f"{row['labels_differ_low']:.0f} to {row['labels_differ_high']:.0f}"
    differ = (
        f"the labels of {row['labels_differ']:.0f} heads differ "
        f"({row['labels_differ_share']:.0%}; 95% interval {interval} heads)"
    )
    assert (row["labels_changed"], row["labels_differ"]) == (2, 3)
    begin = "fastest 25% of the planes stopped, "
    assert f"{begin}{changed} and {differ}" in words
    old = sweep.drop_vars("label_change_confidence")
    assert f"{begin}{differ}" in find(describe(old), "heads differ")


CLAIM = {
    "rank_correlation": -0.5,
    "low": -0.7,
    "high": -0.2,
    "heads": 12,
    "p_value": 0.3,
    "null_median": -0.4,
    "null_low": -0.6,
    "null_high": -0.1,
    "null_draws": 40,
}


@pytest.mark.parametrize(
    "verdict", ["holds", "contradicted", "unresolved", "not testable"]
)
def test_a_claim_is_worded_by_its_verdict_not_by_a_sign(verdict: str):
    words = verdict_sentence({**CLAIM, "verdict": verdict, "why": "no head"})
    tested = verdict != "not testable"
    assert f" {verdict} here{'.' if tested else ': no head.'}" in words
    assert ("no head" in words) != tested
    for number in (
        "wavelength is −0.50. ",
        "(−0.60 to −0.10, median",
        "−0.70 to −0.20.",
    ):
        assert (number in words) == tested


def test_an_unknown_verdict_and_a_missing_number_are_errors():
    with pytest.raises(KeyError):
        verdict_sentence({**CLAIM, "verdict": "true", "why": ""})
    without_number = {**CLAIM, "verdict": "holds", "why": ""}
    del without_number["null_low"]
    with pytest.raises(KeyError):
        verdict_sentence(without_number)


def test_names_are_text_and_layout_is_not():
    comparison = synthetic_comparison(groups=("rope", "<b>a</b>", "{{ 7 *\n7 }}"))
    comparison["wavelength"][{"entry": [1, 2, 4, 5]}] = np.inf
    table = summarize_comparison(comparison)
    words = find(comparison_sentences(comparison, table), "No plane rotates")
    begin = "No plane rotates in <b>a</b> and {{ 7 * 7 }}. No head there"
    assert words.startswith(begin)
    assert words.split() == words.split(" ")


def test_lists_counts_and_ranges_in_words():
    for names, words in (
        (["a"], "a"),
        (["a", "b"], "a and b"),
        (["a", "b", "c"], "a, b and c"),
    ):
        assert in_words(names) == words
    for count, words in ((1, "1 head"), (2, "2 heads"), (1024, "1,024 heads")):
        assert plural(count, "head") == words
    for numbers, words in (
        ([3], "3"),
        ([0, 1, 2, 5], "0–2 and 5"),
        ([1, 3, 4], "1 and 3–4"),
    ):
        assert ranges(numbers) == words


HOSTILE = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def profile() -> xr.Dataset:
    profile, _ = synthetic_profile(layers=6)
    return profile


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
    table = pd.DataFrame(
        {
            "model": "m",
            "verdict": ["holds", "holds", "contradicted", "not testable"],
            "statement": ["a", "b", "c", "d"],
            "claim": ["a", "b", "c", "d"],
        }
    )
    assert claims_sentences(table) == [
        "Of 4 claims, 2 hold, 1 is contradicted and 1 is not testable.",
        "Contradicted: c.",
    ]
    tested = table[:3]
    by_layers = pd.concat([tested.assign(layers=kind) for kind in ("full", "sliding")])
    first, second = claims_sentences(by_layers)[:2]
    assert first.startswith("Of 6 tests of 3 claims, 4 hold and 2 are")
    assert second == "Contradicted: c (full layers); c (sliding layers)."
    unresolved = table.assign(model="none", verdict="unresolved")
    first = claims_sentences(pd.concat([unresolved, table]))[0]
    assert first == "Of 4 claims, 2 hold in m and none in none."
    first = claims_sentences(pd.concat([table, tested.assign(model="q")]))[0]
    expected = "Of 4 claims, 2 hold in m and 2 in q (where only 3 were tested)."
    assert first == expected


RECORD = {
    "findings": ["Of 14 claims, none."],
    "model": {"name": "toy"},
    "runs": {"toy": {"facts": "6 layers"}},
    "versions": {"torch": "1"},
    "command": "ropelens claims",
}


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
    cells = re.findall(
        r'<td class="[a-z-]+"><a class="[a-z-]+" href="#(model-\d-\w+)"', page
    )
    assert len(cells) == (len(several) if len(names) > 1 else 0)
    for place in cells:
        assert f'id="{place}"' in page
    addresses = re.findall(r' id="([^"]+)"', page)
    assert len({*addresses}) == len(addresses)


def test_the_originals_of_claims_are_listed_once_for_all_models(table: pd.DataFrame):
    table = table[table["claim"].isin(["band", "decay", "diagonal"])]
    other = table.assign(model="other", nearness="far")
    other.loc[other["claim"] == "decay", "floor"] = "numbers below 7"
    known = table.assign(model="known")
    unknown = table.assign(model="unknown", doi="")
    page = render_claims(pd.concat([unknown, known, other]), RECORD)
    linked = re.findall(r'href="#original-(\w+)"', page)
    assert sorted(linked) == ["band", "band", "decay", "diagonal", "diagonal"]
    for name in linked:
        assert page.count(f'id="original-{name}"') == 1
    assert page.count("Original: ") == 3 + 1, "the other floor is in its row"
    assert page.count("Counts as none: ") == 3 + 1
    row = page[page.index('id="model-3-decay"') :]
    row = row[: row.index("</details>")]
    assert "Counts as none: numbers below 7" in row
    assert page.count("Nearness: far.") == 3
    alone = render_claims(known, RECORD)
    assert "#original-" not in alone
    assert alone.count("Counts as none: ") == 3


def test_a_cell_shows_each_kind_of_layers_and_the_first_sentence_counts_them(table):
    kinds = ("sliding", "full")
    tested = table[table["claim"].isin(["band", "decay"])]
    decay = tested[tested["claim"] == "decay"].assign(verdict="holds")
    of_kinds = [decay]
    for kind, verdict in zip(kinds, ("holds", "unresolved"), strict=True):
        band = tested[tested["claim"] == "band"]
        of_kinds.append(band.assign(layers=kind, verdict=verdict))
    mixed = pd.concat(of_kinds).assign(model="mixed")
    both = pd.concat([tested.assign(model="plain"), mixed])
    page = render_claims(both, RECORD)
    for kind in kinds:
        assert f"</b> {kind} layers</li>" in page
    (cell,) = re.findall(r'<td class="by-kind">(.*?)</td>', page, re.DOTALL)
    shown = re.sub(r"<[^>]*>", "", cell.replace("</a>", ", "))
    assert shown == "S ✓, F ○, "
    counts = "1 of 1 in sliding layers and 0 of 1 in full layers"
    assert f"in mixed (tested apart: {counts})" in claims_sentences(both)[0]


def test_rows_link_to_their_figures_on_the_page_of_the_analysis(table, profile):
    run = {"facts": "6 layers", "page": '../#1 "page"/index.html'}
    linked = render_claims(table, {**RECORD, "runs": {"toy": run}})
    places = re.findall(r'href="\.\./%231%20%22page%22/index.html#([\w=-]+)"', linked)
    drawn = [row for row in table["call"] if "plot_" in row]
    assert len(places) == len(drawn) > 9
    assert "#" + places[0] not in render_claims(table, RECORD)
    page = render_page(profile, rl.classify_heads(profile))
    assert page.count("Show the figure") == len(drawn)
    assert page.count('<details class="more claim"') == len(table)
    assert f"Of {len(table)} claims, " in page
    for place in set(places):
        tab = place.replace("view=", "all-tab-").replace("tab=", "one-tab-")
        assert f'id="{tab}"' in page
