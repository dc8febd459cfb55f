"""What a comparison says: sentences with numbers, and the facts of the run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from ropelens.comparison.pairs import entries_of
from ropelens.comparison.table import LOOKS_AT
from ropelens.figures.text import change_and_interval
from ropelens.measure.induction import best_head
from ropelens.report.sentences import say
from ropelens.report.table import CHANCE

Record = dict[str, Any]
"""The numbers that a sentence tells."""

ORDER = (
    *("losses", "unpaired_losses", "past_context", "repeats", "previous_token"),
    *("without_rotation", "claims", "wavelengths", "growth", "unfinished", "unlike_seeds"),
)
"""The sentences as they follow each other, the most important first."""

OVER_TEXT = {
    "sequences": "over the text of one seed",
    "groups": "over the text, paired",
    "apart": "over the text, unpaired",
}
"""What an interval is over that is not over seeds."""


def findings(comparison: xr.Dataset, table: pd.DataFrame) -> list[str]:
    """The comparison in sentences, the most important first."""
    rows = table.to_dict("records")
    baseline = str(comparison.attrs["baseline"])
    records: dict[str, Record | None] = {"previous_token": {"rows": rows}}
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
        numbers = {"gain_changes": gain, "retrieval_changes": retrieval, "chance": CHANCE}
        records["repeats"] = {"rows": rows, **numbers}
    records["without_rotation"] = _without_rotation(comparison, table)
    records["claims"] = _claims(comparison, table)
    records["wavelengths"] = _wavelengths(comparison, table)
    if "growth_loss" in comparison:
        records["growth"] = _growth(comparison, str(table["group"].iloc[0]))
    if runs := comparison.attrs.get("unfinished"):
        records["unfinished"] = {"runs": runs}
    records["unlike_seeds"] = _unlike_seeds(comparison)
    said = [
        say("comparison", name, **record) for name in ORDER if (record := records.get(name))
    ]
    lead, own = (str(comparison.attrs.get(name, "")) for name in ("lead", "findings"))
    return [*filter(None, [lead]), *said, *own.splitlines()]


def _losses(table: pd.DataFrame) -> Record:
    """The differences in loss to the baseline, from the best to the worst."""
    known = table[table["loss_change"].notna()].sort_values("loss_change")
    names = ("loss_change", "low", "high")
    changes = [
        _change(row, names, OVER_TEXT.get(row["over"], _seeds(row)))
        for row in known.to_dict("records")
    ]
    return {"changes": changes, "of_one_seed": bool((known["over"] == "sequences").any())}


def _without_rotation(comparison: xr.Dataset, table: pd.DataFrame) -> Record | None:
    """The groups in which no plane of any layer turns."""
    groups = [
        group
        for group in table["group"]
        if not np.isfinite(entries_of(comparison, group)["wavelength"]).any()
    ]
    return {"groups": groups} if groups else None


def _wavelengths(comparison: xr.Dataset, table: pd.DataFrame) -> Record | None:
    """The wavelengths that heads select through; whether all groups turn the same planes."""
    names = ["positional_wavelength", "semantic_wavelength"]
    known = table[table[names].notna().all(axis=1)]
    if known.empty:
        return None
    turning = {
        tuple(np.isfinite(entries_of(comparison, group)["wavelength"][0, 0].values))
        for group in table["group"]
    }
    return {"groups": known.to_dict("records"), "alike": len(turning) == 1}


def _claims(comparison: xr.Dataset, table: pd.DataFrame) -> Record | None:
    """The verdicts on the paper's claim, by group, with the numbers of a single model."""
    if "verdict" not in comparison:
        return None
    groups = []
    for group in table["group"]:
        own = entries_of(comparison, group)
        names = ("rank_correlation", "null_low", "null_high")
        numbers = {
            name: own[name].item() if own.sizes["entry"] == 1 else None for name in names
        }
        verdicts = list(Counter(own["verdict"].values.tolist()).items())
        groups.append({"group": group, "verdicts": verdicts, **numbers})
    return {"groups": groups}


