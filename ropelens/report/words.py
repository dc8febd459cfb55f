"""Sentences about results: the numbers for templates/sentences, where a macro is a sentence."""

import itertools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from ropelens.arguments import public
from ropelens.budget.labels import DOUBTS
from ropelens.claims.classify import classify_heads
from ropelens.comparison.table import group_entries, summarize_comparison
from ropelens.figures.follow import FOLLOWS
from ropelens.figures.formats import change_and_interval, short_count, visible_token
from ropelens.figures.inputs import idle_layers
from ropelens.figures.style import EXCLUDED_LABELS, LABEL_ORDER
from ropelens.intervals import ENOUGH_DOCUMENTS
from ropelens.interventions.changes import changes_of_edits, class_changes
from ropelens.interventions.top_planes import top_planes
from ropelens.interventions.truncation_table import (
    QUARTER,
    summarize_truncation,
    sweeps_by_kind,
)
from ropelens.interventions.variables import OWN_ROTATION
from ropelens.profiles.heads import FRACTIONS
from ropelens.profiles.kinds import layers_by_kind
from ropelens.profiles.measures import NEEDLES
from ropelens.report.render import write_sentence, write_sentences

Record = dict[str, Any]  # the numbers of a sentence
Records = dict[str, Record | None]  # by macro

CHANCE = 1 / NEEDLES  # share of needles found by a guess among the values in the prompt
DOUBT = 0.8  # other text may change a label with a lower confidence
FREE = 0.01  # nats/token: a step is called free if its interval ends below this
END_NAMES = {"slow": "slowest", "fast": "fastest"}
CONTROL = {
    "slow": "random",
    "fast": "random",
    "band": "band control",
}  # kinds of random sets


@public
def describe(results: xr.Dataset | pd.DataFrame) -> list[str]:
    """Describe results in sentences with numbers. The most important sentence comes first.

    `results` is a profile, a table of heads, or a result of `truncate`, `reach`, `compare`,
    `evaluate`, `capture`, `attribute_planes` or `patch_each`.
    """
    if isinstance(results, pd.DataFrame):
        return heads_sentences(results)
    match results.attrs.get("kind"):
        case "truncation":
            return sweep_sentences(results, summarize_truncation(results))
        case "reach":
            return reach_sentences(results)
        case "comparison":
            return comparison_sentences(results, summarize_comparison(results))
        case "evaluation" | "attribution" | "patches" | "capture" as kind:
            return [*write_sentences("results", RECORDS[kind](results)).values()]
    sentences = [
        *heads_sentences(classify_heads(results)),
        *attention_sentences(results),
    ]
    return [*sentences, *filter(None, [kind_words(results), idle_words(results)])]


def heads_sentences(heads: pd.DataFrame) -> list[str]:
    """Sentences about a table of heads. The first one has the labels and the verdict."""
    sentences = head_words(heads)
    first = [sentences.pop(name) for name in ("headline", "claim") if name in sentences]
    return [" ".join(first), *sentences.values()]


def label_counts(heads: pd.DataFrame) -> dict[str, int]:
    """Number of heads with each label, in the order of `LABEL_ORDER`, including 0."""
    return {label: int((heads["label"] == label).sum()) for label in LABEL_ORDER}


