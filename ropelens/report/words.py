"""Sentences about results: numbers are computed here, and worded by templates/sentences.

A template is about one kind of result; each of its macros words one sentence. White space in a
macro is layout: a sentence has single spaces, and none before a comma.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jinja2
import numpy as np
import pandas as pd
import xarray as xr

from ropelens.comparison.pairs import entries_of
from ropelens.comparison.table import LOOKS_AT, summarize_comparison
from ropelens.errors import public
from ropelens.figures.head_wavelengths import selectivity_shares
from ropelens.figures.style import LABELS
from ropelens.figures.text import (
    NOTHING,
    change_and_interval,
    mean_count,
    number,
    short_count,
    signed,
)
from ropelens.figures.wavelengths import marks, plane_index, turning_wavelengths
from ropelens.measure.heads import classify_heads
from ropelens.measure.terms import NEEDLES, OWN
from ropelens.measure.truncation_table import best_head, summarize_truncation
from ropelens.report.render import TEMPLATES
from ropelens.statistics.intervals import ENOUGH_DOCUMENTS

Record = dict[str, Any]
"""The numbers of a sentence."""

CHANCE = 1 / NEEDLES
"""Share of needles that a guess among the prompt's values finds."""


@public
def describe(results: xr.Dataset | pd.DataFrame) -> list[str]:
    """What results show, in sentences with numbers, the most important first.

    `results`: a profile or its table of heads, or what `truncate`, `reach` or `compare` gave.
    Without sentences about what was not measured.
    """
    if isinstance(results, pd.DataFrame):
        return heads_sentences(results)
    kind = results.attrs.get("kind")
    if kind == "truncation":
        return sweep_sentences(results)
    if kind == "reach":
        return reach_sentences(results)
    if kind == "comparison":
        return comparison_sentences(results, summarize_comparison(results))
    return [*heads_sentences(classify_heads(results)), *attention_on(results)]


def say(subject: str, sentence: str, /, **record: object) -> str:
    """The sentence that a macro of `subject` makes of a record; "" where it says nothing.

    The text is plain: HTML needs it escaped.
    """
    macros = _environment().get_template(f"{subject}.txt").module
    words = str(getattr(macros, sentence)(**record)).split()
    return re.sub(r" (?=[,;.:)])", "", " ".join(words))


def _say_all(subject: str, records: Mapping[str, Record | None]) -> list[str]:
    """The sentences of the records that there are, in their order."""
    return [say(subject, name, **record) for name, record in records.items() if record]


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES / "sentences"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "number": number,
        "signed": signed,
        "short": short_count,
        "mean_count": mean_count,
        "percent": lambda share: f"{100 * share:.3g}%",
        "plural": plural,
        "in_words": in_words,
        "ranges": ranges,
    }
    environment.globals |= {"NOTHING": NOTHING, "change_and_interval": change_and_interval}
    return environment


def plural(count: int, noun: str) -> str:
    """ "1 head", "2 heads", "1,024 heads"."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def in_words(parts: Sequence[object], last: str = "and") -> str:
    """["a", "b", "c"] as "a, b and c"."""
    *some, end = map(str, parts)
    return f"{', '.join(some)} {last} {end}" if some else end


def ranges(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 5] as "0–2 and 5"; `numbers` rise."""
    firsts = [n for n in numbers if n - 1 not in numbers]
    lasts = [n for n in numbers if n + 1 not in numbers]
    runs = zip(firsts, lasts, strict=True)
    return in_words([f"{a}" if a == b else f"{a}–{b}" for a, b in runs])


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


# ---- a profile and its heads

DOUBT = 0.8
"""A label with less confidence may well change with other text."""

MOST_OFFSETS = 4
"""Offsets of positional heads that are named, at most."""


def heads_sentences(heads: pd.DataFrame) -> list[str]:
    """What a table of heads shows; the first sentence has the labels and the verdict."""
    first = f"{headline(heads)} {claim_sentence(heads.attrs.get('claim'))}".strip()
    return [first, *filter(None, (where_positional(heads), through_wavelengths(heads)))]


