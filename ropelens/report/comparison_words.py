"""What a comparison says: sentences with numbers, and the facts of the run."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from ropelens.comparison.pairs import entries_of
from ropelens.comparison.table import LOOKS_AT
from ropelens.figures.wavelengths import short_count
from ropelens.report.table import CHANCE, interval, signed


def findings(comparison: xr.Dataset, table: pd.DataFrame) -> list[str]:
    """The comparison in sentences, the most important first."""
    said = [_losses(comparison, table)]
    if "loss_past_context" in table and table["loss_past_context"].notna().any():
        said.append(
            "Past the trained context the loss is "
            + _each(table, "loss_past_context", "{:.2f}")
            + f" nats per token{_apart(table, 'loss_past_context')}."
        )
    if "repeat_loss" in table:
        said.append(
            "Random tokens, repeated, cost "
            + _each(table, "repeat_loss", "{:.2f}")
            + f" nats per token{_apart(table, 'repeat_loss')}. "
            "Of keys, the value was found for "
            + _each(table, "retrieval", "{:.0%}")
            + f" (chance {CHANCE:.1%}){_apart(table, 'retrieval')}."
        )
    said.append(
        "Heads that give half their attention to the previous token: "
        + _each(table, "previous_token_heads", "{:.3g}")
        + "; in the first layer: "
        + _each(table, "previous_token_layer_0", "{:.3g}")
        + "."
    )
    waves = table[table[["positional_wavelength", "semantic_wavelength"]].notna().all(axis=1)]
    if len(waves):
        said.append(
            "Of the planes that turn, positional and semantic heads select through median "
            "wavelengths of "
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


def _losses(comparison: xr.Dataset, table: pd.DataFrame) -> str:
    """Loss of the baseline, and the differences to it from the best to the worst."""
    baseline = str(comparison.attrs["baseline"])
    known = table[table["loss_change"].notna()].sort_values("loss_change")
    losses = _each(table, "loss", "{:.3f}")
    if known.empty:
        why = f"no other model read the tokens that {baseline} did"
        if "context" in comparison.attrs:
            why = f"no run has one of {baseline} with its size and seed beside it"
        return f"The loss is {losses} nats per token; {why}."
    changes = "; ".join(
        f"{row['group']} {signed(row['loss_change'])} "
        f"({interval(row['low'], row['high'])}, {_over(row)})"
        for row in known.to_dict("records")
    )
    return (
        f"Against {baseline}, the loss changes by: {changes} nats per token, "
        "with 95% intervals."
    )


def _over(row: Mapping[Hashable, Any]) -> str:
    """What the interval of a row is over."""
    return "both standard errors" if row["over"] == "apart" else _pairs(row, "sequences")


def _apart(table: pd.DataFrame, name: str) -> str:
    """Whose change of `name` has a 95% interval that leaves out 0, and who has no interval.

    An interval without any width is none: shares of few needles may change alike in all pairs.
    """
    paired = table[table[f"{name}_change"].notna()]
    if paired.empty:
        return ""
    wide = paired[f"{name}_low"] < paired[f"{name}_high"]
    without = ", ".join(paired["group"][~wide])
    if not wide.any():
        return f"; no interval is known of {without}"
    known = paired[wide]
    apart = known[(known[f"{name}_low"] > 0) | (known[f"{name}_high"] < 0)]
    baseline = str(table["group"].iloc[0])
    changes = ", ".join(
        f"{row['group']} {signed(row[f'{name}_change'])} "
        f"({interval(row[f'{name}_low'], row[f'{name}_high'])}, {_pairs(row, 'trials')})"
        for row in apart.to_dict("records")
    )
    said = (
        f"; 95% intervals of the change from {baseline} leave out 0 for {changes}"
        if changes
        else f"; no 95% interval of a change from {baseline} leaves out 0"
    )
    return f"{said}; no interval is known of {without}" if without else said


def _pairs(row: Mapping[Hashable, Any], parts: str) -> str:
    """What an interval of a row is over: its pairs of seeds, or the `parts` of one."""
    return f"{row['pairs']} pairs of seeds" if row["pairs"] > 1 else f"{parts}, one seed"


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
        "a head on the previous token": entries["growth_previous_token"].max(heads) >= LOOKS_AT,
        "positional heads": (entries["growth_label"] == "positional").any(heads),
        "semantic heads": (entries["growth_label"] == "semantic").any(heads),
        "an induction head": entries["growth_induction"].max(heads) >= LOOKS_AT,
    }
    steps = comparison["step"].values
    told = [
        f"{what} at step {int(steps[found.values.argmax()]):,}"
        if bool(found.any())
        else f"{what} at no step"
        for what, found in appear.items()
    ]
    return (
        f"In {entries['entry'].item()}, of the checkpoints kept, first: {', '.join(told)}; "
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
        f"of wavelength {short_count(wavelength)} tokens"
        if math.isfinite(wavelength)
        else "that does not rotate"
    )
    return f"queries are longest in a plane {where}, as from step {since:,} on"


def _each(table: pd.DataFrame, name: str, digits: str) -> str:
    return ", ".join(
        f"{digits.format(value)} ({group})"
        for group, value in zip(table["group"], table[name], strict=True)
    )


def facts(comparison: xr.Dataset, table: pd.DataFrame) -> list[str]:
    """The line under the title: what stands side by side."""
    entries = comparison.sizes["entry"]
    said = [
        f"{len(table)} groups, {entries} entries"
        if entries > len(table)
        else f"{entries} entries"
    ]
    if "context" in comparison.attrs:
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
        ("entries", ", ".join(comparison["entry"].values.tolist())),
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
    said += [("seed", str(facts["seed"])), ("created", str(facts["created"]))]
    if "model" in comparison.coords:
        models = zip(comparison["entry"].values, comparison["model"].values, strict=True)
        said.append(("models", ", ".join(f"{entry}: {model}" for entry, model in models)))
    return said
