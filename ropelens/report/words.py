"""Sentences about results: numbers are computed here, and worded by templates/sentences.

A template is about one kind of result; each of its macros words one sentence. White space in a
macro is layout: a sentence has single spaces, and none before a comma.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jinja2
import numpy as np
import pandas as pd
import xarray as xr

from ropelens.comparison.table import entries_of, summarize_comparison
from ropelens.errors import public
from ropelens.figures.style import LABELS
from ropelens.figures.text import (
    NOTHING,
    change_and_interval,
    mean_count,
    number,
    short_count,
    signed,
)
from ropelens.measure.heads import classify_heads
from ropelens.measure.terms import NEEDLES, OWN
from ropelens.measure.truncation_table import summarize_truncation
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
    environment.globals |= {
        "NOTHING": NOTHING,
        "nan": math.nan,
        "change_and_interval": change_and_interval,
    }
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
    counts = sorted(label_counts(heads).items(), key=lambda pair: -pair[1])
    return say("profile", "headline", heads=len(heads), counts=[c for c in counts if c[1]])


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
            record: Record = {"label": label, "heads": len(rows)}
            record |= {"low": top.min(), "high": top.max()}
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
    records: dict[str, Record | None] = {
        "no_confidence": {"heads": len(heads)} if heads["confidence"].isna().all() else None,
        "faint": {"count": faint, "heads": int(named.sum()), "limit": limit},
        "doubtful": {"count": doubtful, "heads": len(heads), "doubt": DOUBT},
    }
    weak = _say_all(
        "profile", {name: r for name, r in records.items() if r and r.get("count", 1)}
    )
    return [*(line.strip() for line in stated if line.strip()), *weak]


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


# ---- a sweep

FREE = 0.01
"""Nats/token: a cut whose interval ends below this is called free."""

QUARTER = 0.75
ENDS = {"slow": "slowest", "fast": "fastest"}
CONTROL = {"slow": "random", "fast": "random", "band": "band control"}
"""The kind of the random sets that an entry is compared with."""


def sweep_sentences(sweep: xr.Dataset, table: pd.DataFrame | None = None) -> list[str]:
    """What a sweep of stopped planes shows; `table` is its `summarize_truncation`.

    First, without intervals, which planes may stop for nothing and what the fastest cost; then
    a quarter of the planes from either end, beside as many random ones; the slowest planes that
    may stop for less than 0.01 nats/token; the most costly band; heads with a new label;
    retrieval.
    """
    table = summarize_truncation(sweep) if table is None else table
    rows = [_record(table, row) for _, row in table.iterrows()]
    ends, labels = (_quarters(rows, of) for of in ("loss_change", "labels_changed"))
    slow = [
        row for row in rows if row["kind"] == "slow" and row["loss_change_high"] is not None
    ]
    free = _free(slow)
    fast = [row for row in ends if row["kind"] == "fast"]
    bands = [row for row in rows if row["kind"] == "band" and row["loss_change"] is not None]
    most = max(bands, key=lambda row: row["loss_change"], default=None)
    retrieval = rows[0]["retrieval"]
    records = {
        "short": {"free": free, "fast": fast[0]} if free and fast else None,
        "ends": {"rows": ends} if ends else None,
        "free": free,
        "bands": {"count": len(bands), "most": most} if most else None,
        "labels": {"rows": labels} if labels else None,
        "retrieval": None if retrieval is None else {"share": retrieval, "chance": CHANCE},
    }
    return _say_all("truncation", records)


def control_change(table: pd.DataFrame, row: pd.Series) -> float:
    """The mean loss change of the random sets that an entry is compared with; NaN without."""
    control = table[table["kind"] == CONTROL.get(row["kind"])]
    same = "band" if row["kind"] == "band" else "kept"
    return float(control.loc[control[same] == row[same], "loss_change"].mean())


def span(row: Mapping[Any, Any] | pd.Series) -> str:
    """The wavelengths that stop: "63 to 199", or one."""
    low, high = short_count(row["wavelength_low"]), short_count(row["wavelength_high"])
    return low if low == high else f"{low} to {high}"


def _record(table: pd.DataFrame, row: pd.Series) -> Record:
    """A row of the summary with its end, share, wavelengths, random planes; None for NaN."""
    words = {"end": ENDS.get(row["kind"], ""), "stopped": 1 - row["kept"], "span": span(row)}
    record = dict(row) | words | {"control": control_change(table, row)}
    return {name: None if pd.isna(value) else value for name, value in record.items()}


def _quarters(rows: Sequence[Record], measured: str) -> list[Record]:
    """For each end the entry that stops a quarter of the planes, or nearest to it."""
    ends = ([r for r in rows if r["kind"] == end and r[measured] is not None] for end in ENDS)
    return [min(some, key=lambda row: abs(row["kept"] - QUARTER)) for some in ends if some]


def _free(slow: Sequence[Record]) -> Record | None:
    """The last of the cuts from the slow end that are free one after another, and the first."""
    rows = sorted(slow, key=lambda row: -row["kept"])
    free = [*itertools.takewhile(lambda row: row["loss_change_high"] < FREE, rows)]
    return (
        {"last": free[-1] if free else None, "least": rows[0], "limit": FREE} if rows else None
    )


# ---- the reach of heads

FAR = 10
"""Distances from a tenth of the farthest on are called far."""


def reach_sentences(reach: xr.Dataset) -> list[str]:
    """Where heads lose their picked key, a sentence a variant; then how often it wins."""
    every = reach.stack(one=("layer", "head")).dropna("one", how="all", subset=["horizon"])
    trained, farthest = every.attrs["trained_context"], int(every["distance"].max())
    sentences = []
    for name in every["variant"].values.tolist():
        of_variant = every.sel(variant=name)
        horizon, far = of_variant["horizon"].values, slice(farthest / FAR, None)
        lost = horizon[np.isfinite(horizon) & (horizon > 0)]
        record = {
            "variant": name,
            "lost": lost.tolist(),
            "median": np.median(lost) if len(lost) else None,
            "heads": len(horizon),
            "never": int((horizon == 0).sum()),
            "certain": int((of_variant["lowest_score"] > of_variant["others_level"]).sum()),
            "within": int((lost <= trained).sum()) if name == OWN else None,
            "trained": trained,
            "still": float(of_variant["unmoved_win_share"].mean()),
            "moved": float(of_variant["win_share"].sel(distance=far).mean()),
            "begin": farthest // FAR,
            "farthest": farthest,
        }
        sentences.append(say("reach", "lost", own=OWN, **record))
    distance = float(every["picked_distance"].mean())
    return [*sentences, say("reach", "near", rows=every.attrs["rows"], distance=distance)]


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
    if runs := comparison.attrs.get("unfinished"):
        records["unfinished"] = {"runs": runs}
    records["unlike_seeds"] = _unlike_seeds(comparison)
    lead, added = (str(comparison.attrs.get(name, "")) for name in ("lead", "findings"))
    return [*filter(None, [lead]), *_say_all("comparison", records), *added.splitlines()]


def _losses(table: pd.DataFrame) -> Record:
    """The differences in loss to the baseline, from the best to the worst."""
    known = table[table["loss_change"].notna()].sort_values("loss_change").to_dict("records")
    names = ("loss_change", "low", "high")
    changes = [_change(row, names, OVER_TEXT.get(row["over"], _seeds(row))) for row in known]
    return {"changes": changes, "of_one_seed": any(r["over"] == "sequences" for r in known)}


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