def label_counts(heads: pd.DataFrame) -> dict[str, int]:
    """How many heads carry each label, in the order of `LABELS`, 0 included."""
    return {label: int((heads["label"] == label).sum()) for label in LABELS}


def headline(heads: pd.DataFrame) -> str:
    """How many heads do what: "Of 40 heads, 12 are positional, 9 semantic and 3 sink."."""
    counts = sorted(_present(heads), key=lambda pair: -pair[1])
    return say("profile", "headline", heads=len(heads), counts=counts)


def _present(heads: pd.DataFrame) -> list[tuple[str, int]]:
    """Labels that heads carry, with how many do."""
    return [(label, count) for label, count in label_counts(heads).items() if count]


def claim_sentence(claim: dict | None) -> str:
    """Whether positional heads use short wavelengths here, and how sure that is.

    "" without a claim: a table of heads that was read from a file has none.
    """
    return say("profile", "claim", **claim) if claim else ""


def where_positional(heads: pd.DataFrame) -> str:
    """In which layers the positional heads are, and how far they look back; "" without any."""
    rows = heads[heads["label"] == "positional"]
    if not len(rows):
        return ""
    offsets = rows["offset"].dropna().astype(int).value_counts().sort_index()
    common = offsets.sort_values(ascending=False, kind="stable").head(MOST_OFFSETS)
    return say(
        "profile",
        "where_positional",
        layers=sorted({int(layer) for layer in rows["layer"]}),
        offsets=list(common.sort_index().items()),
        all=len(common) == len(offsets),
        bands=int(rows["offset"].isna().sum()),
    )


def through_wavelengths(heads: pd.DataFrame) -> str:
    """The strongest planes of positional and of semantic heads; "" without either."""
    groups = []
    for label in ("positional", "semantic"):
        rows = heads[(heads["label"] == label) & heads["top_share"].notna()]
        if len(rows):
            top = rows["top_wavelength"].astype(float)
            record: Record = {
                "label": label,
                "heads": len(rows),
                "low": top.min(),
                "high": top.max(),
            }
            record["median"] = top.quantile(0.5, interpolation="lower")
            record["share"] = float(rows["top_share"].median())
            groups.append(record | {"planes": int(rows["planes_to_half"].median())})
    return say("profile", "through_wavelengths", groups=groups) if groups else ""


def attention_on(profile: xr.Dataset) -> list[str]:
    """The head that attends most to each set of tokens that heads were searched by."""
    sentences = []
    for name in map(str, profile.data_vars):
        of, _, tokens = name.partition("_on_")
        if of != "attention" or f"even_on_{tokens}" not in profile:
            continue
        attention, even = (profile[key].values for key in (name, f"even_on_{tokens}"))
        at = np.unravel_index(np.nanargmax(attention - even), attention.shape)
        record = {"attention": float(attention[at]), "even": float(even[at])}
        record["tokens"] = profile[name].attrs["long_name"].removeprefix("mean attention on ")
        sentences.append(say("profile", "attention_on", head=f"{at[0]}.{at[1]}", **record))
    return sentences


def scope(attrs: Mapping[Any, Any]) -> str:
    """That results of few documents hold for this text alone; "" where there are enough.

    `attrs` are those of the results.
    """
    documents = int(attrs.get("documents", ENOUGH_DOCUMENTS))
    return "" if documents >= ENOUGH_DOCUMENTS else say("profile", "scope", documents=documents)


def label_rules(thresholds: dict | None) -> str:
    """When a head carries which label, with the thresholds that were used, where known."""
    return say("profile", "label_rules", thresholds=thresholds)