def _change(row: Mapping[Hashable, Any], names: tuple[str, str, str], over: str) -> Record:
    """A group's change, its interval (`names` of the three) and what that is over."""
    value, interval = change_and_interval(*(row[name] for name in names))
    return {"group": row["group"], "value": value, "interval": interval, "over": over}


def _seeds(row: Mapping[Hashable, Any]) -> str:
    """How many pairs of seeds an interval is over, if it is over seeds."""
    return f"{row['pairs']} pairs of seeds" if row["pairs"] > 1 else ""


def _changes(table: pd.DataFrame, name: str) -> Record:
    """Whose change of `name` has a 95% interval that leaves out 0, and who has no interval.

    An interval without any width is none: shares of few needles may change alike in all pairs.
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


def _growth(comparison: xr.Dataset, group: str) -> Record:
    """When the first heads of the baseline appear, as the checkpoints kept tell.

    And in which plane its queries are longest at the end, and since which step they are.
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
        (what, int(steps[found.values.argmax()]) if found.any() else None)
        for what, found in appear.items()
    ]
    norm = entry["growth_q_norm"].mean(heads).transpose("step", "frequency")
    norm = norm.dropna("step", how="all")  # steps that another run kept
    most = norm.fillna(-1).argmax("frequency").values
    moved = np.flatnonzero(most != most[-1])
    wavelength = float(entry["wavelength"].median("layer")[most[-1]])
    return {
        "entry": entry["entry"].item(),
        "heads": sorted(first, key=lambda found: found[1] is None),
        "share": LOOKS_AT,
        "since": int(norm["step"].values[moved[-1] + 1 if len(moved) else 0]),
        "wavelength": wavelength if math.isfinite(wavelength) else None,
    }


def facts(comparison: xr.Dataset, table: pd.DataFrame) -> list[str]:
    """The line under the title: what stands side by side."""
    entries = comparison.sizes["entry"]
    of_runs = "context" in comparison.attrs
    said = [f"{entries} {'runs' if of_runs else 'models'}"]
    if entries > len(table):
        said.insert(0, f"{len(table)} variants")
    if of_runs:
        said.append(f"context {int(comparison.attrs['context']):,}")
    if "tokens_seen" in comparison.coords:
        seen = sorted({int(tokens) for tokens in comparison["tokens_seen"].max("step").values})
        counts = " and ".join(f"{tokens:,}" for tokens in seen)
        said.append(f"{counts} training tokens" + (" each" if len(seen) == 1 else ""))
    return said


def run_facts(comparison: xr.Dataset) -> list[tuple[str, str]]:
    """What was run, as pairs of a name and a value with its unit."""
    facts = comparison.attrs
    said = [
        ("runs" if "context" in facts else "models", ", ".join(_named(comparison))),
        ("baseline", str(facts["baseline"])),
    ]
    if "context" in facts:
        said += [
            ("context", f"{facts['context']:,} tokens"),
            ("text", "validation text of the runs"),
            (
                "sequences",
                f"{facts['sequences']:,} for the loss, {facts['head_sequences']:,} for heads "
                f"and planes, {facts['growth_sequences']:,} for these of each step",
            ),
        ]
    elif "source" in comparison.coords:
        sources = dict.fromkeys(comparison["source"].values.tolist())
        said.append(("text", "; ".join(source for source in sources if source)))
    return [*said, ("seed", str(facts["seed"])), ("created", str(facts["created"]))]


def _named(comparison: xr.Dataset) -> list[str]:
    """The entries; of analyses, whose names are folders, with the models in them."""
    entries = comparison["entry"].values.tolist()
    if "model" not in comparison.coords:
        return entries
    models = comparison["model"].values.tolist()
    return [f"{entry} ({model})" for entry, model in zip(entries, models, strict=True)]
