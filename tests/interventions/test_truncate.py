"""Sweeps: the planes that stop, the measured changes, and the table of changes."""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
import xarray as xr
from oracles.tiny import tiny
from scipy import stats
from tiny_checkpoints import tiny_llama

import ropelens as rl
from ropelens.errors import BadArgument, UnsupportedModel
from ropelens.interventions import cuts as planned
from ropelens.interventions import truncate as module
from ropelens.interventions.changes import best_head
from ropelens.interventions.cuts import Cut, PlaneSweep, Wavelengths
from ropelens.interventions.truncate import edits_of, named_entries
from ropelens.interventions.truncation_table import COLUMNS, summarize_truncation
from ropelens.report import describe
from ropelens.rope import select
from ropelens.rope.planes import Planes

TOKENS = torch.randint(2, 40, (6, 24), generator=torch.Generator().manual_seed(0))


def rotating_planes(planes: int, base: float = 10_000.0) -> Wavelengths:
    wavelengths = 2 * np.pi * base ** (np.arange(planes) / planes)
    return dict(enumerate(wavelengths.tolist()))


def plan(
    layers: Sequence[Wavelengths], *, seed: int = 0, **changes: object
) -> list[Cut]:
    return PlaneSweep(**changes).cuts({"all": layers}, seed=seed)


def of_kind(cuts: Sequence[Cut], kind: str) -> list[Cut]:
    return [cut for cut in cuts if cut.kind == kind]


def test_names_of_edits_give_the_share_that_really_rotates():
    layers = [rotating_planes(4)] * 2
    cuts = plan(layers, keep=[1, 0.875, 0.8, 0.5, 0], controls=1)
    assert [cut.edit for cut in cuts] == [
        "none",
        "slow 0.75",
        "fast 0.75",
        "random 0.75 #0",
        "slow 0.5",
        "fast 0.5",
        "random 0.5 #0",
        "slow 0",
        "fast 0",
    ]
    assert [cut.kept for cut in cuts[:2]] == [1, 0.75]
    assert [cut.edit for cut in plan(layers, keep=[1], ends=["slow"])] == ["none"]


def test_controls_have_the_size_of_the_edit_and_are_nested():
    layers = [rotating_planes(16)] * 3
    cuts = plan(layers, seed=5)
    assert cuts == plan(layers, seed=5)
    assert cuts != plan(layers, seed=6)
    random = of_kind(cuts, "random")
    assert not [cut for cut in random if cut.kept in (0, 1)]
    for share in PlaneSweep.keep[1:-1]:
        of_share = [cut for cut in cuts if cut.kept == share]
        kinds = [cut.kind for cut in of_share]
        assert kinds == ["slow", "fast", "random", "random", "random"]
        for cut in of_share:
            assert len(set(cut.stopped)) == 1, "the same planes in all layers"
            assert len(cut.stopped[0]) == 16 * (1 - share)
        assert len({cut.stopped for cut in of_share[2:]}) == 3
    for draw in range(3):
        sets = [set(cut.stopped[0]) for cut in random if cut.draw == draw]
        for smaller, larger in pairwise(sets):
            assert smaller < larger


def test_a_cut_that_stops_all_planes_does_not_change_the_controls_of_other_cuts():
    layers = [rotating_planes(8)] * 2
    cuts = [cut for cut in plan(layers, keep=[0.5, 0]) if cut.kept]
    assert cuts == plan(layers, keep=[0.5])


@pytest.mark.parametrize("planes", [2, 3, 4, 8])
def test_controls_differ_from_the_sets_that_they_control(planes: int):
    """With few planes, a random set is often an end or the band, and must be drawn again."""
    cuts = plan([rotating_planes(planes)] * 2, bands=planes, controls=20)
    ends = {cut.stopped for cut in cuts if cut.kind in ("slow", "fast")}
    random = {cut.stopped for cut in of_kind(cuts, "random")}
    assert not random & ends
    assert bool(random) == (planes > 2)  # with two planes, each plane is an end
    bands = of_kind(cuts, "band")
    assert [cut.band for cut in bands] == list(range(planes))
    for band in bands:
        controls = []
        for cut in of_kind(cuts, "band control"):
            if cut.band == band.band:
                controls.append(cut.stopped)
        assert len(controls) == 20
        assert band.stopped not in controls