def head_words(heads: pd.DataFrame) -> dict[str, str]:
    """Sentences about a table of heads by their macros. A table from a file has no claim."""
    counts = sorted(label_counts(heads).items(), key=lambda pair: -pair[1])
    positional = heads[heads["label"] == "positional"]
    offsets = positional["offset"].dropna().astype(int).value_counts().sort_index()
    common = offsets.sort_values(ascending=False, kind="stable").head(4)
    where = {
        "layers": sorted({int(layer) for layer in positional["layer"]}),
        "offsets": list(common.sort_index().items()),
        "all": len(common) == len(offsets),
        "bands": int(positional["offset"].isna().sum()),
    }
    labels = [label for label, count in counts if count]
    by_label = [
        _label_numbers(label, heads[heads["label"] == label]) for label in labels
    ]
    groups: list[Record] = []
    for label in ("positional", "semantic"):
        rows = heads[(heads["label"] == label) & heads["top_share"].notna()]
        if len(rows):
            wavelengths = rows["top_wavelength"].to_numpy(float)
            record: Record = {"label": label, "heads": len(rows)}
            record |= {
                "median": float(np.median(wavelengths)),
                "low": float(wavelengths.min()),
            }
            record |= {
                "high": wavelengths.max(),
                "share": float(rows["top_share"].median()),
            }
            groups.append(record | {"planes": int(rows["planes_to_half"].median())})
    doubts = {name: int(np.sum(heads.get(name, 0))) for name in DOUBTS}
    records = {
        "headline": {
            "heads": len(heads),
            "counts": [pair for pair in counts if pair[1]],
        },
        "claim": heads.attrs.get("claim"),
        "by_label": {"groups": by_label},
        "doubts": doubts | {"heads": len(heads)} if any(doubts.values()) else None,
        "where_positional": where if len(positional) else None,
        "through_wavelengths": {"groups": groups} if groups else None,
    }
    return write_sentences("profile", records)


def _label_numbers(label: str, heads: pd.DataFrame) -> Record:
    """The numbers of a sentence about the heads with one label: medians over these heads."""
    median = heads.reindex(columns=[*FOLLOWS, *FRACTIONS[:2], "total_bits"]).median()
    numbers = {
        name.removeprefix("follows_"): float(median[name]) for name in median.index
    }
    sink = float((heads["sink_bits"] / heads["total_bits"]).median())
    return {"label": label, "heads": len(heads), "sink": sink} | numbers


def attention_sentences(profile: xr.Dataset) -> list[str]:
    """Sentences that name the head with most attention on each searched set of tokens."""
    sentences = []
    for name in map(str, profile):
        control_name = name.replace("attention", "control", 1)
        if name.startswith("attention_on_") and control_name in profile:
            attention, control = profile[name].values, profile[control_name].values
            place = np.unravel_index(np.nanargmax(attention - control), attention.shape)
            record = {
                "attention": float(attention[place]),
                "control": float(control[place]),
            }
            words = profile[name].attrs["long_name"].removeprefix("attention on ")
            record["tokens"] = words.rpartition(", ")[0]  # without "where one is seen"
            head = f"{place[0]}.{place[1]}"
            sentences.append(
                write_sentence("profile", "attention_on", head=head, **record)
            )
    return sentences


def kind_words(profile: xr.Dataset) -> str:
    """Sentence about the kinds of layers and their rotations; "" if a profile lacks them."""
    if "reach" not in profile.coords:
        return ""
    kinds = []
    for kind, layers in layers_by_kind(profile).items():
        if kind != "recurrent":
            facts = profile[["base", "scaling", "reach"]].isel(layer=layers[0])
            record = {name: facts[name].item() for name in ("base", "scaling", "reach")}
            kinds.append(record | {"kind": kind, "layers": len(layers)})
    return write_sentence("profile", "kinds", kinds=kinds)


def idle_words(profile: xr.Dataset) -> str:
    """Sentence that names the layers without attention; "" if all layers attend."""
    idle, layers = idle_layers(profile), profile.sizes["layer"]
    return write_sentence("profile", "idle", idle=idle, layers=layers) if idle else ""


def scope(attrs: Mapping[Any, Any]) -> str:
    """Sentences about short or uniform text, from the attributes of results; "" if neither."""
    trained = int(attrs.get("trained_context", 0))
    record = {"context": int(attrs.get("context", trained)), "trained": trained}
    record["documents"] = int(attrs.get("documents", ENOUGH_DOCUMENTS))
    return write_sentence("profile", "scope", enough=ENOUGH_DOCUMENTS, **record)


