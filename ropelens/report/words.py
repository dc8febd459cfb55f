"""Sentences about results: numbers are computed here, and worded by templates/sentences.

A template is about one kind of result; each of its macros words one sentence. White space in a
macro is layout: a sentence has single spaces, and none before a comma.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from ropelens.comparison.table import group_entries, summarize_comparison
from ropelens.errors import public
from ropelens.figures.formats import change_and_interval, short_count
from ropelens.figures.inputs import idle_layers
from ropelens.figures.style import EXCLUDED_LABELS, LABEL_ORDER
from ropelens.intervals import ENOUGH_DOCUMENTS
from ropelens.interventions.truncation_table import QUARTER, class_changes, summarize_truncation
from ropelens.interventions.variables import NEEDLES, OWN
from ropelens.profiles.heads import classify_heads
from ropelens.report.render import say, say_all

Record = dict[str, Any]  # the numbers of a sentence

CHANCE = 1 / NEEDLES  # share of needles that a guess among the prompt's values finds


@public
def describe(results: xr.Dataset | pd.DataFrame) -> list[str]:
    """What results show, in sentences with numbers, the most important first.

    `results`: a profile or its table of heads, or what `truncate`, `reach` or `compare` gave.
    """
    if isinstance(results, pd.DataFrame):
        return heads_sentences(results)
    by_kind: dict[object, Callable[..., list[str]]] = {
        "truncation": sweep_sentences,
        "reach": reach_sentences,
        "comparison": comparison_sentences,
    }
    if describe_kind := by_kind.get(results.attrs.get("kind")):
        return describe_kind(results)
    said = [*heads_sentences(classify_heads(results)), *attention_on(results)]
    return [*said, *filter(None, [idle_words(results)])]


# ---- a profile and its heads

DOUBT = 0.8  # a label with less confidence may well change with other text


def heads_sentences(heads: pd.DataFrame) -> list[str]:
    """What a table of heads shows; the first sentence has the labels and the verdict."""
    said = head_words(heads)
    first = " ".join(said.pop(name) for name in ("headline", "claim") if name in said)
    return [first, *said.values()]


def label_counts(heads: pd.DataFrame) -> dict[str, int]:
    """How many heads carry each label, in the order of `LABEL_ORDER`, 0 included."""
    return {label: int((heads["label"] == label).sum()) for label in LABEL_ORDER}


def head_words(heads: pd.DataFrame) -> dict[str, str]:
    """Sentences about a table of heads, by their macros; without those that say nothing.

    The claim is unknown of a table that was read from a file.
    """
    counts = sorted(label_counts(heads).items(), key=lambda pair: -pair[1])
    positional = heads[heads["label"] == "positional"]
    offsets = positional["offset"].dropna().astype(int).value_counts().sort_index()
    common = offsets.sort_values(ascending=False, kind="stable").head(4)  # to be named
    where = {
        "layers": sorted({int(layer) for layer in positional["layer"]}),
        "offsets": list(common.sort_index().items()),
        "all": len(common) == len(offsets),
        "bands": int(positional["offset"].isna().sum()),
    }
    groups: list[Record] = []
    for label in ("positional", "semantic"):
        rows = heads[(heads["label"] == label) & heads["top_share"].notna()]
        if len(rows):
            top = rows["top_wavelength"].astype(float)
            record: Record = {"label": label, "heads": len(rows)}
            record |= {"low": top.min(), "high": top.max()}
            record["median"] = top.quantile(0.5, interpolation="lower")
            record["share"] = float(rows["top_share"].median())
            groups.append(record | {"planes": int(rows["planes_to_half"].median())})
    records = {
        "headline": {"heads": len(heads), "counts": [one for one in counts if one[1]]},
        "claim": heads.attrs.get("claim"),
        "where_positional": where if len(positional) else None,
        "through_wavelengths": {"groups": groups} if groups else None,
    }
    return say_all("profile", records)


def attention_on(profile: xr.Dataset) -> list[str]:
    """The head that attends most to each set of tokens that heads were searched by."""
    sentences = []
    for name in map(str, profile.data_vars):
        of, _, tokens = name.partition("_on_")
        if of != "attention" or f"control_on_{tokens}" not in profile:
            continue
        attention, control = (profile[key].values for key in (name, f"control_on_{tokens}"))
        at = np.unravel_index(np.nanargmax(attention - control), attention.shape)
        record = {"attention": float(attention[at]), "control": float(control[at])}
        words = profile[name].attrs["long_name"].removeprefix("attention on ")
        record["tokens"] = words.removesuffix(", where one is seen")
        sentences.append(say("profile", "attention_on", head=f"{at[0]}.{at[1]}", **record))
    return sentences


def idle_words(profile: xr.Dataset) -> str:
    """How many layers of a hybrid model do not attend, and which; "" where all do."""
    idle = idle_layers(profile)
    return say("profile", "idle", idle=idle, layers=profile.sizes["layer"]) if idle else ""


def scope(attrs: Mapping[Any, Any]) -> str:
    """Of which lengths and documents results speak; "" where they are those of the model.

    `attrs` are those of the results.
    """
    trained = int(attrs.get("trained_context", 0))
    record = {"context": int(attrs.get("context", trained)), "trained": trained}
    documents = int(attrs.get("documents", ENOUGH_DOCUMENTS))
    return say("profile", "scope", documents=documents, enough=ENOUGH_DOCUMENTS, **record)


def cautions(profile: xr.Dataset, heads: pd.DataFrame) -> list[str]:
    """The warnings of the run, a line each in the attribute "warnings", and weak labels."""
    stated = [line.strip() for line in str(profile.attrs.get("warnings", "")).splitlines()]
    named = ~heads["label"].isin(EXCLUDED_LABELS)
    limit = heads.attrs.get("thresholds", {}).get("faint", np.nan)
    faint = int((named & (heads["total_bits"] < limit)).sum())
    doubtful, count = int((heads["confidence"] < DOUBT).sum()), len(heads)
    if (heads["label"] == "untested").any():
        stated.append(say("profile", "untested", rows=int(profile["group_scored"].sum())))
        return [*filter(None, stated)]
    weak = {
        "no_confidence": {"heads": count} if heads["confidence"].isna().all() else None,
        "faint": {"count": faint, "heads": named.sum(), "limit": limit} if faint else None,
        "doubtful": {"count": doubtful, "heads": count, "doubt": DOUBT} if doubtful else None,
    }
    return [*filter(None, stated), *say_all("profile", weak).values()]


# ---- a sweep

FREE = 0.01  # nats/token: a cut whose interval ends below this is called free

ENDS = {"slow": "slowest", "fast": "fastest"}
CONTROL = {"slow": "random", "fast": "random", "band": "band control"}
"""The kind of the random sets that an entry is compared with."""


def sweep_sentences(sweep: xr.Dataset, table: pd.DataFrame | None = None) -> list[str]:
    """What a sweep of stopped planes shows; `table` is its `summarize_truncation`.

    First which planes may stop for nothing, or what they cost, and what the fastest cost; then
    a quarter of the planes from either end, beside as many random ones, on all text, in the
    second half of the context, and on the farthest copies; the slowest planes that may stop for
    less than 0.01 nats/token; the most costly band; heads with a new label; retrieval; the loss
    and the attention of each class of tokens. Each names the context that was measured, and
    says where that is not the trained one.
    """
    rows = _sweep_records(summarize_truncation(sweep) if table is None else table)
    at: Record = {name: int(sweep.attrs[name]) for name in ("context", "trained_context")}
    at["heads"] = str(sweep.attrs.get("heads", "*")).removeprefix("*")
    measured = {"ends": "loss_change", "far": "far_loss_change", "copies": "copy_loss_change"}
    measured |= {"labels": "labels_changed"}
    quarters = {name: _quarters(rows, column) for name, column in measured.items()}
    of_quarters: dict[str, Record] = {
        name: {"at": at, "rows": of} for name, of in quarters.items() if of
    }
    if "copies" in of_quarters:
        distance = int(sweep["copy_distance"][-1])
        of_quarters["copies"] |= {"distance": distance, "plain": rows[0]}
    free = _free(rows)
    fast = [row for row in quarters["ends"] if row["kind"] == "fast"]
    bands = [row for row in rows if row["kind"] == "band" and row["loss_change"] is not None]
    most = max(bands, key=lambda row: row["loss_change"], default=None)
    retrieval, classes = rows[0]["retrieval"], class_changes(sweep)
    of_classes = [
        row | {"classes": classes[classes["edit"] == row["edit"]].to_dict("records")}
        for row in (quarters["ends"] if len(classes) else ())
    ]
    records = {
        "short": {"at": at, "free": free, "fast": fast[0]} if free and fast else None,
        **{name: of_quarters.get(name) for name in ("ends", "far", "copies")},
        "free": {"at": at, **free} if free else None,
        "bands": {"at": at, "count": len(bands), "most": most} if most else None,
        "labels": of_quarters.get("labels"),
        "retrieval": None if retrieval is None else {"share": retrieval, "chance": CHANCE},
        "classes": {"at": at, "rows": of_classes} if of_classes else None,
    }
    return [*say_all("truncation", records).values()]


def _sweep_records(table: pd.DataFrame) -> list[Record]:
    """Rows of the summary with their end, share and wavelengths; None for NaN.

    `control` is the mean loss change of the random sets that an entry is compared with.
    """
    records = []
    for row in table.to_dict("records"):
        low, high = (short_count(row[f"wavelength_{end}"]) for end in ("low", "high"))
        words = {"end": ENDS.get(row["kind"], ""), "stopped": 1 - row["kept"]}
        words["span"] = low if low == high else f"{low} to {high}"
        random = table[table["kind"] == CONTROL.get(row["kind"])]
        same = "band" if row["kind"] == "band" else "kept"
        words["control"] = random.loc[random[same] == row[same], "loss_change"].mean()
        every = (row | words).items()
        records.append({str(name): None if pd.isna(value) else value for name, value in every})
    return records


def _quarters(rows: Sequence[Record], measured: str) -> list[Record]:
    """For each end the entry that stops a quarter of the planes, or nearest to it."""
    ends = ([r for r in rows if r["kind"] == end and r[measured] is not None] for end in ENDS)
    return [min(some, key=lambda row: abs(row["kept"] - QUARTER)) for some in ends if some]


def _free(rows: Sequence[Record]) -> Record | None:
    """The last of the cuts from the slow end that are free one after another, and the first."""
    slow = [r for r in rows if r["kind"] == "slow" and r["loss_change_high"] is not None]
    if not slow:
        return None
    slow.sort(key=lambda row: -row["kept"])
    free = [*itertools.takewhile(_is_free, slow)]
    return {"last": free[-1] if free else None, "least": slow[0], "limit": FREE}


def _is_free(row: Record) -> bool:
    """Whether the loss hardly changes, in the second half of the context too."""
    high, far = row["loss_change_high"], row["far_loss_change_high"]
    return high < FREE and (row["far_loss"] is None or (far is not None and far < FREE))


# ---- the reach of heads


def reach_sentences(reach: xr.Dataset) -> list[str]:
    """How many heads find copies, and the best of them at every distance, by variant."""
    measured = reach["found_share"].notnull().any(("variant", "run_distance"))
    distance = reach["distance"].values
    far = distance[distance >= max(distance, default=0) / 10]
    sentences = []
    for name in reach["variant"].values.tolist():
        found = reach.sel(variant=name)
        near = found["found_share"].isel(run_distance=0).fillna(0)
        layer, head = np.unravel_index(near.values.argmax(), near.shape)
        best = found.isel(layer=layer, head=head)
        off = 100 * abs(best["foretold_share"] - best["found_share"]).max().item()
        numbers = {
            "copied": reach.attrs.get("copied", ""),
            "distances": reach["run_distance"].values.tolist(),
            **{of: best[f"found_{of}"].values.tolist() for of in ("share", "low", "high")},
            "finders": int((near >= 0.5).sum()),
            "heads": (int(measured.sum()), measured.size),  # that were run, and all
            "foretold": off if np.isfinite(off) else None,
            "beyond": [far.min(), far.max()] if len(far) else None,
            "extrapolated": float(best["extrapolated_share"].sel(distance=far).mean()),
        }
        sentences.append(say("reach", "copies", variant=name, own=OWN, **numbers))
    return sentences


# ---- a comparison

OVER_TEXT = {"sequences": "over the text of one seed", "groups": "over the text, paired"}


def comparison_sentences(
    comparison: xr.Dataset, table: pd.DataFrame | None = None
) -> list[str]:
    """What a comparison shows, by its `table`, and the sentences that its writer added."""
    table = summarize_comparison(comparison) if table is None else table
    rows, attrs = table.to_dict("records"), comparison.attrs
    baseline = str(attrs["baseline"])
    records: dict[str, Record | None] = {}
    if "source" in comparison.coords:
        models = {*comparison["model"].values.tolist()}
        sources = comparison["source"].values.astype(str)
        sampled = {text.rpartition(", sampled from ")[2] for text in sources}
        writers = sorted(models & sampled) if len(models) > 1 else []
        records["sampled"] = {"writers": writers} if writers else None
    if known := [row for row in rows if not pd.isna(row["loss_change"])]:
        known.sort(key=lambda row: row["loss_change"])
        names = ("loss_change", "low", "high")
        over = [OVER_TEXT.get(row["over"], _seeds(row)) for row in known]
        changes = [_change(row, names, of) for row, of in zip(known, over, strict=True)]
        of_one_seed = any(row["over"] == "sequences" for row in known)
        losses = {"baseline": baseline, "changes": changes, "of_one_seed": of_one_seed}
        records["losses"] = losses
    else:
        of_runs = "context" in attrs
        records["unpaired_losses"] = {"baseline": baseline, "rows": rows, "of_runs": of_runs}
    if "loss_past_context" in table and table["loss_past_context"].notna().any():
        past = _changes(table, "loss_past_context")
        records["past_context"] = {"rows": rows, "changes": past}
    if "repeat_gain" in table:
        gain, retrieval = (_changes(table, name) for name in ("repeat_gain", "retrieval"))
        apart = {"gain_changes": gain, "retrieval_changes": retrieval}
        records["repeats"] = {"rows": rows, "chance": CHANCE, **apart}
    records["previous_token"] = {"rows": rows}
    fastest = comparison["wavelength"].min(("layer", "frequency"))
    still = [of for of in table["group"] if not np.isfinite(group_entries(fastest, of)).any()]
    records["without_rotation"] = {"groups": still} if still else None
    runs = attrs.get("unfinished")
    records["unfinished"] = {"runs": runs} if runs else None
    lead, added = (str(attrs.get(name, "")) for name in ("lead", "findings"))
    said = say_all("comparison", records).values()
    return [*filter(None, [lead]), *said, *added.splitlines()]


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
