"""What a comparison says: sentences with numbers, and the facts of the run."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from ropelens.comparison.pairs import entries_of
from ropelens.comparison.table import LOOKS_AT
from ropelens.figures.numbers import NOTHING, change_and_interval, mean_count, short_count
from ropelens.report.table import CHANCE

OVER_TEXT = {
    "sequences": "over the text of one seed",
    "groups": "over the text, paired",
    "apart": "over the text, unpaired",
}
"""What an interval is over that is not over seeds."""


def findings(comparison: xr.Dataset, table: pd.DataFrame) -> list[str]:
    """The comparison in sentences, the most important first."""
    said = [_losses(comparison, table)]
    if "loss_past_context" in table and table["loss_past_context"].notna().any():
        said.append(
            "Past the trained context the loss is "
            + _each(table, "loss_past_context", "{:.2f}".format)
            + f" nats per token{_apart(table, 'loss_past_context')}."
        )
    if "repeat_gain" in table:
        said.append(
            "Random tokens that come a second time cost less by "
            + _each(table, "repeat_gain", "{:.2f}".format)
            + f" nats per token{_apart(table, 'repeat_gain')}. "
            "Of keys, the value was found for "
            + _each(table, "retrieval", "{:.1%}".format)
            + f" (chance {CHANCE:.1%}){_apart(table, 'retrieval')}."
        )
    said.append(
        "Heads that give half their attention to the previous token: "
        + _each(table, "previous_token_heads", mean_count)
        + "; in the first layer: "
        + _each(table, "previous_token_layer_0", mean_count)
        + "."
    )
    if still := _without_rotation(comparison, table):
        said.append(
            f"Nothing rotates in {' and '.join(still)}: no head there can be positional by its "
            "rotation, and what lower layers tell it of position counts as content."
        )
    waves = table[table[["positional_wavelength", "semantic_wavelength"]].notna().all(axis=1)]
    if len(waves):
        said.append(
            f"Of the planes that turn{_unlike(comparison, table)}, positional and semantic "
            "heads select through median wavelengths of "
            + ", ".join(
                f"{short_count(row['positional_wavelength'])} and "
                f"{short_count(row['semantic_wavelength'])} tokens ({row['group']})"
                for row in waves.to_dict("records")
            )
            + "."
        )
    if "growth_loss" in comparison:
        said.append(_growth(comparison, str(table["group"].iloc[0])))
    if unfinished := comparison.attrs.get("unfinished"):
        said.append(f"Of the study, these runs were not finished: {unfinished}.")
    if lacking := _lacking(comparison):
        said.append(
            f"Rows are of unlike seeds: {'; '.join(lacking)}. Means are over the seeds that a "
            "row has, changes over its pairs with the baseline."
        )
    return said + str(comparison.attrs.get("findings", "")).splitlines()


def _without_rotation(comparison: xr.Dataset, table: pd.DataFrame) -> list[str]:
    """The groups in which no plane of any layer turns."""
    return [
        group
        for group in table["group"]
        if not np.isfinite(entries_of(comparison, group)["wavelength"]).any()
    ]


def _unlike(comparison: xr.Dataset, table: pd.DataFrame) -> str:
    """A warning where groups turn planes that others stop: their means are of other planes."""
    turning = {
        tuple(np.isfinite(entries_of(comparison, group)["wavelength"][0, 0].values))
        for group in table["group"]
    }
    return " (not the same in all)" if len(turning) > 1 else ""


def _losses(comparison: xr.Dataset, table: pd.DataFrame) -> str:
    """Loss of the baseline, and the differences to it from the best to the worst."""
    baseline = str(comparison.attrs["baseline"])
    known = table[table["loss_change"].notna()].sort_values("loss_change")
    if known.empty:
        why = (
            f"no run of another variant has the size and seed of one of {baseline}"
            if "context" in comparison.attrs
            else f"no other model read the tokens that {baseline} did"
        )
        losses = _each(table, "loss", "{:.3f}".format)
        return f"The loss is {losses} nats per token, not to be compared in pairs: {why}."
    changes = "; ".join(
        f"{row['group']} {_change(row, ('loss_change', 'low', 'high'), _over(row))}"
        for row in known.to_dict("records")
    )
    said = f"Loss against that of {baseline}, nats per token with 95% intervals: {changes}."
    if (known["over"] == "sequences").any():
        said += " An interval over the text of one seed says nothing of training again."
    return said


def _change(row: Mapping[Hashable, Any], names: tuple[str, str, str], over: str) -> str:
    """A change, its interval (`names` of the three) and what that is over."""
    value, ends = change_and_interval(*(row[name] for name in names))
    return f"{value} ({ends}, {over})" if ends != NOTHING else f"{value} (no interval)"


def _over(row: Mapping[Hashable, Any]) -> str:
    """What the interval of a row is over."""
    if row["over"] in OVER_TEXT:
        return OVER_TEXT[row["over"]]
    return _seeds(row)


def _seeds(row: Mapping[Hashable, Any]) -> str:
    """How many pairs of seeds an interval is over, if it is over seeds."""
    return f"{row['pairs']} pairs of seeds" if row["pairs"] > 1 else ""


def _apart(table: pd.DataFrame, name: str) -> str:
    """Whose change of `name` has a 95% interval that leaves out 0, and who has no interval.

    An interval without any width is none: shares of few needles may change alike in all pairs.
    """
    paired = table[table[f"{name}_change"].notna()]
    low, high = paired[f"{name}_low"], paired[f"{name}_high"]
    alike, alone = paired["group"][low == high], paired["group"][low.isna()]
    known = paired[low < high]
    apart = known[(known[f"{name}_low"] > 0) | (known[f"{name}_high"] < 0)]
    baseline = str(table["group"].iloc[0])
    said = ""
    if len(apart):
        names = (f"{name}_change", f"{name}_low", f"{name}_high")
        told = (
            f"{row['group']} {_change(row, names, _seeds(row) or 'over trials of one seed')}"
            for row in apart.to_dict("records")
        )
        said += (
            f"; the 95% interval of the change from {baseline} leaves out 0 for "
            f"{', '.join(told)}"
        )
    elif len(known):
        said += f"; no change from {baseline} is told from 0 by its 95% interval"
    if len(alike):
        over = "pairs" if (paired["pairs"] > 1).any() else "trials"
        said += f"; {', '.join(alike)}: the same change in all {over}, so no interval"
    if len(alone):
        said += f"; {', '.join(alone)}: one pair, so no interval"
    return said


def _lacking(comparison: xr.Dataset) -> list[str]:
    """For each group without a seed that another of its size has: its name and the seeds."""
    seeds: dict[str, dict[str, set[int]]] = {}
    names = ("size", "group", "seed")
    for size, group, seed in zip(*(comparison[n].values.tolist() for n in names), strict=True):
        seeds.setdefault(size, {}).setdefault(group, set()).add(seed)
    lacking = []
    for of_size in seeds.values():
        every = set().union(*of_size.values())
        for group, has in of_size.items():
            if missing := sorted(every - has):
                word = "seed" if len(missing) == 1 else "seeds"
                lacking.append(f"{group} has no {word} {', '.join(map(str, missing))}")
    return lacking


def _growth(comparison: xr.Dataset, group: str) -> str:
    """When the first heads of the baseline appear, as the checkpoints kept tell."""
    entries = entries_of(comparison, group).isel(entry=0)
    heads = ("layer", "head")
    appear = {
        "previous-token head": entries["growth_previous_token"].max(heads) >= LOOKS_AT,
        "positional head": (entries["growth_label"] == "positional").any(heads),
        "semantic head": (entries["growth_label"] == "semantic").any(heads),
        "induction head": entries["growth_induction"].max(heads) >= LOOKS_AT,
    }
    steps = comparison["step"].values
    first = {
        what: int(steps[found.values.argmax()]) for what, found in appear.items() if found.any()
    }
    parts = [f"the first {what} at step {step:,}" for what, step in first.items()]
    parts += [f"no {what}" for what in appear if what not in first]
    return (
        f"{entries['entry'].item()}, at the checkpoints kept: {', '.join(parts)} "
        f"(previous-token and induction: {LOOKS_AT:.0%} of the attention or more); "
        f"{_longest_queries(entries)}."
    )


def _longest_queries(entry: xr.Dataset) -> str:
    """In which plane the queries of an entry are longest, and since which step they are."""
    norm = entry["growth_q_norm"].mean(("layer", "head")).transpose("step", "frequency")
    norm = norm.dropna("step", how="all")  # steps that another run kept
    most = norm.fillna(-1).argmax("frequency").values
    moved = np.flatnonzero(most != most[-1])
    since = int(norm["step"].values[moved[-1] + 1 if len(moved) else 0])
    wavelength = float(entry["wavelength"].median("layer")[most[-1]])
    where = (
        f"of wavelength {wavelength:,.0f} tokens"
        if math.isfinite(wavelength)
        else "that does not rotate"
    )
    return f"from step {since:,} on its longest queries lie in a plane {where}"


def _each(table: pd.DataFrame, name: str, write: Callable[[float], str]) -> str:
    return ", ".join(
        f"{write(value)} ({group})"
        for group, value in zip(table["group"], table[name], strict=True)
    )


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