def cautions(profile: xr.Dataset, heads: pd.DataFrame) -> list[str]:
    """The warnings of the run, a line each in the attribute "warnings", and weak labels."""
    stated = str(profile.attrs.get("warnings", "")).splitlines()
    named = heads["label"].isin(["positional", "semantic", "mixed"])
    limit = heads.attrs.get("thresholds", {}).get("faint", np.nan)
    faint = int((named & (heads["total_bits"] < limit)).sum())
    doubtful = int((heads["confidence"] < DOUBT).sum())
    records = {
        "no_confidence": {"heads": len(heads)} if heads["confidence"].isna().all() else None,
        "faint": {"count": faint, "heads": int(named.sum()), "limit": limit} if faint else None,
        "doubtful": {"count": doubtful, "heads": len(heads), "doubt": DOUBT}
        if doubtful
        else None,
    }
    return [*(line.strip() for line in stated if line.strip()), *_say_all("profile", records)]


def slow_planes(profile: xr.Dataset) -> str:
    """How many planes never turn within the context; "" where all do."""
    context = int(profile.attrs.get("context", 0))
    wavelength = profile["wavelength"].values[0]
    slow = int((wavelength > context).sum())
    if not context or not slow:
        return ""
    planes = int((~pd.isna(wavelength)).sum())
    alike = np.allclose(profile["wavelength"], wavelength, rtol=1e-3, equal_nan=True)
    return say("profile", "slow_planes", slow=slow, planes=planes, context=context, alike=alike)


def map_summary(profile: xr.Dataset, heads: pd.DataFrame) -> str:
    """The head map in words, for screen readers."""
    layers = range(profile.sizes["layer"])
    counts = [_present(heads[heads["layer"] == layer]) for layer in layers]
    return say("profile", "map_summary", layers=counts, heads=profile.sizes["head"])


# ---- a sweep

FREE = 0.01
"""Nats/token: a cut whose interval ends below this is called free."""

QUARTER = 0.75
ENDS = {"slow": "slowest", "fast": "fastest"}
CONTROL = {"slow": "random", "fast": "random", "band": "band control"}
"""The kind of the random sets that an entry is compared with."""

FEW = 5
"""Bands of which a rank correlation means nothing."""


def sweep_sentences(sweep: xr.Dataset, table: pd.DataFrame | None = None) -> list[str]:
    """What a sweep of stopped planes shows; `table` is its `summarize_truncation`.

    First, without intervals, which planes may stop for nothing and what the fastest cost; then
    a quarter of the planes from either end, beside as many random ones; the slowest planes that
    may stop for less than 0.01 nats/token; where the trained context and the predicted band
    lie among the planes; the most costly band; heads with a new label; retrieval.
    """
    table = summarize_truncation(sweep) if table is None else table
    ends, free = _quarters(table, "loss_change"), _free(table)
    labels = _quarters(table, "labels_changed")
    fast = [row for row in ends if row["kind"] == "fast"]
    random = [row["control"] for row in ends if row["control"] is not None]
    share = _known(table["retrieval"].iloc[0])
    records = {
        "short": {"free": free, "fast": fast[0]} if free and fast else None,
        "ends": {"rows": ends, "random": random[-1] if random else None} if ends else None,
        "free": free,
        "places": _places(sweep),
        "bands": _bands(table, sweep),
        "labels": {"rows": labels} if labels else None,
        "retrieval": None if share is None else {"share": share, "chance": CHANCE},
    }
    return _say_all("truncation", records)


def control_change(table: pd.DataFrame, row: pd.Series) -> float:
    """The mean loss change of the random sets that an entry is compared with; NaN without."""
    control = table[table["kind"] == CONTROL[row["kind"]]]
    same = "band" if row["kind"] == "band" else "kept"
    return float(control.loc[control[same] == row[same], "loss_change"].mean())


def span(row: Mapping[Any, Any] | pd.Series) -> str:
    """The wavelengths that stop: "63 to 199", or one."""
    low, high = short_count(row["wavelength_low"]), short_count(row["wavelength_high"])
    return low if low == high else f"{low} to {high}"


def _record(table: pd.DataFrame, row: pd.Series) -> Record:
    """A row of the summary with its end, its share, its wavelengths, its random planes."""
    words = {"end": ENDS.get(row["kind"], ""), "stopped": 1 - row["kept"], "span": span(row)}
    return dict(row) | words | {"control": _known(control_change(table, row))}