def cautions(profile: xr.Dataset, heads: pd.DataFrame) -> list[str]:
    """Warnings of the run (the attribute "warnings"), and sentences about weak labels."""
    warnings = [
        line.strip() for line in str(profile.attrs.get("warnings", "")).splitlines()
    ]
    named = ~heads["label"].isin(EXCLUDED_LABELS)
    limit = heads.attrs.get("thresholds", {}).get("faint", np.nan)
    faint = int((named & (heads["total_bits"] < limit)).sum())
    doubtful, count = int((heads["confidence"] < DOUBT).sum()), len(heads)
    weak: Records = {
        "no_confidence": {"heads": count} if heads["confidence"].isna().all() else None,
        "faint": {"count": faint, "heads": named.sum(), "limit": limit}
        if faint
        else None,
        "doubtful": {"count": doubtful, "heads": count, "doubt": DOUBT}
        if doubtful
        else None,
    }
    if (heads["label"] == "untested").any():
        weak = {"untested": {"rows": int(profile["group_scored"].sum())}}
    return [*filter(None, warnings), *write_sentences("profile", weak).values()]


def sweep_sentences(sweep: xr.Dataset, table: pd.DataFrame) -> list[str]:
    """Sentences about a sweep and its summary `table`, first on the cost of planes."""
    if len(sweeps := sweeps_by_kind(sweep)) > 1:
        edits = [table[table["edit"].isin(x["edit"].values)] for x in sweeps.values()]
        return [*itertools.chain(*map(sweep_sentences, sweeps.values(), edits))]
    rows, classes = _sweep_records(table), class_changes(sweep)
    setup: Record = {
        name: int(sweep.attrs[name]) for name in ("context", "trained_context")
    }
    setup |= {"act": "stopping", "done": "stopped", "can": "stop"}
    if by := f"{sweep.attrs['scale']:g}" if "scale" in sweep.attrs else "":
        setup |= {
            "act": f"scaling by {by}",
            "done": f"scaled by {by}",
            "can": f"be scaled by {by}",
        }
    setup["heads"] = (
        str(sweep.attrs.get("heads", "*")).removeprefix("*").removeprefix(".*")
    )
    ends, free = _quarters(rows, "loss_change"), _free(rows)
    fast = next((row for row in ends if row["kind"] == "fast"), None)
    copied: Record = {"rows": _quarters(rows, "copy_loss_change"), "plain": rows[0]}
    if copied["rows"]:
        copied["distance"] = int(sweep["copy_distance"][-1])
    bands = [r for r in rows if r["kind"] == "band" and r["loss_change"] is not None]
    most = max(bands, key=lambda row: row["loss_change"], default=None)
    share = rows[0]["retrieval"]
    by_edit = {
        edit: of_edit.to_dict("records") for edit, of_edit in classes.groupby("edit")
    }
    records: Records = {
        "short": {"free": free, "fast": fast} if free and fast else None,
        "ends": {"rows": ends},
        "far": {"rows": _quarters(rows, "far_loss_change")},
        "copies": copied,
        "free": free,
        "bands": {"count": len(bands), "most": most} if bands else None,
        "labels": {"rows": _quarters(rows, "labels_changed")},
        "retrieval": None if share is None else {"share": share, "chance": CHANCE},
        "classes": {
            "rows": [x | {"classes": by_edit[x["edit"]]} for x in ends if by_edit]
        },
    }
    return [*write_sentences("truncation", records, setup=setup).values()]


def _sweep_records(table: pd.DataFrame) -> list[Record]:
    """Rows of the summary with end, share, wavelengths and control; None replaces NaN."""
    records = []
    for row in table.to_dict("records"):
        low, high = (short_count(row[f"wavelength_{end}"]) for end in ("low", "high"))
        row["end"], row["stopped"] = END_NAMES.get(row["kind"], ""), 1 - row["kept"]
        row["span"] = low if low == high else f"{low} to {high}"
        random = table[table["kind"] == CONTROL.get(row["kind"])]
        same = "band" if row["kind"] == "band" else "kept"
        row["control"] = random.loc[random[same] == row[same], "loss_change"].mean()
        records.append(
            {str(k): None if pd.isna(value) else value for k, value in row.items()}
        )
    return records