@pytest.mark.parametrize("bands", [1, 3, 8, 16])
def test_bands_divide_the_planes_in_order(bands: int):
    cuts = plan([rotating_planes(16)] * 2, keep=[1], bands=bands, controls=2)
    chosen = of_kind(cuts, "band")
    assert [n for cut in chosen for n in cut.stopped[0]] == list(range(16))
    sizes = [len(cut.stopped[0]) for cut in chosen]
    assert len(sizes) == bands
    assert max(sizes) - min(sizes) <= 1
    controls = of_kind(cuts, "band control")
    assert len(controls) == (0 if bands == 1 else 2 * bands)
    for cut in controls:
        assert len(cut.stopped[0]) == sizes[cut.band]


def test_layers_that_rotate_differently_keep_their_own_counts():
    layers = [rotating_planes(8), rotating_planes(8, 1e6), {}, rotating_planes(4)]
    cuts = plan(layers, keep=[0.5], bands=4, controls=1)
    slow = of_kind(cuts, "slow")[0]
    assert slow.stopped == ((4, 5, 6, 7), (4, 5, 6, 7), (), (2, 3))
    assert slow.kept == 0.5
    random = of_kind(cuts, "random")[0]
    assert [len(numbers) for numbers in random.stopped] == [4, 4, 0, 2]
    unnamed = xr.Dataset(coords={"edit": range(len(cuts))})
    named = named_entries(unnamed, cuts)
    assert named["planes"].values[cuts.index(slow)] == "0 1: 4,5,6,7; 3: 2,3"
    spans = []
    stopped: list[tuple[int, int]] = []
    for cut in of_kind(cuts, "band"):
        pairs = [(layer, n) for layer, ns in enumerate(cut.stopped) for n in ns]
        lengths = [layers[layer][n] for layer, n in pairs]
        spans.append((min(lengths), max(lengths)))
        stopped += pairs
    assert len(stopped) == len(set(stopped)) == 20
    assert all(a[1] < b[0] for a, b in pairwise(spans))
    assert [edit.heads for edit in edits_of(slow, ["*"] * 4)] == ["0.*,1.*", "3.*"]


def test_planes_without_rotation_do_not_count():
    planes = Planes(torch.tensor([1.0, 0.1, 0.01, 1e-3, 0.0, 0.0]), 12, "half")
    cuts = plan([planned.rotating_planes(planes)], keep=[0.5])
    (cut,) = of_kind(cuts, "slow")
    assert cut.stopped == ((2, 3),)
    assert cut.planes == "2,3"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"keep": [0.5, 1.5]}, "from 0 to 1, not 1.5"),
        ({"ends": ["low"]}, "truncate: ends must be"),
        ({"heads": "3.*"}, r"no head '3..' that rotates\.\s.*0, 1, 2 rotate"),
        ({"heads": "0.1,3.0"}, r"no head '3..' that rotates\.\s.*0, 1, 2 rotate"),
    ],
)
def test_arguments_that_cannot_be_swept_are_refused(changes: dict, words: str):
    with pytest.raises(BadArgument, match=words):
        rl.truncate(tiny("smollm3"), TOKENS, **changes)


def test_planes_that_do_not_rotate_cannot_be_swept():
    with pytest.raises(UnsupportedModel, match="The model has no planes that rotate"):
        plan([{}])


def test_copies_go_as_far_back_as_the_context_allows():
    model = tiny_llama(max_position_embeddings=64).eval()
    sweep = rl.truncate(model, TOKENS, keep=[0.5], controls=0)
    assert sweep["copy_distance"].values.tolist() == [2, 11]  # of 24 tokens
    table = summarize_truncation(sweep).set_index("edit")
    losses = sweep["copy_loss"].sel(copy_distance=11).mean("trial")
    expected = float(losses.sel(edit="slow 0.5") - losses.sel(edit="none"))
    assert table.loc["slow 0.5", "copy_loss_change"] == pytest.approx(expected)