def _quarters(table: pd.DataFrame, measured: str) -> list[Record]:
    """For each end the entry that stops a quarter of the planes, or nearest to it."""
    ends = (table[(table["kind"] == end) & table[measured].notna()] for end in ENDS)
    nearest = [r.iloc[int((r["kept"] - QUARTER).abs().argmin())] for r in ends if len(r)]
    return [_record(table, row) for row in nearest]


def _free(table: pd.DataFrame) -> Record | None:
    """How many of the slowest planes may stop for nothing."""
    rows = table[(table["kind"] == "slow") & table["loss_change_high"].notna()]
    rows = rows.sort_values("kept", ascending=False)
    if not len(rows):
        return None
    free = rows[(rows["loss_change_high"] < FREE).cummin()]
    last = _record(table, free.iloc[-1]) if len(free) else None
    return {"last": last, "least": _record(table, rows.iloc[0]), "limit": FREE}


def _places(sweep: xr.Dataset) -> Record | None:
    """Where the trained context and the predicted band lie among the planes."""
    _, wavelength = turning_wavelengths(sweep)
    every = [
        (name, length, plane_index(wavelength, length)) for name, length in marks(sweep).items()
    ]
    inside = [place for place in every if place[2] is not None]
    return {"slowest": len(wavelength) - 1, "marks": inside} if inside else None


def _bands(table: pd.DataFrame, sweep: xr.Dataset) -> Record | None:
    """The most costly band, and how the cost of bands goes with selectivity."""
    bands = table[(table["kind"] == "band") & table["loss_change"].notna()]
    if not len(bands):
        return None
    correlation = math.nan
    if "selectivity_keys" in sweep and len(bands) > FEW:
        share = selectivity_shares(sweep)
        wavelength = sweep["wavelength"].transpose("layer", "frequency").values[:, None]
        within = [
            np.nanmean(np.nansum(share * ((wavelength >= low) & (wavelength <= high)), axis=-1))
            for low, high in zip(bands["wavelength_low"], bands["wavelength_high"], strict=True)
        ]
        pushes = pd.Series(within, bands.index)
        correlation = bands["loss_change"].corr(pushes, method="spearman")
    most = _record(table, bands.iloc[int(bands["loss_change"].argmax())])
    return {"count": len(bands), "most": most, "correlation": _known(correlation)}


# ---- the reach of heads

FAR = 10
"""Distances from a tenth of the farthest on are called far."""


def reach_sentences(reach: xr.Dataset) -> list[str]:
    """Where heads lose their picked key, a sentence a variant; then how often it wins."""
    every = reach.stack(one=("layer", "head")).dropna("one", how="all", subset=["horizon"])
    variants = every["variant"].values.tolist()
    lost = [
        say("reach", "lost", own=OWN, **_lost(every.sel(variant=name))) for name in variants
    ]
    farthest = int(every["distance"].max())
    far = every["win_share"].sel(distance=slice(farthest / FAR, None))
    still = every["unmoved_win_share"].mean("one").values.tolist()
    moved = far.mean("distance").mean("one").values.tolist()
    wins = {
        "still": dict(zip(variants, still, strict=True)),
        "moved": dict(zip(variants, moved, strict=True)),
        "begin": int(far["distance"][0]),
        "end": farthest,
        "distances": far.sizes["distance"],
    }
    return [*lost, *_say_all("reach", {"near": _near(every), "wins": wins | {"own": OWN}})]


def _lost(heads: xr.Dataset) -> Record:
    """In how many heads one variant loses the picked key, and at what distances."""
    horizon = heads["horizon"].values
    lost = horizon[np.isfinite(horizon) & (horizon > 0)]
    return {
        "variant": heads["variant"].item(),
        "lost": lost.tolist(),
        "median": np.median(lost) if len(lost) else None,
        "heads": len(horizon),
        "farthest": int(heads["distance"].max()),
        "never": int((horizon == 0).sum()),
        "certain": int((heads["lowest_score"] > heads["others_level"]).sum()),
    }