def _quarters(rows: Sequence[Record], column: str) -> list[Record]:
    """For each end, the measured entry that stops the share nearest to a quarter."""
    known = [row for row in rows if row[column] is not None]
    by_end = ([row for row in known if row["kind"] == end] for end in END_NAMES)
    return [
        min(same, key=lambda row: abs(row["kept"] - QUARTER)) for same in by_end if same
    ]


def _free(rows: Sequence[Record]) -> Record | None:
    """First step from the slow end, and the last one of the steps before the first cost."""
    slow = [
        r for r in rows if r["kind"] == "slow" and r["loss_change_high"] is not None
    ]
    slow.sort(key=lambda row: -row["kept"])
    last = None
    for row in slow:  # the loss hardly changes, also in the second half of the context
        high, far = row["loss_change_high"], row["far_loss_change_high"]
        if high >= FREE or (
            row["far_loss"] is not None and (far is None or far >= FREE)
        ):
            break
        last = row
    return {"last": last, "least": slow[0], "limit": FREE} if slow else None


def reach_sentences(reach: xr.Dataset) -> list[str]:
    """One sentence for each variant about the heads that find copies, and the best head."""
    measured = reach["found_share"].notnull().any(("variant", "run_distance"))
    distance = reach["distance"].values
    far = distance[distance >= max(distance, default=0) / 10]
    facts: Record = {"own": OWN_ROTATION, "copied": reach.attrs.get("copied", "")}
    facts |= {"heads": (int(measured.sum()), measured.size)}
    facts |= {"beyond": [far.min(), far.max()] if len(far) else None}
    facts |= {"distances": reach["run_distance"].values.tolist()}
    sentences = []
    for name in reach["variant"].values.tolist():
        variant = reach.sel(variant=name)
        near = variant["found_share"].isel(run_distance=0).fillna(0)
        layer, head = np.unravel_index(near.values.argmax(), near.shape)
        best = variant.isel(layer=layer, head=head)
        error = 100 * abs(best["foretold_share"] - best["found_share"]).max().item()
        numbers = {
            end: best[f"found_{end}"].values.tolist()
            for end in ("share", "low", "high")
        }
        numbers |= {"finders": int((near >= 0.5).sum()), "best": f"{layer}.{head}"}
        numbers["predicted"] = error if np.isfinite(error) else None
        numbers["extrapolated"] = float(
            best["extrapolated_share"].sel(distance=far).mean()
        )
        sentences.append(
            write_sentence("reach", "copies", variant=name, **numbers, **facts)
        )
    return sentences


def comparison_sentences(comparison: xr.Dataset, table: pd.DataFrame) -> list[str]:
    """Sentences about a comparison and its `table`, and the sentences of its author."""
    rows, attrs = table.to_dict("records"), comparison.attrs
    baseline, writers = {"baseline": str(attrs["baseline"])}, []
    if "source" in comparison.coords:
        models = {*comparison["model"].values.tolist()}
        sources = comparison["source"].values.astype(str)
        sampled = {text.rpartition(", sampled from ")[2] for text in sources}
        writers = sorted(models & sampled) if len(models) > 1 else []
    records: Records = {"sampled": {"writers": writers} if writers else None}
    if known := [row for row in rows if not pd.isna(row["loss_change"])]:
        known.sort(key=lambda row: row["loss_change"])
        changes = [_change_record(row, ("loss_change", "low", "high")) for row in known]
        of_one_seed = any(row["over"] == "sequences" for row in known)
        records["losses"] = baseline | {"changes": changes, "of_one_seed": of_one_seed}
    else:
        records["unpaired_losses"] = baseline | {
            "rows": rows,
            "of_runs": "context" in attrs,
        }
    if "loss_past_context" in table and table["loss_past_context"].notna().any():
        past = _changes_by_group(table, "loss_past_context")
        records["past_context"] = {"rows": rows, "changes": past}
    if "repeat_gain" in table:
        gains, retrieval = (
            _changes_by_group(table, n) for n in ("repeat_gain", "retrieval")
        )
        repeats = {"gain_changes": gains, "retrieval_changes": retrieval}
        records["repeats"] = {"rows": rows, "chance": CHANCE} | repeats
    records["previous_token"] = {"rows": rows}
    fastest = comparison["wavelength"].min(("layer", "frequency"))
    turns = fastest < np.inf  # False for NaN as well
    still = [group for group in table["group"] if not group_entries(turns, group).any()]
    records["without_rotation"] = {"groups": still} if still else None
    runs = attrs.get("unfinished")
    records["unfinished"] = {"runs": runs} if runs else None
    lead, added = (str(attrs.get(name, "")) for name in ("lead", "findings"))
    sentences = write_sentences("comparison", records).values()
    return [*filter(None, [lead]), *sentences, *added.splitlines()]