def test_planes_stop_only_in_the_named_heads():
    model = tiny_llama().eval()
    heads = "0.*,1.2"
    sweep = rl.truncate(
        model, TOKENS, heads=heads, keep=(), bands=2, controls=0, measures=["loss"]
    )
    assert sweep["edit"].values.tolist() == ["none", "band 0", "band 1"]
    planes = sweep["planes"][1:].to_series().str.split(",")
    edits = {}
    for name, numbers in planes.items():
        chosen = select.PlaneNumbers([*map(int, numbers)])
        edits[name] = rl.stop(chosen, heads=heads)
    evaluated = rl.evaluate(model, TOKENS, edits=edits, measures=["loss"])
    np.testing.assert_array_equal(sweep["loss"], evaluated["loss"])
    assert describe(sweep)[0].startswith("Within 24 tokens")
    assert f", only in heads {heads}, of 2 bands" in describe(sweep)[0]


def test_equal_sets_are_measured_once(monkeypatch):
    evaluated: dict[str, object] = {}
    evaluate = module.evaluate

    def spy(*given: object, edits: dict, **options: object) -> xr.Dataset:
        evaluated.update(edits)
        return evaluate(*given, edits=edits, **options)

    monkeypatch.setattr(module, "evaluate", spy)
    dataset = rl.truncate(tiny_llama().eval(), TOKENS, bands=4, measures=["loss"])
    sets = [text for text in dataset["planes"].values if text]
    assert len(evaluated) == len(set(sets)) < len(sets)
    everything = dataset.isel(edit=dataset["planes"].values == "0,1,2,3")
    assert everything["edit"].values.tolist() == ["slow 0", "fast 0"]
    assert np.ptp(everything["loss"].values, axis=0).max() == 0
    wavelength = 2 * np.pi * 10_000.0 ** (np.arange(4) / 4)
    for number in range(1, dataset.sizes["edit"]):
        entry = dataset.isel(edit=number)
        stopped = [int(plane) for plane in str(entry["planes"].item()).split(",")]
        assert entry["kept"] == 1 - len(stopped) / 4
        assert entry["planes_stopped"] == len(stopped)
        low = float(entry["wavelength_low"])
        high = float(entry["wavelength_high"])
        assert low == pytest.approx(wavelength[stopped[0]], rel=1e-5)
        assert high == pytest.approx(wavelength[stopped[-1]], rel=1e-5)
        kind = entry["kind"].item()
        assert bool(entry["draw"] >= 0) == (kind in ("random", "band control"))
        assert bool(entry["band"] >= 0) == kind.startswith("band")


def assert_interval(row, name: str, changes: np.ndarray) -> None:
    expected = stats.ttest_1samp(changes, 0).confidence_interval()
    assert row[f"{name}_change_low"] == pytest.approx(expected.low)
    assert row[f"{name}_change_high"] == pytest.approx(expected.high)


def test_the_summary_has_a_row_for_each_edit(sweep: xr.Dataset):
    table = summarize_truncation(sweep)
    assert tuple(table.columns) == COLUMNS
    assert table["edit"].tolist() == sweep["edit"].values.tolist()
    none = table.iloc[0]
    for name in ("loss", "repeat_loss", "retrieval"):
        assert none[f"{name}_change"] == 0
        assert none[f"{name}_change_low"] == 0
    loss = np.average(sweep["loss"], axis=1, weights=sweep["predicted_tokens"])
    np.testing.assert_allclose(table["loss"], loss)
    np.testing.assert_allclose(table["loss_change"], loss - loss[0], atol=1e-12)
    retrieval = sweep["retrieval"].mean(["retrieval_length", "depth"])
    np.testing.assert_allclose(table["retrieval"], retrieval)
    per_trial = sweep["retrieval_hit"].mean(["retrieval_length", "depth"])
    assert_interval(table.iloc[8], "retrieval", (per_trial[8] - per_trial[0]).values)


def test_the_summary_counts_labels_and_names_the_head_that_changed(sweep: xr.Dataset):
    sweep = sweep.copy(deep=True)
    sweep["label"][:] = "sink"
    sweep["label"][2, 0, :3] = "semantic"
    sweep["label"][2, 1, 0] = ""
    sweep["label"][3] = ""
    sweep["attention_change"][2, 4, 5] = 9.0
    sweep["attention_change"][2, 0, 0] = np.nan
    sweep["label_change_confidence"][:] = 0.94
    sweep["label_change_confidence"][2, 0, :2] = 0.95
    table = summarize_truncation(sweep)
    assert table["labels_changed"].tolist()[:3] == [0, 0, 2]
    assert table["labels_changed_share"][2] == 2 / 39
    assert table["labels_differ"].tolist()[:3] == [0, 0, 3]
    assert table["labels_differ_share"][2] == 3 / 39
    assert table.loc[3, ["labels_changed", "labels_differ"]].isna().all()