def _near(every: xr.Dataset) -> Record:
    """Where the picked keys stand, and the horizons of the model's rotation."""
    record = {"rows": every.attrs["rows"], "distance": float(every["picked_distance"].mean())}
    if OWN not in every["variant"].values:
        return record | {"own": None}
    own, trained = every.sel(variant=OWN), every.attrs["trained_context"]
    sure = int((own["horizon_high"] < 2 * own["horizon_low"]).sum())
    measured = not own["horizon_low"].isnull().all()
    within = int(((own["horizon"] > 0) & (own["horizon"] <= trained)).sum())
    of_own = {"heads": every.sizes["one"], "within": within, "trained_context": trained}
    return record | {"own": of_own | {"sure": sure if measured else None}}


# ---- a comparison

OVER_TEXT = {
    "sequences": "over the text of one seed",
    "groups": "over the text, paired",
}
"""The units of an interval that is not over seeds."""


def comparison_sentences(comparison: xr.Dataset, table: pd.DataFrame) -> list[str]:
    """What a comparison shows, and the sentences that its writer added."""
    rows = table.to_dict("records")
    baseline = str(comparison.attrs["baseline"])
    records: dict[str, Record | None] = {}
    if table["loss_change"].notna().any():
        records["losses"] = {"baseline": baseline, **_losses(table)}
    else:
        of_runs = "context" in comparison.attrs
        records["unpaired_losses"] = {"baseline": baseline, "rows": rows, "of_runs": of_runs}
    if "loss_past_context" in table and table["loss_past_context"].notna().any():
        changes = _changes(table, "loss_past_context")
        records["past_context"] = {"rows": rows, "changes": changes}
    if "repeat_gain" in table:
        gain, retrieval = (_changes(table, name) for name in ("repeat_gain", "retrieval"))
        changes = {"gain_changes": gain, "retrieval_changes": retrieval}
        records["repeats"] = {"rows": rows, "chance": CHANCE, **changes}
    records["previous_token"] = {"rows": rows}
    records["without_rotation"] = _without_rotation(comparison, table)
    records["claims"] = _claims(comparison, table)
    records["wavelengths"] = _wavelengths(comparison, table)
    if "growth_loss" in comparison:
        records["growth"] = _growth(comparison, str(table["group"].iloc[0]))
    if runs := comparison.attrs.get("unfinished"):
        records["unfinished"] = {"runs": runs}
    records["unlike_seeds"] = _unlike_seeds(comparison)
    lead, added = (str(comparison.attrs.get(name, "")) for name in ("lead", "findings"))
    return [*filter(None, [lead]), *_say_all("comparison", records), *added.splitlines()]


def _losses(table: pd.DataFrame) -> Record:
    """The differences in loss to the baseline, from the best to the worst."""
    known = table[table["loss_change"].notna()].sort_values("loss_change")
    names = ("loss_change", "low", "high")
    changes = [
        _change(row, names, OVER_TEXT.get(row["over"], _seeds(row)))
        for row in known.to_dict("records")
    ]
    return {"changes": changes, "of_one_seed": bool((known["over"] == "sequences").any())}


def _change(row: Mapping[Hashable, Any], names: tuple[str, str, str], over: str) -> Record:
    """A group's change, its interval (`names` of the three) and what that is over."""
    value, interval = change_and_interval(*(row[name] for name in names))
    return {"group": row["group"], "value": value, "interval": interval, "over": over}


def _seeds(row: Mapping[Hashable, Any]) -> str:
    """How many pairs of seeds an interval is over, if it is over seeds."""
    return f"{row['pairs']} pairs of seeds" if row["pairs"] > 1 else ""


def _changes(table: pd.DataFrame, name: str) -> Record:
    """The groups whose change of `name` has a 95% interval without 0, and those without one.

    An interval of no width is none: shares of few needles may change alike in all pairs.
    """
    names = (f"{name}_change", f"{name}_low", f"{name}_high")
    change, low, high = (table[column] for column in names)
    paired = change.notna()
    known = paired & (low < high)
    apart = table[known & ((low > 0) | (high < 0))].to_dict("records")
    over = "over trials of one seed"
    return {
        "baseline": str(table["group"].iloc[0]),
        "known": bool(known.any()),
        "apart": [_change(row, names, _seeds(row) or over) for row in apart],
        "alike": table["group"][paired & (low == high)].tolist(),
        "units": "pairs" if (table["pairs"][paired] > 1).any() else "trials",
        "alone": table["group"][paired & low.isna()].tolist(),
    }