def _change_record(
    row: Mapping[Hashable, Any], columns: tuple[str, str, str]
) -> Record:
    """Change of a group and its interval, from three columns, with the number of pairs."""
    value, interval = change_and_interval(*(row[name] for name in columns))
    record = {name: row[name] for name in ("group", "over", "pairs")}
    return record | {"value": value, "interval": interval}


def _changes_by_group(table: pd.DataFrame, name: str) -> Record:
    """Groups whose change of `name` has a 95% interval without 0, and groups without interval.

    An interval of width 0 does not count, because shares of few needles may change alike.
    """
    columns = (f"{name}_change", f"{name}_low", f"{name}_high")
    change, low, high = (table[column] for column in columns)
    paired = change.notna()
    known = paired & (low < high)
    over = np.where(table["pairs"] > 1, "seeds", "trials")
    apart = table.assign(over=over)[known & ((low > 0) | (high < 0))].to_dict("records")
    return {
        "baseline": str(table["group"].iloc[0]),
        "known": bool(known.any()),
        "apart": [_change_record(row, columns) for row in apart],
        "alike": table["group"][paired & (low == high)].tolist(),
        "units": "pairs" if (table["pairs"][paired] > 1).any() else "trials",
        "single": table["group"][paired & low.isna()].tolist(),
    }


def _evaluation_records(results: xr.Dataset) -> Records:
    """The changes of each edit, without its controls."""
    rows = changes_of_edits(results).iloc[1:].to_dict("records")
    changes = [row for row in rows if not row.get("control_of")]
    return {"evaluated": {"edits": len(rows), "changes": changes}}


def _attribution_records(results: xr.Dataset) -> Records:
    """The planes with the largest attribution, and the check of their effects."""
    names = {"wrong": "wrong_signs", "rank": "rank_correlation", "worst": "worst"}
    checked = {name: results.attrs.get(attr, np.nan) for name, attr in names.items()}
    rows = top_planes(results, 5).to_dict("records")
    planes = {"answer": results.attrs["answer"], "rows": rows}
    return {"planes": planes, "checked": checked if "dropped" in results else None}


def _patch_records(results: xr.Dataset) -> Records:
    """The head, layer or position whose patch changes the answer most."""
    change, attrs = results["change"], results.attrs
    largest = change[abs(change).fillna(-1).argmax(...)]
    words = ", ".join(f"{dim} {largest[dim].item()}" for dim in change.dims)
    numbers = {name: attrs[name] for name in ("over", "answer", "source_answer")}
    return {"patched": numbers | {"place": words, "change": largest.item()}}


def _capture_records(results: xr.Dataset) -> Records:
    """The heads that attend most to one key, in the last row."""
    results = results.isel(prompt=0, missing_dims="ignore")
    last = results["attention"].isel(query=-1)
    tokens = [visible_token(str(token)) for token in results["key_token"].values]
    rows = []
    for n in np.argsort(-last.max("key").values)[:4]:
        head, key = str(last["head"].values[n]), int(np.nanargmax(last.values[n]))
        rows.append(
            {"head": head, "key": tokens[key], "share": float(last.values[n, key])}
        )
    sizes = {"heads": results.sizes["head"], "tokens": len(tokens)}
    return {"captured": sizes | {"query": tokens[-1], "rows": rows}}


RECORDS = {
    "evaluation": _evaluation_records,
    "attribution": _attribution_records,
    "patches": _patch_records,
    "capture": _capture_records,
}
"""Functions that return the records of sentences in templates/sentences/results.txt."""