def test_results_of_earlier_versions_do_not_know_which_labels_changed(
    sweep: xr.Dataset,
):
    old = sweep.drop_vars("label_change_confidence")
    table = summarize_truncation(old)
    assert table["labels_changed"].isna().all()
    counts = summarize_truncation(sweep)
    assert table["labels_differ"].tolist() == counts["labels_differ"].tolist()
    assert (counts["labels_changed"] < counts["labels_differ"]).any()
    heads = rl.paired_changes(old, by="head")
    differs = heads["label_before"] != heads["label_after"]
    assert heads["changed"].isna().tolist() == differs.tolist()
    figure = rl.plot_truncation(old, measures=["labels"])
    assert figure.layout.yaxis.title.text == "heads with another<br>label (share)"


def test_the_best_head_is_not_measured_in_the_trials_that_chose_it():
    """If all heads are alike, the chosen head has the same mean score as the others."""
    noise = np.random.default_rng(3).normal(0.5, 0.1, size=(400, 8, 4, 8))
    trials = xr.DataArray(noise, dims=("edit", "trial", "layer", "head"))
    assert float(best_head(trials).mean()) == pytest.approx(0.5, abs=0.01)
    assert float(trials.mean("trial").max(("layer", "head")).mean()) > 0.55
    trials[7, :, 2, 3] += 1
    trials[8, :, 1, 0] = np.nan  # a head that a layer does not have
    chosen = best_head(trials)
    np.testing.assert_array_equal(chosen[7], trials[7, 1::2, 2, 3])
    chosen_in_7 = best_head(trials, chosen_in=trials[7])
    np.testing.assert_array_equal(chosen_in_7, trials[:, 1::2, 2, 3])
    assert chosen[8].notnull().all()


def test_changes_of_heads_have_intervals(sweep: xr.Dataset):
    sweep = sweep.copy(deep=True)
    resampled = np.arange(sweep.sizes["resample"])
    sweep["labels_changed_resampled"][5] = resampled
    table = summarize_truncation(sweep)
    scores = sweep["trial_induction"].values
    half = scores[0, ::2].mean(0)
    layer, head = np.unravel_index(half.argmax(), half.shape)
    trials = scores[:, 1::2, layer, head]
    np.testing.assert_allclose(table["induction"], trials.mean(1))
    change = trials.mean(1) - trials[0].mean()
    np.testing.assert_allclose(table["induction_change"], change)
    row = table.iloc[5]
    assert_interval(row, "induction", trials[5] - trials[0])
    assert row["labels_differ_low"] == np.quantile(resampled, 0.025)
    share = np.quantile(resampled, 0.975) / sweep["label"][0].size
    assert row["labels_differ_share_high"] == pytest.approx(share)


def test_measures_that_were_not_taken_are_nan(sweep: xr.Dataset):
    table = summarize_truncation(sweep[["loss", "predicted_tokens"]])
    assert tuple(table.columns) == COLUMNS
    assert table["loss_change"].notna().all()
    for name in ("repeat_loss", "retrieval_change", "labels_changed", "labels_differ"):
        assert table[name].isna().all()


def test_planes_are_scaled_instead_of_stopped():
    model = tiny_llama()
    truncate = partial(
        rl.truncate, model, TOKENS, measures="loss", keep=[0.5], controls=1
    )
    zero = truncate(scale=0)
    one = truncate(scale=1)
    dropped = {"slow": rl.drop(select.Slowest(0.5))}
    evaluation = rl.evaluate(model, TOKENS, edits=dropped, measures="loss")
    expected = evaluation["loss"].sel(edit="slow")
    loss = zero["loss"].sel(edit="slow 0.5")
    np.testing.assert_allclose(loss, expected, 1e-6)
    np.testing.assert_allclose(one["loss"].std("edit"), 0, atol=1e-6)
    assert "scaling by 0 the slowest 50%" in describe(zero)[0]
    figure = rl.plot_truncation(zero)
    assert "either end: scaled by 0 instead" in figure.layout.title.text