def _without_rotation(comparison: xr.Dataset, table: pd.DataFrame) -> Record | None:
    """The groups in which no plane of any layer turns."""
    wavelengths = {
        group: entries_of(comparison, group)["wavelength"] for group in table["group"]
    }
    groups = [group for group, length in wavelengths.items() if not np.isfinite(length).any()]
    return {"groups": groups} if groups else None


def _claims(comparison: xr.Dataset, table: pd.DataFrame) -> Record | None:
    """The verdicts on the paper's claim, by group, with the numbers of a single model."""
    if "verdict" not in comparison:
        return None
    groups = []
    for group in table["group"]:
        entries = entries_of(comparison, group)
        names = ("rank_correlation", "null_low", "null_high")
        alone = entries.sizes["entry"] == 1
        numbers = {name: entries[name].item() if alone else None for name in names}
        verdicts = list(Counter(entries["verdict"].values.tolist()).items())
        groups.append({"group": group, "verdicts": verdicts, **numbers})
    return {"groups": groups}


def _wavelengths(comparison: xr.Dataset, table: pd.DataFrame) -> Record | None:
    """The wavelengths that heads select through; whether all groups turn the same planes."""
    known = table[table[["positional_wavelength", "semantic_wavelength"]].notna().all(axis=1)]
    if known.empty:
        return None
    turning = {
        tuple(np.isfinite(entries_of(comparison, group)["wavelength"][0, 0].values))
        for group in table["group"]
    }
    return {"groups": known.to_dict("records"), "alike": len(turning) == 1}


def _growth(comparison: xr.Dataset, group: str) -> Record:
    """At which checkpoint the baseline has its first heads, and where its longest queries lie.

    `since` is the first step from which on these stay in the plane where they end.
    """
    entry = entries_of(comparison, group).isel(entry=0)
    heads = ("layer", "head")
    induction = best_head(entry["growth_trial_induction"]).mean("trial")
    appear = {
        "previous-token head": entry["growth_previous_token"].max(heads) >= LOOKS_AT,
        "positional head": (entry["growth_label"] == "positional").any(heads),
        "semantic head": (entry["growth_label"] == "semantic").any(heads),
        "induction head": induction >= LOOKS_AT,
    }
    steps = comparison["step"].values
    first = [
        (what, int(steps[there.values.argmax()]) if there.any() else None)
        for what, there in appear.items()
    ]
    norm = entry["growth_q_norm"].mean(heads).transpose("step", "frequency")
    norm = norm.dropna("step", how="all")  # the steps of another run
    most = norm.fillna(-1).argmax("frequency").values
    moved = np.flatnonzero(most != most[-1])
    return {
        "entry": entry["entry"].item(),
        "heads": sorted(first, key=lambda one: one[1] is None),
        "share": LOOKS_AT,
        "since": int(norm["step"].values[moved[-1] + 1 if len(moved) else 0]),
        "wavelength": _known(float(entry["wavelength"].median("layer")[most[-1]])),
    }


def _unlike_seeds(comparison: xr.Dataset) -> Record | None:
    """The groups without a seed that another of its size has, with these seeds."""
    seeds: dict[str, dict[str, set[int]]] = {}
    names = ("size", "group", "seed")
    for size, group, seed in zip(*(comparison[n].values.tolist() for n in names), strict=True):
        seeds.setdefault(size, {}).setdefault(group, set()).add(seed)
    missing = [
        (group, sorted(set().union(*of_size.values()) - has))
        for of_size in seeds.values()
        for group, has in of_size.items()
    ]
    missing = [(group, lacks) for group, lacks in missing if lacks]
    return {"missing": missing} if missing else None
